"""Fixtures shared by all tests: the sample traces, ingested once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import settings

# The first call of a kernel compiles it: seconds on a fresh machine, and no property's fault.
settings.register_profile("preplay", deadline=None, print_blob=True)
settings.load_profile("preplay")

ROOT = Path(__file__).parent.parent
SAMPLES = ROOT / "traces" / "samples"
DATA = ROOT / "tests" / "data"
CONVERSATION = SAMPLES / "mooncake_conversation_trace.jsonl.gz"
SYNTHETIC = DATA / "mooncake_synthetic_trace.jsonl.gz"
AZURE = SAMPLES / "azure_llm_2023_conv_head.csv"


@pytest.fixture(scope="session")
def expected():
    """Integers of the independent reference implementation (tests/data/README.md)."""
    return json.loads((DATA / "prefix_expected.json").read_text())["traces"]


@pytest.fixture(scope="session")
def conversation(tmp_path_factory):
    """Trace folder of the whole conversation trace."""
    from pipeline.ingest import ingest

    out = tmp_path_factory.mktemp("traces") / "conversation.trace"
    ingest([CONVERSATION], out)
    return out


@pytest.fixture(scope="session")
def synthetic(tmp_path_factory):
    """Trace folder of the whole synthetic trace."""
    from pipeline.ingest import ingest

    out = tmp_path_factory.mktemp("traces") / "synthetic.trace"
    ingest([SYNTHETIC], out)
    return out


@pytest.fixture(scope="session")
def azure(tmp_path_factory):
    """Trace folder of Azure's sample: prefix identity unknown."""
    from pipeline.ingest import ingest

    out = tmp_path_factory.mktemp("traces") / "azure.trace"
    ingest([AZURE], out)
    return out


@pytest.fixture(scope="session")
def small_trace(tmp_path_factory):
    """The conversation trace's first 300 requests: enough for studies that test the machinery, not the numbers."""
    import gzip

    from pipeline.ingest import ingest

    folder = tmp_path_factory.mktemp("traces")
    log = folder / "head.jsonl"
    with gzip.open(CONVERSATION, "rt") as stream:
        log.write_text("".join(line for line, _ in zip(stream, range(300), strict=False)))
    out = folder / "head.trace"
    ingest([log], out)
    return out


STUDY = """
name = "{name}"
trace = "{trace}"
seeds = [1, 2]

[slo]
ttft_ms = 10_000
tpot_ms = 100

[baseline.fleet]
gpu = "h100-sxm"
replicas = 2
tensor_parallel = 4

[baseline.model]
name = "llama-3.1-70b"

[baseline.workload]
spread_ticks = true

[whatif.caching.prefix_cache]
enabled = true

[whatif.speculation.speculation]
method = "eagle"
k = 2
conditional_acceptance = [0.7, 0.6]
acceptance_source = "test"

[whatif.both.prefix_cache]
enabled = true

[whatif.both.speculation]
method = "eagle"
k = 2
conditional_acceptance = [0.7, 0.6]
acceptance_source = "test"
"""


@pytest.fixture(scope="session")
def study_file(tmp_path_factory, small_trace):
    """A study of two seeds and the 2 x 2 on the small trace."""
    file = tmp_path_factory.mktemp("studies") / "study.toml"
    file.write_text(STUDY.format(name="small", trace=small_trace))
    return file


@pytest.fixture(scope="session")
def run_folder(tmp_path_factory, study_file):
    """A complete run with its report."""
    from pipeline.study import run_study
    from reports.page import write_report

    out = tmp_path_factory.mktemp("runs") / "small"
    return run_study(study_file, out, finish=lambda folder: write_report(folder) and None)
