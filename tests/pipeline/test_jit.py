"""Where compiled code is kept, and that the kernels also run as plain Python."""

from __future__ import annotations

import os
import subprocess
import sys

from tests.conftest import ROOT

TELL = "from pipeline import jit; print(jit.CACHE_FOLDER, jit.compiled_before())"


def python(code, **environment):
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, **environment},
    ).stdout.strip()


def test_the_folder_follows_the_user_and_starts_empty(tmp_path):
    folder, compiled = python(TELL, NUMBA_CACHE_DIR=str(tmp_path)).rsplit(" ", 1)
    assert folder.startswith(str(tmp_path / "kernels-"))
    assert compiled == "False"


def test_the_folder_depends_on_every_source(tmp_path):
    """A change in any kernel's file must not find code compiled from the old one."""
    import shutil

    shutil.copytree(ROOT / "pipeline", tmp_path / "pipeline", ignore=shutil.ignore_patterns("__pycache__"))
    tell = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); {TELL}"
    before = python(tell, NUMBA_CACHE_DIR=str(tmp_path), PYTHONPATH=str(tmp_path))
    with (tmp_path / "pipeline/replay/pool.py").open("a") as source:
        source.write("# changed\n")
    assert python(tell, NUMBA_CACHE_DIR=str(tmp_path), PYTHONPATH=str(tmp_path)) != before


COMPARE = (
    "import warnings; warnings.filterwarnings('ignore', 'overflow encountered')\n"
    "from tests.pipeline.replay.support import *\n"
    "from tests.reference.strategies import busy_case\n"
    "for seed in range({cases}):\n"
    "    specs, config = busy_case(seed)\n"
    "    fast, slow = run_both(specs, config)\n"
    "    assert_equal(fast, slow)\n"
    "print('equal')"
)


def test_kernels_run_uncompiled():
    """NUMBA_DISABLE_JIT=1 gives the same replay, for debugging and coverage."""
    assert python(COMPARE.format(cases=40), NUMBA_DISABLE_JIT="1") == "equal"


def test_kernels_stay_inside_their_arrays(tmp_path):
    """Compiled code checks no bounds: here it does, and a kernel that reads or writes outside raises."""
    checked = {"NUMBA_BOUNDSCHECK": "1", "NUMBA_CACHE_DIR": str(tmp_path)}
    outside = (
        "import numba, numpy as np\n"
        "def last(values):\n    return values[values.shape[0]]\n"
        "kernel = numba.njit(error_model='numpy', _nrt=False)(last)\n"
        "try:\n    kernel(np.zeros(3))\nexcept IndexError:\n    print('raises')"
    )
    assert python(outside, **checked) == "raises"
    assert python(COMPARE.format(cases=400), **checked) == "equal"
