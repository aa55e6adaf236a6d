"""A run folder that version 0.1 wrote (mined, fitted and certified on the built-in pair) still
reads and decodes as it did; answers.json holds what 0.1 itself answered."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from lenience.decoding.certified import read_certificate
from lenience.decoding.pair import Pair
from lenience.heads.head import load_head
from lenience.runs.journal import Journal
from lenience.runs.record import mined_samples, read_run
from lenience.tasks import WordMath, take

FIXTURE = Path(__file__).parent / "fixtures" / "run-0.1"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    shutil.copytree(FIXTURE, tmp_path / "run")
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
def test_it_decodes_as_it_did(name: str, run: Path, built_in: Pair) -> None:
    answers = json.loads((run / "answers.json").read_text())[name]
    options: dict = {"rule": f"certified:{run}"}
    if name != "certified":
        options = {"rule": f"judge:{run}/{name}", "max_new_tokens": 320, "window": 4}
    for sample, tokens in zip(take(WordMath(), "test", 2), answers, strict=True):
        assert built_in.generate(sample.prompt, **options).tokens == tokens
