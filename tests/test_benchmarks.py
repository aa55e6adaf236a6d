"""Benchmarks in the layouts that they are published in, on rows made for these tests."""

from __future__ import annotations

import base64
import csv
import gzip
import json
import pickle
import re
import shutil
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from capabilities import needs
from rouge_score.rouge_scorer import RougeScorer

import lenience
from lenience.core.errors import InputError
from lenience.tasks import BENCHMARKS, Sample, Task
from lenience.tasks.choice import Arc, CommonsenseQa, Mmlu
from lenience.tasks.code import (
    HumanEval,
    LiveCodeBench,
    cases_in,
    last_block,
    same_output,
)
from lenience.tasks.expressions import same_expression
from lenience.tasks.finding import choice
from lenience.tasks.math import Gsm8k, Math
from lenience.tasks.published import fold_of


def jsonl(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def gsm_rows(n: int, first: int = 0) -> list[dict[str, Any]]:
    return [
        {
            "question": f"What is {i} and {i}?",
            "answer": f"It is <<{i}+{i}={2 * i}>>.\n#### {2 * i}",
        }
        for i in range(first, first + n)
    ]


def lm_eval(text: str, reference: str, kind: str) -> bool:
    """What lm-eval's gsm8k says of a response: its filters and its exact_match, after its YAML."""
    for end in ("Question:", "</s>", "<|im_end|>"):
        text = text.split(end)[0]
    pattern, group = {
        "strict": (r"#### (\-?[0-9\.\,]+)", 0),
        "flexible": (r"(-?[$0-9.,]{2,})|(-?[0-9]+)", -1),
    }[kind]
    found = re.findall(pattern, text)
    answer = "[invalid]"
    if found:
        match = found[group]
        if isinstance(match, tuple):
            match = next((m for m in match if m), "[invalid]")
        answer = match.strip()
    for ignored in (",", r"\$", "(?s).*#### ", r"\.$"):
        answer, reference = re.sub(ignored, "", answer), re.sub(ignored, "", reference)
    return answer.lower() == reference.lower()


NUMBERS = [
    "18", "-18", "1,800", "18.0", "18.", "$18", "$1,800.50", "18%", "0", "−18", "1.800,50", ".5",
    "18 apples", "**18**", "\\boxed{18}", "eighteen", "", "1/2", "3 or 18", "18</s>",
]  # fmt: skip
SHAPES = [
    "#### {}", "so it is 7.\n#### {}", "####{}", "### {}", "The answer is {}.", "{}",
    "#### {}\n\nQuestion: What is 4?\nAnswer: #### 4", "#### 5\n#### {}", "12 + 6 = {} dollars",
    "#### {}\nThat is 99 in all.",
]  # fmt: skip


@pytest.mark.parametrize("kind", ["strict", "flexible"])
def test_gsm8k_is_scored_as_lm_eval_scores_it(tmp_path: Path, kind: str) -> None:
    texts = [shape.format(number) for shape in SHAPES for number in NUMBERS]
    assert len(texts) == 200
    path = jsonl(tmp_path / "test.jsonl", gsm_rows(1))
    task = lenience.task(f"gsm8k:extract={kind}", data=path)
    found = 0
    for wanted in ("18", "-18", "1800", "1,800.50"):
        reference = f"Thus.\n#### {wanted}"
        row = {"question": "?", "answer": reference}
        sample = Gsm8k().read(row, "", "test")
        assert sample is not None
        right = [lm_eval(text, reference, kind) for text in texts]
        assert [task.correct(text, sample) for text in texts] == right
        found += sum(right)
    assert 20 < found < 400


def test_gsm8k_shows_solved_problems_and_does_not_mine_them(tmp_path: Path) -> None:
    jsonl(tmp_path / "train.jsonl", gsm_rows(10))
    jsonl(tmp_path / "test.jsonl", gsm_rows(3, first=50))
    task = lenience.task("gsm8k", data=tmp_path, shots=8)
    assert (
        len(list(task.samples("train"))) == 2 and len(list(task.samples("test"))) == 3
    )
    (sample, *_) = task.samples("test")
    assert isinstance(sample.prompt, str) and sample.reference == "100"
    shown = "Question: What is 0 and 0?\nAnswer: It is <<0+0=0>>.\n#### 0\n\nQuestion: What is 1"
    assert sample.prompt.startswith(shown)
    assert sample.prompt.endswith("\n#### 14\n\nQuestion: What is 50 and 50?\nAnswer:")
    turns = lenience.task("gsm8k:shots=8,turns=true", data=str(tmp_path))
    (sample, *_) = turns.samples("test")
    assert [one["role"] for one in sample.prompt] == ["user", "assistant"] * 8 + [
        "user"
    ]
    assert task.answer("#### 5\n#### 6") == "5"  # the first
    assert lenience.task("gsm8k", data=tmp_path).answer("5, then 6") == "6"


@pytest.mark.parametrize("kind", ["value", "flexible"])
def test_gsm8k_looks_for_no_answer_behind_the_first_end(
    tmp_path: Path, kind: str
) -> None:
    path = jsonl(tmp_path / "test.jsonl", gsm_rows(1))
    task = lenience.task(f"gsm8k:extract={kind}", data=path)
    for text in (
        "so 18\n\nQuestion: 4 of 5?</s> 99",
        "so 18<|im_end|> 7\nQuestion: 3?\n</s> 2",
    ):
        assert task.answer(text) == "18"


@pytest.mark.parametrize(
    ("a", "b", "same"),
    [
        ("1/2", r"\frac{1}{2}", True), ("0.5", r"\frac12", True),
        (r"2\sqrt{3}", r"\sqrt{12}", True),
        ("x^2+1", "1+x^2", True), ("(1,2)", "(2,1)", False), ("7", "8", False),
        (r"\text{Evelyn}", r"\text{Evelyn}", True),
        (r"50\%", "50", True), ("1,000", "1000", True),
        (r"\frac{\pi}{2}", r"\pi/2", True), ("-3", "3", False),
    ],
)  # fmt: skip
def test_expressions_are_compared_by_their_values(a: str, b: str, same: bool) -> None:
    assert same_expression(a, b) is same


def test_math_in_a_file_for_each_problem_and_in_one(tmp_path: Path) -> None:
    row = {
        "problem": "Half?",
        "level": "Level 3",
        "type": "A",
        "solution": r"It is $\boxed{1/2}$.",
    }
    for number in range(6):
        path = (
            tmp_path
            / "MATH"
            / ("test" if number % 2 else "train")
            / f"kind{number}"
            / "1.json"
        )
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(row, indent=2))
    task = lenience.task("math", data=tmp_path / "MATH")
    (sample, *rest) = task.samples("test")
    assert len(rest) == 2 and sample.reference == "1/2"
    assert task.correct(r"So \boxed{\frac{2}{4}}", sample)
    assert not task.correct(r"So \boxed{2}", sample) and not task.correct("1/2", sample)
    five = jsonl(
        tmp_path / "five.jsonl", [{"problem": "?", "answer": "5", "unique_id": "a/1"}]
    )
    assert (
        next(iter(lenience.task("math:sets=whole", data=five).samples("test"))).id
        == "a/1"
    )
    with pytest.raises(InputError, match="there is no problem in it"):
        lenience.task("math:level=2", data=tmp_path / "MATH")
    assert issubclass(Math, Task)


HUB = {
    "choices": {"label": ["1", "2", "3"], "text": ["red", "green", "blue"]},
    "answerKey": "2",
}
ORIGINAL = {
    "id": "q1",
    "answerKey": "C",
    "question": {
        "question_concept": "sky",
        "stem": "Sky?",
        "choices": [{"label": one, "text": f"c{one}"} for one in "ABCDE"],
    },
}


def test_choices_in_the_hubs_and_the_original_layout(tmp_path: Path) -> None:
    table = pa.Table.from_pylist(
        [{"id": f"r{i}", "question": "Sky?", **HUB} for i in range(4)]
    )
    (tmp_path / "arc").mkdir()
    pq.write_table(table, tmp_path / "arc" / "test-00000-of-00001.parquet")
    task = lenience.task("arc:sets=whole", data=tmp_path / "arc")
    sample = next(iter(task.samples("test")))
    assert sample.reference == "B" and "A. red\nB. green\nC. blue" in str(sample.prompt)
    assert task.correct("Let me think. Answer: B", sample)
    assert task.answer("Answer: D", sample) is None  # there are three
    jsonl(tmp_path / "csqa" / "dev_rand_split.jsonl", [ORIGINAL])
    unlabelled = {
        name: value for name, value in ORIGINAL.items() if name != "answerKey"
    }
    jsonl(tmp_path / "csqa" / "test_rand_split_no_answers.jsonl", [unlabelled])
    jsonl(
        tmp_path / "csqa" / "train_rand_split.jsonl",
        [ORIGINAL, {**ORIGINAL, "id": "q2"}],
    )
    task = lenience.task("csqa", data=tmp_path / "csqa")
    assert [one.reference for one in task.samples("test")] == ["C"]
    assert len(list(task.samples("train"))) == 2
    assert {Arc.title, CommonsenseQa.title, Mmlu.title} < BENCHMARKS.keys()


def test_mmlu_from_its_own_tables_with_shots_of_the_subject(tmp_path: Path) -> None:
    for role, n in (("dev", 2), ("val", 3), ("test", 8)):
        for subject, letter in (("world_history", "A"), ("anatomy", "D")):
            path = tmp_path / role / f"{subject}_{role}.csv"
            path.parent.mkdir(exist_ok=True)
            with path.open("w", newline="") as file:
                rows = [[f"{subject} {role} {i},?", *"wxyz", letter] for i in range(n)]
                csv.writer(file).writerows(rows)
                file.write("\n")  # which some editions end with
    task = lenience.task("mmlu:shots=2", data=tmp_path)
    samples = list(task.samples("test"))
    assert len(samples) == 16 and len(list(task.samples("train"))) == 6
    history = next(
        one
        for one in samples
        if "world history test 3" in str(one.prompt).lower()
        or "world_history test 3" in str(one.prompt)
    )
    assert str(history.prompt).startswith(
        "The following are multiple choice questions (with answers) about world history.\n\n"
        "world_history dev 0,?\nA. w\nB. x\nC. y\nD. z\nAnswer: A\n\nworld_history dev 1"
    )
    assert task.correct(" A\n\nNext", history) and not task.correct(" Apples", history)
    some = lenience.task("mmlu:subset=6,seed=3", data=tmp_path)
    chosen = list(some.samples("test"))
    assert (
        sorted(one.metadata["stratum"] for one in chosen)
        == ["anatomy"] * 3 + ["world history"] * 3
    )
    assert [one.id for one in chosen] == [one.id for one in some.samples("test")]
    table = [{"id": f"r{i}", "question": f"{i}?", **HUB} for i in range(200)]
    one_set = lenience.task(
        "arc:subset=20", data=jsonl(tmp_path / "arc" / "all.jsonl", table)
    )
    assert len(list(one_set.samples("test"))) == 20
    shutil.rmtree(tmp_path / "arc")
    other = lenience.task("mmlu:subset=6,seed=4", data=tmp_path)
    assert [one.id for one in chosen] != [one.id for one in other.samples("test")]


SAID = {
    "Answer: {}": True, "answer is {}": True, "The answer is ({}).": True, "**Answer: {}**": True,
    "The correct answer is: {}": True, "The best choice is {}": True, "({})": True, "{}": True,
    "{}.": True, "Option {}": True, "I think it is {}": True, "the answer would be {}": True,
    "Answer: [{}]": True, "A and B are wrong.\nAnswer: {}": True, "I pick {}!": True,
    "{}) because it fits": True, "Final answer: **{}**": True, "Answer - {}": True,
    "It is not clear.": False, "Answer: all of these": False,
}  # fmt: skip


def test_letters_are_found_in_a_hundred_odd_answers() -> None:
    texts = [(form.format(letter), letter if right else None)
             for form, right in SAID.items() for letter in "ABCDE"]  # fmt: skip
    assert len(texts) == 100
    assert [(text, choice(text)) for text, _ in texts] == texts


HUMAN = {
    "task_id": "Own/0",
    "prompt": "from typing import List\n\n\ndef twice(x: int) -> int:\n    return 2 * x\n\n\n"
    'def total(xs: List[int]) -> int:\n    """ The sum of twice each.\n    """\n',
    "entry_point": "total",
    "canonical_solution": "    return sum(twice(x) for x in xs)\n",
    "test": "def check(candidate):\n    assert candidate([1, 2]) == 6\n"
    "    assert candidate([]) == 0\n    assert candidate([3]) == twice(3) == total([3])\n",
}


@pytest.fixture
def human(tmp_path: Path) -> HumanEval:
    path = tmp_path / "HumanEval.jsonl.gz"
    path.write_bytes(gzip.compress((json.dumps(HUMAN) + "\n").encode()))
    task = HumanEval(sets="whole").open(str(path))
    return task


@needs("sandbox")
def test_completions_and_code_blocks_are_run(human: HumanEval) -> None:
    (sample,) = human.samples("test")
    body = HUMAN["canonical_solution"]
    whole = "def total(xs):\n    return sum(2 * x for x in xs)\n"
    texts = {
        body: "passed",
        body + "\n\ndef more():\n    this is no Python\n": "passed",
        f"Here:\n```python\n{whole}```\nDone.": "passed",
        f"```python\nimport os\n\n{whole}\nprint('x')\n```": "passed",
        f"```\n{body}```": "passed",
        f"```python\n{whole}": "passed",
        whole: "passed",
        "    return sum(xs)\n": "wrong answer",
        "    return None\n": "wrong answer",
        "    return [\n": "crash",
        "    raise ValueError('a\x1b[31m')\n": "crash",
        "```python\ndef totals(xs): return 0\n```": "missing function",
        "": "missing function",
    }
    scores = human.score([(text, sample) for text in texts])
    assert [one.verdict.split(":")[0] for one in scores] == list(texts.values())
    assert [one.correct for one in scores] == [
        kind == "passed" for kind in texts.values()
    ]
    assert all(one.verdict.isprintable() for one in scores)


@needs("sandbox")
def test_tests_that_cannot_run_are_told(human: HumanEval) -> None:
    (sample,) = human.samples("test")
    for test in ("def check(", "import no_such_module", "x = 1"):
        broken = replace(sample, id="Own/9", metadata={**sample.metadata, "test": test})
        with pytest.raises(InputError, match="Own/9: its tests cannot be run"):
            human.score([("    return 0\n", broken)])
        human._verdicts.clear()


@needs("sandbox")
def test_programs_agree_where_both_pass_or_both_fail(human: HumanEval) -> None:
    (sample,) = human.samples("test")
    texts = (
        HUMAN["canonical_solution"],
        "    return 2 * sum(xs)\n",
        "    return 0\n",
        "    no\n",
    )
    right, other, wrong, broken = (human.answer(text, sample) for text in texts)
    assert human.same(right, other, sample) is True
    assert human.same(right, wrong, sample) is False
    assert human.same(wrong, broken, sample) is True
    assert human.same(None, right, sample) is None


def lcb(**more: Any) -> dict[str, Any]:
    row = {
        "question_title": "t", "question_content": "Add them.", "platform": "own",
        "question_id": "1", "contest_id": "c", "contest_date": "2024-05-01T00:00:00",
        "starter_code": "", "difficulty": "easy", "metadata": "{}",
        "public_test_cases": json.dumps([{"input": "1 2\n", "output": "3\n", "testtype": "stdin"}]),
        "private_test_cases": "[]",
    }  # fmt: skip
    return row | more


def packed(tests: list[dict[str, str]]) -> str:
    return base64.b64encode(zlib.compress(pickle.dumps(json.dumps(tests)))).decode()


FUNCTIONAL = lcb(
    question_id="2",
    difficulty="hard",
    contest_date="2024-09-01T00:00:00",
    starter_code="class Solution:\n    def pairs(self, xs: List[int], k: int) -> List[int]:\n",
    metadata=json.dumps({"func_name": "pairs"}),
    public_test_cases=json.dumps(
        [{"input": "[1, 2]\n3", "output": "[3, 6]", "testtype": "functional"}]
    ),
    private_test_cases=packed(
        [{"input": "[]\n1", "output": "[]", "testtype": "functional"}]
    ),
)


@needs("sandbox")
def test_livecodebench_runs_programs_and_methods(tmp_path: Path) -> None:
    hidden = packed([{"input": "5 5\n", "output": "10.0", "testtype": "stdin"}])
    path = jsonl(tmp_path / "test.jsonl", [lcb(private_test_cases=hidden), FUNCTIONAL])
    task = LiveCodeBench(sets="whole").open(str(path))
    by_input, by_call = task.samples("test")
    assert "reads the input from stdin" in str(by_input.prompt)
    assert "def pairs" in str(by_call.prompt)
    programs = {
        "print(sum(map(int, input().split())))": "passed",
        "print('  ', sum(map(int, input().split())), '  ')": "passed",
        "print(3)": "wrong answer",
        "print(sum(map(int, input().split())) + 1)": "wrong answer",
        "print(1 / 0)": "crash",
        "x = [": "crash",
        "import sys\nsys.exit(0)": "wrong answer",
        "print(sum(map(int, input().split())))\nsys.exit(1)": "passed",
        "a, b = map(int, stdin.readline().split())\nprint(a + b)\nexit()": "passed",
        "print(sum(map(int, input().split())) + pow(2, 5, 2))": "passed",
        "x = bisect.bisect_left([1], 1) + random.randint(0, 0) + len(deque())\n"
        "print(x + sum(map(int, input().split())))": "passed",
        "assert len(str(10 ** 5000)) == 5001\nprint(sum(map(int, input().split())))": "passed",
        "import threading\nt = threading.Thread(target=lambda: print(sum(map(int, "
        "input().split()))))\nt.start()\nt.join()": "passed",
    }
    scores = task.score([(f"```python\n{one}\n```", by_input) for one in programs])
    assert [one.verdict.split(":")[0] for one in scores] == list(programs.values())
    methods = {
        "class Solution:\n    def pairs(self, xs: List[int], k): return [k * x for x in xs]":
            "passed",
        "class Solution:\n    def pairs(self, xs, k): return tuple(k * x for x in xs)": "passed",
        "def pairs(xs, k): return [k * x for x in xs]": "passed",
        "class Solution:\n    def pairs(self, xs, k): return [k * x for x in xs] or None":
            "wrong answer",
        "class Solution:\n    def pears(self, xs, k): return []": "missing function",
        "class Solution:\n    def pairs(self, xs, k): return xs[9]": "crash",
    }  # fmt: skip
    scores = task.score([(f"```python\n{one}\n```", by_call) for one in methods])
    assert [one.verdict.split(":")[0] for one in scores] == list(methods.values())


@needs("sandbox")
def test_livecodebench_takes_releases_levels_and_dates(tmp_path: Path) -> None:
    for number in (1, 2, 3):
        name = f"test{number if number > 1 else ''}.jsonl"
        jsonl(
            tmp_path / name,
            [lcb(question_id=f"a{number}"), FUNCTIONAL | {"question_id": f"b{number}"}],
        )
    ids = lambda **options: [  # noqa: E731
        one.id
        for one in lenience.task(
            "livecodebench:sets=whole", data=tmp_path, **options
        ).samples("test")
    ]
    assert ids(release="v2") == ["a1", "b1", "a2", "b2"]
    assert ids(difficulty="hard") == ["b1", "b2", "b3"]
    assert ids(until="2024-05-31", release="v1") == ["a1"]
    assert ids(since="2024-06-01", release="v1") == ["b1"]
    with pytest.raises(InputError, match=r"release v5 lacks test4\.jsonl"):
        ids(release="v5")


class Evil:
    def __reduce__(self) -> Any:
        return (print, ("ran",))


def test_a_pickle_that_would_run_something_is_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    evil = base64.b64encode(zlib.compress(pickle.dumps(Evil()))).decode()
    for text in (
        evil,
        "AAAA",
        "[1]",
        base64.b64encode(b"x").decode(),
        packed([{"input": "1"}]),
    ):  # type: ignore[list-item]
        with pytest.raises(InputError, match="test cases cannot be read"):
            cases_in(text)
    assert "ran" not in capsys.readouterr().out


def test_outputs_are_compared_line_by_line_then_as_decimals() -> None:
    same = [
        ("3\n", "3"),
        (" 1 2 \n3\n", "1 2\n3"),
        ("0.10", "0.1"),
        ("1e3", "1000"),
        ("a b", "a b"),
    ]
    other = [
        ("3\n4", "3"),
        ("1 2", "1  2 3"),
        ("0.1000001", "0.1"),
        ("a", "b"),
        ("nan", "NaN"),
        ("", "0"),
    ]
    assert all(same_output(*pair) for pair in same)
    assert not any(same_output(*pair) for pair in other)


PROGRAM = "def add(a, b):\n    return a + b\n"
REPLIES = {
    "one block": f"Here:\n```python\n{PROGRAM}```\n",
    "usage behind it": f"```python\n{PROGRAM}```\nFor example:\n```python\nprint(add(1, 2))\n```\n",
    "a shell behind it": f"```python\n{PROGRAM}```\n```bash\npython add.py\n```\n",
    "output behind it": f"```py\n{PROGRAM}```\n```text\n3\n```\n```\n3\n```",
    "a thought before it": f"<think>\n```python\ndef add(a, b): return 0\n```\n</think>\n"
    f"```python\n{PROGRAM}```",
    "an open fence in a thought": f"<think>```python\ndef add(a, b): return 0\n</think>\n"
    f"```python\n{PROGRAM}```",
    "a first attempt": f"```python\ndef add(a, b): return 0\n```\nBetter:\n```Python\n{PROGRAM}```",
    "CRLF": f"```python\n{PROGRAM}```".replace("\n", "\r\n"),
    "a language with attributes": f"```python title=x\n{PROGRAM}```",
    "cut off": f"```python\n{PROGRAM}",
}


@pytest.mark.parametrize("name", REPLIES)
def test_the_program_is_the_block_that_defines_the_function(name: str) -> None:
    prompt = "def add(a, b):\n    ...\n"
    sample = Sample(
        "x", prompt, None, {"prompt": prompt, "entry_point": "add", "test": ""}
    )
    space: dict[str, Any] = {}
    exec(str(HumanEval(form="chat").answer(REPLIES[name], sample)), space)
    assert space["add"](1, 2) == 3
    program = last_block(REPLIES[name], "add")
    assert program is not None and program.replace("\r", "") == PROGRAM


def test_without_a_block_there_is_no_program() -> None:
    assert last_block("x") is None and last_block("```\n\n```") is None
    assert last_block("```python\na\n```\n```\nb\n```") == "b\n"
    assert last_block("Use ```foo``` here.\n```python\na\n```") == "a\n"
    assert last_block("```python\na = 1\n```\n```python\nb = (") == "a = 1\n"
    assert last_block("```bash\nls\n```") is None


def test_gsm8k_compares_values_unless_a_published_rule_is_named(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "test.jsonl", gsm_rows(1))
    task = lenience.task("gsm8k", data=path)
    strict = lenience.task("gsm8k:extract=strict", data=path)
    for wanted, text in (
        ("-5", "#### −5"), ("18", "#### 18.00"), ("1800", "#### $1,800"),
        ("18", "It is 18 dollars."),
        ("18", "#### 18\n\nQuestion: What is 2 + 5?\nAnswer: 7\n#### 7"),
    ):  # fmt: skip
        sample = Gsm8k().read({"question": "?", "answer": f"#### {wanted}"}, "", "test")
        assert sample is not None and task.correct(text, sample), text
        wrong = Gsm8k().read({"question": "?", "answer": "#### 17"}, "", "test")
        assert wrong is not None and not task.correct(text, wrong)
    sample = Gsm8k().read({"question": "?", "answer": "#### 18"}, "", "test")
    assert sample is not None and not strict.correct("#### 18.00", sample)
    assert "Question:" in task.stop_strings
    for one in (task, strict):
        assert one.answer("<think>As shown: #### 5</think>So\n#### 18") == "18"


def test_rouge_is_rouge_scores_own(tmp_path: Path) -> None:
    rows = [
        {
            "article": "A long story.",
            "highlights": f"The cat number {i} sat.",
            "id": f"{i}",
        }
        for i in range(5)
    ]
    task = lenience.task(
        "summary:sets=whole,rouge=rouge1", data=jsonl(tmp_path / "cnn.jsonl", rows)
    )
    samples = list(task.samples("test"))
    assert task.measure == "ROUGE-1" and task.by_degree and task.has_loss
    texts = ["The cat sat.", "cats sitting", "", "the cat number 3 sat", "nothing"]
    scorer = RougeScorer(["rouge1"], use_stemmer=True)
    for text in texts:
        wanted = [
            scorer.score(str(one.reference), text)["rouge1"].fmeasure for one in samples
        ]
        scores = task.score([(text, one) for one in samples])
        assert [1 - one.loss for one in scores] == pytest.approx(wanted)
    good, bad = "The cat number 0 sat.", "dog"
    assert (
        task.loss(bad, good, samples[0]) == 1 and task.loss(good, bad, samples[0]) == 0
    )
    assert task.same(good, good + "!", samples[0]) and not task.same(
        good, bad, samples[0]
    )


def test_continuations_of_lines_of_text(tmp_path: Path) -> None:
    path = tmp_path / "news.txt"
    words = " ".join(f"w{i}" for i in range(40))
    path.write_text(f"{words}\n\ntoo short\n")
    (sample,) = lenience.task("continuation:words=4,sets=whole", data=path).samples(
        "test"
    )
    assert sample.prompt == "w0 w1 w2 w3" and str(sample.reference).split()[:1] == [
        "w4"
    ]
    assert len(str(sample.reference).split()) == 16


def test_a_single_set_is_split_into_fifths_that_cover_it(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "all.jsonl", gsm_rows(200))
    whole = {
        one.id for one in lenience.task("gsm8k:sets=whole", data=path).samples("test")
    }
    tests = []
    for fold in range(5):
        task = lenience.task("gsm8k", data=path, fold=fold)
        train, test = (
            {one.id for one in task.samples(split)} for split in ("train", "test")
        )
        assert train | test == whole and not train & test
        assert {fold_of(id) for id in test} == {fold}
        tests.append(test)
    assert set().union(*tests) == whole and sum(map(len, tests)) == 200
    assert all(20 < len(test) < 60 for test in tests)


def test_formats_hold_the_same_rows(tmp_path: Path) -> None:
    rows = gsm_rows(4)
    jsonl(tmp_path / "a" / "test.jsonl", rows)
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "test.json").write_text(json.dumps(rows))
    (tmp_path / "c").mkdir()
    with (tmp_path / "c" / "test.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, ["question", "answer"])
        writer.writeheader()
        writer.writerows(rows)
    (tmp_path / "d").mkdir()
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "d" / "test-0.parquet")
    found = [
        [(one.prompt, one.reference) for one in
         lenience.task("gsm8k:sets=whole", data=tmp_path / name).samples("test")]
        for name in "abcd"
    ]  # fmt: skip
    assert found[0] == found[1] == found[2] == found[3] and len(found[0]) == 4


def test_the_task_is_known_by_its_options_and_its_files(tmp_path: Path) -> None:
    one = jsonl(tmp_path / "one.jsonl", gsm_rows(5))
    two = jsonl(tmp_path / "two.jsonl", gsm_rows(5, first=1))
    a, b = (lenience.task("gsm8k:extract=strict", data=path) for path in (one, two))
    assert a.reads == b.reads == "gsm8k:extract=strict version=2"
    assert a.name != b.name and a.label == b.label == "gsm8k:extract=strict"
    assert a.name == lenience.task("gsm8k", data=one, extract="strict").name


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (
            "gsm8k:shot=8",
            "gsm8k has no argument 'shot'; it has fold, sets, shots, extract, turns",
        ),
        ("gsm8k:shots=many", "must be a whole number"),
        ("gsm8k:shots=-1", "must be from 0 to 64"),
        ("gsm8k:extract=loose", "must be value or strict or flexible"),
        ("gsm8k:fold=5", "from 0 to 4"),
        ("humaneval", "lacks 'prompt'; it has question, answer"),
        ("mtbench", "lacks 'turns'"),
        ("livecodebench:release=v9", "must be v1 to v6"),
        ("livecodebench:since=May", "must be as 2024-08-31"),
        ("summary:within=2", "must be from 0 to 1"),
        ("arc", "lacks 'choices'"),
        ("math:level=7", "level must be 1 to 5"),
        ("gsm8k:shots=5", "5 rows are too few for 5 shots"),
        ("arc:shots=2", "shots come from dev, train or validation"),
    ],
)
def test_wrong_options_and_files_of_others_are_told(
    tmp_path: Path, spec: str, message: str
) -> None:
    path = jsonl(tmp_path / "rows.jsonl", gsm_rows(5))
    with pytest.raises(InputError, match=re.escape(message)):
        lenience.task(spec, data=path)


def test_data_that_is_not_there_or_is_several_is_told(tmp_path: Path) -> None:
    for data, message in (
        (tmp_path / "no.jsonl", "no such file or folder"),
        ("no-such-org/no-such-data", "is neither a file nor a dataset"),
        (jsonl(tmp_path / "x.txt", []), "is none of .jsonl"),
    ):
        with pytest.raises(InputError, match=message):
            lenience.task("gsm8k", data=data)
    for name in ("main", "socratic"):
        jsonl(tmp_path / "hub" / name / "test.jsonl", gsm_rows(2))
    with pytest.raises(InputError, match=r"holds several \(main, socratic\)"):
        lenience.task("gsm8k", data=tmp_path / "hub")
    with pytest.raises(InputError, match=r"name its files \(--data FILE\|FOLDER\)"):
        lenience.task("gsm8k")
    with pytest.raises(InputError, match="is for benchmarks"):
        lenience.task("wordmath", data=tmp_path)
    broken = tmp_path / "test-0.parquet"
    broken.write_bytes(b"PAR1")
    with pytest.raises(InputError, match="cannot be read"):
        lenience.task("gsm8k", data=broken)


@pytest.mark.parametrize("name", BENCHMARKS)
def test_every_benchmark_states_its_source_prompt_and_scorer(name: str) -> None:
    said = f"{BENCHMARKS[name].__doc__} {BENCHMARKS[name].__mro__[1].__doc__}"
    assert re.search(r"\b20\d\d\b", said), said
    assert "prompt" in said.lower() and len(said) > 200
    assert isinstance(Sample("a", "b", None).metadata, dict)


def hub_rows(role: str, n: int) -> list[dict[str, Any]]:
    return [
        {"question": f"{role} {i}?", "choices": list("wxyz"), "answer": 1}
        for i in range(n)
    ]


def test_a_folder_of_several_sets_is_refused_and_formats_are_not_counted_twice(
    tmp_path: Path,
) -> None:
    for subject in ("all", "anatomy"):
        (tmp_path / "mmlu" / subject).mkdir(parents=True)
        for role in ("test", "dev"):
            table = pa.Table.from_pylist(hub_rows(role, 3))
            pq.write_table(
                table, tmp_path / "mmlu" / subject / f"{role}-00000-of-00001.parquet"
            )
    (tmp_path / "mmlu" / "auxiliary_train").mkdir()
    pq.write_table(
        pa.Table.from_pylist(hub_rows("train", 2)),
        tmp_path / "mmlu" / "auxiliary_train" / "train-00000-of-00001.parquet",
    )
    with pytest.raises(InputError, match=r"holds several \(all, anatomy\); name one"):
        lenience.task("mmlu", data=tmp_path / "mmlu")
    task = lenience.task("mmlu", data=tmp_path / "mmlu" / "all")
    assert len(list(task.samples("test"))) == 3
    question = {"stem": "Sky?", "choices": [{"label": "A", "text": "red"}]}
    row = {"id": "a1", "answerKey": "A", "question": question}
    jsonl(tmp_path / "ARC-Easy" / "ARC-Easy-Test.jsonl", [row])
    (tmp_path / "ARC-Easy" / "ARC-Easy-Test.csv").write_text(
        "questionID,question\na1,Sky?\n"
    )
    arc = lenience.task("arc:sets=whole", data=tmp_path / "ARC-Easy")
    assert [one.id for one in arc.samples("test")] == ["a1"]


def test_files_of_another_choice_benchmark_are_told(tmp_path: Path) -> None:
    data = jsonl(tmp_path / "dev_rand_split.jsonl", [ORIGINAL])
    for name in ("arc", "mmlu"):
        with pytest.raises(InputError, match="is a row of csqa; write --task csqa"):
            lenience.task(name, data=data)


def test_folds_of_what_has_a_test_set_are_refused(tmp_path: Path) -> None:
    for role in ("train", "test"):
        jsonl(tmp_path / f"{role}.jsonl", gsm_rows(4))
    for spec in ("gsm8k:fold=1", "gsm8k:sets=whole"):
        with pytest.raises(InputError, match="has its own test set"):
            lenience.task(spec, data=tmp_path)
    assert len(list(lenience.task("gsm8k", data=tmp_path).samples("test"))) == 4


def test_a_math_verify_that_does_not_work_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "math_verify.py").write_text("raise ImportError('no sympy here')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    from lenience.tasks.expressions import _Comparer

    with pytest.raises(
        InputError, match=r"math-verify does not work here .*no sympy here"
    ):
        _Comparer().ask("1/2", "0.5")
