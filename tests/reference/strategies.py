"""Random small traces and engines, features drawn together, tight enough that eviction and preemption are common."""

from __future__ import annotations

from random import Random

from hypothesis import strategies as st

from tests.reference import ReferenceConfig, RequestSpec


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[RequestSpec], ReferenceConfig]:
    """A trace and a configuration that can serve at least some of it."""
    block = draw(st.integers(1, 4))
    trace_block = block * draw(st.sampled_from([1, 1, 2, 4, 8]))
    block *= draw(st.sampled_from([1] * 6 + [2, 3])) if trace_block == block else 1
    policy = draw(st.sampled_from(["lru"] * 4 + ["fifo", "lfu", "prefix_priority"]))
    ttl_s = draw(st.sampled_from([None, None, 0.5, 2.0, 10.0])) if policy in ("lru", "fifo") else None
    pool_blocks = draw(st.integers(2, 40))
    drafts = draw(st.integers(0, 4)) if draw(st.booleans()) else 0
    acceptance = tuple(draw(st.lists(st.sampled_from([0.0, 0.3, 0.7, 0.9, 1.0]), min_size=drafts, max_size=drafts)))
    batched = draw(st.integers(1, 40))
    config = ReferenceConfig(
        replicas=draw(st.integers(1, 3)),
        block_tokens=block,
        trace_block_tokens=trace_block,
        pool_blocks=pool_blocks,
        max_batched_tokens=batched,
        max_sequences=draw(st.integers(1, 6)),
        max_model_len=draw(st.integers(2, pool_blocks * block)),
        prefix_caching=draw(st.sampled_from([True, True, False])),
        drop_last_hit_block=draw(st.booleans()),
        reserve_full_isl=draw(st.booleans()),
        long_prefill_token_threshold=draw(st.sampled_from([0, 0, 1, 3, 7])),
        hit_alignment_blocks=draw(st.sampled_from([1, 1, 2, 3])),
        visible=draw(st.sampled_from(["scheduled", "scheduled", "step", "finish"])),
        cache_decode_blocks=draw(st.booleans()),
        unhashed_last=draw(st.booleans()) and policy == "lru",
        scheduling=draw(st.sampled_from(["fcfs", "fcfs", "priority", "longest_prefix"])),
        lpm_most_waiting=draw(st.sampled_from([2, 128])),
        lpm_shared_tokens=draw(st.sampled_from([1, 2, 3, 4, 6, 32])),
        policy=policy,
        priority_blocks=draw(st.integers(0, 4)),
        ttl_s=ttl_s,
        merge_duplicates=draw(st.sampled_from([False, False, True])),
        conditional_acceptance=acceptance,
        **(draw(drafting(drafts, batched)) if drafts else {}),
        seed=draw(st.integers(0, 2**63 - 1)),
        interval_s=draw(st.sampled_from([0.7, 3.0, 50.0])),
    )
    return draw(traces(trace_block)), config


@st.composite
def drafting(draw: st.DrawFn, levels: int, batched: int) -> dict[str, object]:
    """The rest of a proposer of so many levels."""
    return some_drafting(Random(draw(st.integers(0, 2**32))), levels, batched)


def some_drafting(random: Random, levels: int, batched: int) -> dict[str, object]:
    """The rest of a proposer of so many levels: profiles, a tree or a chain, matches, a policy."""
    profiles = [
        tuple(random.choice([0.2, 0.6, 0.95]) for _ in range(levels)) for _ in range(random.choice([0, 0, 1, 2]))
    ]
    chosen: dict[str, object] = {
        "other_profiles": tuple(profiles),
        "slots": min(batched - 1, random.choice([0, 0, 0, 1, 2])),
    }
    widths = tuple(random.choice([1, 2, 3]) for _ in range(levels)) if random.random() < 0.2 else ()
    most = sum(widths) if widths else levels
    chosen["lookahead_tokens"] = random.choice([None, None, 0])
    policy = random.choice(["fixed", "fixed", "by_batch", "goodput", "adaptive"])
    if policy == "by_batch":
        split = random.randint(1, 4)
        chosen["k_by_batch"] = ((1, split, most), (split + 1, split + 2, random.choice([0, levels // 2])))
    if policy == "adaptive":
        chosen["tiers"] = tuple(sorted({1, (most + 1) // 2, most}))
        chosen["first_tier"] = random.choice(chosen["tiers"])
    if random.random() < 0.3:
        hit = random.choice([0.0, 0.5, 0.8, 1.0])
        chosen |= {"hit_after_hit": hit, "hit_after_miss": random.choice([0.0, 0.2, 1.0])}
        chosen["match_tokens"] = random.choice([0.0, 0.0, 1.5, 4.0])
    return chosen | {"widths": widths, "drafts_by": policy}


@st.composite
def traces(draw: st.DrawFn, trace_block: int) -> list[RequestSpec]:
    """Requests whose ids are the nodes of a random tree of prefixes, so that equal ids mean equal prefixes."""
    nodes: dict[tuple[int, int, int], int] = {}  # (parent, branch, tokens) -> id; a partial block is a node of its own
    arrival = 0.0
    requests = []
    for _ in range(draw(st.integers(0, 12))):
        arrival += draw(st.sampled_from([0.0, 0.0, 0.0, 0.5, 3.0, 40.0]))
        blocks = draw(st.integers(0, 6))
        rest = draw(st.integers(0, trace_block - 1))
        if blocks == 0 and rest == 0:
            rest = 1
            if trace_block == 1:
                blocks, rest = 1, 0
        parent = -1
        ids = []
        for size in [trace_block] * blocks + [rest] * (rest > 0 and draw(st.booleans())):
            branch = draw(st.sampled_from([0, 0, 0, 1, 2]))
            parent = nodes.setdefault((parent, branch, size), len(nodes))
            ids.append(parent)
        known = draw(st.sampled_from([True] * 6 + [False]))
        output = draw(st.integers(1, 14))
        tokens, named = blocks * trace_block + rest, None
        if known and draw(st.sampled_from([False, False, True])):  # a later turn's prompt names some of the reply
            named = tokens + draw(st.integers(0, output))
            ids = ids[:blocks]
            parent = ids[-1] if ids else -1
            for size in _sizes(named - blocks * trace_block, trace_block):
                parent = nodes.setdefault((parent, draw(st.sampled_from([0, 0, 1])), size), len(nodes))
                ids.append(parent)
        priority = draw(st.sampled_from([0, 0, 1, 2]))
        requests.append(RequestSpec(arrival, tokens, output, ids if known else None, priority, named))
    return requests


def _sizes(tokens: int, trace_block: int) -> list[int]:
    """The blocks that so many tokens fill, the last one perhaps in part."""
    return [trace_block] * (tokens // trace_block) + [tokens % trace_block] * (tokens % trace_block > 0)


def busy_case(seed: int) -> tuple[list[RequestSpec], ReferenceConfig]:
    """A case from a seed, of a kind in which the interesting is common: long queues, small pools, shared prefixes.

    They shrink badly, but are rare when hypothesis draws every choice alone.
    """
    random = Random(seed)
    block = random.choice([1, 2, 3, 4])
    trace_block = block * random.choice([1, 1, 2, 4, 8])
    if trace_block == block:
        block *= random.choice([1] * 6 + [2, 3])
    policy = random.choice(["lru"] * 4 + ["fifo", "lfu", "prefix_priority"])
    pool_blocks = random.randint(8, 40)
    drafts = random.choice([0, 0, 1, 2, 4])
    batched = random.choice([3, 8, 20, 60])
    config = ReferenceConfig(
        replicas=random.choice([1, 1, 1, 2]),
        block_tokens=block,
        trace_block_tokens=trace_block,
        pool_blocks=pool_blocks,
        max_batched_tokens=batched,
        max_sequences=random.randint(2, 8),
        max_model_len=pool_blocks * block - random.choice([0, 0, 1, block]),
        prefix_caching=random.random() < 0.85,
        drop_last_hit_block=random.random() < 0.3,
        reserve_full_isl=random.random() < 0.5,
        long_prefill_token_threshold=random.choice([0, 0, 0, 2, 5]),
        hit_alignment_blocks=random.choice([1, 1, 1, 2]),
        visible=random.choice(["scheduled", "scheduled", "step", "finish"]),
        cache_decode_blocks=random.random() < 0.8,
        unhashed_last=random.random() < 0.4 and policy == "lru",
        scheduling=random.choice(["fcfs", "fcfs", "priority", "longest_prefix"]),
        lpm_most_waiting=random.choice([2, 128]),
        lpm_shared_tokens=random.choice([1, 2, 3, 4, 6, 32]),
        policy=policy,
        priority_blocks=random.randint(0, 4),
        ttl_s=random.choice([None, None, 0.5, 2.0]) if policy in ("lru", "fifo") else None,
        merge_duplicates=random.random() < 0.4,
        conditional_acceptance=tuple(random.choice([0.2, 0.6, 0.9]) for _ in range(drafts)),
        **(some_drafting(random, drafts, batched) if drafts else {}),
        seed=random.randrange(2**63),
        interval_s=random.choice([0.7, 3.0, 50.0]),
    )
    nodes: dict[tuple[int, int, int], int] = {}
    arrival = 0.0
    specs = []
    for _ in range(random.randint(3, 16)):
        arrival += random.choice([0.0, 0.0, 0.1, 0.4, 4.0])
        most = max(1, (pool_blocks * block) // trace_block)
        blocks = random.randint(0, min(most, 6))
        rest = random.randint(0 if blocks else 1, max(trace_block - 1, 0 if blocks else 1))
        if trace_block == 1:
            blocks, rest = max(blocks, 1), 0
        parent, ids = -1, []
        for size in [trace_block] * blocks + [rest] * (rest > 0 and random.random() < 0.6):
            parent = nodes.setdefault((parent, random.choice([0, 0, 0, 0, 1]), size), len(nodes))
            ids.append(parent)
        output = random.choice([1, 2, 5, 12, 25])
        tokens, named = blocks * trace_block + rest, None
        if random.random() < 0.3:  # a later turn's prompt names some of the reply
            named = tokens + random.randint(0, output)
            ids = ids[:blocks]
            parent = ids[-1] if ids else -1
            for size in _sizes(named - blocks * trace_block, trace_block):
                parent = nodes.setdefault((parent, random.choice([0, 0, 0, 1]), size), len(nodes))
                ids.append(parent)
        known = random.random() < 0.95
        specs.append(
            RequestSpec(arrival, tokens, output, ids if known else None, random.randint(0, 2), named if known else None)
        )
    return specs, config


def busy_cases() -> st.SearchStrategy[tuple[list[RequestSpec], ReferenceConfig]]:
    """The same as a strategy."""
    return st.integers(0, 2**32 - 1).map(busy_case)


def traces_and_configs() -> st.SearchStrategy[tuple[list[RequestSpec], ReferenceConfig]]:
    """Both kinds: those that shrink well, and those in which much happens."""
    return st.one_of(cases(), busy_cases())
