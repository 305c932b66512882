"""The study file: a baseline scenario, the what-ifs compared with it, SLOs and seeds. One TOML document.

A what-if names only what it changes; everything else is the baseline's. Every field is described in `docs/study-file.md`,
which a test keeps in step with this module. Units are in the names.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PositiveFloat,
    PositiveInt,
    field_validator,
    model_validator,
)

from schemas.errors import StudyError
from schemas.hardware import KvDtype, WeightDtype
from schemas.validation import read_toml, validated

Probability = Annotated[float, Field(ge=0.0, le=1.0)]

_NAME = re.compile(r"[a-z0-9][a-z0-9_.-]{0,63}")


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Fleet(_Section):
    """Which GPUs, how many, and how requests find them."""

    gpu: str = Field(description="name in the GPU catalogue")
    replicas: PositiveInt = Field(description="independent engines")
    tensor_parallel: PositiveInt = Field(default=1, description="GPUs of one tensor-parallel group")
    pipeline_parallel: PositiveInt = Field(
        default=1,
        description="stages of a replica, each a tensor-parallel group with a part of the layers; not modelled in the replay, "
        "`preplay estimate` knows more (docs/parallelism.md)",
    )
    expert_parallel: bool = Field(
        default=False,
        description="routed experts whole on one GPU of the tensor-parallel group each, instead of a slice on every GPU (vLLM's "
        "enable_expert_parallel without data parallelism)",
    )
    calibration: str = Field(
        default="auto",
        description="constants of the cost model: the shipped ones of the GPU where there are (auto), data-sheet defaults (none), "
        "a shipped name, or a file made by `preplay calibrate`",
    )
    router: Literal["round_robin"] = Field(default="round_robin", description="which replica gets the next request")

    @property
    def gpus_per_replica(self) -> int:
        """GPUs of one engine: of all its stages."""
        return self.tensor_parallel * self.pipeline_parallel

    @property
    def gpus(self) -> int:
        """GPUs of the whole fleet."""
        return self.replicas * self.gpus_per_replica


class Served(_Section):
    """The model that is served, and at which precision."""

    name: str = Field(
        description="name in the model catalogue, or a Hugging Face config.json (or its folder), relative to the study file"
    )
    weight_dtype: WeightDtype = Field(default="bf16", description="precision of the weights")
    kv_dtype: KvDtype = Field(default="bf16", description="precision of the KV cache")


class Engine(_Section):
    """The engine's scheduler and memory settings, by vLLM's names where it has them."""

    block_tokens: PositiveInt = Field(
        default=16,
        description="tokens per KV block; when prefix caching is on a divisor or a multiple of the trace's block size",
    )
    max_batched_tokens: PositiveInt = Field(
        default=8192, description="token budget of one step (max_num_batched_tokens)"
    )
    max_sequences: PositiveInt = Field(default=256, description="requests running at once (max_num_seqs)")
    long_prefill_token_threshold: Annotated[int, Field(ge=0)] = Field(
        default=0, description="most tokens of one request in one step; 0 = no limit"
    )
    reserve_full_isl: bool = Field(
        default=True,
        description="admit a request only if its whole sequence fits the free KV blocks, not merely its first chunk "
        "(scheduler_reserve_full_isl; false = as older vLLM)",
    )
    max_model_len: PositiveInt | None = Field(
        default=None,
        description="longest sequence in tokens; not set = the model's, or what the KV pool can hold if less",
    )
    scheduling: Literal["fcfs", "priority", "longest_prefix"] = Field(
        default="fcfs",
        description="who of the waiting is admitted next: first come first served, by priority (vLLM), or longest cached prefix "
        "first (SGLang's LPM; first come first served with prefix caching off or more than 128 waiting)",
    )
    priorities: dict[str, int] = Field(
        default={}, description="with scheduling = 'priority': priority by tenant, the smallest first"
    )
    default_priority: int = Field(default=0, description="priority of tenants not named in priorities")
    cuda_graph_sizes: Literal["vllm", "none"] | tuple[PositiveInt, ...] = Field(
        default="vllm",
        description="token counts with a captured CUDA graph: a step of fewer tokens computes as many as the next larger one; "
        "vLLM's default sizes, none, or a list",
    )
    gpu_memory_utilization: Annotated[float, Field(gt=0.0, le=1.0)] = Field(
        default=0.9, description="share of each GPU's memory that the engine may use"
    )

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.max_batched_tokens < self.max_sequences:
            raise ValueError(
                f"max_batched_tokens {self.max_batched_tokens} is less than max_sequences {self.max_sequences}"
            )
        if not isinstance(self.cuda_graph_sizes, str):
            if not self.cuda_graph_sizes:
                raise ValueError("cuda_graph_sizes is empty; write 'none' where no graphs are captured")
            if max(self.cuda_graph_sizes) > self.max_batched_tokens:
                raise ValueError(
                    f"a CUDA graph of {max(self.cuda_graph_sizes)} tokens is larger than any step: max_batched_tokens is "
                    f"{self.max_batched_tokens}"
                )
        if self.scheduling == "priority" and not self.priorities:
            raise ValueError("scheduling = 'priority' needs priorities, a table of tenant = number")
        return self


class PrefixCache(_Section):
    """Reuse of resident KV blocks between requests with equal prefixes."""

    enabled: bool = Field(default=False, description="reuse prefix blocks")
    visible: Literal["scheduled", "step", "finish"] = Field(
        default="scheduled",
        description="when a full block can be hit: as soon as it is scheduled (vLLM), after the step that computed it (SGLang), "
        "or when its request is done",
    )
    cache_decode_blocks: bool = Field(default=True, description="keep blocks with generated tokens in them cached, too")
    hit_alignment_tokens: PositiveInt | None = Field(
        default=None, description="hits are multiples of so many tokens (hybrid models); not set = block_tokens"
    )
    unhashed_freed: Literal["first", "last"] = Field(
        default="first",
        description="freed blocks that hold no full block's content are reused before cached ones (vLLM since 2026-05), or queue "
        "behind them (before)",
    )
    policy: Literal["lru", "fifo", "lfu", "prefix_priority"] = Field(
        default="lru",
        description="which cached block loses its content first: least recently released (vLLM), registered first, least often "
        "used, or least recently released with the first priority_tokens of every prompt kept longest",
    )
    priority_tokens: PositiveInt | None = Field(
        default=None,
        description="with policy = 'prefix_priority': how much of the head of every prompt is evicted last",
    )
    ttl_s: Annotated[float, Field(ge=0.0)] = Field(
        default=0.0,
        description="cached blocks are dropped so long after their last use (policy lru) or after they were computed (fifo), as "
        "providers do; 0 = never, only when the room is needed",
    )
    duplicates: Literal["kept", "merged"] = Field(
        default="kept",
        description="two requests that compute the same block side by side keep a copy each (vLLM), or share one (SGLang, "
        "TensorRT-LLM)",
    )
    replies: Literal["inferred", "private"] = Field(
        default="inferred",
        description="whether the next turn of a session can hit the blocks that its predecessor generated; which they are is "
        "inferred from the next turn's prompt (docs/replay.md). Without sessions in the trace nobody can",
    )

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.policy == "prefix_priority" and self.priority_tokens is None:
            raise ValueError("policy = 'prefix_priority' needs priority_tokens")
        if self.ttl_s > 0 and self.policy not in ("lru", "fifo"):
            raise ValueError(f"ttl_s works with policy = 'lru' or 'fifo', not '{self.policy}'")
        if self.unhashed_freed == "last" and self.policy != "lru":
            raise ValueError("unhashed_freed = 'last' is a trait of the LRU queue: it works with policy = 'lru' only")
        return self


class NoSpeculation(_Section):
    """Plain decoding: one token per request and step."""

    method: Literal["none"] = "none"


class _Chain(_Section):
    """What every chain drafter has: a fixed number of drafts, and how likely each is accepted."""

    k: PositiveInt = Field(description="draft tokens per request and step")
    conditional_acceptance: tuple[Probability, ...] = Field(
        description="for draft i = 1..k: probability that it is accepted, given that all before it were"
    )
    acceptance_source: str = Field(min_length=1, description="where these rates come from; printed in the report")

    @model_validator(mode="after")
    def _one_rate_per_draft(self) -> Self:
        if len(self.conditional_acceptance) != self.k:
            raise ValueError(
                f"conditional_acceptance has {len(self.conditional_acceptance)} rates for k = {self.k} drafts; "
                "rates beyond those measured are not extrapolated"
            )
        return self

    @property
    def expected_acceptance_length(self) -> float:
        """Tokens per verification step, the target's own included, far from the output's end."""
        length = survival = 1.0
        for rate in self.conditional_acceptance:
            survival *= rate
            length += survival
        return length


class Eagle(_Chain):
    """EAGLE / EAGLE-3 / MTP: a head of a few layers of the target's width, with the target's LM head, run k times."""

    method: Literal["eagle"]
    layers: PositiveInt = Field(default=1, description="transformer layers of the head")


class DraftModel(_Chain):
    """A smaller model of the same vocabulary, with its own weights and KV cache, run k times."""

    method: Literal["draft_model"]
    model: str = Field(description="name in the model catalogue, or a config.json as for model.name")


Speculation = Annotated[NoSpeculation | Eagle | DraftModel, Field(discriminator="method")]


class Workload(_Section):
    """What is done to the trace's arrivals before they are replayed."""

    rate: PositiveFloat = Field(
        default=1.0, description="arrival rate multiplier: 2 = the same requests in half the time"
    )
    spread_ticks: bool = Field(
        default=False,
        description="spread arrivals that share a timestamp over the log's tick (seeded), as a coarse clock hides them",
    )
    warmup_s: Annotated[float, Field(ge=0.0)] = Field(
        default=0.0,
        description="requests of the trace's first so many seconds are replayed but left out of every result, so that the "
        "rest meets warm caches and queues; 0 = a cold start counts",
    )


class Scenario(_Section):
    """One complete configuration."""

    fleet: Fleet
    model: Served
    engine: Engine = Engine()
    prefix_cache: PrefixCache = PrefixCache()
    speculation: Speculation = NoSpeculation()
    workload: Workload = Workload()

    @model_validator(mode="after")
    def _aligned(self) -> Self:
        alignment = self.prefix_cache.hit_alignment_tokens
        if alignment is not None and alignment % self.engine.block_tokens:
            raise ValueError(
                f"prefix_cache.hit_alignment_tokens {alignment} is not a multiple of engine.block_tokens {self.engine.block_tokens}"
            )
        return self


class Slo(_Section):
    """Service levels. A scenario meets them when the given percentile of each named latency is within its limit."""

    percentile: Annotated[float, Field(gt=0.0, lt=100.0)] = Field(
        default=95.0, description="percentile that is held to the limits"
    )
    ttft_ms: PositiveFloat | None = Field(default=None, description="time to first token, ms")
    tpot_ms: PositiveFloat | None = Field(default=None, description="time per output token after the first, ms")
    e2e_ms: PositiveFloat | None = Field(default=None, description="whole request, ms")

    @model_validator(mode="after")
    def _something(self) -> Self:
        if self.ttft_ms is None and self.tpot_ms is None and self.e2e_ms is None:
            raise ValueError("an SLO needs at least one of ttft_ms, tpot_ms, e2e_ms")
        return self


class Study(_Section):
    """The whole file, what-ifs resolved."""

    name: str = Field(description="name of the study; the default name of its run folder")
    title: str = Field(default="", description="the report's headline; the name where empty")
    trace: str = Field(description="trace folder, relative to the study file")
    seeds: tuple[Annotated[int, Field(ge=0, lt=2**63)], ...] = Field(
        default=(1,), min_length=1, description="one replay per seed"
    )
    timeline_interval_s: PositiveFloat = Field(default=10.0, description="width of a timeline interval, seconds")
    sensitivity: Literal["none", "baseline", "all"] = Field(
        default="baseline",
        description="scenarios whose latency percentiles get elasticities (section 10 of the report), by the first seed; 1 to 3 s "
        "each for an hour of traffic",
    )
    notes: str = Field(default="", description="printed in the report's assumptions")
    slo: Slo
    baseline: Scenario
    whatif: dict[str, Scenario] = Field(default={}, description="what-ifs by name; each holds only what it changes")

    @field_validator("name")
    @classmethod
    def _plain_name(cls, name: str) -> str:
        return checked_name(name)

    @field_validator("whatif")
    @classmethod
    def _plain_names(cls, whatif: dict[str, Scenario]) -> dict[str, Scenario]:
        for name in whatif:
            if checked_name(name) == BASELINE:
                raise ValueError(f"a what-if can't be called '{BASELINE}'")
        return whatif

    @field_validator("seeds")
    @classmethod
    def _distinct(cls, seeds: tuple[int, ...]) -> tuple[int, ...]:
        if len(set(seeds)) != len(seeds):
            raise ValueError("a seed stands there twice")
        return seeds

    @property
    def scenarios(self) -> dict[str, Scenario]:
        """Every scenario by name, the baseline first."""
        return {BASELINE: self.baseline, **self.whatif}


BASELINE = "baseline"


def checked_name(name: str) -> str:
    """`name` if it can be a folder's name on every system. Raises ValueError."""
    if not _NAME.fullmatch(name):
        raise ValueError(
            f"'{name}' is no name: small letters, digits, '_', '-' and '.', 64 at most, a letter or digit first"
        )
    return name


def load_study(file: Path) -> Study:
    """Read, resolve and validate a study file. Raises StudyError with the key path of the first fault."""
    return resolve_study(read_toml(file, StudyError), file)


def resolve_study(document: dict[str, Any], file: Path | None = None) -> Study:
    """A parsed study document with every what-if merged over the baseline. Raises StudyError."""
    document = _beside(document, file)
    baseline = document.get("baseline")
    whatif = document.get("whatif")
    if isinstance(baseline, dict) and isinstance(whatif, dict):
        merged = {
            name: merged_over(baseline, changes) if isinstance(changes, dict) else changes
            for name, changes in whatif.items()
        }
        document = {**document, "whatif": merged}
    return validated(Study, document, error=StudyError, file=file)


_FILES = (("model", "name"), ("speculation", "model"), ("fleet", "calibration"))
"""Settings that may name a file, relative to the study's."""


def _beside(document: dict[str, Any], file: Path | None) -> dict[str, Any]:
    """The document with files named by scenarios made absolute, so that nothing later has to know where the study lay."""
    if file is None:
        return document
    folder = file.parent.absolute()

    def placed(scenario: Any) -> Any:
        if not isinstance(scenario, dict):
            return scenario
        changed = dict(scenario)
        for section, key in _FILES:
            table = scenario.get(section)
            value = table.get(key) if isinstance(table, dict) else None
            if isinstance(value, str) and (value.endswith(".json") or "/" in value):
                changed[section] = {**changed[section], key: str(folder / value)}
        return changed

    result = dict(document)
    if "baseline" in document:
        result["baseline"] = placed(document["baseline"])
    if isinstance(document.get("whatif"), dict):
        result["whatif"] = {name: placed(each) for name, each in document["whatif"].items()}
    return result


def merged_over(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """`base` with `changes` laid over it, table by table.

    A `speculation` table that names another method replaces the base's whole: the variants share no defaults.
    """
    result = dict(base)
    for key, value in changes.items():
        old = base.get(key)
        if isinstance(value, dict) and isinstance(old, dict):
            replaces = key == "speculation" and value.get("method", old.get("method")) != old.get("method")
            result[key] = value if replaces else merged_over(old, value)
        else:
            result[key] = value
    return result
