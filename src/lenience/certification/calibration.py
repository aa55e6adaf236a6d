"""Answers of the target and of settings on prompts that nothing was chosen on, and the losses between them."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from filelock import FileLock, Timeout

from lenience.certification.question import Question
from lenience.certification.sequential_tests import Test, Tried
from lenience.core.errors import InputError
from lenience.core.files import read_json, write_json
from lenience.decoding.certified import unplaced, unplaced_stop
from lenience.decoding.options import Options, check_options, learned
from lenience.decoding.pair import Pair
from lenience.runs.journal import Journal, open_run
from lenience.runs.record import check_prompts, describe
from lenience.runs.uses import fresh, locked, note_uses
from lenience.tasks import Sample, Task, known_as, reads

if TYPE_CHECKING:
    from numpy.typing import NDArray


Show = Callable[[str, int, int], None]


TUNING = 8
"""How many prompts an automatic window is picked on."""


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
