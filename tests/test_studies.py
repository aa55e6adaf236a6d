"""The studies of papers under studies/, on random models."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lenience import load_pair
from lenience.core.errors import InputError
from lenience.core.files import EMBEDDED
from lenience.decoding.pair import Pair
from lenience.heads.fitting import Examples
from lenience.mining.search import MineConfig, mine
from lenience.rules.registry import RULES
from lenience.tasks import Sample

sys.path.insert(0, str(Path(__file__).parents[1] / "studies"))
pytest.importorskip("matplotlib")

import autojudge
import judge_authors
import judge_labels
import next_judges
import numpy as np
import paired
import selfjudge
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


@pytest.mark.parametrize(("budget", "share"), [(0, 1), (0.7, 1), (3, 1), (3, 0.1)])
def test_a_budget_is_spent_in_order_and_by_each_answer_alone(
    budget: float,
    share: float,
    llama: Pair,
    judge: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The risks of lenient tokens are added up from the trace's scores."""
    monkeypatch.setitem(RULES, "spending", judge_labels.Spending)
    slope, offset = 0.5, 0.25
    path = judge.removeprefix("judge:").removesuffix("@0.5")
    rule = f"spending:{path},risk={budget},share={share},slope={slope},offset={offset}"
    prompts = [[3, 4, 5], [9, 8, 7, 6], [20], [11, 30]]
    outs = llama.generate_batch(prompts, rule=rule, batch_size=3, max_new_tokens=60)
    lenient = 0
    for prompt, out in zip(prompts, outs):
        alone = llama.generate(prompt, rule=rule, max_new_tokens=60)
        assert alone.tokens == out.tokens
        spent = 0.0
        for entry in out.trace:
            if entry.score is None:
                continue
            logit = math.log(entry.score / (1 - entry.score))
            risk = 1 / (1 + math.exp(slope * logit + offset))
            if entry.origin == "draft-lenient":
                assert risk <= share * (budget - spent) + 1e-4
                spent += risk
                lenient += 1
            else:
                assert risk > share * (budget - spent) - 1e-4
    assert (lenient > 0) == (budget > 0)
    if not budget:
        exact = llama.generate_batch(prompts, rule="target", max_new_tokens=60)
        assert [out.tokens for out in outs] == [out.tokens for out in exact]


def test_calibration_finds_the_curve_that_drew_the_labels() -> None:
    rng = np.random.default_rng(0)
    scores = rng.normal(size=40_000) * 3
    harmless = rng.random(len(scores)) < 1 / (1 + np.exp(-(0.4 * scores + 1.0)))
    slope, offset = judge_labels.calibrated(scores, harmless)
    assert (slope, offset) == pytest.approx((0.4, 1.0), abs=0.05)


def test_no_judge_scores_a_sample_that_it_has_learned_from(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Features name their sample, their run and their label; a head that has learned from a run
    reads that run's labels. The runs hold their samples in other orders."""
    learned: list[tuple[set[int], set[int]]] = []
    sizes = set()

    def score(inside: Examples, rows: np.ndarray, seed: int) -> np.ndarray:
        learned.append((set(inside.in_memory[:, 0]), set(rows[:, 0])))
        sizes.add((len(set(inside.in_memory[:, 1])), len(inside)))
        knows = set(rows[:, 1]) <= set(inside.in_memory[:, 1])
        return rows[:, 2] if knows else rng.random(len(rows))

    rng = np.random.default_rng(0)
    monkeypatch.setattr(judge_labels, "by_mlp", score)
    monkeypatch.setattr(next_judges, "RESAMPLES", 3)
    runs = {}
    for number, mismatches in enumerate((3, 6)):
        order = rng.permutation(20)
        samples = np.repeat(np.arange(20), mismatches)
        harmless = rng.random(len(samples)) < 0.5
        x = np.stack([order[samples], np.full(len(samples), number), harmless], 1)
        names = np.array([f"train-{i}" for i in order])[samples]
        examples = Examples(x.astype(np.float32), harmless, samples)
        runs[f"run {number}"] = judge_labels.Labelled(examples, names)
    found = judge_labels.crossed(runs)
    assert len(learned) == 4 * 5 * 2  # judges, folds and scored runs
    assert not any(inside & outside for inside, outside in learned)
    # of 16 samples a fold: either run, both, and half as many of both
    assert sizes == {(1, 48), (1, 96), (2, 144), (2, 48)}
    for row in found["rows"]:
        knows = row["learned_from"] in (row["scored"], "both", "both, equal")
        assert (row["auc"]["value"] == 1) == knows
        if row["learned_from"] != row["scored"]:
            against = row["against_own"]["auc"]["value"]
            assert against == pytest.approx(row["auc"]["value"] - 1)


def test_a_judge_is_calibrated_on_samples_that_it_has_not_learned_from(
    tmp_path: Path,
) -> None:
    source = Mined(EMBEDDED / "run", SampleTask(), None, None)
    learned = [record["id"] for record in source.first(tmp_path / "run", 8)]
    judge_labels.leave_out(source, tmp_path / "rest", 8, 10)
    lines = (tmp_path / "rest" / "journal.jsonl").read_text().splitlines()
    assert len(lines) == 2 and not {json.loads(line)["id"] for line in lines} & {
        *learned
    }


def test_a_run_with_other_labels_is_no_source(tmp_path: Path, llama: Pair) -> None:
    about = json.loads((EMBEDDED / "run" / "run.json").read_text())
    (tmp_path / "run.json").write_text(json.dumps({**about, "temperature": 0.6}))
    source = Mined(tmp_path, SampleTask(), None, None)
    with pytest.raises(InputError, match="was mined with other options"):
        judge_labels.mined_too(source, llama, tmp_path / "other", 2)
    assert not (tmp_path / "other").exists()


def test_settings_are_certified_in_order_up_to_the_first_that_fails() -> None:
    """Of 100 problems, one loss excludes a loss of 10 % and seven do not: the binomial probability
    of so few at 10 % is 0.0003 and 0.2."""

    def row(lost: int, speed: float) -> dict[str, object]:
        return {"right": "0" * lost + "1" * (100 - lost), "tokens_per_pass": speed}

    rows = {
        "target": row(0, 1),
        "recall 0.99": row(0, 2),
        "recall 0.98": row(1, 4),
        "recall 0.9": row(7, 3),
        "recall 0.8": row(0, 9),
        "share 1 budget 2": row(7, 2.9),
    }
    told = judge_labels._certified(rows, "recall", 0.1)
    assert told == {"setting": "recall 0.98", "max_drop": 0.1, "tokens_per_pass": 4}
    assert judge_labels._certified(rows, "share 1", 0.1) is None
    assert judge_labels._loss(rows, "recall 0.9")["lost"] == 7
    (nearest,) = judge_labels._nearest(rows)
    assert (nearest["second"], nearest["tokens_per_pass"]) == ("recall 0.9", [2.9, 3])


def read_by_hand(**changed: list) -> judge_authors.Tokens:
    """Return the tokens of two rows with a right answer of three tokens and a wrong one of two."""
    values = {
        "own": [1, 0, 1, 1, 0] * 2,
        "wrong": [0, 0, 0, 0, 1] * 2,
        "rows": [0] * 5 + [1] * 5,
        "questions": [0] * 5 + [1] * 5,
        "of_wrong": [0, 0, 0, 1, 1] * 2,
    }
    whole = ("rows", "questions")
    arrays = {
        name: np.array(changed.get(name, value), int if name in whole else bool)
        for name, value in values.items()
    }
    return judge_authors.Tokens(states=np.zeros((10, 1, 4), np.float32), **arrays)


def test_verified_answers_end_at_their_first_rejected_token() -> None:
    tokens = read_by_hand(own=[1, 0, 1, 1, 0, 1, 1, 1, 1, 0])
    found = judge_authors.verified(tokens, ~tokens.of_wrong, tokens.own)
    assert found["share_accepted"] == pytest.approx((2 / 3 + 1) / 2)
    assert found["tokens_before_a_rejection"] == (1 + 3) / 2
    # resampled answers are both the one, both the other, or one each
    assert found["share_accepted_interval"] == pytest.approx([2 / 3, 1])
    errors = judge_authors.errors_accepted(tokens, tokens.rows == 0, tokens.own)
    assert errors["share"] == 0
    everything = np.ones(10, bool)
    errors = judge_authors.errors_accepted(tokens, everything, everything)
    assert errors["share"] == 1


def test_a_first_objection_stands_at_the_error_or_before_it_or_nowhere() -> None:
    """The target's own tokens are never rejected; others are if their logit is below zero."""
    tokens = read_by_hand(own=[1, 1, 1, 1, 0, 1, 1, 1, 0, 0])
    names = np.repeat(["a", "b"], 5)
    for logits, where in (
        ([9, 9, 9, -9, -9, 9, 9, 9, 9, -9], "at the error"),
        ([9, 9, 9, 9, -9, 9, 9, 9, -9, -9], "before it"),
        ([9, 9, 9, 9, -9, 9, 9, 9, 9, 9], "not by its end"),
    ):
        accepted = {"judge": judge_authors.accepted_by(tokens, np.array(logits))}
        found = judge_authors.first_objections(tokens, accepted, names)
        assert found["a"]["n"] == found["b"]["n"] == 1
        for author, place in (("a", "at the error"), ("b", where)):
            shares = {key: row["share"] for key, row in found[author]["judge"].items()}
            assert shares.pop(place) == 1 and not any(shares.values())


def drawn_tokens(rows: int, questions: np.ndarray) -> judge_authors.Tokens:
    rng = np.random.default_rng(0)
    wrong = rng.random(rows) < 0.5
    x = (rng.normal(size=(rows, 1, 6)) - wrong[:, None, None]).astype(np.float32)
    nothing = np.zeros(rows, bool)
    return judge_authors.Tokens(x, nothing, wrong, np.arange(rows), questions, nothing)


def test_a_head_knows_nothing_of_rows_that_it_does_not_learn_from() -> None:
    """Neither their labels nor their states, not even for the scale."""
    tokens = drawn_tokens(400, np.arange(400))
    x = tokens.states[:, 0]
    learned = np.arange(400) < 300
    asked = {"own": x[~learned]}
    scores = judge_authors.scores_of(x, tokens, learned, asked)["own"]
    others = replace(tokens, wrong=np.where(learned, tokens.wrong, ~tokens.wrong))
    moved = np.where(learned[:, None], x, 50 * x + 9)
    again = judge_authors.scores_of(moved, others, learned, asked)["own"]
    assert (scores == again).all()
    flipped = replace(tokens, wrong=~tokens.wrong)
    turned = judge_authors.scores_of(x, flipped, learned, asked)["own"]
    assert np.corrcoef(scores, turned)[0, 1] < 0


def test_no_head_scores_a_question_that_it_has_learned_from(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """States name their question. Of 60 questions in 5 folds a head learns from 48, or from fewer
    if it may learn from no more."""
    questions = np.tile(np.arange(60), 4)
    tokens = drawn_tokens(240, questions)
    x = questions[:, None].astype(np.float32)
    calls = []

    def look(
        x: np.ndarray, tokens: judge_authors.Tokens, learned: np.ndarray, asked: dict
    ) -> dict[str, np.ndarray]:
        known = set(tokens.questions[learned])
        assert not known & set(asked["own"][:, 0])
        calls.append((len(known), int(learned.sum()), len(asked["own"])))
        return {name: rows[:, 0] for name, rows in asked.items()}

    monkeypatch.setattr(judge_authors, "scores_of", look)
    scores = judge_authors.out_of_fold(x, tokens, others=x + 100)
    assert calls == [(48, 192, 48)] * 5
    assert (scores["own"] == questions).all()
    assert (scores["others"] == questions + 100).all()
    calls.clear()
    judge_authors.out_of_fold(x, tokens, most=30)
    assert calls == [(30, 120, 48)] * 5


def test_aucs_are_compared_on_the_same_questions() -> None:
    tokens = drawn_tokens(300, np.arange(300) // 3)
    good = (~tokens.wrong).astype(float)
    noise = np.random.default_rng(2).random(300)
    everything = np.ones(300, bool)
    found = judge_authors.compared(tokens, {"a": good, "b": noise}, everything)
    assert found["a"]["value"] == 1 and found["a"]["interval"] == [1, 1]
    difference = found["a minus b"]
    assert difference["value"] == pytest.approx(1 - found["b"]["value"])
    # the first is always 1, so the difference is as uncertain as the second
    low, high = found["b"]["interval"]
    assert difference["interval"] == pytest.approx([1 - high, 1 - low])


@pytest.mark.parametrize(
    ("correct", "wrong", "end"),
    [
        ("2 and 13 are 15, less 4 is 11.", "2 and 13 are 95, less 4 is 11.", 15),
        ("2 and 13 are 15, less 4 is 11.", "2 and 13 are 19, less 4 is 11.", 15),
        # the last number, or the answer itself, leaves nothing to correct
        ("2 and 13 are 15, less 4 is 11.", "2 and 13 are 15, less 4 is 91.", None),
        ("That is 11. The answer is 11.", "That is 19. The answer is 11.", None),
        # the wrong answer goes on otherwise
        ("2 and 13 are 15, less 4 is 11.", "2 and 13 are 915, less 4 is 911.", None),
    ],
)
def test_a_slip_ends_with_its_number_if_something_is_left_to_correct(
    correct: str, wrong: str, end: int | None
) -> None:
    begin = next(i for i, (a, b) in enumerate(zip(correct, wrong)) if a != b)
    row = {"correct": correct, "wrong": wrong, "error": [begin, begin + 1]}
    assert judge_authors.end_of_slip(row) == end


def test_annotated_answers_are_read_as_transformers_reads_them(
    tmp_path: Path, llama: Pair
) -> None:
    """States and most probable tokens at each token of both answers, the wrong one cut after its
    error."""
    row = {"question": "w5 w9 w2 ", "correct": "w7 w3 w8 w4", "wrong": "w7 w6 w8 w4"}
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({**row, "error": [3, 5]}) + "\n")
    lm = llama.target
    tokens = judge_authors.read_tokens(lm, path, [1, None])
    prompt = lm.encode(row["question"])
    ids = lm.tokenizer(row["correct"], add_special_tokens=False)["input_ids"]
    out = lm.model(torch.tensor([prompt + ids]), output_hidden_states=True)
    own = out.logits[0, len(prompt) - 1 : -1].argmax(-1).numpy() == np.array(ids)
    right = ~tokens.of_wrong
    assert (tokens.own[right] == own).all()
    for layer, place in ((0, 1), (1, -1)):
        expected = out.hidden_states[place][0, len(prompt) :].detach().numpy()
        np.testing.assert_allclose(tokens.states[right][:, layer], expected, atol=1e-4)
    assert tokens.wrong[tokens.of_wrong].tolist()[-1]
    assert tokens.wrong.sum() == tokens.wrong[tokens.of_wrong].sum() >= 1
    assert tokens.of_wrong.sum() < right.sum()


def test_answers_are_right_if_their_last_numbers_are_equal() -> None:
    assert judge_authors.is_right("3 and 4 make 7.", "The answer is 7")
    assert judge_authors.is_right("that is 1,200", "so 1200.0")
    assert not judge_authors.is_right("7 and 4", "The answer is 7")
    assert not judge_authors.is_right("none", "The answer is 7")


def test_a_score_by_prompt_is_the_logit_of_yes_minus_that_of_no(
    tmp_path: Path, llama: Pair, chatting: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each answer after a swap is asked about, in order; the logits are transformers' own."""
    monkeypatch.setattr(selfjudge, "SAID", ("w3", "w8"))
    # the tokenizer of the tests knows few words
    monkeypatch.setattr(selfjudge, "QUESTION", "{question} w1 {own} w2 {swapped} w3")
    lm = load_pair(chatting, compile=False).target
    task = SampleTask()
    samples = {sample.id: sample for sample in list(task.samples("train"))[:2]}
    using = autojudge.Search(llama, task, samples, 20)
    records = []
    for id, sample in samples.items():
        ids = llama.target.encode(sample.prompt)
        own = autojudge.continued(using, [ids], len(ids), "target")[0]
        record = {"id": id, "prompt_ids": ids, "response_ids": own}
        records.append({**record, "answers": {"target": "0"}})
    found = selfjudge.by_answers(using, tmp_path, records)
    scores = selfjudge.by_prompt(lm, using, tmp_path, found)
    yes, no = (lm.tokenizer(word)["input_ids"][-1] for word in ("w3", "w8"))
    expected = []
    for record in found:
        prompt = record["prompt_ids"]
        own = record["response_ids"]
        for swap in record["mismatches"]:
            start = prompt + own[: swap["position"]] + [swap["draft_token"]]
            (whole,) = autojudge.continued(using, [start], len(prompt), "target")
            text = selfjudge.QUESTION.format(
                question=samples[record["id"]].prompt,
                own=llama.target.decode(own),
                swapped=llama.target.decode(whole),
            )
            asked = lm.tokenizer.apply_chat_template(
                [{"role": "user", "content": text}],
                add_generation_prompt=True,
                return_dict=True,
                return_tensors="pt",
            )
            with torch.no_grad():
                logits = lm.model(asked["input_ids"]).logits[0, -1]
            expected.append(float(logits[yes] - logits[no]))
    assert len(expected) > 5
    np.testing.assert_allclose(scores, expected, atol=1e-4)
