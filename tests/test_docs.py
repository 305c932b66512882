"""Documentation tells the truth: its commands run, its study is valid, its links lead somewhere, its tables match the code."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib

import pytest

from schemas.study import resolve_study
from schemas.study_reference import reference_markdown
from tests.conftest import ROOT
from traces.registry import formats

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
README = (ROOT / "README.md").read_text()


def blocks(text, language):
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


def test_the_study_reference_is_the_programs_own():
    assert (ROOT / "docs/study-file.md").read_text() == reference_markdown(), (
        "python -m schemas.study_reference > docs/study-file.md"
    )


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), target


def test_formats_in_the_docs_are_the_registered_ones():
    table = (ROOT / "docs/traces.md").read_text().split("## Formats")[1].split("##")[0]
    assert re.findall(r"^\| `([^`]+)` \|", table, re.MULTILINE) == sorted(formats(), reverse=True)


def test_the_readmes_study_is_valid():
    (text,) = blocks(README, "toml")
    assert list(resolve_study(tomllib.loads(text)).scenarios) == ["baseline", "caching", "speculation"]


def test_make_targets_exist():
    makefile = (ROOT / "Makefile").read_text()
    for command in re.findall(r"^make (\w+)$", "\n".join(blocks(README, "sh")), re.MULTILINE):
        assert re.search(rf"^{command}:", makefile, re.MULTILINE), command


def test_the_readmes_commands_run(tmp_path):
    """Every `preplay` line of the README, in order, on a log of 300 real requests under the names that the README uses."""
    import gzip

    from tests.conftest import CONVERSATION

    with gzip.open(CONVERSATION, "rt") as stream:
        (tmp_path / "requests.jsonl").write_text("".join(line for line, _ in zip(stream, range(300), strict=False)))
    (study,) = blocks(README, "toml")
    (tmp_path / "study.toml").write_text(study)
    commands = [line for block in blocks(README, "sh") for line in block.splitlines() if line.startswith("preplay ")]
    assert len(commands) >= 4
    for command in commands:
        arguments = shlex.split(command)[1:]
        done = subprocess.run(
            [sys.executable, "-m", "pipeline.cli", *arguments], cwd=tmp_path, capture_output=True, text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )  # fmt: skip
        assert done.returncode == 0, (command, done.stderr)
        assert done.stdout.strip(), command
    assert (tmp_path / "runs/mine/report.html").exists()


def test_commands_named_in_the_readme_exist():
    for command in re.findall(r"^\| `preplay (\w+)", README, re.MULTILINE):
        done = subprocess.run(
            [sys.executable, "-m", "pipeline.cli", command, "--help"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        )
        assert "Usage" in done.stdout


def test_numbers_in_the_docs_are_the_oracles(expected):
    text = (ROOT / "docs/reuse.md").read_text()
    truth = expected["conversation_trace.jsonl"]
    for capacity, words in (("10000", "with 10,000 blocks"), ("100000", "with 100,000")):
        assert f"{truth['one_pass'][capacity]:,}" in text and words in text
    assert f"{100 * truth['infinite']['token_vllm']:.1f} % of prompt tokens" in text


def test_demo_end_to_end(tmp_path):
    """`preplay demo`: all four scenarios, three seeds, the page; and its study is the one that ships."""
    done = subprocess.run(
        [sys.executable, "-m", "pipeline.cli", "demo", "--out", str(tmp_path / "demo")],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout.strip() == str(tmp_path / "demo/run/report.html")
    html = (tmp_path / "demo/run/report.html").read_text()
    assert "12,031 rows read = 12,031 kept + 0 rejected" in html
    assert "spread over the log" in html
    assert "interaction = (both" in html
    assert (tmp_path / "demo/study.toml").read_bytes() == (ROOT / "pipeline/studies/demo.toml").read_bytes()


def test_a_wheel_holds_what_the_program_reads(tmp_path):
    """Package data is in the wheel: catalogue, samples, SQL, template, demo study."""
    import zipfile

    source = tmp_path / "source"
    ignore = shutil.ignore_patterns(
        ".venv", ".git", "demo", "runs", "*.egg-info", "build", "__pycache__", ".*_cache", ".hypothesis"
    )
    shutil.copytree(ROOT, source, ignore=ignore)
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(tmp_path), str(source)],
        check=True, capture_output=True,
    )  # fmt: skip
    (wheel,) = tmp_path.glob("preplay-*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    wanted = [
        "schemas/catalog/gpus.toml", "schemas/catalog/models.toml", "traces/samples/mooncake_conversation_trace.jsonl.gz",
        "traces/samples/LICENSE.mooncake", "reports/sql/header.sql", "reports/template/page.html.j2", "reports/template/page.css",
        "reports/template/page.js", "pipeline/studies/demo.toml", "pipeline/replay/pool.py", "reports/sections/reuse.py",
    ]  # fmt: skip
    assert [name for name in wanted if name not in names] == []
    assert not any(name.startswith(("tests/", "benchmarks/", "docs/")) for name in names)
    # And it works from any folder, without the checkout.
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    code = (
        "import pipeline, pathlib; assert pathlib.Path(pipeline.__file__).is_relative_to({site!r}); "
        "from pipeline.demo import prepare_demo; from pipeline.study import check_study; "
        "print(len(check_study(prepare_demo(pathlib.Path('d'), force=False, say=print)).scenarios))"
    ).format(site=str(tmp_path / "site"))
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "site")}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=elsewhere, env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == "4"
