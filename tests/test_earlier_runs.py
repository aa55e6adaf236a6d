"""A run folder that version 0.1 wrote (mined, fitted and certified on the built-in pair) still
reads and decodes as it did; answers.json holds what 0.1 itself answered."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from lenience.certification.audit import Audit, AuditConfig
from lenience.certification.certificate import read_certificate
from lenience.certification.certify import certify
from lenience.certification.question import CertifyConfig
from lenience.core.files import EMBEDDED
from lenience.decoding.loading import load_pair
from lenience.decoding.pair import Pair
from lenience.heads.fitting import FitConfig
from lenience.heads.head import Inputs, load_head
from lenience.mining.search import MineConfig, mine
from lenience.runs.journal import Journal
from lenience.runs.record import mined_samples, read_run
from lenience.tasks import WordMath, take
from lenience.training.fit import HeadPlan, fit_run

FIXTURES = Path(__file__).parent / "fixtures"


@pytest.fixture(scope="module")
def pair_0_1() -> Pair:
    """The built-in pair of 0.1: a narrower target, the same draft."""
    target = FIXTURES / "pair-0.1" / "target"
    return load_pair(str(target), str(EMBEDDED / "draft"), compile=False)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    shutil.copytree(FIXTURES / "run-0.1", tmp_path / "run")
    return tmp_path / "run"


def test_its_records_read(run: Path) -> None:
    assert read_run(run).task == "wordmath"
    samples = list(mined_samples(Journal(run / "journal.jsonl")))
    assert len(samples) == 3 and all(sample.mismatches for sample in samples)
    head = load_head(run / "judge")
    assert head.threshold == pytest.approx(0.9998, abs=1e-4)
    certificate = read_certificate(run)
    assert certificate.certified is not None
    assert (certificate.certified.rule, certificate.certified.n) == (
        "judge:oldrun/judge@0.99999",
        8,
    )


@pytest.mark.parametrize("name", ["certified", "judge@0.99"])
def test_it_decodes_as_it_did(name: str, run: Path, pair_0_1: Pair) -> None:
    answers = json.loads((run / "answers.json").read_text())[name]
    options: dict = {"rule": f"certified:{run}"}
    if name != "certified":
        options = {"rule": f"judge:{run}/{name}", "max_new_tokens": 320, "window": 4}
    for sample, tokens in zip(take(WordMath(), "test", 2), answers, strict=True):
        assert pair_0_1.generate(sample.prompt, **options).tokens == tokens


def test_its_mining_goes_on(run: Path, pair_0_1: Pair) -> None:
    before = (run / "journal.jsonl").read_bytes()
    assert mine(pair_0_1, WordMath(), run, MineConfig(limit=3)).samples == 3
    assert (run / "journal.jsonl").read_bytes() == before, (
        "what is there is not done again"
    )
    assert mine(pair_0_1, WordMath(), run, MineConfig(limit=4)).samples == 4
    assert (run / "journal.jsonl").read_bytes().startswith(before)


def test_a_head_is_fitted_to_it_and_certified_on_other_prompts(
    run: Path, pair_0_1: Pair
) -> None:
    mine(pair_0_1, WordMath(), run, MineConfig(limit=12))
    inputs, config = Inputs(("draft",), ("previous",)), FitConfig(role="stop")
    head = fit_run(pair_0_1, run, HeadPlan(inputs, run / "stop", config))
    assert load_head(run / "stop", "stop").fingerprint == head.fingerprint
    used = {
        json.loads(line)["id"] for line in (run / "uses.jsonl").read_text().splitlines()
    }
    rule = f"judge:{run}/judge@0.99999"
    question = CertifyConfig(rules=(rule,), max_drop=0.6, confidence=0.6, limit=4)
    certificate = certify(pair_0_1, WordMath(), run, question)
    assert certificate.n <= 4
    lines = [json.loads(line) for line in (run / "uses.jsonl").read_text().splitlines()]
    drawn = [line["id"] for line in lines[len(used) :] if line["use"] == "calibration"]
    assert drawn and not used & set(drawn), "no prompt is used twice"


def test_its_certificate_is_audited(run: Path, pair_0_1: Pair) -> None:
    watch = Audit(run, pair_0_1, WordMath(), AuditConfig(share=1.0))
    (sample,) = take(WordMath(), "test", 1)
    state = watch.see(sample.prompt, "no answer at all", sample.reference)
    assert state is not None and (state.audited, state.losses) == (1, 1)
