"""Tasks: wordmath's solutions are right, whoever writes them; a user's own files."""

from __future__ import annotations

import gzip
import json
import random
import re
from collections.abc import Callable
from pathlib import Path

import pytest

import lenience
from lenience import InputError
from lenience.tasks import JsonlTask, Sample, Score, as_task, take, wordmath

TASK = wordmath.WordMath()


@pytest.mark.parametrize("author", ["target", "draft"])
def test_every_written_solution_is_right(author: str) -> None:
    """Every equation and every remark on a result is evaluated; the last step's result is the
    answer."""
    for i in range(1500):
        problem = wordmath.problem("check", i)
        text = wordmath.solution(problem, author, random.Random(i))
        equations = re.findall(r"(\d+) ([-+*/]) (\d+) = (\d+)", text)
        for x, op, y, result in equations:
            assert eval(f"{x} {op} {y}") == int(result), text
        steps = [operation for group in problem.groups for operation in group]
        results = {operation.result for operation in steps}
        for value, side, mark in re.findall(r"that is (\d+) (below|above) (\d+)", text):
            assert (
                int(mark) + (int(value) if side == "above" else -int(value)) in results
            ), text
        for value in re.findall(r"(?:twice|double) that would be (\d+)", text):
            assert int(value) / 2 in results, text
        for kind in re.findall(r"that is an (odd|even) number", text):
            assert kind in {"odd" if result % 2 else "even" for result in results}, text
        results_said = re.findall(
            r"(?:= |to \w+ )(\d+)", re.sub(r"as a check, [^.]*\.", "", text)
        )
        assert TASK.answer(text) == results_said[-1], text
        assert all(operation.result >= 0 and operation.y > 0 for operation in steps)
        assert all(
            operation.x % operation.y == 0 for operation in steps if operation.op == "/"
        )


def asked_of(text: str, amounts: dict[str, int]) -> int:
    """The difference that a text asks for, or else the sum."""
    more = re.search(r"How many more \w+ does (\w+) (?:have|make) than (\w+)\?", text)
    return amounts[more[1]] - amounts[more[2]] if more else sum(amounts.values())


def read_compare(text: str) -> int | None:
    """The answer to a problem of two people's amounts, found from its text alone; None for other
    kinds of text."""
    text = re.sub(r"\w+ is \d+ years old\. ", "", text)
    stated = re.match(
        r"(\w+) has (\d+) (\w+)\. (\w+) has (?:(\d+) (more|fewer) \w+ than|(twice|three times) as "
        r"many \w+ as) "
        r"(\w+)\.",
        text,
    )
    if not stated:
        return None
    a, n, unit, b, k, side, times, other = stated.groups()
    assert other == a
    have = {a: int(n)}
    have[b] = (
        have[a] * {"twice": 2, "three times": 3}[times]
        if times
        else have[a] + int(k) * (1 if side == "more" else -1)
    )
    for giver, given, taker in re.findall(
        r"Then (\w+) gives (\d+) \w+ to (\w+)\.", text
    ):
        have[giver], have[taker] = have[giver] - int(given), have[taker] + int(given)
    for taker, given, giver in re.findall(
        r"Then (\w+) gets (\d+) \w+ from (\w+)\.", text
    ):
        have[giver], have[taker] = have[giver] - int(given), have[taker] + int(given)
    assert f"How many more {unit} " in text or text.endswith("do they have together?")
    return asked_of(text, have)


def read_work(text: str) -> int | None:
    text = re.sub(r"\w+ is \d+ years old\. ?", "", text)
    stated = re.match(
        r"(\w+) makes (\d+) \w+ in an hour and works for (\d+) hours\. (\w+) makes (\d+) "
        r"(more|fewer) \w+ in an "
        r"hour than (\w+) and works for (\d+) hours\. How many",
        text,
    )
    if not stated:
        return None
    a, rate, hours, b, k, side, other, others = stated.groups()
    assert other == a
    made = {
        a: int(rate) * int(hours),
        b: (int(rate) + int(k) * (1 if side == "more" else -1)) * int(others),
    }
    return asked_of(text, made)


@pytest.mark.parametrize("read", [read_compare, read_work])
def test_the_longer_texts_have_the_answer_that_a_reader_finds(
    read: Callable[[str], int | None],
) -> None:
    problems = [wordmath.problem("check", i) for i in range(2000)]
    found = [(read(problem.text), problem.answer) for problem in problems]
    assert all(answer is None or answer == wanted for answer, wanted in found)
    assert sum(answer is not None for answer, _ in found) > 400


def test_the_solution_follows_from_the_problem() -> None:
    """A reader of the two simplest kinds of text, written apart from the generator, comes to the
    same answers."""
    seen = {"shop": 0, "share": 0}
    for i in range(4000):
        problem = wordmath.problem("check", i)
        shop = re.fullmatch(
            r"(?:(\w+) has (\d+) coins\. )?\w+ buys (\d+) \w+ at (\d+) coins each and (\d+) \w+ "
            r"at (\d+) "
            r"coins each\. How many coins does \w+ (spend|have left)\?",
            problem.text,
        )
        share = re.fullmatch(
            r"\w+ has (\d+) \w+\. \w+ gives (half|a third|a quarter) of them to \w+\. Then \w+ "
            r"gives (half|a "
            r"third|a quarter) of (the rest|all the .*) to \w+\. How many .* left\?",
            problem.text,
        )
        if shop:
            _, purse, n, p, m, q, asked = shop.groups()
            spent = int(n) * int(p) + int(m) * int(q)
            assert problem.answer == (spent if asked == "spend" else int(purse) - spent)
        elif share:
            whole, parts = int(share[1]), {"half": 2, "a third": 3, "a quarter": 4}
            rest = whole - whole // parts[share[2]]
            assert (
                problem.answer
                == rest - (rest if share[4] == "the rest" else whole) // parts[share[3]]
            )
        seen["shop"] += bool(shop)
        seen["share"] += bool(share)
    assert min(seen.values()) > 250


def test_samples_are_the_same_every_time_and_splits_differ() -> None:
    train, test = take(TASK, "train", 200), take(TASK, "test", 200)
    assert train == take(TASK, "train", 200)
    assert not {sample.prompt for sample in train} & {sample.prompt for sample in test}
    assert train[0].id == "train-0" and test[0].prompt == (
        "Iris is 50 years old. Iris has 122 coins. Iris buys 8 cards at 4 coins each and 11 hats "
        "at 2 coins each. How many coins does Iris have left? Answer:"
    )


def test_the_two_authors_word_things_differently() -> None:
    problems = [wordmath.problem("check", i) for i in range(50)]
    written = [
        [
            wordmath.solution(problem, author, random.Random(1))
            for author in ("target", "draft")
        ]
        for problem in problems
    ]
    assert all(a != b for a, b in written)


@pytest.mark.parametrize(
    "text, found",
    [
        ("The final answer is 12.", "12"),
        ("The final answer is 12", None),
        ("so 12.", None),
        ("", None),
        ("The final answer is 1. The final answer is 3.", "3"),
        ("The final answer is 1,234.", "1234"),
    ],
)
def test_wordmath_answers(text: str, found: str | None) -> None:
    assert TASK.answer(text) == found


def test_two_missing_answers_are_not_the_same() -> None:
    assert TASK.same(None, None) is None and TASK.same("1", None) is None
    assert TASK.same("1", "1") is True and TASK.same("1", "2") is False
    assert not TASK.correct("no answer", wordmath.Sample("x", "p", "1"))


# ---- a user's own tasks


def write(path: Path, rows: list) -> Path:
    path.write_text(
        "\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows)
    )
    return path


def test_a_jsonl_task(tmp_path: Path) -> None:
    rows = [{"prompt": f"p{i}", "reference": f"because … #### {i}"} for i in range(10)]
    task = lenience.task(
        str(write(tmp_path / "t.jsonl", rows)), answer="after:####", same="number"
    )
    test = take(task, "test", None)
    assert [sample.prompt for sample in test] == ["p4", "p9"] and test[
        0
    ].reference == "4"
    assert len(take(task, "train", None)) == 8
    assert task.correct("I think\n#### 4.0", test[0]) and not task.correct("4", test[0])
    assert (
        task.same("1,000", "1000") is True
        and task.same("$12", "12") is True
        and task.same("many", "12") is None
    )


def test_a_jsonl_task_with_splits_messages_and_choices(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "A or B?"}]
    rows = [
        {"id": "q1", "messages": messages, "reference": "B", "split": "test"},
        "",
        {"prompt": "x", "split": "train"},
    ]
    task = lenience.task(
        str(write(tmp_path / "t.jsonl", rows)),
        answer="regex:answer: (.*)",
        same="choice",
    )
    (sample,) = take(task, "test", None)
    assert (sample.id, sample.prompt) == ("q1", messages)
    assert task.correct("answer: (b)", sample) and task.correct(
        "answer: A\nanswer: B", sample
    )
    assert task.same("B", "no letter here stands") is None
    exported = write(
        tmp_path / "e.jsonl", [{"prompt": None, "messages": messages, "split": "test"}]
    )
    chat = lenience.task(str(exported), answer="choice")
    assert take(chat, "test", None)[0].prompt == messages
    text = lenience.task(str(tmp_path / "t.jsonl"), answer="regex:is (.+)", same="text")
    assert text.same("Two  Words", "two words") is True and text.same("", "x") is None


def test_rows_as_they_are_published(tmp_path: Path) -> None:
    """Compressed, in several files that are the splits, under other names; JSON lists as well."""
    rows = [
        {"question": f"q{i}", "answer": f"because\n#### {i}", "hard": True}
        for i in range(7)
    ]
    with gzip.open(tmp_path / "train.jsonl.gz", "wt") as file:
        file.write("\n".join(map(json.dumps, rows[:5])))
    (tmp_path / "test.json").write_text(json.dumps(rows[5:], indent=1))
    files = f"{tmp_path / 'train.jsonl.gz'},{tmp_path / 'test.json'}"
    named = {"reference_field": "answer", "answer": "number-after:####"}
    task = lenience.task(files, prompt_field="question", **named)
    train, test = take(task, "train", None), take(task, "test", None)
    assert [one.prompt for one in train] == [f"q{i}" for i in range(5)]
    assert [(one.id, one.reference) for one in test] == [
        ("test-1", "5"),
        ("test-2", "6"),
    ]
    assert isinstance(task, JsonlTask) and task.unread == ["hard"]
    assert dict(test[0].metadata) == {"hard": True}
    filled = lenience.task(files, prompt_template="{hard}? {question}\n{{A}}:", **named)
    assert take(filled, "test", 1)[0].prompt == "True? q5\n{A}:"
    assert isinstance(filled, JsonlTask) and filled.unread == []
    assert len({task.name, filled.name, task.reads, filled.reads}) == 4


def test_files_that_are_splits(tmp_path: Path) -> None:
    """By their names, with ids that begin anew in each."""
    rows = [{"id": i, "prompt": f"p{i}"} for i in range(5)]
    named = {}
    for name in ("gsm_train", "gsm-test", "testimonials", "trainee"):
        named[name] = str(write(tmp_path / f"{name}.jsonl", rows))
    both = lenience.task(f"{named['gsm_train']},{named['gsm-test']}", answer="choice")
    assert [one.id for one in take(both, "test", 2)] == ["gsm-test-0", "gsm-test-1"]
    assert len(take(both, "train", None)) == len(take(both, "test", None)) == 5
    mixed = f"{named['gsm_train']},{named['testimonials']}"
    with pytest.raises(
        InputError, match=r"testimonials.jsonl, line 1: names no split, as other files"
    ):
        lenience.task(mixed, answer="choice")
    neither = lenience.task(
        f"{named['testimonials']},{named['trainee']}", answer="choice"
    )
    assert len(take(neither, "train", None)) == 8, "every fifth row is test"
    (tmp_path / "b").mkdir()
    again = write(tmp_path / "b/gsm_train.jsonl", rows)
    assert len(
        take(
            lenience.task(f"{named['gsm_train']},{again}", answer="choice"), "train", 99
        )
    )


def test_rows_that_have_other_names_are_told_how_to_be_read(tmp_path: Path) -> None:
    path = str(write(tmp_path / "t.jsonl", [{"question": "x", "answer": "#### 1"}]))
    for options, says in (
        ({}, "it has question, answer: --prompt-field question"),
        ({"prompt_field": "text"}, 'needs a "text"'),
        (
            {"prompt_field": "question"},
            r"unused keys: answer \(--reference-field answer\?\)",
        ),
        ({"prompt_template": "{x}"}, "lacks 'x'.*it has question, answer"),
        ({"prompt_template": "{"}, "braces twice"),
        ({"prompt_template": "{}"}, "braces twice"),
        ({"prompt_template": "{question[a]}"}, "braces twice"),
        ({"prompt_template": "x", "prompt_field": "x"}, "both name the prompt"),
        (
            {"prompt_field": "question", "reference_field": "answer"},
            "try --answer number-after",
        ),
    ):
        with pytest.raises(InputError, match=says):
            lenience.task(path, **options)
    turns = str(write(tmp_path / "turns.jsonl", [{"turns": ["Say 1.", "And 2?"]}]))
    for options in ({}, {"prompt_field": "turns"}):
        with pytest.raises(InputError, match="has turns; --task mtbench"):
            lenience.task(turns, **options)
    with pytest.raises(InputError, match="prompt_field is for tasks from JSON files"):
        lenience.task("wordmath", prompt_field="question")
    whole = json.dumps({"question": "x", "prompt": "y", "answer": "#### 1"})
    (tmp_path / "bom.json").write_bytes(b"\xef\xbb\xbf" + whole.encode())
    template = {"prompt_template": "{question!r:>5}", "answer": "choice"}
    task = lenience.task(str(tmp_path / "bom.json"), **template)
    assert isinstance(task, JsonlTask) and task.unread == ["prompt", "answer"]
    compressed = gzip.compress(whole.encode())
    (tmp_path / "cut.jsonl.gz").write_bytes(compressed[:12] + b"xxxx" + compressed[16:])
    with pytest.raises(InputError, match=r"cut.jsonl.gz: cannot be read"):
        lenience.task(str(tmp_path / "cut.jsonl.gz"), answer="choice")
    (tmp_path / "t.jsonl.gz").write_bytes(b"not compressed")
    with pytest.raises(InputError, match="cannot be read"):
        lenience.task(f"{path}.gz", answer="choice")


@pytest.mark.parametrize(
    "row, options, says",
    [
        ("{", {}, "line 2: not JSON"),
        ({"prompt": 5}, {}, 'line 2: its "prompt" is no text: 5'),
        ({"prompt": "y", "id": "1"}, {}, "'1' is a duplicate"),
        ({"question": "x"}, {}, 'line 2: needs a "prompt"'),
        ({"prompt": "x"}, {"answer": "x"}, "regex:PATTERN"),
        ({"prompt": "y", "id": 1}, {}, "'1' is a duplicate"),
        ({"messages": [1, 2]}, {}, "line 2: needs"),
        ({"prompt": None}, {}, "line 2: needs"),
        ({"prompt": "x"}, {"answer": "regex:("}, "not a regular expression"),
        (
            {"prompt": "x"},
            {"answer": "choice", "same": "vibes"},
            "number, text, choice",
        ),
        (
            {"prompt": "x"},
            {"answer": "number-after"},
            "number-after:MARKER, last-number, boxed",
        ),
        (
            {"prompt": "x"},
            {"answer": "choice:A"},
            "number-after:MARKER, last-number, boxed",
        ),
    ],
)
def test_wrong_jsonl_tasks_are_told(
    row, options: dict, says: str, tmp_path: Path
) -> None:
    path = write(tmp_path / "t.jsonl", [{"prompt": "fine"}, row])
    with pytest.raises(InputError, match=says):
        lenience.task(str(path), **options)


@pytest.mark.parametrize(
    "text, found",
    [
        ("so\n#### 18 apples", 18),
        ("**#### 18**", 18),
        ("#### \\boxed{18}", 18),
        ("####\n18", 18),
        ("####\n\n**18**", 18),
        ("#### −5", -5),
        ("#### -5.", -5),
        ("#### 1/2", 0.5),
        ("#### 18</s>", 18),
        ("#### $1,800.50 a year", 1800.5),
        ("#### 50 %", 50),
        ("#### 3,5 kg", 3.5),
        ("#### 1.234,5", 1234.5),
        ("#### 1,234", 1234),
        ("#### 12,345,678", 12345678),
        ("#### 7\n#### 8 and 9", 7),
        ("#### none", None),
        ("18", None),
        ("#### ", None),
        ("####\n\nno\n5", None),
    ],
)
def test_the_number_after_a_marker(
    text: str, found: float | None, tmp_path: Path
) -> None:
    path = write(tmp_path / "t.jsonl", [{"prompt": "x"}])
    task = lenience.task(str(path), answer="number-after:####")
    answer = task.answer(text)
    assert (answer is None) == (found is None)
    if found is not None:
        assert (
            task.same(answer, str(found)) is True
            and task.same(answer, str(found + 1)) is False
        )


@pytest.mark.parametrize(
    "text, letter",
    [
        ("I think C", "C"),
        ("Answer: A cat is B", "B"),
        ("Answer: B", "B"),
        ("The answer is (C).", "C"),
        ("the answer is **D**", "D"),
        ("A is wrong, since B follows. So the answer is A.", "A"),
        ("(b)", "B"),
        ("b", "B"),
        ("Option A: no. Option B: yes. I choose (B)", "B"),
        ("I don't know", None),
        ("a cat", None),
        ("", None),
    ],
)
def test_the_letter_that_is_chosen(
    text: str, letter: str | None, tmp_path: Path
) -> None:
    path = write(tmp_path / "t.jsonl", [{"prompt": "x"}])
    assert lenience.task(str(path), answer="choice").answer(text) == letter


def test_what_is_boxed_and_the_last_number(tmp_path: Path) -> None:
    path = str(write(tmp_path / "t.jsonl", [{"prompt": "x"}]))
    boxed = lenience.task(path, answer="boxed")
    assert (
        boxed.answer(r"\boxed{1} so \boxed{\frac{1}{2}} and \boxed{3") == r"\frac{1}{2}"
    )
    assert boxed.answer(r"\boxed{}") is None and boxed.answer("18") is None
    assert boxed.same("X  y", "x y") is True
    last = lenience.task(path, answer="last-number")
    assert last.answer("3 and then 4, or 5.") == "5" and last.answer("none") is None
    assert last.same("0,5", "1/2") is True and last.same("1/0", "1/0") is None


@pytest.mark.parametrize(
    "references, says",
    [
        (["a #### 5", "b #### 6"], "try --answer number-after:####"),
        ([r"\boxed{5}"], "try --answer boxed"),
        (["A", "(C)"], "try --answer choice"),
        (["1,000", "3.5"], "try --answer last-number"),
        (["def f(): ..."], "name a task of your own, file.py:Name"),
        ([None], "name a task of your own, file.py:Name"),
    ],
)
def test_how_answers_are_found_must_be_said(
    references: list[str | None], says: str, tmp_path: Path
) -> None:
    rows = [{"prompt": "x", "reference": reference} for reference in references]
    path = write(tmp_path / "t.jsonl", rows)
    with pytest.raises(
        InputError, match=r"name how answers are found \(--answer\)"
    ) as error:
        lenience.task(str(path))
    assert says in str(error.value)


def test_a_task_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from lenience.tasks import WordMath\nclass Mine(WordMath):\n    name = 'mine'\nlame = 3\n"
    )
    assert lenience.task(f"{tmp_path}/mine.py:Mine").name == "mine"
    (tmp_path / "own.py").write_text(
        (Path(__file__).parents[1] / "docs/your-own-task.md")
        .read_text()
        .split("```python")[1]
        .split("```")[0]
    )
    own = lenience.task(f"{tmp_path}/own.py:Capitals")
    before = own.version  # type: ignore[attr-defined]
    (tmp_path / "own.py").write_text((tmp_path / "own.py").read_text() + "\n")
    assert lenience.task(f"{tmp_path}/own.py:Capitals").version != before  # type: ignore[attr-defined]
    for spec, says in (
        (f"{tmp_path}/mine.py:Other", "no 'Other'"),
        (f"{tmp_path}/no.py:Mine", "no such file"),
        (f"{tmp_path}/mine.py:lame", "lacks name"),
        ("wordmaths", "there is no task 'wordmaths'"),
        (f"{tmp_path}/no.jsonl", "cannot be read"),
    ):
        with pytest.raises(InputError, match=says):
            lenience.task(spec)
    (tmp_path / "bad.py").write_text("1/0")
    with pytest.raises(InputError, match="ZeroDivisionError"):
        lenience.task(f"{tmp_path}/bad.py:X")


class OldJsonl(JsonlTask):
    """Written before answers saw their samples."""

    def answer(self, text: str) -> str | None:  # type: ignore[override]
        return super().answer(text)


def test_a_checker_that_raises_ends_the_run_or_counts_as_wrong() -> None:
    class Raises:
        name = "raises"

        def samples(self, split: str) -> list[Sample]:
            return [Sample("a", "x", "1"), Sample("b", "y", "2")]

        def answer(self, text: str, sample: Sample) -> str | None:
            return str(int(text))

        def same(self, a: str, b: str) -> bool:
            return int(a) == int(b)

        def score(self, pairs: list[tuple[str, Sample]]) -> list[Score]:
            return [
                Score(float(text) == float(one.reference), 0.0) for text, one in pairs
            ]

        def loss(self, text: str, target_text: str, sample: Sample) -> float:
            return float(int(text) != int(target_text))

    task, (a, b) = as_task(Raises()), Raises().samples("test")
    for call in (
        lambda: task.answer("one", a),
        lambda: task.same("1", "one", a),
        lambda: task.score([("one", a)]),
        lambda: task.loss("one", "1", a),
    ):
        with pytest.raises(
            RuntimeError, match=r"'raises', sample a: .* failed with ValueErr"
        ):
            call()

    class Wrong(Raises):
        failures_are_wrong = True

    task = as_task(Wrong())
    with pytest.warns(
        UserWarning, match="sample a: answer failed with ValueError.*like further ones"
    ):
        assert task.answer("one", a) is None
    assert task.answer("1", a) == "1" and task.same("1", "one", a) is False
    assert task.same(None, "1", a) is None, "a missing answer is never another one"
    assert task.score([("one", a), ("2", b)]) == [Score(False, 1.0), Score(True, 0.0)]
    assert task.loss("one", "1", a) == 1.0 and task.loss("1", "1", a) == 0.0


def test_a_wrapped_task_keeps_what_it_says_of_references(tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl", [{"prompt": "x", "reference": "so #### 5"}])
    task = as_task(OldJsonl(path, "after:####", "number"))
    assert task.scores_by_reference and task.reference("so #### 5") == "5"
    assert task.reads == "answer=after:#### same=number version=3"
    assert not task.has_loss and not task.scores_batches


class WithOptions:
    """Its own options are no samples, its ids and answers no texts."""

    name = "options"

    def samples(self, split: str):
        yield Sample(7, "p", "1")  # type: ignore[arg-type]

    def answer(self, text: str, strip: bool = True):
        return text.strip() if strip is True else text

    def same(self, a, b, tolerance: float = 1e-3):
        return abs(float(a) - float(b)) < tolerance

    def loss(self, text: str, target_text: str, sample: Sample) -> float:
        return 0.5


def test_a_tasks_own_options_are_not_mistaken_for_samples() -> None:
    task = as_task(WithOptions())
    (sample,) = take(task, "test", None)
    assert sample.id == "7"
    assert (
        task.answer(" x ", sample) == "x" and task.same("1", "1.0001", sample) is True
    )
    assert task.has_loss and task.loss("", "", sample) == 0.5


class Undecided(WithOptions):
    def correct(self, text: str, sample: Sample):
        return None


def test_what_is_not_said_to_be_right_is_wrong() -> None:
    task = as_task(Undecided())
    (sample,) = take(task, "test", None)
    assert task.score([("x", sample)]) == [Score(False, 1.0)]


def test_a_task_with_a_loss_has_one() -> None:
    class Lossy(wordmath.WordMath):
        def loss(self, text: str, target_text: str, sample: Sample) -> float:
            return 0.0

    assert Lossy().has_loss and not TASK.has_loss


def test_an_empty_split_is_told(tmp_path: Path) -> None:
    path = str(write(tmp_path / "t.jsonl", [{"prompt": "x"}]))
    task = lenience.task(path, answer="last-number")
    with pytest.raises(InputError, match="no samples in its split 'test'"):
        take(task, "test", 5)
