"""How the hot loops are compiled: numba, cached on disk, without the interpreter's lock.

Two decisions live here.

- *Where compiled code is kept.* numba's own cache looks at a function's file only, not at the files of the functions that it
  calls: after a change in `pool.py` it would happily run an old `loop.py` with the old pool inside. So the cache folder's name
  is a hash over every source file that takes part, and a change anywhere means a new folder.
- *No reference counting inside kernels* (`_nrt=False`). Kernels take NamedTuples of arrays; with counting, every call that isn't
  inlined touches a counter per array, which made the replay 14 times slower (measured: 4.4 s against 0.3 s for the conversation
  trace on 16 replicas). A kernel therefore can't create arrays: its caller does.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

import numba

Function = TypeVar("Function", bound=Callable[..., object])

_PACKAGE = Path(__file__).parent


def _cache_folder() -> Path:
    """``NUMBA_CACHE_DIR``, else the user's cache folder, else a temporary one; below it one folder per version of us."""
    digest = hashlib.sha256(numba.__version__.encode())
    for source in sorted(_PACKAGE.rglob("*.py")):
        digest.update(source.read_bytes())
    leaf = f"kernels-{digest.hexdigest()[:16]}"
    home = os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()
    for base in (os.environ.get("NUMBA_CACHE_DIR"), Path(home) / "preplay"):
        if base:
            folder = Path(base) / leaf
            try:
                folder.mkdir(parents=True, exist_ok=True)
            except OSError:
                continue
            if os.access(folder, os.W_OK):
                return folder
    # Readable by this user only: compiled code from a folder that others can write to would be theirs to choose.
    return Path(tempfile.mkdtemp(prefix=f"preplay-{leaf}-"))


CACHE_FOLDER = _cache_folder()
numba.config.CACHE_DIR = str(CACHE_FOLDER)  # type: ignore[attr-defined]


def njit(function: Function) -> Function:
    """Compile a kernel: arrays and scalars in, scalars out, no allocation inside."""
    options: dict[str, Any] = {"cache": True, "nogil": True, "error_model": "numpy", "_nrt": False}
    return cast("Function", numba.njit(**options)(function))


COMPILING = "compiling the replay engine for this machine: once, about 15 s"
"""What to say where `compiled_before` is false."""


def inlined(function: Function) -> Function:
    """Compile a kernel into its caller: for what runs once per step.

    Handing fifty arrays over costs about 75 ns a call even uncounted; inlining the scheduler and the commit made the replay
    on 8 replicas twice as fast (163 to 85 ms).
    """
    options: dict[str, Any] = {"inline": "always", "error_model": "numpy", "_nrt": False}
    return cast("Function", numba.njit(**options)(function))


def compiled_before() -> bool:
    """Whether compiled kernels of exactly these sources are there, so that the first call won't take long."""
    return next(CACHE_FOLDER.rglob("loop.run_replica*.nbc"), None) is not None
