"""The built-in task: generated word problems, answered step by step.

Important and unimportant tokens both occur, and cannot be told apart by their looks. Wording, the
order of independent steps, the order of the operands of a sum, checks and asides may differ without
harm, digits included. The digits of a result, the operator, and words such as *gives* or *gets*,
*of the rest* or *of the whole* decide the answer. Two *authors* ("target" and "draft") prefer
different wordings in different contexts. Each model of the built-in pair was trained on one
author's solutions, so the models often disagree without harm.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from functools import cache
from typing import TypeVar

from lenience.core.errors import InputError
from lenience.tasks.base import Sample, Task, number_after
from lenience.tasks.wordmath_problems import Operation, Problem, problem, prompt

T = TypeVar("T")
# fmt: off
OPENERS = {  # "#" stands for the number of the step
    "first": ("First,", "To start,", "At first,", "Initially,", "Firstly,", "Foremost,",
        "Beginning,", "#."),
    "middle": ("Then,", "Next,", "Now,", "After that,", "Further,", "Afterwards,", "Moreover,",
        "#."),
    "last": ("Finally,", "At last,", "In the end,", "So,", "Lastly,", "Therefore,", "Ultimately,",
        "#."),
}
FILLERS = ("as told,", "from that,", "here,", "by now,", "clearly,")
ASIDES = ("By the way,", "Note:", "Incidentally,", "Also,", "Besides,", "Remark:", "Aside:",
    "Notably,")
RULE_WORDS = {"+": ("add", "to"), "-": ("take", "from"), "*": ("multiply", "by"), "/": ("divide",
    "by")}
STYLES = ("plain", "reason", "compute", "rule", "short", "result", "sum", "means")
WHY = ("because", "since", "as", "for", "given", "seeing", "knowing", "noting")
COMPUTE = ("compute", "calculate", "find", "determine", "evaluate", "establish", "note", "write")
GET = ("get", "reach", "obtain", "find", "have", "make", "see", "produce")
REMARKS = ("none", "check", "double", "landmark", "recap", "parity", "none", "none", "landmark")
LANDMARKS = (20, 50, 100, 200, 300, 400)
# fmt: on


@cache
def _ranking(
    author: str, choice: str, context: str, n: int, agree: float
) -> tuple[int, ...]:
    """Return an author's ranking of the n options of a choice in a context, fixed by their names.
    In a share `agree` of the contexts the draft's author has the target's ranking. In the others
    its halves are swapped and shuffled, so that the draft's first words are rarely the target's."""
    order = random.Random(f"target|{choice}|{context}").sample(range(n), n)
    rng = random.Random(f"draft|{choice}|{context}")
    if author == "draft" and rng.random() >= agree:
        high = order[: n // 2]
        low = order[n // 2 :]
        order = rng.sample(low, len(low)) + rng.sample(high, len(high))
    return tuple(order)


class _Author:
    """An author, who draws each wording about a third as often as the next better ranked one, and
    every wording sometimes."""

    def __init__(self, name: str, rng: random.Random):
        self.name = name
        self.rng = rng

    def pick(
        self, choice: str, context: str, options: Sequence[T], agree: float = 0.35
    ) -> T:
        n = len(options)
        rank = self.rng.choices(range(n), weights=[0.33**k + 0.015 for k in range(n)])[
            0
        ]
        return options[_ranking(self.name, choice, context, n, agree)[rank]]

    def step(self, op: Operation, place: str, number: int) -> str:
        """Write one operation; its `place` among the steps is first, middle or last."""
        opener = self.pick("opener", f"{place}|{op.op}", OPENERS[place]).replace(
            "#", str(number)
        )
        clauses = ("", *op.clauses, *FILLERS)
        clause = self.pick("clause", f"{op.op}|{op.verbs[0]}|{place}", clauses)
        return " ".join(
            part for part in (opener, clause, self._body(op, place)) if part
        )

    def _body(self, op: Operation, place: str) -> str:
        x = op.x
        y = op.y
        r = op.result
        unit = op.unit
        if op.op in "+*" and self.pick(
            "swap", f"{op.op}|{unit}|{place}", (False, True), agree=0
        ):
            x, y = y, x
        sum_ = f"{x} {op.op} {y} = {r}"
        whom = "them" if op.subject == "they" else op.subject
        has = f"{op.subject} {self.pick('verb', f'{unit}|{place}', op.verbs)}"
        style = self.pick("style", f"{op.op}|{unit}", STYLES)
        if style == "plain":
            return f"{has} {sum_} {unit}."
        if style == "reason":
            return f"{has} {r} {unit}, {self.pick('why', unit, WHY)} {sum_}."
        if style == "compute":
            return (
                f"we {self.pick('compute', unit, COMPUTE)} {sum_}, so {has} {r} {unit}."
            )
        if style == "rule":
            return f"let us {self._rule(op, x, y)} {r} {unit} for {whom}."
        if style == "result":
            return f"{r} {unit} for {whom}, {self.pick('why', unit, WHY)} {sum_}."
        if style == "sum":
            return f"{sum_}, so {has} {r} {unit}."
        if style == "means":
            return f"that means {has} {sum_} {unit}."
        return f"for {whom}: {sum_}."

    def _rule(self, op: Operation, x: int, y: int) -> str:
        do, link = RULE_WORDS[op.op]
        p, q = (x, y) if op.op in "*/" else (y, x)
        return f"{do} {p} {link} {q} to {self.pick('get', op.unit, GET)}"

    def remark(self, op: Operation, place: str, problem: Problem) -> str:
        """Write a remark that does not affect the answer, or an empty text."""
        kind = self.pick("remark", f"{op.op}|{op.unit}|{place}", REMARKS)
        if kind == "none":
            return ""
        said = self._remark(kind, op, problem)
        return f"{self.pick('aside', f'{kind}|{op.unit}', ASIDES)} {said}"

    def _remark(self, kind: str, op: Operation, problem: Problem) -> str:
        r = op.result
        back = {"+": "-", "-": "+", "*": "/", "/": "*"}[op.op]
        if kind == "recap":
            return problem.recaps[self.rng.randrange(len(problem.recaps))]
        if kind == "check":
            return f"as a check, {r} {back} {op.y} = {op.x}."
        if kind == "double":
            double = self.pick("double", op.unit, ("twice that", "double that"))
            return f"{double} would be {2 * r}."
        if kind == "landmark":
            mark = self.pick("landmark", f"{op.op}|{op.unit}", LANDMARKS, agree=0)
            return f"that is {abs(mark - r)} {'below' if r < mark else 'above'} {mark}."
        return f"that is an {'odd' if r % 2 else 'even'} number."


def solution(problem: Problem, author: str, rng: random.Random) -> str:
    """Return a correct solution of `problem` in the wording that `author` ("target" or "draft")
    prefers."""
    pen = _Author(author, rng)
    steps: list[Operation] = []
    for group in problem.groups:
        if len(group) == 2:
            context = f"{group[0].op}{group[1].op}|{group[0].unit}"
            if pen.pick("order", context, (False, True), agree=0):
                group = (group[1], group[0])
        steps += group
    said = []
    for i, op in enumerate(steps):
        place = "first" if i == 0 else "last" if i == len(steps) - 1 else "middle"
        said += [pen.step(op, place, i + 1), pen.remark(op, place, problem)]
    said.append(f"The final answer is {problem.answer}.")
    return " ".join(part for part in said if part)


class WordMath(Task):
    """Arithmetic word problems for the built-in pair. The splits "train" and "test" hold 20,000
    problems each, on none of which the models were trained."""

    name = "wordmath"
    version = 2
    size = 20_000
    scores_by_reference = True
    max_new_tokens = 320

    def samples(self, split: str) -> Iterator[Sample]:
        if split not in ("train", "test"):
            raise InputError(
                f"task wordmath has no split {split!r}; it has train and test"
            )
        for i in range(self.size):
            made_up = problem(split, i)
            yield Sample(f"{split}-{i}", prompt(made_up), str(made_up.answer))

    def answer(self, text: str, sample: Sample | None = None) -> str | None:
        return number_after(text, "The final answer is", closed_by=".")
