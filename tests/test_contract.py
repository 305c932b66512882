"""The house: which package may import which, what start-up may import, and what the program must never name."""

from __future__ import annotations

import ast
import subprocess
import sys

import pytest

from tests.conftest import ROOT

ALLOWED = {
    "schemas": set(),
    "traces": {"schemas"},
    "pipeline": {"schemas", "traces"},
    "reports": {"schemas", "pipeline"},
}
"""Data moves one way: schemas <- traces <- pipeline <- reports. The command line alone sees all."""

REPORTS_MAY_READ = {"pipeline.warehouse", "pipeline.folders"}
"""Reports read the warehouse only (and write files as everybody does)."""


def imports(file):
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("package", ALLOWED)
def test_import_contract(package):
    for file in (ROOT / package).rglob("*.py"):
        if file == ROOT / "pipeline/cli.py":
            continue
        for name in imports(file):
            top = name.split(".")[0]
            if top in ALLOWED and top != package:
                assert top in ALLOWED[package], f"{file.relative_to(ROOT)} imports {name}"
                if package == "reports" and top == "pipeline":
                    assert any(name == each or name.startswith(f"{each}.") for each in REPORTS_MAY_READ), (
                        f"{file}: {name}"
                    )


def test_the_product_does_not_import_its_tests():
    for package in ALLOWED:
        for file in (ROOT / package).rglob("*.py"):
            assert not any(name.split(".")[0] in ("tests", "benchmarks") for name in imports(file)), file


def test_help_imports_nothing_heavy():
    code = (
        "import sys; from pipeline.cli import app\n"
        "from typer.testing import CliRunner\n"
        "assert CliRunner().invoke(app, ['--help']).exit_code == 0\n"
        "heavy = {'torch', 'numba', 'polars', 'duckdb', 'pyarrow', 'altair', 'numpy', 'vl_convert', 'jinja2'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_sources_stay_readable():
    """A file with a second noun in it is split; the limit is where a reader gets lost, not a matter of style."""
    for package in ALLOWED:
        for file in (ROOT / package).rglob("*.py"):
            assert len(file.read_text().splitlines()) <= 450, file
