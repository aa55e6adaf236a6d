"""The studies of papers under studies/, on random models."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from lenience.core.errors import InputError
from lenience.decoding.pair import Pair
from lenience.mining.search import MineConfig, mine
from lenience.tasks import Sample

sys.path.insert(0, str(Path(__file__).parents[1] / "studies"))
pytest.importorskip("matplotlib")

import autojudge
import numpy as np
import paired
from mined import Mined


class SampleTask:
    """A task like code: an answer is found with the help of its sample, and behind a stop string
    nothing counts."""

    name, max_new_tokens, stop_strings = "by-sample", 20, ("w39 ",)

    def samples(self, split: str):
        for i in range(12):
            yield Sample(
                f"{split}-{i}", f"w{1 + i} w{1 + (7 * i) % 40} w3", None, {"modulus": 3}
            )

    def answer(self, text: str, sample: Sample | None = None) -> str | None:
        numbers = [int(word[1:]) for word in text.split()]
        return str(sum(numbers) % sample.metadata["modulus"]) if sample else None

    def same(
        self, a: str | None, b: str | None, sample: Sample | None = None
    ) -> bool | None:
        assert sample is not None
        return None if a is None or b is None else a == b

    def correct(self, text: str, sample: Sample) -> bool:
        return self.answer(text, sample) == "0"


def by_transformers(
    pair: Pair, task: SampleTask, record: dict
) -> list[tuple[int, int, bool]]:
    """Each mismatch of the target's own answer and whether it is important, by plain generation."""

    def greedy(role: str, ids: list[int], most: int) -> list[int]:
        out = getattr(pair, role).model.generate(
            torch.tensor([ids]),
            max_new_tokens=most,
            do_sample=False,
            attention_mask=torch.ones(1, len(ids)),
        )
        return out[0, len(ids) :].tolist()

    def answer(response: list[int]) -> int:
        text = pair.target.decode(response).split("w39 ")[0]
        return sum(int(word[1:]) for word in text.split()) % 3

    prompt, own, found = record["prompt_ids"], record["response_ids"], []
    for i, token in enumerate(own):
        (guess,) = greedy("draft", prompt + own[:i], 1)
        if guess != token:
            whole, room = [*own[:i], guess], task.max_new_tokens - i - 1
            if room and guess not in pair.target.eos_ids:
                whole += greedy("target", prompt + whole, room)
            found.append((i, guess, answer(whole) != answer(own)))
    return found


def test_searches_ask_the_task_with_the_sample_and_end_at_stop_strings(
    llama: Pair, tmp_path: Path
) -> None:
    task = SampleTask()
    mine(llama, task, tmp_path, MineConfig(limit=12, max_new_tokens=20))
    source = Mined(tmp_path, task, None, None)
    lines = (tmp_path / "journal.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    using = autojudge.Search.of(source, llama, records)
    labels = set()
    for record in records:
        found = autojudge.naive(using, record)["mismatches"]
        told = [
            (one["position"], one["draft_token"], one["important"]) for one in found
        ]
        assert told == by_transformers(llama, task, record)
        labels |= {important for *_, important in told}
        back = autojudge.reversed_(using, record)
        assert not using.other(record, back["final_ids"])
    assert labels == {True, False}
    assert any(
        "w39 " in llama.target.decode(record["response_ids"]) for record in records
    )


def test_a_search_names_a_sample_that_the_task_no_longer_has(
    llama: Pair, tmp_path: Path
) -> None:
    task = SampleTask()
    mine(llama, task, tmp_path, MineConfig(limit=2, max_new_tokens=20))
    with pytest.raises(InputError, match="sample other is not among the task's"):
        autojudge.Search.of(Mined(tmp_path, task, None, None), llama, [{"id": "other"}])


def test_the_exact_mcnemar_test_is_the_binomial_sum_over_the_differing_problems() -> (
    None
):
    right = {
        "a": "1" * 9 + "0" + "11" + "00",
        "b": "0" * 9 + "1" + "11" + "00",
        "same": "1" * 14,
    }
    test = paired.mcnemar("a", "b", right)
    assert (test.n, test.only_first, test.only_second) == (14, 9, 1)
    # at most one of ten, on either side
    assert test.p == pytest.approx(2 * (1 + 10) / 2**10)
    assert paired.mcnemar("a", "a", right).p == 1.0


def test_the_difference_of_tokens_per_pass_is_that_of_all_tokens_over_all_passes() -> (
    None
):
    twice, once = np.array([[8.0, 4.0]] * 5), np.array([[3.0, 3.0]] * 5)
    assert paired.difference(twice, once) == (1.0, 1.0, 1.0)
    rng = np.random.default_rng(1)
    first = np.stack([rng.poisson(30, 200) + 1.0, rng.poisson(10, 200) + 1.0], 1)
    second = np.stack([first[:, 0], first[:, 1] + rng.integers(0, 2, 200)], 1)
    whole, low, high = paired.difference(first, second)
    assert whole == pytest.approx(
        first[:, 0].sum() / first[:, 1].sum() - second[:, 0].sum() / second[:, 1].sum()
    )
    assert 0 < low < whole < high  # the same tokens in at least as many passes
    assert paired.difference(first, first) == (0.0, 0.0, 0.0)
    assert paired.difference(first, np.zeros((200, 2))) is None


def test_right_answers_of_a_journal_are_ordered_by_problem(tmp_path: Path) -> None:
    lines = [
        {
            "id": "test-2",
            "rule": "exact",
            "setting": "exact; window=4",
            "correct": True,
        },
        {
            "id": "test-1",
            "rule": "exact",
            "setting": "exact; window=4",
            "correct": False,
        },
        {
            "id": "test-1",
            "rule": "topk:3",
            "setting": "topk:3; window=4",
            "correct": True,
        },
        {
            "id": "test-2",
            "rule": "topk:3",
            "setting": "topk:3; window=4",
            "correct": True,
        },
    ]
    path = tmp_path / "compare.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert paired.right_answers(path) == {("exact", 4): "01", ("topk:3", 4): "11"}
