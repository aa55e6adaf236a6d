"""The built-in task: generated word problems, answered step by step.

Its point is that both kinds of token occur and cannot be told apart by their looks. Wording, the
order of independent steps, the order of the operands of a sum, checks and asides may differ without
harm, digits included; the digits of a result, the operator, and words such as *gives* or *gets*,
*of the rest* or *of the whole* decide the answer. Two *authors* ("target" and "draft") prefer
different wordings in different contexts: the models of the built-in pair were each trained on one
author's solutions, so that they disagree harmlessly all the time.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TypeVar

from lenience.core.errors import InputError
from lenience.tasks.base import Sample, Task, number_after

# fmt: off
NAMES = [
    "Ann",
    "Bob",
    "Cara",
    "Dan",
    "Eva",
    "Finn",
    "Gina",
    "Hugo",
    "Iris",
    "Jack",
    "Kira",
    "Liam",
    "Mona",
    "Nils",
    "Olga",
    "Paul",
]
GOODS = ["apples", "pears", "books", "coins", "cards", "stamps", "shells", "marbles", "pens",
    "stones"]
WARES = ["lamps", "chairs", "bowls", "ropes", "hats", "masks", "toys", "boxes"]
PARTS = {2: "half", 3: "a third", 4: "a quarter"}
TIMES = {2: "twice", 3: "three times", 4: "four times"}

HAS = ("has", "owns", "holds", "keeps", "possesses", "retains", "carries", "stores")
HAVE = ("have", "own", "hold", "keep", "possess", "retain", "carry", "store")
GETS = ("gets", "receives", "takes", "earns", "obtains", "accepts", "gains", "wins")
COST = ("cost", "take", "need", "use", "require", "demand", "consume", "claim")
MAKES = ("makes", "builds", "finishes", "completes", "produces", "assembles", "crafts", "delivers")
MAKE = ("make", "build", "finish", "complete", "produce", "assemble", "craft", "deliver")
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


@dataclass(frozen=True)
class Operation:
    """One step of a solution: `x op y = result`, said of `subject` in `unit`; `clauses` may restate
    why."""

    subject: str
    verbs: tuple[str, ...]
    sum: tuple[int, str, int]
    """x, op and y"""
    unit: str
    clauses: tuple[str, ...] = ()

    @property
    def x(self) -> int:
        return self.sum[0]

    @property
    def op(self) -> str:
        return self.sum[1]

    @property
    def y(self) -> int:
        return self.sum[2]

    @property
    def result(self) -> int:
        if self.op == "+":
            return self.x + self.y
        if self.op == "-":
            return self.x - self.y
        return self.x * self.y if self.op == "*" else self.x // self.y


@dataclass(frozen=True)
class Problem:
    """A question and the groups of steps that answer it; the steps of a group may come in any
    order, and the last one decides."""

    text: str
    groups: tuple[tuple[Operation, ...], ...]
    recaps: tuple[str, ...]
    """What may be said of it that decides nothing."""

    @property
    def answer(self) -> int:
        return self.groups[-1][-1].result


@dataclass
class _Story:
    """A problem while it is being made up."""

    person: str
    facts: list[str]
    recaps: list[str]
    groups: list[tuple[Operation, ...]]
    question: str = ""

    def ask(self, question: str, step: Operation) -> None:
        """Put the question that a last step answers."""
        self.question = question
        self.groups.append((step,))

    def finish(self, rng: random.Random) -> Problem:
        if rng.random() < 0.3:  # a number that decides nothing
            age = f"{self.person} is {rng.randint(7, 70)} years old."
            self.facts.insert(rng.randint(0, len(self.facts)), age)
            self.recaps.append(age)
        text = " ".join([*self.facts, self.question])
        return Problem(text, tuple(self.groups), tuple(self.recaps))


def _compare(rng: random.Random) -> Problem:
    """Amounts given relative to one another, perhaps a gift, then a total or a difference."""
    a, b = rng.sample(NAMES, 2)
    unit = rng.choice(GOODS)
    n = rng.randint(6, 60)
    related, fact = _related(rng, n, unit, (a, b))
    facts = [f"{a} has {n} {unit}.", fact]
    story = _Story(a, facts, [f"at the start {a} had {n} {unit}."], [(related,)])
    have = {a: n, b: related.result}
    if rng.random() < 0.6:
        _give(rng, story, have, unit)
    if rng.random() < 0.5 and have[a] != have[b]:
        high, low = (a, b) if have[a] > have[b] else (b, a)
        sum_ = (have[high], "-", have[low])
        step = Operation(high, HAS, sum_, unit, (f"compared with {low},",))
        story.ask(f"How many more {unit} does {high} have than {low}?", step)
    else:
        step = Operation(f"{a} and {b}", HAVE, (have[a], "+", have[b]), unit)
        story.ask(f"How many {unit} do they have together?", step)
    return story.finish(rng)


def _related(
    rng: random.Random, n: int, unit: str, people: tuple[str, str]
) -> tuple[Operation, str]:
    """How many the second of two people has, relative to the first one's n; and how it is told."""
    a, b = people
    kind = rng.choice(("more", "fewer", "times") if n > 6 else ("more", "times"))
    if kind == "times":
        m = rng.choice((2, 3))
        clauses = (f"with {TIMES[m]} as many as {a},", f"at {TIMES[m]} the number of {a},")
        fact = f"{b} has {TIMES[m]} as many {unit} as {a}."
        return Operation(b, HAS, (n, "*", m), unit, clauses), fact
    k = rng.randint(2, 30 if kind == "more" else min(30, n - 3))
    op = "+" if kind == "more" else "-"
    return Operation(
        b, HAS, (n, op, k), unit, _than(a, k, kind)
    ), f"{b} has {k} {kind} {unit} than {a}."


def _than(other: str, k: int, kind: str) -> tuple[str, ...]:
    """Clauses that say that something is k more, or fewer, than the other's."""
    return (
        f"with {k} {kind} than {other},",
        f"at {k} {'above' if kind == 'more' else 'below'} {other},",
    )


def _give(rng: random.Random, story: _Story, have: dict[str, int], unit: str) -> None:
    """Let one of two people give the other some of what they have."""
    giver, taker = rng.sample(tuple(have), 2)
    k = rng.randint(2, min(30, have[giver] - 1))
    if rng.random() < 0.5:
        story.facts.append(f"Then {giver} gives {k} {unit} to {taker}.")
    else:
        story.facts.append(f"Then {taker} gets {k} {unit} from {giver}.")
    gave = (f"after giving {k} to {taker},", f"having given {k} away,")
    got = (f"after getting {k} from {giver},", f"having got {k} more,")
    minus = Operation(giver, HAS, (have[giver], "-", k), unit, gave)
    plus = Operation(taker, HAS, (have[taker], "+", k), unit, got)
    story.recaps.append(f"before that {giver} had {have[giver]} {unit}.")
    have[giver], have[taker] = minus.result, plus.result
    story.groups.append((minus, plus))


def _shop(rng: random.Random) -> Problem:
    """Two purchases, their costs in either order, then the sum, the change or the difference."""
    a = rng.choice(NAMES)
    left, right = rng.sample(GOODS[:3] + GOODS[4:] + WARES, 2)
    n, p, m, q = (rng.randint(2, 12) for _ in range(4))
    while n * p == m * q:
        q = rng.randint(2, 12)
    one, two = _purchase(left, n, p), _purchase(right, m, q)
    facts = [f"{a} buys {n} {left} at {p} coins each and {m} {right} at {q} coins each."]
    recaps = [f"one of the {left} was {p} coins.", f"one of the {right} was {q} coins."]
    story = _Story(a, facts, recaps, [(one, two)])
    asked = rng.choice(("spend", "left", "left", "more"))
    if asked == "more":
        question = "How many more coins go to {high} than to {low}?"
        _ask_difference(story, (one, two), COST, question, "compared,")
        return story.finish(rng)
    sum_ = (one.result, "+", two.result)
    both = Operation("both", COST, sum_, "coins", ("taken together,", "as a sum,"))
    story.ask(f"How many coins does {a} spend?", both)
    if asked == "left":
        _pay(rng, story, a, both.result)
    return story.finish(rng)


def _pay(rng: random.Random, story: _Story, buyer: str, cost: int) -> None:
    """Give the buyer a purse that the cost leaves something of, and ask for the rest."""
    purse = cost + rng.randint(3, 90)
    story.facts.insert(0, f"{buyer} has {purse} coins.")
    story.recaps.append(f"at the start {buyer} had {purse} coins.")
    clauses = ("after paying,", "with that paid,")
    step = Operation(buyer, HAS, (purse, "-", cost), "coins", clauses)
    story.ask(f"How many coins does {buyer} have left?", step)


def _purchase(ware: str, n: int, price: int) -> Operation:
    clauses = (f"at {price} each,", f"for {n} of them,")
    return Operation(f"the {ware}", COST, (n, "*", price), "coins", clauses)


def _ask_difference(
    story: _Story,
    steps: tuple[Operation, Operation],
    verbs: tuple[str, ...],
    question: str,
    clause: str = "compared with {low},",
) -> None:
    """Ask how much the larger of two results is above the other; `question` and `clause` name the
    steps' subjects as {high} and {low}."""
    low, high = sorted(steps, key=lambda step: step.result)
    names = {"high": high.subject, "low": low.subject}
    sum_ = (high.result, "-", low.result)
    step = Operation(high.subject, verbs, sum_, high.unit, (clause.format(**names),))
    story.ask(question.format(**names), step)


def _share(rng: random.Random) -> Problem:
    """Two gifts by fraction, the second one of the rest or of the whole."""
    a, b, c = rng.sample(NAMES, 3)
    unit = rng.choice(GOODS)
    n, first, second, of_rest = _fractions(rng)
    of_what = "of the rest" if of_rest else f"of all the {unit} {a} had at first"
    facts = [
        f"{a} has {n} {unit}.",
        f"{a} gives {PARTS[first]} of them to {b}.",
        f"Then {a} gives {PARTS[second]} {of_what} to {c}.",
    ]
    gift = Operation(b, GETS, (n, "/", first), unit, (f"with {PARTS[first]} of them,",))
    rest = _left_after(n, a, gift)
    sum_ = (rest.result if of_rest else n, "/", second)
    second_gift = Operation(c, GETS, sum_, unit, _of_what(second, of_rest))
    groups: list[tuple[Operation, ...]] = [(gift, second_gift), (rest,)]
    if of_rest:
        groups = [(gift,), (rest,), (second_gift,)]
    story = _Story(a, facts, [f"at the start {a} had {n} {unit}."], groups)
    asked = rng.choice(("left", "left", "more"))
    if asked == "more" and gift.result != second_gift.result:
        if not of_rest:
            groups.pop(1)
        question = f"How many more {unit} does {{high}} get than {{low}}?"
        _ask_difference(story, (gift, second_gift), HAS, question)
    else:
        step = _left_after(rest.result, a, second_gift)
        story.ask(f"How many {unit} does {a} have left?", step)
    return story.finish(rng)


def _left_after(n: int, giver: str, gift: Operation) -> Operation:
    clauses = (f"after giving to {gift.subject},", "with that gone,")
    return Operation(giver, HAS, (n, "-", gift.result), gift.unit, clauses)


def _of_what(part: int, of_rest: bool) -> tuple[str, ...]:
    """Clauses that say what the second gift is a part of."""
    wordings = ("of the whole,", "of all at first,")
    if of_rest:
        wordings = ("of the rest,", "of what is left,")
    return tuple(f"with {PARTS[part]} {wording}" for wording in wordings)


def _fractions(rng: random.Random) -> tuple[int, int, int, bool]:
    """A number, two divisors and whether the second one is of the rest, such that all come out even
    and something is left."""
    while True:
        n, first = rng.randint(12, 120), rng.choice((2, 3, 4))
        second, of_rest = rng.choice((2, 3, 4)), rng.random() < 0.5
        base = n - n // first if of_rest else n
        if n % first == 0 and base % second == 0 and n - n // first - base // second > 0:
            return n, first, second, of_rest


def _work(rng: random.Random) -> Problem:
    """Two workers, the second one's rate given relative to the first one's."""
    a, b = rng.sample(NAMES, 2)
    unit = rng.choice(WARES)
    rate, hours, others = rng.randint(4, 20), rng.randint(2, 6), rng.randint(2, 6)
    kind = rng.choice(("more", "fewer"))
    k = rng.randint(1, 9 if kind == "more" else rate - 2)
    facts = [
        f"{a} makes {rate} {unit} in an hour and works for {hours} hours.",
        f"{b} makes {k} {kind} {unit} in an hour than {a} and works for {others} hours.",
    ]
    op = "+" if kind == "more" else "-"
    one = _shift(a, rate, hours, unit)
    pace = Operation(f"each hour {b}", MAKES, (rate, op, k), unit, _than(a, k, kind))
    two = _shift(b, pace.result, others, unit)
    recaps = [f"in an hour {a} makes {rate} {unit}.", f"{b} works for {others} hours."]
    story = _Story(a, facts, recaps, [(one, pace), (two,)])
    if rng.random() < 0.5 or one.result == two.result:
        step = Operation("they", MAKE, (one.result, "+", two.result), unit, ("together,",))
        story.ask(f"How many {unit} do they make together?", step)
    else:
        question = f"How many more {unit} does {{high}} make than {{low}}?"
        _ask_difference(story, (one, two), MAKES, question)
    return story.finish(rng)


def _shift(worker: str, rate: int, hours: int, unit: str) -> Operation:
    clauses = (f"in {hours} hours,", f"working for {hours} hours,")
    return Operation(worker, MAKES, (rate, "*", hours), unit, clauses)


T = TypeVar("T")
FAMILIES: tuple[Callable[[random.Random], Problem], ...] = (_compare, _shop, _share, _work)


@cache
def _ranking(author: str, choice: str, context: str, n: int, agree: float) -> tuple[int, ...]:
    """The order in which an author prefers the n options of a choice in a context; fixed for ever
    by its name.

    In a share `agree` of the contexts the draft's author has the target's order; in the others he
    likes best what the target's author likes least, so that what the draft says is seldom among the
    first words that the target would say.
    """
    order = random.Random(f"target|{choice}|{context}").sample(range(n), n)
    rng = random.Random(f"draft|{choice}|{context}")
    if author == "draft" and rng.random() >= agree:
        high, low = order[: n // 2], order[n // 2 :]
        order = rng.sample(low, len(low)) + rng.sample(high, len(high))
    return tuple(order)


class _Author:
    """Draws wordings: each option about a third as often as the one that the author likes better,
    none never."""

    def __init__(self, name: str, rng: random.Random):
        self.name, self.rng = name, rng

    def pick(self, choice: str, context: str, options: Sequence[T], agree: float = 0.35) -> T:
        n = len(options)
        rank = self.rng.choices(range(n), weights=[0.33**k + 0.015 for k in range(n)])[0]
        return options[_ranking(self.name, choice, context, n, agree)[rank]]

    def step(self, op: Operation, place: str, number: int) -> str:
        """Say one operation, at a `place` among the steps: first, middle or last."""
        opener = self.pick("opener", f"{place}|{op.op}", OPENERS[place]).replace("#", str(number))
        clauses = ("", *op.clauses, *FILLERS)
        clause = self.pick("clause", f"{op.op}|{op.verbs[0]}|{place}", clauses)
        return " ".join(part for part in (opener, clause, self._body(op, place)) if part)

    def _body(self, op: Operation, place: str) -> str:
        x, y, r, unit = op.x, op.y, op.result, op.unit
        if op.op in "+*" and self.pick("swap", f"{op.op}|{unit}|{place}", (False, True), agree=0):
            x, y = y, x
        sum_, whom = f"{x} {op.op} {y} = {r}", "them" if op.subject == "they" else op.subject
        has = f"{op.subject} {self.pick('verb', f'{unit}|{place}', op.verbs)}"
        style = self.pick("style", f"{op.op}|{unit}", STYLES)
        if style == "plain":
            return f"{has} {sum_} {unit}."
        if style == "reason":
            return f"{has} {r} {unit}, {self.pick('why', unit, WHY)} {sum_}."
        if style == "compute":
            return f"we {self.pick('compute', unit, COMPUTE)} {sum_}, so {has} {r} {unit}."
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
        """Say something that decides nothing, or nothing."""
        kind = self.pick("remark", f"{op.op}|{op.unit}|{place}", REMARKS)
        if kind == "none":
            return ""
        said = self._remark(kind, op, problem)
        return f"{self.pick('aside', f'{kind}|{op.unit}', ASIDES)} {said}"

    def _remark(self, kind: str, op: Operation, problem: Problem) -> str:
        r, back = op.result, {"+": "-", "-": "+", "*": "/", "/": "*"}[op.op]
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
    """A right solution of `problem` in the wording that `author` ("target" or "draft") prefers."""
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


def problem(
    split: str, index: int, families: Sequence[Callable[[random.Random], Problem]] = FAMILIES
) -> Problem:
    """The `index`-th problem of a split, of one of `families`; its seed is the split's name, so
    splits never share one."""
    rng = random.Random(f"wordmath/{split}/{index}")
    return rng.choice(families)(rng)


def prompt(problem: Problem) -> str:
    return f"{problem.text} Answer:"


class WordMath(Task):
    """The task `wordmath`; splits "train" and "test" hold 20,000 problems each, none of which a
    model was trained on."""

    name = "wordmath"
    version = 2
    size = 20_000
    scores_by_reference = True
    max_new_tokens = 320

    def samples(self, split: str) -> Iterator[Sample]:
        if split not in ("train", "test"):
            raise InputError(f"task wordmath has no split {split!r}; it has train and test")
        for i in range(self.size):
            made_up = problem(split, i)
            yield Sample(f"{split}-{i}", prompt(made_up), str(made_up.answer))

    def answer(self, text: str, sample: Sample | None = None) -> str | None:
        return number_after(text, "The final answer is", closed_by=".")
