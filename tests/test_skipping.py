"""The layers that a target can leave out, against transformers' own forward without them."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from test_cli import last_json, run
from test_mining import ParityTask

from lenience.decoding.pair import Pair
from lenience.mining.search import MineConfig, mine
from lenience.training.features import mined_samples
from lenience.training.skipping import search_layers, worth


def said_without(pair: Pair, layers: tuple[int, ...], ids: list[int]) -> list[int]:
    """The most probable token after each, by a copy of the model whose layers were deleted."""
    model = copy.deepcopy(pair.target.model)
    for layer in sorted(layers, reverse=True):
        del model.model.layers[layer - 1]
    with torch.inference_mode():
        return model(torch.tensor([ids]), use_cache=False).logits[0].argmax(-1).tolist()


def test_the_best_further_layer_is_left_out_each_time(
    llama: Pair, tmp_path: Path
) -> None:
    mine(
        llama,
        ParityTask(),
        tmp_path,
        MineConfig(answers_only=True, limit=6, max_new_tokens=20),
    )
    samples = mined_samples(tmp_path)

    def agreement(layers: tuple[int, ...]) -> float:
        same = total = 0
        for sample in samples:
            said = said_without(llama, layers, sample.prompt_ids + sample.response_ids)
            begin = len(sample.prompt_ids) - 1
            for wanted, token in zip(sample.response_ids, said[begin:]):
                same, total = same + (wanted == token), total + 1
        return same / total

    found, before = search_layers(llama, samples), tuple[int, ...]()
    depth = llama.target.num_layers
    assert [len(one.layers) for one in found] == list(range(1, depth))
    for one in found:
        others = [
            agreement((*before, layer))
            for layer in range(1, depth + 1)
            if layer not in before
        ]
        assert one.agreement == pytest.approx(agreement(one.layers))
        assert one.agreement == pytest.approx(max(others))
        assert set(before) < set(one.layers)
        before = one.layers


def test_worth_is_the_papers_formula() -> None:
    """By hand: with half of the tokens kept and a free draft two tokens a pass in the limit; one
    that costs as much as the target is worth nothing."""
    times, window = worth(0.5, 0.0)
    assert times == pytest.approx(2, abs=1e-4) and window == 16
    assert worth(0.5, 1.0) == (1.0, 0)
    times, window = worth(0.8, 0.25)
    by_window = [(1 - 0.8 ** (w + 1)) / 0.2 / (0.25 * w + 1) for w in range(17)]
    assert times == pytest.approx(max(by_window))
    assert times == pytest.approx((1 - 0.8 ** (window + 1)) / 0.2 / (0.25 * window + 1))


def test_the_command_names_a_drafter_that_decodes(tmp_path: Path) -> None:
    mined = run("mine", "--task", "wordmath", "--out", tmp_path / "run", "--limit", "3")
    assert mined.returncode == 0, mined.stderr
    told = last_json(run("fit", tmp_path / "run", "--drafter", "skip", "--json"))
    assert told["drafter"].startswith("skip:") and len(told["skipped"]) == 7
    best = max(told["skipped"], key=lambda one: one["times"])
    assert told["drafter"] == f"skip:{','.join(map(str, best['layers']))}"
    wrong = run("fit", tmp_path / "run", "--drafter", "skip", "--heads", "3")
    assert wrong.returncode == 2 and "leave it out" in wrong.stderr
