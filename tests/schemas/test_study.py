"""Study files: what they resolve to, and one placed line for every mistake."""

from __future__ import annotations

import tomllib

import pytest

from schemas.errors import StudyError
from schemas.study import load_study, resolve_study

GOOD = """
name = "x"
trace = "t"
[slo]
ttft_ms = 5000
[baseline.fleet]
gpu = "h100-sxm"
replicas = 2
[baseline.model]
name = "llama-3.1-8b"
[whatif.spec.speculation]
method = "eagle"
k = 2
conditional_acceptance = [0.5, 0.6]
acceptance_source = "me"
"""


def resolve(extra="", base=GOOD):
    return resolve_study(tomllib.loads(base + extra))


def test_a_whatif_holds_only_what_it_changes():
    study = resolve('[whatif.big.fleet]\nreplicas = 5\n[whatif.other.model]\nweight_dtype = "fp8"\n')
    assert list(study.scenarios) == ["baseline", "spec", "big", "other"]
    assert study.whatif["big"].fleet.replicas == 5
    assert study.whatif["big"].fleet.gpu == "h100-sxm"
    assert study.whatif["other"].model.name == "llama-3.1-8b"
    assert study.whatif["spec"].speculation.expected_acceptance_length == pytest.approx(1 + 0.5 + 0.5 * 0.6)


def test_another_method_replaces_the_whole_speculation_table():
    base = (
        GOOD
        + '[baseline.speculation]\nmethod="draft_model"\nmodel="llama-3.1-8b"\nk=1\nconditional_acceptance=[0.5]\nacceptance_source="q"\n'
    )
    study = resolve('[whatif.off.speculation]\nmethod = "none"\n', base)
    assert study.whatif["off"].speculation.method == "none"
    assert study.whatif["spec"].speculation.method == "eagle"


@pytest.mark.parametrize(
    ("extra", "line"),
    [
        (
            "[whatif.b.prefix_cache]\nenable = true\n",
            "whatif.b.prefix_cache.enable: unknown key 'enable'; did you mean 'enabled'?",
        ),
        (
            '[whatif.b.speculation]\nmethod = "eagle"\nkk = 2\n',
            "whatif.b.speculation.kk: unknown key 'kk'; did you mean 'k'?",
        ),
        ('[whatif.b.speculation]\nmethod = "eagl"\n', "'none', 'eagle', 'draft_model'"),
        ("[whatif.b.fleet]\nreplicas = 0\n", "whatif.b.fleet.replicas: Input should be greater than 0 (given: 0)"),
        ("[whatif.b]\nfleet = 3\n", "whatif.b.fleet: "),
        (
            '[whatif.speculation]\nmethod = "eagle"\n',
            "unknown key 'method'; it belongs in [whatif.speculation.speculation]",
        ),
        (
            "[baseline.engine]\nmax_sequence = 3\n",
            "baseline.engine.max_sequence: unknown key 'max_sequence'; did you mean 'max_sequences'?",
        ),
        ("[whatif.B.fleet]\nreplicas = 1\n", "'B' is no name"),
        ("[whatif.baseline.fleet]\nreplicas = 1\n", "can't be called 'baseline'"),
        (
            '[whatif.b.speculation]\nmethod="eagle"\nk=2\nconditional_acceptance=[0.5]\nacceptance_source="q"\n',
            "1 rates for k = 2",
        ),
        ("[whatif.b.engine]\nmax_batched_tokens = 8\n", "max_batched_tokens 8 is less than max_sequences 256"),
    ],
)
def test_mistakes_are_placed(extra, line):
    with pytest.raises(StudyError) as caught:
        resolve(extra)
    assert line in caught.value.line()
    assert "\n" not in caught.value.line()


def test_missing_parts_are_named():
    with pytest.raises(StudyError, match=r"'trace' is missing"):
        resolve_study({"name": "x", "slo": {"ttft_ms": 1}, "baseline": tomllib.loads(GOOD)["baseline"]})
    with pytest.raises(StudyError, match="at least one of ttft_ms"):
        resolve_study({**tomllib.loads(GOOD), "slo": {}})
    with pytest.raises(StudyError, match="twice"):
        resolve_study({**tomllib.loads(GOOD), "seeds": [1, 1]})


def test_files_that_are_no_study(tmp_path):
    with pytest.raises(StudyError, match=r"nothing\.toml: no such file"):
        load_study(tmp_path / "nothing.toml")
    (tmp_path / "bad.toml").write_text("name = \n")
    with pytest.raises(StudyError, match=r"bad\.toml: not valid TOML: .*line 1"):
        load_study(tmp_path / "bad.toml")
    (tmp_path / "latin.toml").write_bytes(b"name = '\xe9'\n")
    with pytest.raises(StudyError, match="can't be read"):
        load_study(tmp_path / "latin.toml")


def test_a_fault_that_every_whatif_inherits_is_told_once():
    base = GOOD.replace("replicas = 2", "replicas = 0")
    with pytest.raises(StudyError) as caught:
        resolve("[whatif.c.prefix_cache]\nenabled = true\n", base)
    assert "more after this one" not in caught.value.line()
    with pytest.raises(StudyError, match=r"seeds: needs at least 1"):
        resolve_study({**tomllib.loads(GOOD), "seeds": []})
