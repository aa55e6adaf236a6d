"""Problems of mathematics whose answers are numbers or expressions: GSM8K and MATH."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal, Self

from lenience.core.errors import InputError
from lenience.tasks.base import Messages, Sample
from lenience.tasks.expressions import comparer, same_expression
from lenience.tasks.finding import answers, boxed, without_thought
from lenience.tasks.published import Published, chat
from lenience.tasks.rows import Row

IGNORED = (",", r"\$", r"(?s).*#### ", r"\.$")
"""Patterns that lm-eval removes from both sides before comparing."""
EXTRACTIONS = {
    "strict": (re.compile(r"#### (\-?[0-9\.\,]+)"), 0),
    "flexible": (re.compile(r"(-?[$0-9.,]{2,})|(-?[0-9]+)"), -1),
}
"""Patterns of lm-eval, each with the index of the match that counts."""
_AFTER_MARKER = answers("number-after:####", None)
_LAST = answers("last-number", None)
UNTIL = ("Question:", "</s>", "<|im_end|>")
"""Texts at which lm-eval ends a response."""


@dataclass(kw_only=True)
class Gsm8k(Published):
    """GSM8K, grade-school problems (Cobbe 2021): rows {question, answer} with the number after
    "####".

    The prompt is that of lm-eval's task gsm8k: "Question: …\\nAnswer:", after `shots` solved
    problems. These are the first of the training file and are left out of the samples. The prompt
    is one text, or chat messages with turns=true. By default the answer is the number after the
    first "####", or the last number if there is no "####", and answers are compared by value: 18
    and 18.00 are the same.

    `extract` selects one of lm-eval's two filters instead, for published figures: strict (the first
    number after "####") or flexible (the last number). Texts are then compared without commas,
    dollar signs and a full stop, so 18 and 18.0 differ, and a minus sign U+2212 is lost. Tested
    against a second implementation of those regular expressions on 200 answers.
    """

    title: ClassVar[str] = "gsm8k"
    version = 2
    max_new_tokens = 512
    stop_strings = UNTIL
    train_roles: ClassVar[tuple[str, ...]] = ("train", "test")
    test_roles: ClassVar[tuple[str, ...]] = ("test", "train")
    shots: int = 0
    extract: Literal["value", "strict", "flexible"] = "value"
    turns: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self._shown: list[tuple[str, str]] = []
        if not 0 <= self.shots <= 64:
            raise InputError(f"gsm8k's shots must be from 0 to 64, not {self.shots}")

    def _prepare(self, files: dict[str, list[Path]]) -> None:
        if not self.shots:
            return
        role = "train" if "train" in files else next(iter(files))
        rows = [row for path in files[role] for _, row in self._rows(path)]
        if len(rows) <= self.shots:
            raise InputError(
                f"task gsm8k: {len(rows)} rows are too few for {self.shots} shots"
            )
        self._shown = list(map(_solved, rows[: self.shots]))

    def read(self, row: Row, where: str, role: str) -> Sample | None:
        question, solution = _solved(row)
        if "####" not in solution:
            raise InputError('its answer holds no "####"')
        if (question, solution) in self._shown:
            return None
        return Sample(str(row.get("id", "")), self._prompt(question), _plain(solution))

    def _prompt(self, question: str) -> str | Messages:
        asked = f"Question: {question}\nAnswer:"
        shown = []
        for before, answer in self._shown:
            shown.append((f"Question: {before}\nAnswer:", answer))
        if self.turns:
            turns = [turn for a, b in shown for turn in (("user", a), ("assistant", b))]
            return chat(*turns, ("user", asked))
        return "\n\n".join([*(f"{a} {b}" for a, b in shown), asked])

    def answer(self, text: str, sample: Sample | None = None) -> str | None:
        text = without_thought(text)
        ends = [text.find(end) for end in UNTIL if end in text]
        text = text[: min(ends, default=len(text))]
        if self.extract == "value":
            return _AFTER_MARKER.find(text) if "####" in text else _LAST.find(text)
        pattern, which = EXTRACTIONS[self.extract]
        found = pattern.findall(text)
        if not found:
            return None
        match = found[which]
        number = match if isinstance(match, str) else next(filter(None, match), "")
        return _plain(number.strip()) or None

    def same(
        self, a: str | None, b: str | None, sample: Sample | None = None
    ) -> bool | None:
        if self.extract != "value":
            return super().same(a, b, sample)
        return None if a is None or b is None else _LAST.same(a, b)


def _solved(row: Row) -> tuple[str, str]:
    return str(row["question"]), str(row["answer"])


def _plain(text: str) -> str:
    for pattern in IGNORED:
        text = re.sub(pattern, "", text)
    return text.lower()


@dataclass(kw_only=True)
class Math(Published):
    r"""MATH and MATH-500, competition problems (Hendrycks 2021): rows {problem, solution}, or
    with an `answer`, in one file or many.

    The prompt asks to reason step by step and to put the answer into \boxed{}. The last box counts.
    math-verify (extra "math"), the scorer of current published tables, compares it with the
    reference: 1/2, 0.5 and \frac12 are the same.
    """

    title: ClassVar[str] = "math"
    version = 1
    max_new_tokens = 1024
    level: int = 0
    """Level of difficulty, from 1 to 5; 0 for all."""
    PROMPT: ClassVar[str] = (
        "{problem}\n\nPlease reason step by step, and put your final answer within \\boxed{{}}."
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.level <= 5:
            raise InputError(
                f"math's level must be 1 to 5, or 0 for all, not {self.level}"
            )

    def open(self, data: str) -> Self:
        comparer()  # raises without math-verify, before anything is decoded
        return super().open(data)

    def read(self, row: Row, where: str, role: str) -> Sample | None:
        level = re.search(r"\d", str(row.get("level", "")))
        if self.level and (level is None or int(level[0]) != self.level):
            return None
        reference = row["answer"] if row.get("answer") else boxed(str(row["solution"]))
        if reference is None:
            raise InputError("its solution holds no \\boxed answer")
        prompt = self.PROMPT.format(problem=row["problem"])
        return Sample(str(row.get("unique_id", "")), prompt, str(reference))

    def answer(self, text: str, sample: Sample | None = None) -> str | None:
        return boxed(text)

    def same(
        self, a: str | None, b: str | None, sample: Sample | None = None
    ) -> bool | None:
        return None if a is None or b is None else same_expression(a, b)
