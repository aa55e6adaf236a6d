"""Programming problems, scored by tests in a sandbox: HumanEval and LiveCodeBench."""

from __future__ import annotations

import ast
import base64
import binascii
import io
import json
import pickle
import re
import time
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from functools import cached_property, lru_cache
from pathlib import Path
from threading import BoundedSemaphore
from typing import Any, ClassVar, Literal, Self

from lenience.core.errors import InputError
from lenience.core.files import digest_bytes
from lenience.tasks.base import Sample, Score
from lenience.tasks.finding import without_thought
from lenience.tasks.published import Published
from lenience.tasks.rows import Row
from lenience.tasks.sandbox import Limits, Sandbox, TestVerdict, sandbox, workers

ITS_TESTS = "passes its tests"
"""The reference of a problem without a solution."""
MOST_REMEMBERED = 10_000
"""Maximum number of cached verdicts."""
MOST_TESTS = 1 << 29
"""Maximum size of one problem's tests, in bytes."""
CODEX_STOPS = ("\nclass", "\ndef", "\n#", "\nif", "\nprint")
"""Texts that end a completion of HumanEval (Chen 2021, section 2)."""
MODULES = (
    "string re datetime collections heapq bisect copy math random statistics itertools functools "
    "operator io sys json builtins typing"
)
PREAMBLE = "".join(
    [
        *(f"from {name} import *\n" for name in MODULES.split()),
        *(
            f"import {name}\n"
            for name in MODULES.split()
            if name not in ("builtins", "typing")
        ),
        "sys.setrecursionlimit(50000)\nsys.set_int_max_str_digits(50000)\n",
    ]
)
"""Imports that LiveCodeBench puts before a solution."""


@dataclass(kw_only=True)
class CodeTask(Published):
    """Problems whose answer is a program, which is right if it passes every test. Two programs
    agree if both pass or both fail. `unsafe_local` runs programs as this user, without a
    sandbox."""

    measure = "pass@1"
    compares_slowly = True
    scores_by_reference = False
    same_where_wrong = True
    disagreement_is = (
        "the share of prompts on which, of this decoder's program and the target's, one passes "
        "its tests and the other does not"
    )
    unsafe_local: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self._verdicts: dict[tuple[str, str], TestVerdict] = {}
        self._free = BoundedSemaphore(workers())

    def verdict(self, program: str, sample: Sample) -> TestVerdict:
        """Return the outcome of a program on the sample's tests."""
        raise NotImplementedError

    @cached_property
    def sandbox(self) -> Sandbox:
        return sandbox(self.unsafe_local)

    def open(self, data: str) -> Self:
        super().open(data)
        _ = self.sandbox  # raises if no sandbox works, before anything is decoded
        return self

    def same(
        self, a: str | None, b: str | None, sample: Sample | None = None
    ) -> bool | None:
        if a is None or b is None:
            return None
        if a == b:
            return True
        if sample is None:  # the tests belong to the sample
            return None
        return self._known(a, sample).passed == self._known(b, sample).passed

    def score(self, pairs: Sequence[tuple[str, Sample]]) -> list[Score]:
        with ThreadPoolExecutor(workers()) as pool:
            verdicts = list(pool.map(lambda pair: self._of_response(*pair), pairs))
        found = list[Score]()
        for verdict in verdicts:
            found.append(Score(verdict.passed, float(not verdict.passed), str(verdict)))
        return found

    def _of_response(self, text: str, sample: Sample) -> TestVerdict:
        program = self.answer(text, sample)
        if program is None:
            return TestVerdict("missing function", "no program in the response")
        return self._known(program, sample)

    def _known(self, program: str, sample: Sample) -> TestVerdict:
        key = sample.id, digest_bytes(program.encode("utf-8", "replace"))
        verdict = self._verdicts.get(key)
        if verdict is None:
            with self._free:
                verdict = self.verdict(program, sample)
            if len(self._verdicts) >= MOST_REMEMBERED:
                self._verdicts.clear()
            self._verdicts[key] = verdict
        return verdict


@dataclass(kw_only=True)
class HumanEval(CodeTask):
    """HumanEval (Chen 2021), HumanEval.jsonl.gz: 164 functions to complete, pass@1 of one answer.

    form=completion shows the published prompt and ends a completion at the paper's stop texts;
    form=chat asks for the function in a code block. In both forms code blocks take precedence over
    the text, and the last block that defines the function over other blocks. The tests run in
    another process than the function, so that the function cannot read their expectations. Checked
    with the 164 canonical solutions, which pass, and a mutant of each, which fails.
    """

    title: ClassVar[str] = "humaneval"
    version = 2
    max_new_tokens = 512
    form: Literal["completion", "chat"] = "completion"
    LIMITS: ClassVar[Limits] = Limits(seconds=10.0)

    def read(self, row: Row, where: str, role: str) -> Sample | None:
        kept = {name: str(row[name]) for name in ("prompt", "entry_point", "test")}
        prompt = kept["prompt"]
        if self.form == "chat":
            prompt = (
                "Complete the following Python function. Reply with the whole function in one "
                f"code block.\n\n```python\n{prompt.rstrip()}\n```"
            )
        return Sample(str(row["task_id"]), prompt, row.get("canonical_solution"), kept)

    def answer(self, text: str, sample: Sample | None = None) -> str | None:
        if sample is None or not text.strip():
            return None
        prompt = sample.metadata["prompt"]
        before = _before(sample)
        python = [block.code for block in blocks(text) if block.may_be_python]
        solutions = [code for code in python if _definition(sample).search(code)]
        if solutions:
            return f"{before}\n{solutions[-1]}"
        bodies = [code for code in python if code[:1].isspace()]
        if bodies:
            return str(prompt + bodies[0])
        if python:
            return f"{before}\n{python[-1]}"
        text = without_thought(text)
        if _definition(sample).search(text):
            return f"{before}\n{text}"
        ends = [text.find(stop) for stop in CODEX_STOPS if stop in text]
        return str(prompt + text[: min(ends, default=len(text))])

    def verdict(self, program: str, sample: Sample) -> TestVerdict:
        tests = f"{_before(sample)}\n{sample.metadata['test']}\n"
        try:
            return self.sandbox.check(
                program, sample.metadata["entry_point"], tests, self.LIMITS
            )
        except InputError as error:
            raise InputError(f"task humaneval, sample {sample.id}: {error}") from None


def _definition(sample: Sample) -> re.Pattern[str]:
    name = re.escape(sample.metadata["entry_point"])
    return re.compile(rf"^(?:async\s+)?def {name}\b", re.MULTILINE)


def _before(sample: Sample) -> str:
    """Return the part of a prompt before the function to complete: imports, and functions that
    tests may call."""
    prompt: str = sample.metadata["prompt"]
    found = _definition(sample).search(prompt)
    return prompt[: found.start()] if found else ""


@dataclass(kw_only=True)
class LiveCodeBench(CodeTask):
    """LiveCodeBench's code generation (Jain 2024), test.jsonl … test6.jsonl of
    code_generation_lite: programs that read standard input, or methods of a class Solution.

    The prompt shows the problem and its starter code, and asks for one code block. `release` (v1 to
    v6) selects the first files, `difficulty` one of easy, medium and hard, `since` and `until` a
    range of contest dates. The last code block of a response is run, at most 6 s per test, and must
    pass all tests. Outputs are compared line by line, numbers as decimals, as in LiveCodeBench's
    own checker; numpy is not available. Checked on problems of both kinds made for the tests, with
    mutants.
    """

    title: ClassVar[str] = "livecodebench"
    version = 2
    max_new_tokens = 2048
    release: str = ""
    difficulty: Literal["all", "easy", "medium", "hard"] = "all"
    since: str = ""
    until: str = ""
    LIMITS: ClassVar[Limits] = Limits(seconds=6.0, memory=4 << 30, output=16 << 20)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.release and not re.fullmatch(r"v[1-6]", self.release):
            raise InputError(
                f"livecodebench's release must be v1 to v6, not {self.release!r}"
            )
        for name in ("since", "until"):
            date = getattr(self, name)
            if date and not re.fullmatch(r"\d{4}-\d\d-\d\d", date):
                raise InputError(
                    f"livecodebench's {name} must be as 2024-08-31, not {date!r}"
                )

    def _prepare(self, files: dict[str, list[Path]]) -> None:
        if not self.release:
            return
        newest = int(self.release[1:])
        wanted = set()
        for number in range(1, newest + 1):
            wanted.add(f"test{number if number > 1 else ''}")
        found = {path.name.split(".")[0]: path for path in files.get("test", ())}
        lacking = sorted(wanted - found.keys())
        if lacking:
            raise InputError(
                f"task livecodebench: release {self.release} lacks {lacking[0]}.jsonl"
            )
        files["test"] = [found[name] for name in sorted(wanted)]

    def read(self, row: Row, where: str, role: str) -> Sample | None:
        if self.difficulty not in ("all", row["difficulty"]):
            return None
        date = str(row.get("contest_date", ""))[:10]
        if (self.since and date < self.since) or (self.until and date > self.until):
            return None
        kept = {
            "public": row["public_test_cases"],
            "private": row.get("private_test_cases", "[]"),
            "function": json.loads(row.get("metadata") or "{}").get("func_name"),
            "starter": row.get("starter_code") or "",
        }
        return Sample(
            str(row["question_id"]), _asked(row, kept["starter"]), ITS_TESTS, kept
        )

    def answer(self, text: str, sample: Sample | None = None) -> str | None:
        function = None if sample is None else sample.metadata["function"]
        return last_block(text, function or "")

    def verdict(self, program: str, sample: Sample) -> TestVerdict:
        kept = sample.metadata
        tests = [*cases_in(kept["public"]), *cases_in(kept["private"])]
        left = time.monotonic() + (self.LIMITS.seconds + 1) * len(tests) + 5
        stdin = [test for test in tests if test["testtype"] == "stdin"]
        verdicts = self._by_input(program, stdin)
        if len(stdin) < len(tests):
            verdicts = self._by_calls(program, kept["function"], tests)
        for verdict in verdicts:
            if not verdict.passed:
                return verdict
            if time.monotonic() > left:
                return TestVerdict("timeout", "of all tests together")
        return TestVerdict("passed")

    def _by_input(
        self, program: str, tests: Sequence[dict[str, str]]
    ) -> Iterator[TestVerdict]:
        for number, test in enumerate(tests, 1):
            ended = self.sandbox.run(PREAMBLE + program, test["input"], self.LIMITS)
            if ended.status != "ended":
                yield TestVerdict(ended.status, f"test {number}")
            elif ended.code:
                yield TestVerdict(
                    "crash", (ended.err.strip().splitlines() or [""])[-1][-300:]
                )
            elif not same_output(ended.out, test["output"]):
                yield TestVerdict("wrong answer", f"test {number}")
            else:
                yield TestVerdict("passed")

    def _by_calls(
        self, program: str, function: str | None, tests: Sequence[dict[str, str]]
    ) -> Iterator[TestVerdict]:
        if not function:
            raise InputError(
                "task livecodebench: a problem's metadata name no func_name"
            )
        try:
            given = [list(map(json.loads, _lines(test["input"]))) for test in tests]
            wanted = [json.loads(test["output"]) for test in tests]
        except ValueError as error:
            raise InputError(
                f"task livecodebench: a test is no JSON ({error})"
            ) from None
        values = self.sandbox.calls(PREAMBLE + program, function, given, self.LIMITS)
        for number, (value, expected) in enumerate(zip(values, wanted), 1):
            if isinstance(value, TestVerdict):
                yield value
                return
            value = list(value) if isinstance(value, tuple) else value
            right = value == expected
            yield (
                TestVerdict("passed")
                if right
                else TestVerdict("wrong answer", f"test {number}")
            )


def _asked(row: Row, starter: str) -> str:
    wanted = (
        "Write a Python program that reads the input from stdin and writes the answer "
        "to stdout."
    )
    if starter:
        wanted = (
            f"Write the solution in Python, on this code:\n```python\n{starter}\n```"
        )
    return (
        f"### Question\n{row['question_content']}\n\n### Format\n{wanted} Put the code into one "
        "block, ```python … ```.\n\n### Answer\n"
    )


def _lines(text: str) -> list[str]:
    return [line for line in text.split("\n") if line.strip()]


@dataclass(frozen=True)
class CodeBlock:
    """A fenced code block of a response."""

    language: str
    """Language named by the fence, in lower case; "" if none."""
    code: str
    whole: bool
    """False if the response ends before the fence does."""

    @property
    def may_be_python(self) -> bool:
        return self.language in ("", "py", "python", "python3", "python2")

    @property
    def parses(self) -> bool:
        """True if the block is Python by itself."""
        try:
            ast.parse(self.code)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return False
        return True


def blocks(text: str) -> list[CodeBlock]:
    """Return the non-empty code blocks of a response, except those in its thought."""
    text = without_thought(text.replace("\r\n", "\n"))
    fenced = re.finditer(
        r"^[ \t]*```[ \t]*([^\n`]*)\n(.*?)(^[ \t]*```|\Z)",
        text,
        re.DOTALL | re.MULTILINE,
    )
    found = []
    for block in fenced:
        found.append(
            CodeBlock(
                (block[1].split() or [""])[0].strip("{}.").lower(),
                block[2],
                bool(block[3]),
            )
        )
    return [block for block in found if block.code.strip()]


def last_block(text: str, defines: str = "") -> str | None:
    """Return the program in a response: the last complete code block that parses as Python and, if
    given, defines the function `defines`. Otherwise the last block that defines the function, then
    the last block of Python; None if there is none."""
    python = [block for block in blocks(text) if block.may_be_python]
    named = re.compile(rf"^\s*(?:async\s+)?def {re.escape(defines)}\b", re.MULTILINE)
    for wanted in (
        lambda block: (
            block.whole and block.parses and (not defines or named.search(block.code))
        ),
        lambda block: not defines or named.search(block.code),
        lambda block: True,
    ):
        fitting = [block for block in python if wanted(block)]
        if fitting:
            return fitting[-1].code
    return None


class _PlainUnpickler(pickle.Unpickler):
    """An unpickler of plain values, which refuses every import."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"it names {module}.{name}")


@lru_cache(maxsize=16)
def cases_in(text: str) -> list[dict[str, str]]:
    """Return LiveCodeBench's test cases from JSON, or from JSON text that is pickled, compressed
    and base64-encoded. Raises InputError if they cannot be read."""
    try:
        if not text.lstrip().startswith("["):
            packed = zlib.decompressobj().decompress(base64.b64decode(text), MOST_TESTS)
            text = _PlainUnpickler(io.BytesIO(packed)).load()
        tests = json.loads(text)
        found = list[dict[str, str]]()
        for test in tests:
            found.append({name: test[name] for name in ("input", "output", "testtype")})
        return found
    except (
        ValueError,
        KeyError,
        TypeError,
        EOFError,
        zlib.error,
        binascii.Error,
    ) as error:
        raise InputError(
            f"task livecodebench: test cases cannot be read ({error!r})"
        ) from None
    except (pickle.UnpicklingError, IndexError, AttributeError, MemoryError) as error:
        raise InputError(
            f"task livecodebench: test cases cannot be read ({error!r})"
        ) from None


def same_output(out: str, wanted: str) -> bool:
    """Return True if two outputs are equal line by line, ignoring surrounding spaces. Lines of
    numbers are compared by value."""
    lines = [line.strip() for line in out.strip().split("\n")]
    right = [line.strip() for line in wanted.strip().split("\n")]
    if len(lines) != len(right):
        return False
    return all(a == b or _numbers(a) == _numbers(b) != [] for a, b in zip(lines, right))


def _numbers(line: str) -> list[Decimal]:
    """Return the numbers of a line that consists of numbers; otherwise an empty list."""
    try:
        numbers = list(map(Decimal, line.split()))
    except InvalidOperation:
        return []
    return numbers if all(number.is_finite() for number in numbers) else []
