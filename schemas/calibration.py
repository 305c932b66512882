"""A calibration: the fitted constants of one GPU and one engine's kernels, with what they were fitted to and how well.

Shipped ones are `catalog/calibrations/NAME.json`; `preplay calibrate` writes more. Times in microseconds, rates in 1e9 bytes/s
(GB/s) and 1e12 FLOP/s. The laws that the constants belong to are in `pipeline/cost/` and `docs/cost-model.md`.
"""

from __future__ import annotations

from functools import cache
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, ValidationError, model_validator

from schemas.errors import CatalogError

CALIBRATION_VERSION = 1

NonNegative = Annotated[float, Field(ge=0.0)]


class _Term(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Residual(_Term):
    """What a law leaves over at measured points: log(measured / law), interpolated between them."""

    rows: tuple[float, ...] = Field(description="first axis, ascending: tokens, or sequences")
    sites: tuple[tuple[float, ...], ...] = Field(description="second axis: (outputs, inputs) of a GEMM, or (context,)")
    log: tuple[tuple[float, ...], ...] = Field(description="[sites][rows]")

    @model_validator(mode="after")
    def _shape(self) -> Self:
        if len(self.log) != len(self.sites) or any(len(each) != len(self.rows) for each in self.log):
            raise ValueError("log has not one row per site and one value per row")
        return self


class GemmTerm(_Term):
    """Matrix multiplication, see `pipeline/cost/gemm.py`."""

    launch_us: PositiveFloat
    bandwidth_gb_s: PositiveFloat
    tflops: PositiveFloat
    half_tile: PositiveFloat = Field(description="efficiency of 128 x 128 tiles against 256 x 128")
    quarter_tile: PositiveFloat = Field(description="of 128 x 64")
    sharpness: PositiveFloat = Field(description="p of the norm that joins memory and arithmetic time")
    extra_inputs: PositiveFloat = Field(description="a tile's start and end as so many more input features")
    quantised: PositiveFloat = Field(description="share of the time that goes by whole waves of tiles")
    residual: Residual | None = None


class AttentionTerm(_Term):
    """Attention calls with prefilling (or verifying) rows, see `pipeline/cost/attention.py`."""

    launch_us: PositiveFloat
    block_us: PositiveFloat = Field(description="a thread block's start and end")
    unit_us: PositiveFloat = Field(description="64 queries against 128 keys of one head of 128")
    query_us: PositiveFloat = Field(description="a tile of 64 queries besides its keys")
    empty_us: PositiveFloat = Field(description="a thread block without work")
    bandwidth_gb_s: PositiveFloat
    offset_us: PositiveFloat = Field(description="besides KV traffic")
    spill_low: PositiveFloat = Field(description="KV of one head / L2 from which heads read it from memory again ...")
    spill_high: PositiveFloat = Field(description="... and at which all do")
    stall: PositiveFloat = Field(description="cost of the first touch of KV by few blocks")
    sharpness: PositiveFloat
    packs_groups: bool = Field(
        description="query heads that share KV are tiled together and read it once (FlashAttention 3 and later), or each alone"
    )


class DecodeTerm(_Term):
    """Attention calls in which every row has one query, see `pipeline/cost/attention.py`."""

    launch_us: PositiveFloat
    bandwidth_gb_s: PositiveFloat
    wave_us: PositiveFloat = Field(description="time of one wave of (sequence, KV head) blocks besides traffic")
    sharpness: PositiveFloat
    residual: Residual | None = None


class TrafficTerm(_Term):
    """Kernels that only move data (norms, rotary, activation; sampling), see `pipeline/cost/traffic.py`."""

    launch_us: PositiveFloat
    bandwidth_gb_s: PositiveFloat
    cached_gb_s: PositiveFloat = Field(description="while the data fits L2")
    spill_low: PositiveFloat = Field(default=0.5, description="data / L2 from which part of it comes from memory ...")
    spill_width: PositiveFloat = Field(default=1.5, description="... and how much more until all does")
    sharpness: PositiveFloat = Field(default=3.0, description="p of the norm that joins launch and traffic")
    row_us: PositiveFloat = Field(default=1e-6, description="per row (sampling: per sequence)")


class ExpertsTerm(_Term):
    """A mixture-of-experts layer, see `pipeline/cost/experts.py`."""

    launch_us: PositiveFloat
    bandwidth_gb_s: PositiveFloat
    tflops: PositiveFloat
    tile_rows: PositiveFloat
    token_us: PositiveFloat
    sharpness: PositiveFloat


class AllReduceTerm(_Term):
    """All-reduce over so many GPUs."""

    latency_us: PositiveFloat
    link_gb_s: PositiveFloat


class HostTerm(_Term):
    """What the host adds that the GPU waits for."""

    step_us: NonNegative
    sequence_us: NonNegative
    draft_pass_us: NonNegative
    basis: str = Field(description="what these three rest on")


class HeldOut(_Term):
    """Errors on measurements that were not fitted: |predicted / measured - 1|."""

    part: str
    split: str = Field(description="what was held out")
    rows: int
    median: float
    p95: float


class Calibration(_Term):
    """All constants of one GPU and engine. A missing part falls back to data-sheet defaults, and the report says so."""

    version: Literal[1] = 1
    name: str
    gpu: str = Field(description="name in the GPU catalogue")
    engine: str
    sources: tuple[str, ...]
    gemm: dict[str, GemmTerm] = Field(default={}, description="by weight dtype")
    attention: AttentionTerm | None = None
    decode: DecodeTerm | None = None
    pointwise: TrafficTerm | None = None
    sampler: TrafficTerm | None = None
    experts: dict[str, ExpertsTerm] = Field(default={}, description="by weight dtype")
    allreduce: dict[int, AllReduceTerm] = Field(default={}, description="by number of GPUs")
    host: HostTerm | None = None
    held_out: tuple[HeldOut, ...] = ()
    notes: tuple[str, ...] = ()


def read_calibration(file: Path) -> Calibration:
    """A calibration file. Raises CatalogError with its first fault."""
    try:
        return Calibration.model_validate_json(file.read_text(encoding="utf-8"))
    except OSError as problem:
        raise CatalogError(f"can't be read ({problem.strerror})", file=file, mend="name a calibration file") from None
    except ValidationError as problem:
        first = problem.errors()[0]
        place = ".".join(str(part) for part in first["loc"]) or None
        raise CatalogError(
            f"not a calibration: {first['msg']}", file=file, place=place, mend="make one with `preplay calibrate`"
        ) from None


@cache
def shipped() -> dict[str, Calibration]:
    """The shipped calibrations, by name."""
    folder = resources.files("schemas").joinpath("catalog", "calibrations")
    found: dict[str, Any] = {}
    for entry in sorted(folder.iterdir(), key=lambda each: each.name):
        if entry.name.endswith(".json"):
            calibration = Calibration.model_validate_json(entry.read_text(encoding="utf-8"))
            found[calibration.name] = calibration
    return found


def for_gpu(gpu: str) -> Calibration | None:
    """The shipped calibration of a GPU of the catalogue, None where there is none."""
    return next((each for each in shipped().values() if each.gpu == gpu), None)
