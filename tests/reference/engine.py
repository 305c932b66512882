"""The engine of docs/replay.md in plain Python, written from that page. Slow and obvious: the oracle of the compiled one."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from tests.reference.pool import Block, Key, KvPool

StepComponents = Callable[[int, int, int, float, float, float, float, int], tuple[float, ...]]

MASK = 2**64 - 1


def mix(value: int) -> int:
    """SplitMix64's output for the state `value`."""
    z = (value + 0x9E3779B97F4A7C15) & MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def uniform(seed: int, request: int, position: int) -> float:
    return (mix(mix(mix(seed) ^ request) ^ position) >> 11) / 2**53


@dataclass
class RequestSpec:
    """One request of a trace; `block_ids` None = identity unknown."""

    arrival_s: float
    input_tokens: int
    output_tokens: int
    block_ids: list[int] | None


@dataclass
class ReferenceConfig:
    replicas: int
    block_tokens: int
    trace_block_tokens: int
    pool_blocks: int
    max_batched_tokens: int
    max_sequences: int
    max_model_len: int
    prefix_caching: bool = False
    drop_last_hit_block: bool = False
    conditional_acceptance: tuple[float, ...] = ()
    seed: int = 1
    interval_s: float = 10.0

    @property
    def draft_tokens(self) -> int:
        return len(self.conditional_acceptance)


@dataclass
class Request:
    """A request as the engine knows it, and what it reports."""

    number: int
    spec: RequestSpec
    output_tokens: int
    status: str = "completed"
    replica: int = 0
    computed: int = 0
    emitted: int = 0
    drafts: int = 0
    blocks: list[Block] = field(default_factory=list)
    registered: int = 0
    computed_when_preempted: int = 0
    marks: tuple[float, float] = (0.0, 0.0)
    scheduled_s: float | None = None
    first_token_s: float | None = None
    finish_s: float | None = None
    first_output_s: float | None = None
    decode_target_s: float = 0.0
    decode_draft_s: float = 0.0
    hit_tokens: int = 0
    recomputed_tokens: int = 0
    preemptions: int = 0
    emitting_steps: int = 0
    spec_steps: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    trimmed_tokens: int = 0

    @property
    def tokens(self) -> int:
        return self.spec.input_tokens + self.emitted

    def keys(self, config: ReferenceConfig) -> list[Key]:
        """Keys of all full blocks of prompt and output, as far as they are named, then private ones."""
        b, t = config.block_tokens, config.trace_block_tokens
        whole = self.spec.input_tokens // t
        keys: list[Key] = []
        if self.spec.block_ids is not None:
            for block in self.spec.block_ids[:whole]:
                keys += [("trace", block, j) for j in range(t // b)]
            if len(self.spec.block_ids) > whole:
                inside = self.spec.input_tokens // b - len(keys)
                keys += [("trace", self.spec.block_ids[whole], j) for j in range(inside)]
        total = (self.spec.input_tokens + self.output_tokens) // b
        return keys + [("private", self.number, j) for j in range(len(keys), total)]


@dataclass
class Row:
    """One scheduled request of a step."""

    request: Request
    tokens: int
    drafts: int
    decode: bool
    computed: int


class Replica:
    """One engine."""

    def __init__(self, config: ReferenceConfig, step_components: StepComponents, check: bool) -> None:
        self.config = config
        self.step_components = step_components
        self.check = check
        self.pool = KvPool(config.pool_blocks)
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.now = 0.0
        self.target_sum = self.draft_sum = 0.0
        self.steps = 0
        self.timeline: dict[int, dict[str, float]] = defaultdict(lambda: defaultdict(float))

    def run(self, requests: list[Request]) -> None:
        arriving = deque(requests)
        while True:
            while arriving and arriving[0].spec.arrival_s <= self.now:
                request = arriving.popleft()
                self.timeline[self.interval(request.spec.arrival_s)]["arrivals"] += 1
                self.waiting.append(request)
            if not self.waiting and not self.running:
                if not arriving:
                    break
                self.idle_until(arriving[0].spec.arrival_s)
                continue
            self.step()
        assert self.pool.used_blocks == 0, "references are left at the end"

    def interval(self, time: float) -> int:
        return int(time / self.config.interval_s)

    def idle_until(self, then: float) -> None:
        cached = self.pool.cached_blocks
        width = self.config.interval_s
        for interval in range(self.interval(self.now), self.interval(then) + 1):
            begin, end = max(self.now, interval * width), min(then, (interval + 1) * width)
            if cached and end > begin:
                self.timeline[interval]["kv_cached_blocks_mean"] += cached * (end - begin)
        self.now = then

    def step(self) -> None:
        evicted = self.pool.evicted
        counters: dict[str, float] = defaultdict(float)
        rows = self.schedule(counters)
        assert rows, "nothing was scheduled"
        assert sum(row.tokens for row in rows) <= self.config.max_batched_tokens
        assert len(self.running) <= self.config.max_sequences
        prefill = [row for row in rows if not row.decode]
        decode = [row for row in rows if row.decode]
        parts = self.step_components(
            sum(row.tokens for row in rows),
            len(rows),
            len(rows) + sum(row.drafts for row in rows),
            float(sum(row.tokens * row.computed + row.tokens * (row.tokens + 1) // 2 for row in prefill)),
            float(sum(row.computed + row.tokens for row in prefill)),
            float(sum(row.tokens * row.computed + row.tokens * (row.tokens + 1) // 2 for row in decode)),
            float(sum(row.computed + row.tokens for row in decode)),
            self.config.draft_tokens,
        )
        duration = 0.0
        for part in parts:
            duration += part
        assert duration > 0
        row_of = self.timeline[self.interval(self.now)]
        row_of["waiting_mean"] += len(self.waiting) * duration
        row_of["running_mean"] += len(self.running) * duration
        row_of["kv_used_blocks_mean"] += self.pool.used_blocks * duration
        row_of["kv_cached_blocks_mean"] += self.pool.cached_blocks * duration
        names = ("gemm", "attention_prefill", "attention_decode", "communication", "sampling", "draft", "overhead")
        for name, part in zip(names, parts, strict=True):
            row_of[f"{name}_s"] += part
        if self.check:
            self.pool.check_integrity()
        self.now += duration
        self.target_sum += parts[0] + parts[1] + parts[2] + parts[3]
        self.draft_sum += parts[5]
        for row in rows:
            self.commit(row, parts[4] + parts[5], counters)
        self.steps += 1
        counters["steps"] += 1
        counters["prefill_tokens"] += sum(row.tokens for row in prefill)
        counters["decode_tokens"] += sum(row.tokens for row in decode)
        counters["evicted_blocks"] += self.pool.evicted - evicted
        for name, value in counters.items():
            row_of[name] += value
        if self.check:
            self.pool.check_integrity()

    def blocks_for(self, tokens: int) -> int:
        return -(-min(tokens, self.config.max_model_len) // self.config.block_tokens)

    def schedule(self, counters: dict[str, float]) -> list[Row]:
        config = self.config
        budget = config.max_batched_tokens
        rows: list[Row] = []
        preempted = False
        # Running requests.
        place = 0
        while place < len(self.running) and budget > 0:
            request = self.running[place]
            pending = request.tokens - request.computed
            tokens = min(pending + request.drafts, budget, config.max_model_len - 1 - request.computed)
            needed = self.blocks_for(request.computed + tokens + config.draft_tokens) - len(request.blocks)
            while needed > self.pool.free_blocks:
                victim = self.running.pop()
                self.preempt(victim, counters)
                preempted = True
                if victim is request:
                    break
            if request not in self.running:
                break
            self.grow(request, tokens, needed)
            rows.append(self.row(request, tokens, pending))
            budget -= tokens
            place += 1
        # Waiting requests.
        while not preempted and self.waiting and budget > 0 and len(self.running) < config.max_sequences:
            request = self.waiting[0]
            hits: list[Block] = []
            if config.prefix_caching:
                most = (request.tokens - 1) // config.block_tokens
                hits = self.pool.lookup(request.keys(config)[:most])
                if config.drop_last_hit_block:
                    hits = hits[:-1]
            computed = len(hits) * config.block_tokens
            pending = request.tokens - computed
            tokens = min(pending, budget)
            needed = self.blocks_for(computed + tokens) - len(hits)
            if needed + sum(block.refs == 0 for block in hits) > self.pool.free_blocks:
                break
            self.waiting.popleft()
            self.pool.touch(hits)
            request.blocks = list(hits)
            request.registered = len(hits)
            request.computed = computed
            if request.scheduled_s is None:
                request.scheduled_s = self.now
                request.hit_tokens = computed
                counters["hit_tokens"] += computed
            else:
                request.recomputed_tokens += max(0, request.computed_when_preempted - computed)
                request.marks = (self.target_sum, self.draft_sum)
            self.grow(request, tokens, needed)
            self.running.append(request)
            rows.append(self.row(request, tokens, pending))
            budget -= tokens
        return rows

    def row(self, request: Request, tokens: int, pending: int) -> Row:
        decode = pending == 1 and request.emitted >= 1
        return Row(request, tokens, max(0, tokens - pending), decode, request.computed)

    def grow(self, request: Request, tokens: int, needed: int) -> None:
        """Give blocks, and register all that are full with this step's tokens."""
        if needed > 0:
            request.blocks += self.pool.allocate(needed)
        if self.config.prefix_caching:
            full = min(request.computed + tokens, request.tokens) // self.config.block_tokens
            keys = request.keys(self.config)
            for block in range(request.registered, full):
                self.pool.register(request.blocks[block], keys[block])
            request.registered = max(request.registered, full)

    def preempt(self, victim: Request, counters: dict[str, float]) -> None:
        self.release(victim)
        if victim.emitted:
            self.book(victim)
        victim.computed_when_preempted = victim.computed
        victim.computed = 0
        victim.drafts = 0
        victim.preemptions += 1
        counters["preemptions"] += 1
        self.waiting.appendleft(victim)

    def release(self, request: Request) -> None:
        self.pool.release(request.blocks)
        request.blocks = []
        request.registered = 0

    def book(self, request: Request) -> None:
        request.decode_target_s += self.target_sum - request.marks[0]
        request.decode_draft_s += self.draft_sum - request.marks[1]

    def commit(self, row: Row, first_output_s: float, counters: dict[str, float]) -> None:
        request = row.request
        request.computed += row.tokens
        if request.computed < request.tokens:
            return
        accepted = 0
        while accepted < row.drafts and (
            uniform(self.config.seed, request.number, request.emitted + accepted)
            < self.config.conditional_acceptance[accepted]
        ):
            accepted += 1
        request.computed -= row.drafts - accepted
        left = request.output_tokens - request.emitted
        emitted = min(accepted + 1, left)
        request.trimmed_tokens += accepted + 1 - emitted
        request.emitting_steps += 1
        request.spec_steps += row.drafts > 0
        request.draft_tokens += row.drafts
        request.accepted_tokens += accepted
        if request.emitted == 0:
            request.first_token_s = self.now
            request.first_output_s = first_output_s
            request.marks = (self.target_sum, self.draft_sum)
        request.emitted += emitted
        counters["emitted_tokens"] += emitted
        if request.emitted == request.output_tokens:
            request.finish_s = self.now
            self.book(request)
            self.release(request)
            self.running.remove(request)
            counters["finished"] += 1
        else:
            request.drafts = self.config.draft_tokens


@dataclass
class ReferenceResult:
    requests: list[Request]
    replicas: list[Replica]


def replay(
    specs: list[RequestSpec], config: ReferenceConfig, step_components: StepComponents, *, check: bool = True
) -> ReferenceResult:
    """Replay `specs` (by arrival). With `check`, the pool's integrity is checked at every step."""
    requests = []
    queues: list[list[Request]] = [[] for _ in range(config.replicas)]
    for number, spec in enumerate(specs):
        request = Request(number, spec, min(spec.output_tokens, config.max_model_len - spec.input_tokens))
        request.replica = number % config.replicas
        if spec.input_tokens >= config.max_model_len:
            request.status = "refused"
        else:
            queues[request.replica].append(request)
        requests.append(request)
    replicas = [Replica(config, step_components, check) for _ in range(config.replicas)]
    for replica, queue in zip(replicas, queues, strict=True):
        replica.run(queue)
    for request in requests:
        if request.status == "refused":
            continue
        assert request.emitted == request.output_tokens
        assert request.emitted == request.emitting_steps + request.accepted_tokens - request.trimmed_tokens
        assert request.spec.arrival_s <= request.scheduled_s < request.first_token_s <= request.finish_s
    return ReferenceResult(requests, replicas)
