"""The engine of docs/replay.md in plain Python, written from that page. Slow and obvious: the compiled one's oracle."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from math import ceil, floor

from schemas.outcome import COMPONENTS
from tests.reference import Key, ReferenceConfig, Request, RequestSpec, match, uniform
from tests.reference import mix as mix
from tests.reference.pool import Block, KvPool

StepComponents = Callable[..., tuple[float, ...]]
"""(the features of docs/replay.md, in its order) -> COMPONENTS"""


@dataclass
class Row:
    """One scheduled request of a step."""

    request: Request
    tokens: int
    drafts: int
    decode: bool
    computed: int

    @property
    def tiles(self) -> list[int]:
        """For each tile of 64 queries, the blocks of 128 keys up to its last query."""
        ends = [*range(64, self.tokens, 64), self.tokens]
        return [ceil((self.computed + end) / 128) for end in ends]

    @property
    def context(self) -> int:
        return self.computed + self.tokens


class Replica:
    """One engine."""

    def __init__(self, config: ReferenceConfig, step_components: StepComponents, check: bool) -> None:
        self.config = config
        self.step_components = step_components
        self.check = check
        self.pool = KvPool(
            config.pool_blocks,
            config.unhashed_last,
            policy=config.policy,
            priority_blocks=config.priority_blocks,
            ttl_s=config.ttl_s,
            merge_duplicates=config.merge_duplicates,
        )
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.now = 0.0
        self.target_sum = self.draft_sum = 0.0
        self.steps = 0
        self.timeline: dict[int, dict[str, float]] = defaultdict(lambda: defaultdict(float))

    def run(self, requests: list[Request]) -> None:
        arriving = deque(requests)
        while arriving or self.waiting or self.running:
            while arriving and arriving[0].spec.arrival_s <= self.now:
                request = arriving.popleft()
                self.timeline[self.interval(request.spec.arrival_s)]["arrivals"] += 1
                self.wait(request, len(self.waiting))
            if self.waiting or self.running:
                self.step()
            else:
                self.idle_until(arriving[0].spec.arrival_s)
        assert self.pool.used_blocks == 0, "references are left at the end"

    def interval(self, time: float) -> int:
        return int(time / self.config.interval_s)

    def idle_until(self, then: float) -> None:
        """Let time pass, with cached blocks that are dropped when their time to live ends, or now if it has ended already."""
        for block in self.pool.expired(then):
            self.pass_idle(max(self.now, self.pool.expiry(block)))
            self.pool.drop(block)
            self.timeline[self.interval(self.now)]["expired_blocks"] += 1
        self.pass_idle(then)

    def pass_idle(self, then: float) -> None:
        self.book_state(then, {"kv_cached_blocks_mean": self.pool.cached_blocks})
        self.now = then

    def book_state(self, then: float, state: dict[str, int]) -> None:
        """The state from now until `then`, cut at the borders of intervals."""
        width = self.config.interval_s
        for interval in range(self.interval(self.now), self.interval(then) + 1):
            begin, end = max(self.now, interval * width), min(then, (interval + 1) * width)
            for name, value in state.items():
                self.timeline[interval][name] += value * max(0.0, end - begin)

    def step(self) -> None:
        """One step, booked in the interval in which it starts."""
        self.idle_until(self.now)
        assert not self.pool.expired(self.now), "a cached block is older than its time to live"
        book, running = self.timeline[self.interval(self.now)], len(self.running)
        rows = self.schedule(book)
        if (
            not rows
        ):  # the first to run was the first to be preempted: it is no step, and the others' turn at the same time
            assert len(self.running) < running
            return
        assert 0 < sum(row.tokens for row in rows) <= self.config.max_batched_tokens
        prefill = [row for row in rows if not row.decode]
        decode = [row for row in rows if row.decode]
        most = self.drafts_of_step(rows)
        parts = self.step_components(
            len(rows) + sum(row.drafts for row in rows),
            len(decode),
            sum(row.tokens for row in decode),
            float(sum(row.context for row in decode)),
            float(max((row.context for row in decode), default=0)),
            len(prefill),
            sum(row.tokens for row in prefill),
            float(sum(row.context for row in prefill)),
            sum(len(row.tiles) for row in prefill),
            float(sum(sum(row.tiles) for row in prefill)),
            float(max((row.tiles[-1] for row in prefill), default=0)),
            max(1 if row.decode else len(row.tiles) for row in rows),
            self.config.levels(most),
        )
        duration = 0.0
        for name, part in zip(COMPONENTS, parts, strict=True):  # left to right: sum() compensates, and would differ
            duration += part
            book[f"{name}_s"] += part
        assert duration > 0
        state = {"waiting_mean": len(self.waiting), "running_mean": len(self.running)}
        state |= {"kv_used_blocks_mean": self.pool.used_blocks, "kv_cached_blocks_mean": self.pool.cached_blocks}
        self.book_state(self.now + duration, state)
        if self.check:
            self.check_invariants()
        self.now += duration
        self.target_sum += parts[0] + parts[1] + parts[2] + parts[3]
        self.draft_sum += parts[5]
        for row in rows:
            self.commit(row, parts[4] + parts[5], book, most)
        self.steps += 1
        book["steps"] += 1
        book["prefill_tokens"] += sum(row.tokens for row in prefill)
        book["decode_tokens"] += sum(row.tokens for row in decode)
        if self.check:
            self.check_invariants()

    def drafts_of_step(self, rows: list[Row]) -> int:
        """How many tokens are drafted for each row's next step."""
        config = self.config
        if config.drafts_by == "adaptive":
            return max(row.request.tier for row in rows)
        if config.drafts_by == "by_batch":
            return next((k for low, high, k in config.k_by_batch if low <= len(rows) <= high), 0)
        if config.drafts_by == "goodput":
            return self.best_drafts(len(rows), sum(row.context for row in rows))
        return config.k

    def best_drafts(self, rows: int, context: int) -> int:
        """The k of most tokens per second in a step of so many decoding rows and nothing else; of equal ones the smallest."""
        config, rates = self.config, {}
        for k in range(config.k + 1):
            tokens = rows * (1 + k)
            depth = config.levels(k)
            if tokens <= config.max_batched_tokens and (k == 0 or depth > config.levels(k - 1)):
                keys = float(context + tokens)
                parts = self.step_components(
                    tokens, rows, tokens, keys, keys / rows, 0, 0, 0.0, 0, 0.0, 0.0, 1, depth
                )  # fmt: skip
                seconds = 0.0
                for part in parts:
                    seconds += part
                rates[k] = config.expected(k) / seconds
        best = 0
        for k, rate in rates.items():
            if rate > rates[best]:
                best = k
        return best

    def check_invariants(self) -> None:
        """What holds between any two operations (DESIGN: invariants). Does not mutate."""
        pool, size = self.pool, self.config.block_tokens
        pool.check_integrity()
        assert len(self.running) <= self.config.max_sequences
        if self.config.scheduling == "priority":
            assert self.waiting == sorted(self.waiting, key=lambda request: request.urgency), (
                "the queue is out of order"
            )
        held = Counter(block.number for request in self.running for block in request.blocks)
        assert all(block.refs == held[block.number] for block in pool.blocks), "a reference is nobody's"
        for request in self.waiting:
            assert not request.blocks and not request.computed and not request.drafts
        for request in self.running:
            assert request.computed <= min(len(request.blocks) * size, request.tokens + self.config.k)
            assert len({block.number for block in request.blocks}) == len(request.blocks)
            keys = request.keys(self.config)[: request.registered]
            assert [block.key for block in request.blocks] == keys + [None] * (len(request.blocks) - len(keys))

    def blocks_for(self, tokens: int) -> int:
        return -(-min(tokens, self.config.max_model_len) // self.config.block_tokens)

    def schedule(self, book: dict[str, float]) -> list[Row]:
        """Who runs in this step, and with how many tokens: first those that run, then those that wait."""
        rows, preempted = self.schedule_running(book)
        if not preempted:
            self.schedule_waiting(rows, book)
        return rows

    def budget(self, rows: list[Row]) -> int:
        """Tokens that the next row can have in this step; drafting takes slots of the budget, too."""
        return self.config.max_batched_tokens - sum(row.tokens + self.config.slots for row in rows) - self.config.slots

    def schedule_running(self, book: dict[str, float]) -> tuple[list[Row], bool]:
        """The rows of running requests, and whether one was preempted for them."""
        config = self.config
        rows: list[Row] = []
        preempted = False
        for request in list(self.running):
            budget = self.budget(rows)
            if budget <= 0:
                break
            if request not in self.running:  # a victim
                continue
            wanted = request.tokens - request.computed + request.drafts
            most = config.long_prefill_token_threshold or budget
            tokens = min(wanted, most, budget, config.max_model_len - 1 - request.computed)
            needed = max(0, self.blocks_for(request.computed + tokens + config.lookahead) - len(request.blocks))
            while request in self.running and not self.pool.can_allocate(needed):
                victim = self.running[-1]
                if config.scheduling == "priority":
                    victim = max(self.running, key=lambda request: request.urgency)
                rows = [row for row in rows if row.request is not victim]
                self.preempt(victim, book)
                preempted = True
            if request not in self.running:
                break
            rows.append(self.grow(request, tokens, needed, book))
        return rows, preempted

    def schedule_waiting(self, rows: list[Row], book: dict[str, float]) -> None:
        """Admit from the head of the queue, as long as there is room."""
        config = self.config
        sorted_now = False
        while self.waiting and self.budget(rows) > 0 and len(self.running) < config.max_sequences:
            if not sorted_now:
                self.put_longest_prefix_first()
                sorted_now = True
            request = self.waiting[0]
            hits = self.resident(request)
            unit = config.hit_alignment_blocks
            usable = len(hits) // unit * unit
            hits = hits[: max(0, usable - unit) if config.drop_last_hit_block else usable]
            computed = len(hits) * config.block_tokens
            budget = self.budget(rows)
            tokens = min(request.tokens - computed, config.long_prefill_token_threshold or budget, budget)
            needed = max(0, self.blocks_for(computed + tokens + config.lookahead) - len(hits))
            whole = self.blocks_for(request.tokens) - len(hits) if config.reserve_full_isl else 0
            if not self.pool.can_allocate(max(needed, whole), hits):
                break
            self.waiting.pop(0)
            self.running.append(request)
            self.pool.touch(hits)
            request.blocks, request.registered, request.computed = list(hits), len(hits), computed
            if request.scheduled_s is None:
                request.scheduled_s = self.now
                request.hit_tokens = computed
                book["hit_tokens"] += computed
            else:
                request.rehit_tokens += computed
                book["rehit_tokens"] += computed
                request.recomputed_tokens += max(0, request.computed_when_preempted - computed)
                request.marks = (self.target_sum, self.draft_sum)
            rows.append(self.grow(request, tokens, needed, book))

    def resident(self, request: Request) -> list[Block]:
        """The blocks that a request would hit; at least one token is left to compute. Does not mutate."""
        if not self.config.prefix_caching:
            return []
        return self.pool.lookup(request.keys(self.config)[: (request.tokens - 1) // self.config.block_tokens])

    def wait(self, request: Request, place: int) -> None:
        """Join the queue, at a place of it, or where the priority says."""
        self.waiting.insert(place, request)
        if self.config.scheduling == "priority":
            self.waiting.sort(key=lambda request: request.urgency)

    def put_longest_prefix_first(self) -> None:
        """Sort the queue by what each would hit; who begins as another that hits as little lets it go ahead."""
        config, size = self.config, self.config.block_tokens
        few = len(self.waiting) <= config.lpm_most_waiting
        if not (config.scheduling == "longest_prefix" and config.prefix_caching and few):
            return
        first = -(-config.lpm_shared_tokens // size)
        noted: set[tuple[Key, ...]] = set()
        order: dict[Request, tuple[int, int]] = {}
        for request in self.waiting:
            tokens = len(self.resident(request)) * size
            order[request] = (0, -tokens)
            if tokens <= config.lpm_shared_tokens and request.tokens // size >= first:
                beginning = tuple(request.keys(config)[:first])
                if beginning in noted:
                    order[request] = (1, 0)
                noted.add(beginning)
        self.waiting.sort(key=lambda request: order[request])

    def grow(self, request: Request, tokens: int, needed: int, book: dict[str, float]) -> Row:
        """Give blocks; where blocks are visible once scheduled, register those that are full with this step's tokens."""
        pending = request.tokens - request.computed  # those of `tokens` beyond these are drafts
        row = Row(request, tokens, max(0, tokens - pending), pending == 1 and request.emitted >= 1, request.computed)
        evicted = self.pool.evicted
        request.blocks += self.pool.allocate(needed)
        book["evicted_blocks"] += self.pool.evicted - evicted
        if row.decode:
            book["evicted_decode_blocks"] += self.pool.evicted - evicted
        if self.config.visible == "scheduled":
            self.register(request, request.computed + tokens)
        return row

    def register(self, request: Request, computed: int) -> None:
        """Make the blocks that are full with `computed` tokens hittable; drafts never count."""
        if not self.config.prefix_caching:
            return
        final = min(computed, request.tokens)
        if not self.config.cache_decode_blocks:
            final = min(final, request.spec.input_tokens)
        full = final // self.config.block_tokens
        if full > request.registered:
            self.pool.register_from(request.registered, request.blocks, request.keys(self.config)[:full], self.now)
            request.registered = full

    def preempt(self, victim: Request, book: dict[str, float]) -> None:
        self.running.remove(victim)
        self.release(victim)
        if victim.emitted:
            self.book_decode(victim)
        victim.computed_when_preempted, victim.computed, victim.drafts = victim.computed, 0, 0
        victim.preemptions += 1
        book["preemptions"] += 1
        self.wait(victim, 0)

    def release(self, request: Request) -> None:
        self.pool.release(request.blocks, self.now)
        request.blocks, request.registered = [], 0

    def book_decode(self, request: Request) -> None:
        """The steps since the request's mark: its first token, or its readmission after that."""
        request.decode_target_s += self.target_sum - request.marks[0]
        request.decode_draft_s += self.draft_sum - request.marks[1]

    def commit(self, row: Row, first_output_s: float, book: dict[str, float], most: int) -> None:
        """What a row's step has brought: nothing yet (a prefill chunk), or tokens, and perhaps the end."""
        request = row.request
        request.truncated_drafts += request.drafts - row.drafts
        request.computed += row.tokens
        if request.computed < request.tokens:
            request.chunk_steps += 1
            if self.config.visible == "step":
                self.register(request, request.computed)
            return
        accepted = 0
        for rate in self.config.rates(request.number)[: self.config.levels(row.drafts)]:
            if uniform(self.config.seed, request.number, request.emitted + accepted) >= rate:
                break
            accepted += 1
        request.computed -= row.drafts - accepted
        emitted = min(accepted + 1, request.output_tokens - request.emitted)
        request.trimmed_tokens += accepted + 1 - emitted
        request.emitting_steps += 1
        request.spec_steps += row.drafts > 0
        request.draft_tokens += row.drafts
        request.accepted_tokens += accepted
        request.emissions_s.append(self.now)
        book["draft_tokens"] += row.drafts
        book["accepted_tokens"] += accepted
        if request.emitted == 0:
            request.first_token_s, request.first_output_s = self.now, first_output_s
            request.marks = (self.target_sum, self.draft_sum)
        request.emitted += emitted
        book["emitted_tokens"] += emitted
        done = request.emitted == request.output_tokens
        if self.config.visible == "step" or (self.config.visible == "finish" and done):
            self.register(request, request.computed)
        if done:
            request.finish_s = self.now
            self.book_decode(request)
            self.release(request)
            self.running.remove(request)
            book["finished"] += 1
        else:
            self.draft(row, accepted, most)

    def draft(self, row: Row, accepted: int, most: int) -> None:
        """For a request's next step; its tier changes for the one after."""
        config, request = self.config, row.request
        if config.drafts_by == "adaptive":
            most = request.tier
            if row.drafts:
                first = request.spec_steps == 1
                request.smoothed = accepted if first else request.smoothed + 0.2 * (accepted - request.smoothed)
                if request.spec_steps >= 10 and request.spec_steps % 5 == 0:
                    wanted = floor(request.smoothed + 0.5) + 1
                    request.tier = next((tier for tier in config.tiers if tier >= wanted), config.tiers[-1])
        request.drafts = 0
        if most:
            request.drafts = match(config, request.number, request.emitted, request.matched, most)
            request.matched = request.drafts > 0


@dataclass
class ReferenceResult:
    """Every request with its outcome, in the trace's order, and every replica as it stands after its last step."""

    requests: list[Request]
    replicas: list[Replica]

    @property
    def timelines(self) -> list[dict[int, dict[str, float]]]:
        """Per replica: interval -> TIMELINE_COUNTERS, TIMELINE_INTEGRALS in unit-seconds, component seconds."""
        return [{n: dict(row) for n, row in replica.timeline.items()} for replica in self.replicas]

    @property
    def steps(self) -> int:
        return sum(replica.steps for replica in self.replicas)

    @property
    def evicted_blocks(self) -> int:
        return sum(replica.pool.evicted for replica in self.replicas)


def replay(
    specs: list[RequestSpec], config: ReferenceConfig, step_components: StepComponents, *, check: bool = True
) -> ReferenceResult:
    """Replay `specs` (sorted by arrival). With `check`, every invariant is asserted at every step."""
    config.check()
    assert all(a.arrival_s <= b.arrival_s for a, b in pairwise(specs)), "requests are not in order of arrival"
    requests = []
    queues: list[list[Request]] = [[] for _ in range(config.replicas)]
    for number, spec in enumerate(specs):
        request = Request(number, spec, min(spec.output_tokens, config.max_model_len - spec.input_tokens))
        request.replica = number % config.replicas
        request.tier = config.first_tier if config.drafts_by == "adaptive" else 0
        if spec.input_tokens >= config.max_model_len:
            request.status, request.output_tokens = "refused", 0
        else:
            queues[request.replica].append(request)
        requests.append(request)
    replicas = [Replica(config, step_components, check) for _ in range(config.replicas)]
    for replica, queue in zip(replicas, queues, strict=True):
        replica.run(queue)
    end = max(replica.now for replica in replicas)
    for replica in replicas:
        replica.idle_until(end)
    for request in requests:
        request.check_outcome()
    return ReferenceResult(requests, replicas)
