"""ITL from the ends of steps: against numpy on the gaps themselves, over many gaps and with silences."""

from __future__ import annotations

import numpy as np
import pytest

from pipeline.replay.steps import inter_token_latencies, longer_log, new_step_log, note_silent


@pytest.mark.parametrize("seed", range(40))
def test_quantiles_of_the_gaps(seed):
    random = np.random.default_rng(seed)
    steps, requests = 3000, 30
    durations = random.exponential(0.02, steps) + (random.random(steps) < 0.05) * random.exponential(0.3, steps)
    log = new_step_log(steps, 8)
    log.end_s[:] = np.cumsum(durations)
    first = random.integers(0, steps - 1, requests).astype(np.int32)
    last = (first + random.integers(0, steps, requests)).clip(max=steps - 1)
    emits = [np.arange(a, b + 1) for a, b in zip(first, last, strict=True)]
    silent = np.zeros(requests, np.int32)
    notes = []
    for request in range(requests):
        inside = emits[request][1:-1]
        if request % 3 or inside.size == 0:
            continue  # two in three emit in every step
        begin = int(random.choice(inside))
        end = min(begin + int(random.choice([0, 0, 5, 50])), int(inside[-1]))
        notes.append((begin, end, request))
        silent[request] = end - begin + 1
        emits[request] = np.setdiff1d(emits[request], np.arange(begin, end + 1))
    for begin, end, request in sorted(notes):
        if log.totals[0] == log.silent_request.shape[0]:
            log = longer_log(log, 1)
        note_silent(log, request, begin, end)
    emitting = np.array([each.size for each in emits], np.int32)
    longest, p99 = np.full(requests, np.nan), np.full(requests, np.nan)
    mine = np.arange(requests, dtype=np.int32)
    inter_token_latencies(log, steps, mine, first, emitting, silent, longest, p99)
    for request in range(requests):
        gaps = np.diff(log.end_s[emits[request]])
        if gaps.size == 0:
            assert np.isnan(longest[request])
            assert np.isnan(p99[request])
        else:
            assert longest[request] == gaps.max()
            assert p99[request] == pytest.approx(np.percentile(gaps, 99), rel=1e-12)
