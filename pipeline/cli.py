"""The command line: parses, calls a stage, prints. stdout is data, stderr is talk.

Heavy packages are imported inside the commands that need them, so that `preplay --help` is quick.
Exit codes: 0 done, 1 a fault of the program, 2 a mistake that the user can mend, 130 interrupted (docs/errors.md).
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from pipeline.cli_calibrate import calibrate_app
from pipeline.cli_options import Force, OutputFormat, Quiet
from pipeline.console import NOT_IN_THE_LOG, Console, Format, print_records
from schemas.errors import PreplayError

app = typer.Typer(
    name="preplay",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Replay an LLM fleet's request log on a model of its GPUs: how much prompt work is reusable, what prefix caching "
    "and speculative decoding save, and when they stop doing so.\n\n"
    "Start with `preplay demo`. With a log of your own: `preplay ingest LOG`, `preplay reuse TRACE`, then "
    "`preplay run STUDY.toml`.",
)


@app.command()
def ingest(
    logs: Annotated[list[Path], typer.Argument(help="Exported logs, read in this order; .gz is unpacked.")],
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Trace folder to make. [default: the first log's name]")
    ] = None,
    log_format: Annotated[
        str | None, typer.Option("--log-format", help="Name of the log's format. [default: detected]")
    ] = None,
    max_rejected: Annotated[
        float, typer.Option("--max-rejected", min=0.0, max=1.0, help="Share of rows that may be rejected.")
    ] = 0.01,
    sort: Annotated[bool, typer.Option("--sort", help="Sort rows whose timestamps are out of order.")] = False,
    force: Force = False,
    output: OutputFormat = Format.table,
    quiet: Quiet = False,
) -> None:
    """Turn exported logs into a trace (Parquet). Every row is kept or accounted for."""
    from pipeline.ingest import ingest as run_ingest

    console = Console(quiet)
    target = out if out is not None else Path(_stem(logs[0]) + ".trace")
    report = run_ingest(logs, target, format=log_format, max_rejected=max_rejected, sort=sort, force=force)
    console.say(f"detected: {report.evidence}")
    for reason in report.rejected_by_reason:
        console.say(f"rejected {reason.rows}: {reason.reason} (first at {reason.first_file}:{reason.first_line})")
    record = {
        "trace": str(target),
        **report.model_dump(mode="json", exclude={"sources", "rejected_by_reason", "evidence"}),
    }
    if record["prefix_identity"] == "unknown":
        console.say("this log does not tell which prompts share a prefix: every reuse figure of it is unknown")
    print_records([record], output, tall=True, unknown=NOT_IN_THE_LOG)


@app.command()
def reuse(
    trace: Annotated[Path, typer.Argument(help="Trace folder, as `preplay ingest` made it.")],
    capacity: Annotated[
        list[int] | None, typer.Option("--capacity", "-c", help="Cache size in trace blocks; repeat for several.")
    ] = None,
    model: Annotated[
        str | None, typer.Option("--model", help="Also print cache sizes in GiB of this model's KV (bf16).")
    ] = None,
    bound: Annotated[
        bool, typer.Option("--bound", help="Also the offline optimum: the most that any eviction policy could hit.")
    ] = False,
    policy: Annotated[
        list[str] | None,
        typer.Option(
            "--policy",
            help="Also another order of eviction: fifo, fifo_leaf, lfu, length_aware or lru_root_first; repeatable.",
        ),
    ] = None,
    ttl: Annotated[
        list[float] | None,
        typer.Option("--ttl", help="Instead of capacities: time to live in seconds (300, 3600); repeatable."),
    ] = None,
    summary_only: Annotated[
        bool,
        typer.Option("--summary", help="Only the headline: ceiling, hit lengths, reuse distance (JSON and CSV too)."),
    ] = False,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Folder for the whole profile as Parquet.")] = None,
    force: Force = False,
    output: OutputFormat = Format.table,
    quiet: Quiet = False,
) -> None:
    """How much prompt work is reusable, with no clock: the ceiling, and LRU at every cache size."""
    from pipeline.reuse_report import capacity_records, save_profile, summary_record, ttl_records
    from pipeline.trace import read_trace

    console = Console(quiet)
    loaded = read_trace(trace)
    console.compiling()
    summary, profile = summary_record(loaded)
    rows = []
    if profile is not None and not summary_only:
        rows = (
            ttl_records(profile, loaded, ttl)
            if ttl
            else capacity_records(profile, loaded, capacity, model, bound=bound, policies=policy or ())
        )
    if output is Format.table or not rows:
        print_records([summary], output, tall=True, unknown=NOT_IN_THE_LOG)
    if rows:
        if output is Format.table:
            print()
        print_records(rows, output)
    if out is not None:
        save_profile(profile, out, force=force)
        console.say(f"profile: {out}")


@app.command()
def replay(
    study: Annotated[Path, typer.Argument(help="Study file (TOML).")],
    scenario: Annotated[str, typer.Option("--scenario", "-s", help="Which scenario of the study.")] = "baseline",
    seed: Annotated[int | None, typer.Option("--seed", help="Seed. [default: the study's first]")] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="Folder for outcomes and timeline. [default: NAME.SCENARIO.replay]"),
    ] = None,
    force: Force = False,
    output: OutputFormat = Format.table,
    quiet: Quiet = False,
) -> None:
    """Replay one scenario of a study and print its summary; outcomes and timeline go to Parquet."""
    from pipeline.single import replay_one

    console = Console(quiet)
    record, folder = replay_one(study, scenario, seed, out, force=force, say=console.say)
    console.say(f"outcomes and timeline: {folder}")
    print_records([record], output, tall=True)


@app.command()
def elasticities(
    study: Annotated[Path, typer.Argument(help="Study file (TOML).")],
    scenario: Annotated[str, typer.Option("--scenario", "-s", help="Which scenario of the study.")] = "baseline",
    seed: Annotated[int | None, typer.Option("--seed", help="Seed. [default: the study's first]")] = None,
    output: OutputFormat = Format.table,
    quiet: Quiet = False,
) -> None:
    """What TTFT, TPOT and E2E percentiles of a replay are bound by: change in % for 1 % more bandwidth, FLOP/s, host time, ..."""
    from pipeline.single import elasticities_of

    console = Console(quiet)
    records = elasticities_of(study, scenario, seed, say=console.say)
    console.say("on the schedule as it was replayed: slopes for small changes (docs/cost-model.md)")
    if output is Format.table:
        records = [
            {
                name.removeprefix("elasticity_"): round(value, 3) if isinstance(value, float) else value
                for name, value in each.items()
            }
            for each in records
        ]
    print_records(records, output)


@app.command()
def run(
    study: Annotated[Path, typer.Argument(help="Study file (TOML).")],
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Run folder to make. [default: runs/NAME]")] = None,
    force: Force = False,
    resume: Annotated[bool, typer.Option("--resume", help="Keep the replays that a killed run had finished.")] = False,
    no_report: Annotated[bool, typer.Option("--no-report", help="Leave report.html out.")] = False,
    quiet: Quiet = False,
) -> None:
    """Replay every scenario of a study and write the run folder: Parquet, DuckDB database, HTML report."""
    from schemas.study import load_study

    console = Console(quiet)
    target = out if out is not None else Path("runs") / load_study(study).name
    _run_study(study, target, console, force=force, resume=resume, with_report=not no_report)
    print(target)


@app.command()
def report(
    run_folder: Annotated[Path, typer.Argument(metavar="RUN", help="Run folder, as `preplay run` made it.")],
    out: Annotated[Path | None, typer.Option("--out", "-o", help="File to write. [default: RUN/report.html]")] = None,
    quiet: Quiet = False,
) -> None:
    """Write a run's HTML report again: one file, no network needed."""
    from reports.page import write_report

    target = write_report(run_folder, out)
    Console(quiet).say("report written")
    print(target)


@app.command(context_settings={"ignore_unknown_options": True})  # SQL may begin with a comment: --
def query(
    run_folder: Annotated[Path, typer.Argument(metavar="RUN", help="Run folder.")],
    sql: Annotated[
        str | None,
        typer.Argument(help="One SELECT over outcomes, timeline, scenarios, reuse_curve, ...; - reads stdin."),
    ] = None,
    file: Annotated[Path | None, typer.Option("--file", "-i", help="Read the SELECT from this file.")] = None,
    output: OutputFormat = Format.table,
) -> None:
    """Ask a run's database in SQL, read only. `SELECT view_name FROM duckdb_views()` lists what there is."""
    from pipeline.warehouse import query as run_query

    if (sql is None) == (file is None):
        raise PreplayError("give the SQL either as an argument or with --file", mend="e.g. 'SELECT * FROM scenarios'")
    if file is not None:
        try:
            sql = file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            raise PreplayError("can't be read as text", file=file) from None
    names, rows = run_query(run_folder, sys.stdin.read() if sql == "-" else str(sql))
    print_records([dict(zip(names, row, strict=True)) for row in rows], output, columns=names)


@app.command()
def estimate(
    model: Annotated[str, typer.Argument(help="Name in the model catalogue, or the path of a config.json.")],
    gpu: Annotated[str, typer.Argument(help="Name in the GPU catalogue.")],
    tensor_parallel: Annotated[int, typer.Option("--tensor-parallel", "-t", min=1, help="GPUs of one group.")] = 1,
    pipeline_parallel: Annotated[
        int, typer.Option("--pipeline-parallel", min=1, help="Stages, each such a group with a part of the layers.")
    ] = 1,
    expert_parallel: Annotated[
        bool, typer.Option("--expert-parallel", help="Experts whole on one GPU of a group each, not a slice on all.")
    ] = False,
    replicas: Annotated[int, typer.Option("--replicas", min=1, help="Such replicas, for the fleet's tokens/s.")] = 1,
    weight_dtype: Annotated[str, typer.Option("--weight-dtype", help="bf16, fp8 or int4.")] = "bf16",
    kv_dtype: Annotated[str, typer.Option("--kv-dtype", help="bf16 or fp8.")] = "bf16",
    batch: Annotated[
        list[int] | None,
        typer.Option("--batch", "-b", help="Sequences that decode at once; repeatable. [default: 1, 8, 32, 128, most]"),
    ] = None,
    context: Annotated[
        list[int] | None,
        typer.Option("--context", help="Tokens of each sequence so far; repeatable. [default: 1024 and 8192]"),
    ] = None,
    prompt: Annotated[
        int | None, typer.Option("--prompt", help="Prompt tokens for TTFT. [default: the context]")
    ] = None,
    calibration: Annotated[
        str, typer.Option("--calibration", help="auto, none, a shipped calibration's name, or a file.")
    ] = "auto",
    max_batched_tokens: Annotated[
        int, typer.Option("--max-batched-tokens", help="Token budget of one step: prompts are cut into such chunks.")
    ] = 8192,
    max_sequences: Annotated[int, typer.Option("--max-sequences", help="Most sequences that run at once.")] = 256,
    gpu_memory_utilization: Annotated[
        float, typer.Option("--gpu-memory-utilization", help="Share of each GPU's memory that the engine may use.")
    ] = 0.9,
    tiers: Annotated[
        bool,
        typer.Option("--tiers", help="Instead of steps: loading a context's KV from each tier against computing it."),
    ] = False,
    summary_only: Annotated[
        bool, typer.Option("--summary", help="Only the headline: weights, KV pool, what fits (JSON and CSV too).")
    ] = False,
    output: OutputFormat = Format.table,
    quiet: Quiet = False,
) -> None:
    """One model on one GPU or group of GPUs, no trace: what fits, TPOT and TTFT, and what they are bound by."""
    from pipeline.estimate import CONTEXTS, scenario_of, table_rows
    from pipeline.estimate import estimate as run_estimate
    from pipeline.estimate_tiers import tier_rows, tier_table
    from schemas import hardware

    console = Console(quiet)
    scenario = scenario_of(
        model, gpu, tensor_parallel=tensor_parallel, pipeline_parallel=pipeline_parallel, expert_parallel=expert_parallel,
        replicas=replicas, weight_dtype=weight_dtype, kv_dtype=kv_dtype,
        calibration=calibration, max_batched_tokens=max_batched_tokens, max_sequences=max_sequences,
        gpu_memory_utilization=gpu_memory_utilization,
    )  # fmt: skip
    summary, rows = run_estimate(scenario, batch or (), context or CONTEXTS, prompt)
    if tiers:
        rows = tier_rows(scenario, context or CONTEXTS)
    for note in hardware.model(model).notes:
        console.say(note)
    in_table = output is Format.table
    if in_table or summary_only:
        print_records([summary], output, tall=True)
    else:
        console.say(summary["rests_on"])
        if summary["notes"] != "none":
            console.say(summary["notes"])
    if not summary_only:
        if in_table:
            print()
        if in_table:
            rows = tier_table(rows) if tiers else table_rows(rows, replicas)
        print_records(rows, output, unknown="does not fit")


@app.command()
def catalog(
    kind: Annotated[str, typer.Argument(help="gpus or models")] = "gpus",
    output: OutputFormat = Format.table,
) -> None:
    """List the GPUs or models that a study can name."""
    from schemas import hardware

    known: dict[str, Any] = {"gpus": hardware.gpus, "models": hardware.models}
    if kind not in known:
        raise PreplayError(f"unknown catalogue '{kind}'", mend="known: gpus, models")
    records = [entry.model_dump(mode="json", exclude={"source"}) for entry in known[kind]().values()]
    for record in records:
        if kind == "models":
            record["moe"] = (
                "" if record["moe"] is None else f"{record['moe']['experts_per_token']} of {record['moe']['experts']}"
            )
            record["mla"] = "" if record["mla"] is None else "MLA"
    print_records(records, output)


@app.command()
def demo(
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder to make.")] = Path("demo"),
    force: Force = False,
    quiet: Quiet = False,
) -> None:
    """The whole pipeline on a real production trace: 12,031 requests, 2 x 2 of caching and speculation, a report."""
    from pipeline.demo import prepare_demo

    console = Console(quiet)
    study = prepare_demo(out, force=force, say=console.say)
    run_folder = out / "run"
    _run_study(study, run_folder, console, force=True, resume=False, with_report=True)
    console.say(
        f'open {run_folder / "report.html"} in a browser, or ask: preplay query {run_folder} "SELECT * FROM scenarios"'
    )
    print(run_folder / "report.html")


app.add_typer(calibrate_app, name="calibrate")


def _run_study(study: Path, out: Path, console: Console, *, force: bool, resume: bool, with_report: bool) -> None:
    from pipeline.study import run_study

    def finish(folder: Path) -> None:
        if with_report:
            from reports.page import write_report

            console.say("writing the report")
            write_report(folder)

    try:
        run_study(study, out, force=force, resume=resume, say=console.say, finish=finish)
    except KeyboardInterrupt:
        console.say("interrupted; `preplay run ... --resume` does only what is missing")
        raise


def _stem(log: Path) -> str:
    """`a/b.jsonl.gz` -> `b`."""
    name = log.name
    for suffix in (".gz", ".jsonl", ".json", ".csv"):
        name = name.removesuffix(suffix)
    return name or "log"


def _version(wanted: bool) -> None:
    if wanted:
        from importlib import metadata

        print(f"preplay {metadata.version('preplay')}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


def main() -> None:
    """Entry point: the only place that turns errors into exit codes."""
    try:
        app()
    except PreplayError as problem:
        print(f"preplay: {problem.line()}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
