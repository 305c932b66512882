"""Moving KV: by hand and by physics; and against computing it."""

from __future__ import annotations

import itertools
import json
import math
import shlex

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from pipeline.cli import app
from pipeline.cost.build import build_hardware
from pipeline.cost.transfer import Path, host, network, nvme, paths, same_node, store, transfer_seconds
from pipeline.estimate import scenario_of, ttft_seconds
from pipeline.estimate_tiers import block_counts, break_even, load_seconds, saved_seconds, tier_rows
from schemas import hardware
from schemas.errors import StudyError

H100 = hardware.gpu("h100-sxm")
LLAMA = scenario_of("llama-3.1-70b", "h100-sxm", tensor_parallel=4)


def test_by_hand():
    """10 us + 4 x 2 us + 1 GB over 50 GB/s: 20.018 ms; over a path that two GPUs share 10 us + 2 x (8 us + 20 ms)."""
    own = Path("x", 50.0, 10.0, 2.0, shared=False, basis="")
    assert transfer_seconds(own, 1e9, 4, 2) == pytest.approx(20.018e-3)
    shared = Path("x", 50.0, 10.0, 2.0, shared=True, basis="")
    assert transfer_seconds(shared, 1e9, 4, 2) == pytest.approx(40.026e-3)
    assert transfer_seconds(own, 0, 0, 2) == 0


def test_paths_from_data_sheets():
    """PCIe 5: 0.85 x 64; PM9A3: 6.5; 0.9 x 100 Gb/s; 0.7 x 450; 0.9 x 400 Gb/s. GB/s, one direction."""
    assert [path.gb_s for path in paths(H100)] == pytest.approx([54.4, 6.5, 11.25, 315, 45])
    assert host(hardware.gpu("a100-80g")).gb_s == pytest.approx(27.2)
    assert same_node(hardware.gpu("l40s")).gb_s == pytest.approx(0.7 * 32)
    assert nvme(4).gb_s == 26 and store(200).gb_s == network(200).gb_s == 22.5
    assert [path.shared for path in paths(H100)] == [False, True, True, False, False]


@settings(max_examples=100, deadline=None)
@given(st.sampled_from(paths(H100)), st.floats(1, 1e12), st.integers(1, 100_000), st.integers(1, 16))
def test_never_below_the_bytes_over_the_bandwidth(path, size, messages, gpus):
    took = transfer_seconds(path, size, messages, gpus)
    assert took > size / (path.gb_s * 1e9)
    assert transfer_seconds(path, 2 * size, 2 * messages, gpus) > took
    assert transfer_seconds(path, size, messages + 1, gpus) > took
    alone = transfer_seconds(path, size, messages, 1)
    assert (took > alone) == (path.shared and gpus > 1)
    assert transfer_seconds(path, 1e15, 1, 1) == pytest.approx(1e15 / (path.gb_s * 1e9), rel=1e-3), "latency vanishes"


def test_the_pages_example():
    """docs/parallelism.md: 511 blocks of 16 x 80 KiB per GPU, 13.1 ms from the host, 415 ms from one drive for four GPUs."""
    built = build_hardware(LLAMA)
    assert load_seconds(built, host(H100), 511, 4) == pytest.approx(13.1e-3, rel=0.01)
    assert load_seconds(built, nvme(), 511, 4) == pytest.approx(415.3e-3, rel=0.001)


def test_nothing_loaded_saves_nothing_and_more_saves_more():
    built = build_hardware(LLAMA)
    saved = saved_seconds(built, 20_000, [0, 100, 500, 1000, 1249], 8192)
    assert saved[0] == 0
    assert saved == sorted(saved)
    whole = ttft_seconds(built, 20_000, 8192)
    assert 0.9 * whole < saved[-1] < whole, "16 tokens are still to compute"


def test_break_even_by_hand():
    """Loading is slower at one block, faster at 2 and 3; a fast one in between counts only if all after it are fast."""
    assert break_even([1, 2, 3], [5.0, 5.0, 5.0], [1.0, 6.0, 7.0], 16) == 32
    assert break_even([1, 2, 3], [0.5, 7.0, 5.0], [1.0, 6.0, 7.0], 16) == 48
    assert break_even([1, 2, 3], [9.0] * 3, [1.0, 6.0, 7.0], 16) is None
    assert break_even([], [], [], 16) is None


@pytest.mark.parametrize("most", [0, 1, 5, 16, 17, 511, 8191])
def test_counts_end_with_the_most(most):
    counts = block_counts(most)
    assert counts == sorted(set(counts)) and max(counts, default=0) == most
    assert all(b <= math.ceil(1.1 * a) + 1 for a, b in itertools.pairwise(counts))


def test_rows_and_what_does_not_fit():
    tight = scenario_of("llama-3.1-8b", "rtx-4090")
    rows = tier_rows(tight, [1024, 131_000])
    assert [row["context"] for row in rows] == [1024] * 5 + [131_000] * 5
    assert all(row["load_ms"] is None and row["break_even_tokens"] is None for row in rows[5:])
    # 63 of 64 blocks of 2 MiB: the last token has to be computed
    assert rows[0]["kv_gib"] == pytest.approx(63 * 2 / 1024)
    for row in rows[:5]:
        assert (row["break_even_tokens"] is None) == (row["load_ms"] >= row["recompute_ms"])
    with pytest.raises(StudyError, match="has a context of 131072"):
        tier_rows(tight, [200_000])


def test_all_gpus_have_their_part():
    """KV of the replica is the same however it is cut: 327,680 bytes a token of 70B, 511 blocks of 16 tokens."""
    sizes = [
        tier_rows(scenario_of("llama-3.1-70b", "h200", **options), [8192])[0]["kv_gib"]
        for options in ({"tensor_parallel": 2}, {"tensor_parallel": 4}, {"tensor_parallel": 2, "pipeline_parallel": 2})
    ]
    assert sizes == pytest.approx([511 * 16 * 327_680 / 1024**3] * 3)


def test_the_command():
    def run(arguments):
        done = CliRunner().invoke(app, shlex.split(arguments))
        assert done.exit_code == 0, done.output
        return done.stdout

    arguments = "estimate llama-3.1-8b h100-sxm --gpu-memory-utilization 0.3 --tiers --context 512 --context 131000 -q"
    summary, table = run(arguments).split("\n\n")
    assert "kv_pool_tokens" in summary
    lines = table.splitlines()
    assert "break_even_tokens" in lines[0] and max(len(line) for line in lines) < 160
    assert lines[-1].count("does not fit") == 4 and "never" in table
    rows = json.loads(run(f"{arguments} -f json"))
    assert len(rows) == 10 and rows[-1]["load_ms"] is None and rows[0]["load_ms"] > 0
