"""Problems of the built-in task: stories whose questions are answered in a few steps."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

# fmt: off
NAMES = ["Ann", "Bob", "Cara", "Dan", "Eva", "Finn", "Gina", "Hugo", "Iris", "Jack", "Kira", "Liam",
    "Mona", "Nils", "Olga", "Paul"]
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
# fmt: on


@dataclass(frozen=True)
class Operation:
    """One step of a solution: `x op y = result`, about `subject` in `unit`; `clauses` may restate
    the reason."""

    subject: str
    verbs: tuple[str, ...]
    sum: tuple[int, str, int]
    """Operands and operator: x, op and y."""
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
    """A question and the groups of steps that answer it. The steps of a group may come in any
    order; the last step of all gives the answer."""

    text: str
    groups: tuple[tuple[Operation, ...], ...]
    recaps: tuple[str, ...]
    """Remarks that do not affect the answer."""

    @property
    def answer(self) -> int:
        return self.groups[-1][-1].result


@dataclass
class Story:
    """A problem under construction."""

    person: str
    facts: list[str]
    recaps: list[str]
    groups: list[tuple[Operation, ...]]
    question: str = ""

    def ask(self, question: str, step: Operation) -> None:
        """Set the question, and the last step, which answers it."""
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
    """Return a problem of amounts given relative to one another, perhaps with a gift, that asks for
    a total or a difference."""
    a, b = rng.sample(NAMES, 2)
    unit = rng.choice(GOODS)
    n = rng.randint(6, 60)
    related, fact = _related(rng, n, unit, (a, b))
    facts = [f"{a} has {n} {unit}.", fact]
    story = Story(a, facts, [f"at the start {a} had {n} {unit}."], [(related,)])
    have = {a: n, b: related.result}
    if rng.random() < 0.6:
        give(rng, story, have, unit)
    if rng.random() < 0.5 and have[a] != have[b]:
        ask_who_has_more(story, have, unit)
    else:
        step = Operation(f"{a} and {b}", HAVE, (have[a], "+", have[b]), unit)
        story.ask(f"How many {unit} do they have together?", step)
    return story.finish(rng)


def _related(
    rng: random.Random, n: int, unit: str, people: tuple[str, str]
) -> tuple[Operation, str]:
    """Return the step that gives the second person's amount, relative to the first person's n, and
    the sentence that states it."""
    a, b = people
    kind = rng.choice(("more", "fewer", "times") if n > 6 else ("more", "times"))
    if kind == "times":
        m = rng.choice((2, 3))
        clauses = (
            f"with {TIMES[m]} as many as {a},",
            f"at {TIMES[m]} the number of {a},",
        )
        fact = f"{b} has {TIMES[m]} as many {unit} as {a}."
        return Operation(b, HAS, (n, "*", m), unit, clauses), fact
    k = rng.randint(2, 30 if kind == "more" else min(30, n - 3))
    op = "+" if kind == "more" else "-"
    return Operation(
        b, HAS, (n, op, k), unit, _than(a, k, kind)
    ), f"{b} has {k} {kind} {unit} than {a}."


def _than(other: str, k: int, kind: str) -> tuple[str, ...]:
    """Return clauses that state an amount as k more, or fewer, than another person's."""
    return (
        f"with {k} {kind} than {other},",
        f"at {k} {'above' if kind == 'more' else 'below'} {other},",
    )


def give(rng: random.Random, story: Story, have: dict[str, int], unit: str) -> None:
    """Let one of two people give some things to the other."""
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
    have[giver] = minus.result
    have[taker] = plus.result
    story.groups.append((minus, plus))


def ask_who_has_more(story: Story, have: dict[str, int], unit: str) -> None:
    """Ask how much more the richer of two people has."""
    low, high = sorted(have, key=have.__getitem__)
    step = Operation(
        high, HAS, (have[high], "-", have[low]), unit, (f"compared with {low},",)
    )
    story.ask(f"How many more {unit} does {high} have than {low}?", step)


def _shop(rng: random.Random) -> Problem:
    """Return a problem of two purchases, with their costs in either order, that asks for the sum,
    the change or the difference."""
    a = rng.choice(NAMES)
    left, right = rng.sample(GOODS[:3] + GOODS[4:] + WARES, 2)
    n, p, m, q = (rng.randint(2, 12) for _ in range(4))
    while n * p == m * q:
        q = rng.randint(2, 12)
    one = _purchase(left, n, p)
    two = _purchase(right, m, q)
    facts = [
        f"{a} buys {n} {left} at {p} coins each and {m} {right} at {q} coins each."
    ]
    recaps = [f"one of the {left} was {p} coins.", f"one of the {right} was {q} coins."]
    story = Story(a, facts, recaps, [(one, two)])
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


def _pay(rng: random.Random, story: Story, buyer: str, cost: int) -> None:
    """Give the buyer more coins than the cost, and ask for the rest."""
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
    story: Story,
    steps: tuple[Operation, Operation],
    verbs: tuple[str, ...],
    question: str,
    clause: str = "compared with {low},",
) -> None:
    """Ask for the difference of two results; `question` and `clause` name the steps' subjects as
    {high} and {low}."""
    low, high = sorted(steps, key=lambda step: step.result)
    names = {"high": high.subject, "low": low.subject}
    sum_ = (high.result, "-", low.result)
    step = Operation(high.subject, verbs, sum_, high.unit, (clause.format(**names),))
    story.ask(question.format(**names), step)


def _share(rng: random.Random) -> Problem:
    """Return a problem of two gifts given as fractions, the second of the rest or of the whole."""
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
    story = Story(a, facts, [f"at the start {a} had {n} {unit}."], groups)
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
    """Return clauses that state the whole that the second gift is a part of."""
    wordings = ("of the whole,", "of all at first,")
    if of_rest:
        wordings = ("of the rest,", "of what is left,")
    return tuple(f"with {PARTS[part]} {wording}" for wording in wordings)


def _fractions(rng: random.Random) -> tuple[int, int, int, bool]:
    """Return a number, two divisors and True if the second gift is of the rest. All divisions are
    exact, and something is left."""
    while True:
        n = rng.randint(12, 120)
        first = rng.choice((2, 3, 4))
        second = rng.choice((2, 3, 4))
        of_rest = rng.random() < 0.5
        base = n - n // first if of_rest else n
        if (
            n % first == 0
            and base % second == 0
            and n - n // first - base // second > 0
        ):
            return n, first, second, of_rest


def _work(rng: random.Random) -> Problem:
    """Return a problem of two workers, with the second rate given relative to the first."""
    a, b = rng.sample(NAMES, 2)
    unit = rng.choice(WARES)
    rate = rng.randint(4, 20)
    hours = rng.randint(2, 6)
    others = rng.randint(2, 6)
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
    story = Story(a, facts, recaps, [(one, pace), (two,)])
    if rng.random() < 0.5 or one.result == two.result:
        step = Operation(
            "they", MAKE, (one.result, "+", two.result), unit, ("together,",)
        )
        story.ask(f"How many {unit} do they make together?", step)
    else:
        question = f"How many more {unit} does {{high}} make than {{low}}?"
        _ask_difference(story, (one, two), MAKES, question)
    return story.finish(rng)


def _shift(worker: str, rate: int, hours: int, unit: str) -> Operation:
    clauses = (f"in {hours} hours,", f"working for {hours} hours,")
    return Operation(worker, MAKES, (rate, "*", hours), unit, clauses)


FAMILIES: tuple[Callable[[random.Random], Problem], ...] = (
    _compare,
    _shop,
    _share,
    _work,
)
"""Kinds of story, all equally likely."""


def problem(
    split: str,
    index: int,
    families: Sequence[Callable[[random.Random], Problem]] = FAMILIES,
) -> Problem:
    """Return the `index`-th problem of a split, from one of `families`. The seed is the split's
    name with the index, so each split is drawn on its own."""
    rng = random.Random(f"wordmath/{split}/{index}")
    return rng.choice(families)(rng)


def prompt(problem: Problem) -> str:
    return f"{problem.text} Answer:"
