"""Choosing the most lenient setting of a rule whose loss of quality is bounded, on prompts that nothing has been chosen on."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from filelock import FileLock, Timeout

from lenience.bounds import TESTS, Test, Tried, climb, looks, needed, needed_like
from lenience.core.errors import InputError
from lenience.core.files import read_json, write_json
from lenience.decoding.certified import FILE, keep, places, unplaced, unplaced_stop
from lenience.decoding.options import Options, check_options, learned
from lenience.decoding.pair import Pair
from lenience.evaluation.pages import write_certificate
from lenience.rules.registry import ALONE, terms
from lenience.rules.settings import ladder
from lenience.runs.journal import Journal, open_run
from lenience.runs.record import check_prompts, describe
from lenience.runs.uses import fresh, locked, note_uses
from lenience.tasks import Sample, Task, known_as, reads

if TYPE_CHECKING:
    from numpy.typing import NDArray

Loss = Literal["paired", "net", "disagreement", "task"]
Show = Callable[[str, int, int], None]
LOSSES: dict[str, str] = {
    "paired": "the share of prompts that the target alone answers rightly and this decoder wrongly",
    "net": "the target's accuracy minus this decoder's",
    "disagreement": "the share of prompts on which this decoder's final answer is not the target's",
    "task": "the mean loss that the task returns",
}
BINARY = ("paired", "disagreement")
PROMISES_NOT = (
    "more than its confidence where several certificates were asked for until one came out: count all of them",
    "prompts of another kind than those it was calibrated on: it holds on average over prompts like them, not for each of them",
    "other models, heads, dtypes, templates, windows, temperatures or length limits than those it binds",
    "that an answer which is right is worded as the target would have worded it",
)
TUNING = 8
"""How many prompts an automatic window is picked on."""


@dataclass(frozen=True)
class Question:
    """What a certificate is asked for; every field is part of the answer's name."""

    rules: tuple[str, ...]
    max_drop: float
    confidence: float
    loss: Loss = "paired"
    procedure: str = "auto"
    thresholds: tuple[float, ...] = ()
    window: int | Literal["auto"] = 8
    stop: str = "fixed"
    temperature: float = 0.0
    seed: int = 0
    limit: int | None = None
    ids: tuple[str, ...] = ()
    split: str = "train"
    max_new_tokens: int | None = None

    def __post_init__(self) -> None:
        for name, value in (("max_drop", self.max_drop), ("confidence", self.confidence)):
            if not 0 < value < 1:
                raise InputError(f"{name} {value}: must be between 0 and 1, as a fraction")
        if self.limit is not None and self.limit < 1:
            raise InputError(f"limit {self.limit}: must be 1 or more")
        if self.loss not in LOSSES:
            raise InputError(f"loss {self.loss!r}: name one of {', '.join(LOSSES)}")
        if self.procedure not in ("auto", *TESTS):
            raise InputError(f"procedure {self.procedure!r}: name auto or one of {', '.join(TESTS)}")
        if self.procedure == "binomial" and self.loss not in BINARY:
            raise InputError(f"procedure binomial: is for losses of 0 or 1; with --loss {self.loss} take betting")
        object.__setattr__(self, "rules", tuple(dict.fromkeys(self.rules)))
        if not self.rules or any(rule in ALONE for rule in self.rules):
            raise InputError("rule: name one or more that draft; target and draft alone need no certificate")

    @cached_property
    def ladders(self) -> list[list[str]]:
        """Each rule's settings from strict to lenient."""
        return [ladder(rule, self.thresholds) for rule in self.rules]

    @property
    def alpha(self) -> float:
        """The error that each rule may make; several share it alike (Bonferroni)."""
        return (1 - self.confidence) / len(self.rules)

    @property
    def bound(self) -> float:
        """The limit of the loss as it is tested, in [0, 1]."""
        return (1 + self.max_drop) / 2 if self.loss == "net" else self.max_drop

    def test(self, n: int) -> Test:
        """How one setting is tested on up to n prompts."""
        name = self.procedure if self.procedure != "auto" else "binomial" if self.loss in BINARY else "betting"
        return TESTS[name](self.bound, self.alpha, looks(n))

    def prompts(self) -> int:
        """All that are named, or as many as let a setting pass, four times in five, that loses a third of what is allowed; four
        times as many where losses are not 0 or 1, as little is known of them. At most the limit."""
        if self.ids:
            return min(len(self.ids), self.limit or len(self.ids))
        return self.limit or (1 if self.loss in BINARY else 4) * (
            needed(self.max_drop, self.alpha, self.max_drop / 3) or 10_000
        )

    def needed(self, losses: NDArray, least: float = 0.0) -> int | None:
        """How many prompts it would take to certify, four times in five, a setting that loses like these, and at least `least`
        on average where they are 0 or 1."""
        if self.loss not in BINARY:
            return needed_like(self.test, losses)
        return needed(self.max_drop, self.alpha, max(float(losses.mean()), least))


class Calibration:
    """A question's prompts and their answers under its settings; what is finished is kept in `place`."""

    def __init__(
        self, pair: Pair, task: Task, question: Question, samples: list[Sample], place: Path, options: Options, show: Show
    ):
        self.pair, self.task, self.question, self.samples, self.place = pair, task, question, samples, place
        self.options, self.show = options, show
        self.journal = Journal(place / "answers.jsonl")
        self.found = {(record["rule"], record["id"]): record for record in self.journal.resume()}
        self.decoded = 0

    def answers(self, rule: str, n: int, what: str = "") -> list[dict[str, Any]]:
        """The first n prompts' answers by a rule, or by the target alone; `what` is shown while they are decoded."""
        left = [sample for sample in self.samples[:n] if (rule, sample.id) not in self.found]
        options: Options = {**self.options, "rule": rule}
        began = time.perf_counter()
        decoding = self.pair.as_completed([sample.prompt for sample in left], batch_size=32, **options)
        for done, (i, out) in enumerate(decoding, 1):
            record = {
                "id": left[i].id, "rule": rule, "text": out.text, "answer": self.task.answer(out.text),
                "correct": self.task.correct(out.text, left[i]), "tokens": len(out.tokens),
                "target_passes": out.target_passes, "seconds": round(time.perf_counter() - began, 4),
            }  # fmt: skip
            began = time.perf_counter()  # many are decoded together: what each adds
            self.journal.append(record)
            self.found[rule, left[i].id] = record
            self.show(what, n - len(left) + done, n)
        self.decoded += len(left)
        return [self.found[rule, sample.id] for sample in self.samples[:n]]

    def losses(self, rule: str, n: int, what: str = "") -> NDArray:
        """[n] in [0, 1], of the target alone against a rule."""
        alone, lenient = self.answers("target", n, "the target alone"), self.answers(rule, n, what)
        if self.question.loss in ("paired", "net") and not any(record["correct"] for record in alone):
            self._check_target()
        pairs = zip(self.samples, alone, lenient)
        return np.array([_loss(self.task, self.question.loss, sample, a, b) for sample, a, b in pairs])

    def _check_target(self) -> None:
        n = len(self.samples)
        if not any(record["correct"] for record in self.answers("target", n, "the target alone")):
            raise InputError(
                f"task {self.task.name!r}: the target answers none of {n} prompts rightly, so nothing can be lost; look at "
                "how answers are found (--answer, --same), or bound the disagreement (--loss disagreement)"
            )

    def told(self, test: Test, rule: str, one: Tried) -> dict[str, Any]:
        """How a setting's test ended; losses and bounds as they are asked for, also of the net drop."""
        losses, net = self.losses(rule, one.n), self.question.loss == "net"
        lenient, alone = self.answers(rule, one.n), self.answers("target", one.n)
        bound = test.bound(one.look, losses)
        return {
            "rule": rule,
            "window": self.question.window,
            "n": one.n,
            "losses": round(float((2 * losses - 1).sum() if net else losses.sum()), 9),
            "upper_bound": 2 * bound - 1 if net else bound,
            "passed": one.passed,
            "hopeless": one.hopeless,
            "tokens_per_pass": sum(r["tokens"] for r in lenient) / max(1, sum(r["target_passes"] for r in lenient)),
            "accuracy": float(np.mean([r["correct"] for r in lenient])),
            "target_accuracy": float(np.mean([r["correct"] for r in alone])),
        }

    def binds(self, rule: str) -> dict[str, Any]:
        """All that a certificate of this rule depends on."""
        return {
            **self.pair.binding(rule, self.question.stop),
            "window": self.question.window,
            "stop": self.question.stop,
            "temperature": self.question.temperature,
            "top_k": None,
            "top_p": None,
            "max_new_tokens": self.options["max_new_tokens"],
            "task": self.task.name,
            "reads": reads(self.task),
            "data": data_hash(self.samples),
        }

    def lost(self, rule: str, n: int) -> list[dict[str, Any]]:
        """The prompts on which quality was lost, with both answers."""
        at_par = 0.5 if self.question.loss == "net" else 0.0
        rows = zip(self.samples, self.losses(rule, n).tolist(), self.answers("target", n), self.answers(rule, n))
        return [
            {"id": sample.id, "prompt": sample.prompt, "reference": sample.reference, "loss": loss,
             "target": {key: a[key] for key in ("text", "answer")}, "lenient": {key: b[key] for key in ("text", "answer")}}
            for sample, loss, a, b in rows if loss > at_par
        ]  # fmt: skip


def data_hash(samples: Iterable[Sample]) -> str:
    rows = [[sample.id, sample.prompt, sample.reference] for sample in samples]
    return hashlib.blake2b(json.dumps(rows).encode(), digest_size=8).hexdigest()


def _loss(task: Task, loss: str, sample: Sample, alone: dict[str, Any], lenient: dict[str, Any]) -> float:
    if loss == "paired":
        return float(alone["correct"] and not lenient["correct"])
    if loss == "net":
        return (1 + float(alone["correct"]) - float(lenient["correct"])) / 2
    if loss == "disagreement":
        return float(alone["text"] != lenient["text"] and task.same(alone["answer"], lenient["answer"]) is not True)
    value = task.loss(lenient["text"], alone["text"], sample)  # type: ignore[attr-defined]
    if not (isinstance(value, int | float) and 0 <= value <= 1):
        raise InputError(f"task {task.name!r}: its loss of {sample.id} is {value!r}; it must be a number in [0, 1]")
    return float(value)


@contextmanager
def calibration(pair: Pair, task: Task, folder: Path, question: Question, use: str, show: Show) -> Iterator[Calibration]:
    """Check what is asked, and pick and record the prompts: the same ones whenever the same is asked. Raises InputError where
    another process is at the same question."""
    settings = [setting for settings in question.ladders for setting in settings]
    for setting in settings:
        pair.check(setting, question.stop, question.temperature)
    check_options(question.window, question.max_new_tokens or 1, question.temperature, seed=question.seed)
    _check_run(task, folder)
    if question.loss == "task" and not hasattr(task, "loss"):
        raise InputError(f"task {task.name!r}: has no loss(text, target_text, sample); see docs/your-own-task.md")
    asked = _asked(pair, task, question, use)
    key = hashlib.blake2b(json.dumps(asked, sort_keys=True).encode(), digest_size=6).hexdigest()
    used = [head for settings in question.ladders for head in learned(settings[0], question.stop)]
    wanted, tuned = question.prompts(), TUNING if question.window == "auto" else 0
    with locked(folder):  # two certificates that are made at the same time share no prompt
        samples = fresh(pair.target, task, folder, key, wanted + tuned, split=question.split, seed=question.seed,
                        ids=question.ids, learned=used)  # fmt: skip
        n = len(samples) - tuned
        if n < 1:
            raise InputError(
                f"window auto: needs {TUNING} fresh prompts of its own, and there are {len(samples)}; give a number"
            )
        if question.loss in ("paired", "net") and any(sample.reference is None for sample in samples[:n]):
            raise InputError(f"task {task.name!r}: has prompts without a reference; --loss disagreement needs none")
        max_new_tokens = check_prompts(pair, task, samples, question.max_new_tokens)
        place = folder / use / key
        open_run(place, {**asked, "data": data_hash(samples[:n])}, "asked.json")
        for part, what in ((samples[:n], use), (samples[n:], "window")):
            note_uses(folder, pair.target, [(sample.id, sample.prompt) for sample in part], what, key, known_as(task))
    options: Options = {"stop": question.stop, "temperature": question.temperature, "seed": question.seed,
                        "max_new_tokens": max_new_tokens}  # fmt: skip
    with _alone(place):
        if tuned:
            picked, picking = place / "window.json", Options(**{**options, "rule": settings[-1]})
            if not picked.exists():
                write_json(picked, {"window": pair.pick_window([sample.prompt for sample in samples[n:]], **picking)})
            question = replace(question, window=read_json(picked)["window"])
        yield Calibration(pair, task, question, samples[:n], place, {**options, "window": question.window}, show)


@contextmanager
def _alone(place: Path) -> Iterator[None]:
    try:
        held = FileLock(place / "lock").acquire(timeout=0)
    except Timeout:
        raise InputError(f"{place}: another process is at the same question; ask again when it has ended") from None
    with held:
        yield


def _asked(pair: Pair, task: Task, question: Question, use: str) -> dict[str, Any]:
    """What makes a question the same: not where models and heads lie, but what they are."""
    rules = [[unplaced(setting) for setting in settings] for settings in question.ladders]
    same = {"rules": rules, "thresholds": (), "stop": unplaced_stop(question.stop)}
    binds = [pair.binding(setting, question.stop) for settings in question.ladders for setting in settings]
    asked = describe(pair, task, use=use, question=asdict(question) | same, binds=binds)
    asked["models"] = {role: {**model, "name": ""} for role, model in asked["models"].items()}
    del asked["versions"], asked["pair"]
    return dict(json.loads(json.dumps(asked)))


def _check_run(task: Task, folder: Path) -> None:
    """Refuse a task that has changed since the run was mined."""
    if not (folder / "run.json").exists():
        return
    run = read_json(folder / "run.json")
    name = str(run.get("task", "")).split(" (")[0]
    now = {"task": task.name, "task_version": getattr(task, "version", None)}
    if name == task.name.split(" (")[0] and any(run.get(key) != value for key, value in now.items()):
        raise InputError(f"task {task.name!r}: has changed since {folder} was mined ({run.get('task')!r}); mine it again")


# ---- the certificate


def certify(pair: Pair, task: Task, folder: Path, question: Question, show: Show = lambda *_: None) -> dict[str, Any]:
    """The most lenient of the rules' settings whose loss is at most `max_drop` with the wanted confidence, or none; written to
    the run folder, see `lenience.decoding.certified`.

    Learn-then-Test (Angelopoulos 2021): each rule's settings are tested from strict to lenient until one does not pass, each on
    growing batches of prompts. Of several rules that pass, the one with the most tokens per pass is certified. The same
    question asked again goes on where it stopped, or gets the answer that it got. Raises InputError, see `Question` and
    `fresh`.
    """
    with calibration(pair, task, folder, question, "calibration", show) as on:
        made = read_json(on.place / FILE) if (on.place / FILE).exists() else _certificate(on, folder)
    with locked(folder):
        write_certificate(keep(folder, made).with_suffix(".html"), made)
    return made


def _certificate(on: Calibration, folder: Path) -> dict[str, Any]:
    began = time.perf_counter()
    question, n = on.question, len(on.samples)
    test, chains = question.test(n), list[list[dict[str, Any]]]()
    for settings in question.ladders:

        def losses(j: int, seen: int, settings: list[str] = settings) -> NDArray:
            return on.losses(settings[j], seen, f"setting {j + 1} of {len(settings)}")

        chains.append([on.told(test, settings[one.setting], one) for one in climb(test, len(settings), losses)])
    last = [[row for row in chain if row["passed"]][-1] for chain in chains if chain[0]["passed"]]
    best = max(last, key=lambda row: row["tokens_per_pass"], default=None)
    shown = best or min((chain[0] for chain in chains), key=lambda row: row["upper_bound"])
    made = {
        "certified": {**best, "threshold": _threshold(best["rule"]), "heads": places(best["rule"], question.stop, folder)}
        if best
        else None,
        "max_drop": question.max_drop,
        "confidence": question.confidence,
        "loss": question.loss,
        "loss_is": LOSSES[question.loss],
        "n": shown["n"],
        "losses": shown["losses"],
        "upper_bound": shown["upper_bound"],
        "procedure": _procedure(question, test),
        "binds": on.binds(shown["rule"]),
        "promises_not": list(PROMISES_NOT),
        "tried": [row for chain in chains for row in chain],
        "lost": on.lost(shown["rule"], shown["n"]),
        "reason": None if best else _reason(question, shown),
        "needed": None if best else question.needed(on.losses(shown["rule"], shown["n"])),
        "decoded": on.decoded,
        "seconds": round(time.perf_counter() - began, 1),
    }
    write_json(on.place / FILE, made)
    return made


def _threshold(rule: str) -> float | None:
    given = (getattr(term, "threshold", None) for term in terms(rule))
    return next((threshold for threshold in given if threshold is not None), None)


def _procedure(question: Question, test: Test) -> str:
    several = f", the error shared by {len(question.rules)} rules" if len(question.rules) > 1 else ""
    return (
        f"Learn-then-Test: settings tested from strict to lenient until one fails, each by {test.said} "
        f"looked at after {', '.join(map(str, test.looks))} fresh prompts drawn at random, so that the last setting to "
        f"pass loses more than max_drop with a chance of at most {1 - question.confidence:.3g} in all{several}."
    )


def _reason(question: Question, row: dict[str, Any]) -> str:
    rate = row["losses"] / row["n"]
    if row["hopeless"] and rate >= question.max_drop:
        return f"the loss is too high: already the strictest setting, {row['rule']}, lost {rate:.2%} of {row['n']} prompts"
    more = ", more than is allowed, but on too few to be sure" if rate >= question.max_drop else ""
    return f"too few prompts: the strictest setting, {row['rule']}, lost {row['losses']:g} of {row['n']}{more}"


def plan(
    pair: Pair, task: Task, folder: Path, question: Question, pilot: int = 40, show: Show = lambda *_: None
) -> dict[str, Any]:
    """From a pilot of fresh prompts, which are then used up: for each setting, how many calibration prompts it would take to
    certify it four times in five if it loses what it lost in the pilot (at least a quarter of what is allowed), and how many
    target passes and minutes, with all stricter settings and the target alone."""
    asked = replace(question, limit=pilot, ids=question.ids[:pilot])
    with calibration(pair, task, folder, asked, "pilot", show) as on:
        rows = [row for settings in question.ladders for row in _planned(on, question, settings)]
    return {
        "plan": rows,
        "pilot": len(on.samples),
        "max_drop": question.max_drop,
        "confidence": question.confidence,
        "least": needed(question.max_drop, question.alpha, 0.0),
    }


def _planned(on: Calibration, question: Question, settings: list[str]) -> Iterator[dict[str, Any]]:
    pilot = len(on.samples)
    decoded = on.answers("target", pilot, "the target alone")
    for setting in settings:
        lenient, losses = on.answers(setting, pilot, setting), on.losses(setting, pilot)
        decoded = [*decoded, *lenient]
        n = question.needed(losses, question.max_drop / 4)
        yield {
            "rule": setting,
            "pilot_loss": float((2 * losses - 1).mean() if question.loss == "net" else losses.mean()),
            "tokens_per_pass": sum(r["tokens"] for r in lenient) / max(1, sum(r["target_passes"] for r in lenient)),
            "prompts": n,
            "target_passes": None if n is None else round(sum(r["target_passes"] for r in decoded) / pilot * n),
            "minutes": None if n is None else round(sum(r["seconds"] for r in decoded) / pilot * n / 60, 2),
        }
