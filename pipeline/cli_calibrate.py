"""`preplay calibrate ...`: parses, calls a stage, prints; see `pipeline/cli.py`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pipeline.cli_options import Force, OutputFormat, Quiet
from pipeline.console import Console, Format, print_records

calibrate_app = typer.Typer(no_args_is_help=True, help="Fit the cost model's constants to measurements.")


@calibrate_app.command("ops")
def calibrate_ops(
    folder: Annotated[Path, typer.Argument(help="Folder of operator timings (docs/cost-model.md says which files).")],
    gpu: Annotated[str, typer.Option("--gpu", help="Name in the GPU catalogue.")],
    database: Annotated[
        str | None,
        typer.Option("--database", help="How the database's files name the GPU. [default: as --gpu, '-' as '_']"),
    ] = None,
    profile: Annotated[
        str | None, typer.Option("--profile", help="How LLMServingSim's profile names the GPU. [default: no profile]")
    ] = None,
    engine: Annotated[
        str, typer.Option("--engine", help="Engine whose kernels were timed, as the report shall name it.")
    ] = "vllm",
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Calibration to write. [default: GPU-ENGINE.json]")
    ] = None,
    force: Force = False,
    output: OutputFormat = Format.table,
    quiet: Quiet = False,
) -> None:
    """From operator timings: fit every part by gradient descent, print its error on shapes held out, write a calibration file."""
    from pipeline import folders
    from pipeline.cost.calibrate import calibrate_operators
    from schemas import hardware

    console = Console(quiet)
    name = f"{gpu}-{engine}"
    target = out if out is not None else Path(f"{name}.json")
    folders.check_file(target, force=force)
    calibration = calibrate_operators(
        folder, hardware.gpu(gpu), database or gpu.replace("-", "_"), profile, name=name, engine=engine, say=console.say
    )
    folders.write_text(calibration.model_dump_json() + "\n", target)
    print_records([each.model_dump() for each in calibration.held_out], output)
    console.say(f'wrote {target}; use it with fleet.calibration = "{target}"')


@calibrate_app.command("gpu")
def calibrate_gpu(
    gpu: Annotated[str, typer.Option("--gpu", help="Name in the GPU catalogue.")],
    device: Annotated[
        str, typer.Option("--device", help="cuda, cuda:N, or cpu (with --quick, to try it out).")
    ] = "cuda",
    dtype: Annotated[str, typer.Option("--dtype", help="bf16, or fp16 for a GPU without bf16.")] = "bf16",
    engine: Annotated[str, typer.Option("--engine", help="How the report shall name the kernels.")] = "torch",
    quick: Annotated[
        bool, typer.Option("--quick", help="A tiny grid, in seconds: to try it out, not for use.")
    ] = False,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Calibration to write. [default: GPU-ENGINE.json]")
    ] = None,
    force: Force = False,
    output: OutputFormat = Format.table,
    quiet: Quiet = False,
) -> None:
    """From this machine's GPU: time torch's kernels, fit every part, print its error on shapes held out, write a calibration."""
    from pipeline import folders
    from pipeline.cost.microbenchmark import calibration_from, measure
    from schemas import hardware

    console = Console(quiet)
    name = f"{gpu}-{engine}"
    target = out if out is not None else Path(f"{name}.json")
    folders.check_file(target, force=force)
    entry = hardware.gpu(gpu)
    tables = measure(device, dtype=dtype, quick=quick, say=console.say)  # type: ignore[arg-type]
    calibration = calibration_from(tables, entry, name=name, engine=engine, say=console.say)
    folders.write_text(calibration.model_dump_json() + "\n", target)
    print_records([each.model_dump() for each in calibration.held_out], output)
    console.say(f'wrote {target}; use it with fleet.calibration = "{target}"')
