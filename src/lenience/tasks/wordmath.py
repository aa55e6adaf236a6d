"""The built-in task: generated word problems, answered step by step.

Its point is that both kinds of token occur and cannot be told apart by their looks. Wording, the order of independent
steps, the order of the operands of a sum, checks and asides may differ without harm, digits included; the digits of a
result, the operator, and words such as *gives* or *gets*, *of the rest* or *of the whole* decide the answer. Two
*authors* ("target" and "draft") prefer different wordings in different contexts: the models of the built-in pair were
each trained on one author's solutions, so that they disagree harmlessly all the time.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TypeVar

from lenience.core.errors import InputError
from lenience.tasks.base import Sample, number_after

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
GOODS = ["apples", "pears", "books", "coins", "cards", "stamps", "shells", "marbles", "pens", "stones"]
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
    "first": ("First,", "To start,", "At first,", "Initially,", "Firstly,", "Foremost,", "Beginning,", "#."),
    "middle": ("Then,", "Next,", "Now,", "After that,", "Further,", "Afterwards,", "Moreover,", "#."),
    "last": ("Finally,", "At last,", "In the end,", "So,", "Lastly,", "Therefore,", "Ultimately,", "#."),
}
FILLERS = ("as told,", "from that,", "here,", "by now,", "clearly,")
ASIDES = ("By the way,", "Note:", "Incidentally,", "Also,", "Besides,", "Remark:", "Aside:", "Notably,")
RULE_WORDS = {"+": ("add", "to"), "-": ("take", "from"), "*": ("multiply", "by"), "/": ("divide", "by")}
STYLES = ("plain", "reason", "compute", "rule", "short", "result", "sum", "means")
WHY = ("because", "since", "as", "for", "given", "seeing", "knowing", "noting")
COMPUTE = ("compute", "calculate", "find", "determine", "evaluate", "establish", "note", "write")
GET = ("get", "reach", "obtain", "find", "have", "make", "see", "produce")
REMARKS = ("none", "check", "double", "landmark", "recap", "parity", "none", "none", "landmark")
LANDMARKS = (20, 50, 100, 200, 300, 400)


@dataclass(frozen=True)
class Operation:
    """One step of a solution: `x op y = result`, said of `subject` in `unit`; `clauses` may restate why."""

    subject: str
    verbs: tuple[str, ...]
    x: int
    op: str
    y: int
    unit: str
    clauses: tuple[str, ...] = ()

    @property
    def result(self) -> int:
        return {"+": self.x + self.y, "-": self.x - self.y, "*": self.x * self.y, "/": self.x // self.y}[self.op]


@dataclass(frozen=True)
class Problem:
    """A problem's text and its solution: groups of operations, free in order within a group, the last one decides."""

    text: str
    groups: tuple[tuple[Operation, ...], ...]
    recaps: tuple[str, ...]

    @property
    def answer(self) -> int:
        return self.groups[-1][-1].result


# ---- the four families of problems


def _compare(rng: random.Random) -> Problem:
    """Amounts given relative to one another, perhaps a gift, then a total or a difference."""
    a, b = rng.sample(NAMES, 2)
    unit = rng.choice(GOODS)
    n = rng.randint(6, 60)
    facts, recaps = [f"{a} has {n} {unit}."], [f"at the start {a} had {n} {unit}."]
    kind = rng.choice(("more", "fewer", "times") if n > 6 else ("more", "times"))
    if kind == "times":
        m = rng.choice((2, 3))
        facts.append(f"{b} has {TIMES[m]} as many {unit} as {a}.")
        clauses = (f"with {TIMES[m]} as many as {a},", f"at {TIMES[m]} the number of {a},")
        related = Operation(b, HAS, n, "*", m, unit, clauses)
    else:
        k = rng.randint(2, 30 if kind == "more" else min(30, n - 3))
        facts.append(f"{b} has {k} {kind} {unit} than {a}.")
        op, side = ("+", "above") if kind == "more" else ("-", "below")
        related = Operation(b, HAS, n, op, k, unit, (f"with {k} {kind} than {a},", f"at {k} {side} {a},"))
    have = {a: n, b: related.result}
    groups: list[tuple[Operation, ...]] = [(related,)]
    if rng.random() < 0.6:
        giver, taker = rng.sample((a, b), 2)
        k = rng.randint(2, min(30, have[giver] - 1))
        if rng.random() < 0.5:
            facts.append(f"Then {giver} gives {k} {unit} to {taker}.")
        else:
            facts.append(f"Then {taker} gets {k} {unit} from {giver}.")
        gave = (f"after giving {k} to {taker},", f"having given {k} away,")
        got = (f"after getting {k} from {giver},", f"having got {k} more,")
        minus = Operation(giver, HAS, have[giver], "-", k, unit, gave)
        plus = Operation(taker, HAS, have[taker], "+", k, unit, got)
        recaps.append(f"before that {giver} had {have[giver]} {unit}.")
        have[giver], have[taker] = minus.result, plus.result
        groups.append((minus, plus))
    if rng.random() < 0.5 and have[a] != have[b]:
        high, low = (a, b) if have[a] > have[b] else (b, a)
        question = f"How many more {unit} does {high} have than {low}?"
        groups.append((Operation(high, HAS, have[high], "-", have[low], unit, (f"compared with {low},",)),))
    else:
        question = f"How many {unit} do they have together?"
        groups.append((Operation(f"{a} and {b}", HAVE, have[a], "+", have[b], unit),))
    return _problem(rng, facts, question, groups, recaps, a)


def _shop(rng: random.Random) -> Problem:
    """Two purchases, their costs in either order, then the sum, the change or the difference."""
    a = rng.choice(NAMES)
    left, right = rng.sample(GOODS[:3] + GOODS[4:] + WARES, 2)
    n, p, m, q = (rng.randint(2, 12) for _ in range(4))
    while n * p == m * q:
        q = rng.randint(2, 12)
    facts = [f"{a} buys {n} {left} at {p} coins each and {m} {right} at {q} coins each."]
    recaps = [f"one of the {left} was {p} coins.", f"one of the {right} was {q} coins."]
    one = Operation(f"the {left}", COST, n, "*", p, "coins", (f"at {p} each,", f"for {n} of them,"))
    two = Operation(f"the {right}", COST, m, "*", q, "coins", (f"at {q} each,", f"for {m} of them,"))
    groups: list[tuple[Operation, ...]] = [(one, two)]
    asked = rng.choice(("spend", "left", "left", "more"))
    if asked == "more":
        high, low = (one, two) if one.result > two.result else (two, one)
        question = f"How many more coins go to {high.subject} than to {low.subject}?"
        groups.append((Operation(high.subject, COST, high.result, "-", low.result, "coins", ("compared,",)),))
        return _problem(rng, facts, question, groups, recaps, a)
    both = Operation("both", COST, one.result, "+", two.result, "coins", ("taken together,", "as a sum,"))
    groups.append((both,))
    question = f"How many coins does {a} spend?"
    if asked == "left":
        purse = both.result + rng.randint(3, 90)
        facts.insert(0, f"{a} has {purse} coins.")
        recaps.append(f"at the start {a} had {purse} coins.")
        question = f"How many coins does {a} have left?"
        groups.append((Operation(a, HAS, purse, "-", both.result, "coins", ("after paying,", "with that paid,")),))
    return _problem(rng, facts, question, groups, recaps, a)


def _share(rng: random.Random) -> Problem:
    """Two gifts by fraction, the second one of the rest or of the whole."""
    a, b, c = rng.sample(NAMES, 3)
    unit = rng.choice(GOODS)
    while True:
        n, d1, d2, of_rest = rng.randint(12, 120), rng.choice((2, 3, 4)), rng.choice((2, 3, 4)), rng.random() < 0.5
        base = n - n // d1 if of_rest else n
        if n % d1 == 0 and base % d2 == 0 and n - n // d1 - base // d2 > 0:
            break
    whole = f"of all the {unit} {a} had at first"
    facts = [
        f"{a} has {n} {unit}.",
        f"{a} gives {PARTS[d1]} of them to {b}.",
        f"Then {a} gives {PARTS[d2]} {'of the rest' if of_rest else whole} to {c}.",
    ]
    gift = Operation(b, GETS, n, "/", d1, unit, (f"with {PARTS[d1]} of them,",))
    rest = Operation(a, HAS, n, "-", gift.result, unit, (f"after giving to {b},", "with that gone,"))
    of = ("of the rest,", "of what is left,") if of_rest else ("of the whole,", "of all at first,")
    second = Operation(c, gift.verbs, base, "/", d2, unit, tuple(f"with {PARTS[d2]} {o}" for o in of))
    groups: list[tuple[Operation, ...]] = [(gift,), (rest,), (second,)] if of_rest else [(gift, second), (rest,)]
    asked = rng.choice(("left", "left", "more"))
    if asked == "more" and gift.result != second.result:
        high, low = (gift, second) if gift.result > second.result else (second, gift)
        question = f"How many more {unit} does {high.subject} get than {low.subject}?"
        than = (f"compared with {low.subject},",)
        groups.append((Operation(high.subject, HAS, high.result, "-", low.result, unit, than),))
        if not of_rest:
            groups.pop(1)
    else:
        question = f"How many {unit} does {a} have left?"
        clauses = (f"after giving to {c},", "with that gone,")
        groups.append((Operation(a, HAS, rest.result, "-", second.result, unit, clauses),))
    return _problem(rng, facts, question, groups, [f"at the start {a} had {n} {unit}."], a)


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
    side = "above" if kind == "more" else "below"
    one = Operation(a, MAKES, rate, "*", hours, unit, (f"in {hours} hours,", f"working for {hours} hours,"))
    clauses = (f"with {k} {kind} than {a},", f"at {k} {side} {a},")
    pace = Operation(f"each hour {b}", MAKES, rate, "+" if kind == "more" else "-", k, unit, clauses)
    two = Operation(b, MAKES, pace.result, "*", others, unit, (f"in {others} hours,", f"working for {others} hours,"))
    groups: list[tuple[Operation, ...]] = [(one, pace), (two,)]
    if rng.random() < 0.5 or one.result == two.result:
        question = f"How many {unit} do they make together?"
        groups.append((Operation("they", MAKE, one.result, "+", two.result, unit, ("together,",)),))
    else:
        high, low = (one, two) if one.result > two.result else (two, one)
        question = f"How many more {unit} does {high.subject} make than {low.subject}?"
        than = (f"compared with {low.subject},",)
        groups.append((Operation(high.subject, MAKES, high.result, "-", low.result, unit, than),))
    recaps = [f"in an hour {a} makes {rate} {unit}.", f"{b} works for {others} hours."]
    return _problem(rng, facts, question, groups, recaps, a)


T = TypeVar("T")

FAMILIES: tuple[Callable[[random.Random], Problem], ...] = (_compare, _shop, _share, _work)


def _problem(
    rng: random.Random,
    facts: list[str],
    question: str,
    groups: list[tuple[Operation, ...]],
    recaps: list[str],
    person: str,
) -> Problem:
    if rng.random() < 0.3:  # a number that decides nothing
        age = f"{person} is {rng.randint(7, 70)} years old."
        facts.insert(rng.randint(0, len(facts)), age)
        recaps.append(age)
    return Problem(" ".join([*facts, question]), tuple(groups), tuple(recaps))


# ---- writing a solution as one of the authors would


@cache
def _ranking(author: str, choice: str, context: str, n: int, agree: float) -> tuple[int, ...]:
    """The order in which an author prefers the n options of a choice in a context; fixed for ever by its name.

    In a share `agree` of the contexts the draft's author has the target's order; in the others he likes best what the
    target's author likes least, so that what the draft says is seldom among the first words that the target would say.
    """
    order = random.Random(f"target|{choice}|{context}").sample(range(n), n)
    rng = random.Random(f"draft|{choice}|{context}")
    if author == "draft" and rng.random() >= agree:
        high, low = order[: n // 2], order[n // 2 :]
        order = rng.sample(low, len(low)) + rng.sample(high, len(high))
    return tuple(order)


class _Author:
    """Draws wordings: each option about a third as often as the one that the author likes better, none never."""

    def __init__(self, name: str, rng: random.Random):
        self.name, self.rng = name, rng

    def pick(self, choice: str, context: str, options: Sequence[T], agree: float = 0.35) -> T:
        n = len(options)
        rank = self.rng.choices(range(n), weights=[0.33**k + 0.015 for k in range(n)])[0]
        return options[_ranking(self.name, choice, context, n, agree)[rank]]

    def step(self, op: Operation, place: str, number: int) -> str:
        x, y, r, unit = op.x, op.y, op.result, op.unit
        opener = self.pick("opener", f"{place}|{op.op}", OPENERS[place]).replace("#", str(number))
        clause = self.pick("clause", f"{op.op}|{op.verbs[0]}|{place}", ("", *op.clauses, *FILLERS))
        if op.op in "+*" and self.pick("swap", f"{op.op}|{unit}|{place}", (False, True), agree=0):
            x, y = y, x
        sum_, whom = f"{x} {op.op} {y} = {r}", "them" if op.subject == "they" else op.subject
        verb = self.pick("verb", f"{unit}|{place}", op.verbs)
        has = f"{op.subject} {verb}"
        style = self.pick("style", f"{op.op}|{unit}", STYLES)
        if style == "plain":
            body = f"{has} {sum_} {unit}."
        elif style == "reason":
            body = f"{has} {r} {unit}, {self.pick('why', unit, WHY)} {sum_}."
        elif style == "compute":
            body = f"we {self.pick('compute', unit, COMPUTE)} {sum_}, so {has} {r} {unit}."
        elif style == "rule":
            do, link = RULE_WORDS[op.op]
            p, q = (x, y) if op.op in "*/" else (y, x)
            body = f"let us {do} {p} {link} {q} to {self.pick('get', unit, GET)} {r} {unit} for {whom}."
        elif style == "result":
            body = f"{r} {unit} for {whom}, {self.pick('why', unit, WHY)} {sum_}."
        elif style == "sum":
            body = f"{sum_}, so {has} {r} {unit}."
        elif style == "means":
            body = f"that means {has} {sum_} {unit}."
        else:
            body = f"for {whom}: {sum_}."
        return " ".join(part for part in (opener, clause, body) if part)

    def remark(self, op: Operation, place: str, problem: Problem) -> str:
        kind = self.pick("remark", f"{op.op}|{op.unit}|{place}", REMARKS)
        if kind == "none":
            return ""
        r, back = op.result, {"+": "-", "-": "+", "*": "/", "/": "*"}[op.op]
        if kind == "recap":
            said = problem.recaps[self.rng.randrange(len(problem.recaps))]
        elif kind == "check":
            said = f"as a check, {r} {back} {op.y} = {op.x}."
        elif kind == "double":
            said = f"{self.pick('double', op.unit, ('twice that', 'double that'))} would be {2 * r}."
        elif kind == "landmark":
            mark = self.pick("landmark", f"{op.op}|{op.unit}", LANDMARKS, agree=0)
            said = f"that is {abs(mark - r)} {'below' if r < mark else 'above'} {mark}."
        else:
            said = f"that is an {'odd' if r % 2 else 'even'} number."
        return f"{self.pick('aside', f'{kind}|{op.unit}', ASIDES)} {said}"


def solution(problem: Problem, author: str, rng: random.Random) -> str:
    """A right solution of `problem` in the wording that `author` ("target" or "draft") prefers."""
    pen = _Author(author, rng)
    steps: list[Operation] = []
    for group in problem.groups:
        flip = len(group) == 2 and pen.pick("order", f"{group[0].op}{group[1].op}|{group[0].unit}", (False, True), agree=0)
        steps += reversed(group) if flip else group
    said = []
    for i, op in enumerate(steps):
        place = "first" if i == 0 else "last" if i == len(steps) - 1 else "middle"
        said += [pen.step(op, place, i + 1), pen.remark(op, place, problem)]
    said.append(f"The final answer is {problem.answer}.")
    return " ".join(part for part in said if part)


def problem(split: str, index: int, families: Sequence[Callable[[random.Random], Problem]] = FAMILIES) -> Problem:
    """The `index`-th problem of a split, of one of `families`; its seed is the split's name, so splits never share one."""
    rng = random.Random(f"wordmath/{split}/{index}")
    return rng.choice(families)(rng)


def prompt(problem: Problem) -> str:
    return f"{problem.text} Answer:"


class WordMath:
    """The task `wordmath`; splits "train" and "test" hold 20,000 problems each, none of which a model was trained on."""

    name = "wordmath"
    version = 2
    size = 20_000
    max_new_tokens = 320

    def samples(self, split: str) -> Iterator[Sample]:
        if split not in ("train", "test"):
            raise InputError(f"task wordmath has no split {split!r}; it has train and test")
        for i in range(self.size):
            made = problem(split, i)
            yield Sample(f"{split}-{i}", prompt(made), str(made.answer))

    def answer(self, text: str) -> str | None:
        return number_after(text, "The final answer is", closed_by=".")

    def same(self, a: str | None, b: str | None) -> bool | None:
        return None if a is None or b is None else a == b

    def correct(self, text: str, sample: Sample) -> bool:
        return self.same(self.answer(text), sample.reference) is True
