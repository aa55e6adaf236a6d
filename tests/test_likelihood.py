"""Labels by the target's own likelihoods, against passes from scratch by `transformers`."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from test_mining import ParityTask, lines

from lenience import InputError
from lenience.decoding.pair import Pair
from lenience.heads.head import Inputs
from lenience.mining.by_likelihood import AHEAD
from lenience.mining.search import LEAST_SCORE, MineConfig, mine
from lenience.runs.record import read_run
from lenience.tasks import Sample
from lenience.training.fit import HeadPlan, fit_run


class OpenTask(ParityTask):
    """A task whose responses have no answer."""

    name = "open"

    def answer(self, text: str, sample: Sample | None = None) -> str | None:
        return None


@torch.inference_mode()
def likelihood(pair: Pair, before: list[int], tokens: list[int]) -> float:
    """Return log p(tokens | before) under the target, by one pass."""
    logits = pair.target.model(torch.tensor([before + tokens])).logits[0].double()
    logs = logits.log_softmax(-1)[len(before) - 1 :]
    return float(sum(logs[i, token] for i, token in enumerate(tokens)))


@pytest.mark.parametrize("least", [None, -30.0])
def test_scores_equal_passes_from_scratch(
    least: float | None, llama: Pair, tmp_path: Path
) -> None:
    config = MineConfig(limit=6, labels="likelihood", least=least, batch_size=4)
    counts = mine(llama, OpenTask(), tmp_path, config)
    limit = LEAST_SCORE if least is None else least
    labels = []
    for record in lines(tmp_path):
        prompt, own = record["prompt_ids"], record["response_ids"]
        alone = llama.generate(prompt, rule="target", max_new_tokens=24)
        assert own == record["final_ids"] == alone.tokens
        assert record["answers"]["target"] is None
        wanted = {}
        for i, token in enumerate(own):
            before = prompt + own[:i]
            (drafted,) = llama.generate(before, rule="draft", max_new_tokens=1).tokens
            if drafted == token:
                continue
            after = own[i + 1 : i + 1 + AHEAD]
            swapped = likelihood(llama, before, [drafted, *after])
            wanted[i] = drafted, swapped - likelihood(llama, before, [token, *after])
        assert [entry["position"] for entry in record["mismatches"]] == list(wanted)
        for entry in record["mismatches"]:
            drafted, score = wanted[entry["position"]]
            assert entry["draft_token"] == drafted
            assert entry["score"] == pytest.approx(score, abs=1e-3)
            assert entry["important"] == (entry["score"] < limit)
            labels.append(entry["important"])
    assert counts.important == sum(labels) and counts.mismatches == len(labels) > 20
    assert least is None or {True, False} == set(labels)
    assert read_run(tmp_path).labels == {"by": "likelihood", "least": limit}


def test_a_run_with_other_labels_is_refused_and_a_judge_learns_from_these(
    llama: Pair, tmp_path: Path
) -> None:
    config = MineConfig(limit=40, labels="likelihood", least=-30.0)
    mine(llama, OpenTask(), tmp_path, config)
    for other in (MineConfig(limit=40), MineConfig(limit=40, labels="likelihood")):
        with pytest.raises(InputError, match="labels"):
            mine(llama, OpenTask(), tmp_path, other)
    head = fit_run(llama, tmp_path, HeadPlan(Inputs(("target",)), tmp_path / "judge"))
    assert head.metrics["mismatches"] > 50
    strict = llama.generate("w3 w4", rule="exact", max_new_tokens=30)
    rule = f"judge:{tmp_path / 'judge'}"
    none = llama.generate("w3 w4", rule=f"{rule}@1", max_new_tokens=30)
    every = llama.generate("w3 w4", rule=f"{rule}@0", max_new_tokens=30)
    assert none.tokens == strict.tokens != every.tokens


def test_labels_that_answers_had_hold_no_score(llama: Pair, tmp_path: Path) -> None:
    mine(llama, ParityTask(), tmp_path, MineConfig(limit=2))
    found = [entry for record in lines(tmp_path) for entry in record["mismatches"]]
    assert found and all("score" not in entry for entry in found)
    assert read_run(tmp_path).labels is None


@pytest.mark.parametrize(
    "options, says",
    [
        ({"temperature": 0.5}, "temperature: cannot be combined"),
        ({"resamples": 2}, "resamples: cannot be combined"),
        ({"answers_only": True}, "answers_only: cannot be combined"),
    ],
)
def test_other_ways_to_label_are_refused(options: dict, says: str) -> None:
    with pytest.raises(InputError, match=says):
        MineConfig(labels="likelihood", **options)
    with pytest.raises(InputError, match="needs labels by likelihood"):
        MineConfig(least=-3.0)
