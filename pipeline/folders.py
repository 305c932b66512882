"""Folders that appear only when they are complete, and files that appear only whole."""

from __future__ import annotations

import contextlib
import fcntl
import shutil
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from schemas.errors import RunError

LOCK_FILE = ".lock"


def partial_of(out: Path) -> Path:
    """Where `out` is being made: a hidden sibling, so that the rename stays within one file system."""
    return out.with_name(f".{out.name}.partial")


def check_absent(out: Path, *, force: bool, own: frozenset[str]) -> None:
    """Raises RunError where `out` is there already and may not be replaced.

    `--force` replaces what an earlier call of the same command made, that is a folder with nothing but the names `own` in it;
    never a file, a link, the folder that holds the log, or one's documents.
    """
    if not out.exists() and not out.is_symlink():
        return
    if not force:
        raise RunError("is there already", file=out, mend="choose another with --out, or replace it with --force")
    if out.is_symlink() or not out.is_dir():
        raise RunError("is no folder: --force does not replace it", file=out, mend="choose another with --out")
    others = [each.name for each in out.iterdir() if each.name not in own]
    if others:
        raise RunError(
            f"holds something else ('{min(others)}'): --force does not replace it",
            file=out,
            mend="choose another with --out",
        )


def check_file(out: Path, *, force: bool) -> None:
    """Raises RunError where a file `out` is there already and may not be replaced, or where its folder is missing."""
    if not out.parent.is_dir():
        raise RunError("no such folder", file=out.parent, mend="make it, or choose another with --out")
    if out.is_symlink() or (out.exists() and not out.is_file()):
        raise RunError("is no plain file: it is not replaced", file=out, mend="choose another with --out")
    if out.exists() and not force:
        raise RunError("is there already", file=out, mend="choose another with --out, or replace it with --force")


@contextlib.contextmanager
def claimed(partial: Path, *, keep: bool) -> Iterator[None]:
    """Hold `partial` for this process: made anew, or with `keep` as it was left.

    Raises RunError where another process is at it, or where the place can't be written.
    """
    try:
        if partial.exists() and not keep:
            with _lock(partial):
                shutil.rmtree(partial)
        partial.mkdir(parents=True, exist_ok=True)
        with _lock(partial):
            yield
    except BrokenPipeError:
        raise
    except OSError as problem:  # no such place, no permission, read-only, full
        reason = problem.strerror or str(problem).splitlines()[0]
        raise RunError(
            f"can't be written ({reason})", file=problem.filename or partial, mend="choose another place with --out"
        ) from None


@contextlib.contextmanager
def _lock(partial: Path) -> Iterator[None]:
    with (partial / LOCK_FILE).open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RunError(
                "another process is writing it", file=partial, mend="wait for it, or choose another --out"
            ) from None
        yield


def publish(partial: Path, out: Path) -> None:
    """Give a complete folder its name. An older `out` is set aside first and removed last."""
    (partial / LOCK_FILE).unlink(missing_ok=True)
    old = out.with_name(f".{out.name}.old")
    if old.exists():
        shutil.rmtree(old)
    if out.exists():
        out.rename(old)
    partial.rename(out)
    if old.exists():
        shutil.rmtree(old)


def write_parquet(table: pa.Table, file: Path) -> None:
    """Write whole or not at all. The same table gives the same bytes."""
    file.parent.mkdir(parents=True, exist_ok=True)
    unfinished = file.with_name(f".{file.name}.partial")
    pq.write_table(table, unfinished, compression="zstd")
    unfinished.replace(file)


def write_text(text: str, file: Path) -> None:
    """Write whole or not at all."""
    unfinished = file.with_name(f".{file.name}.partial")
    unfinished.write_text(text, encoding="utf-8")
    unfinished.replace(file)
