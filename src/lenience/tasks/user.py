"""Tasks that users write: classes or objects with a task's methods."""

from __future__ import annotations

import importlib.util
import inspect
import sys
import warnings
from collections.abc import Callable, Iterable, Sequence
from copy import copy
from functools import partial
from pathlib import Path
from typing import Any, get_args

from lenience.core.errors import InputError, RunError, first_line
from lenience.core.files import digest_bytes
from lenience.tasks.base import AnswerValue, Messages, Sample, Score, Task

NEEDED = ("name", "samples", "answer")
DOCS = "see docs/your-own-task.md"
TRAITS = (
    "stop_strings",
    "compares_slowly",
    "measure",
    "by_degree",
    "beside_target",
    "at_par",
    "same_where_wrong",
    "loss_is",
    "disagreement_is",
)
"""Properties that a task may set."""


def as_task(task: Any, where: str = "", version: str | None = None) -> CheckedTask:
    """Return a task from any object with a task's methods. Errors in these methods name the sample.
    `answer(text)` and `same(a, b)` may omit the sample. `version` replaces the task's own. Raises
    InputError, with `where`, for a missing method."""
    if isinstance(task, CheckedTask) and version is None:
        return task
    lacking = [part for part in NEEDED if not hasattr(task, part)]
    if lacking:
        name = where or type(task).__name__
        raise InputError(f"task {name}: lacks {', '.join(lacking)}; {DOCS}")
    return CheckedTask(task, version)


class CheckedTask(Task):
    """A wrapper of a user's task, which calls each method as it is declared and checks its
    result."""

    def __init__(self, task: Any, version: str | None):
        self.name = task.name
        self.max_new_tokens = getattr(task, "max_new_tokens", Task.max_new_tokens)
        self.version = getattr(task, "version", None) if version is None else version
        self._task = task
        self.scores_by_reference = getattr(task, "scores_by_reference", False)
        self.failures_are_wrong = getattr(task, "failures_are_wrong", False)
        for trait in TRAITS:
            setattr(self, trait, getattr(task, trait, getattr(Task, trait)))
        self.left_out = set[str]()
        """Ids of the samples that were left out."""
        self._fits: Callable[[Sample], bool] = lambda _: True
        self._told = False
        self._same = _own(task, "same")
        self._correct = _own(task, "correct")
        self._score = _own(task, "score")
        self._loss = _own(task, "loss")
        self._reads = _own(task, "reads")
        self._reference = _own(task, "reference")
        self._points = _own(task, "points")
        self._attach = _own(task, "attach")
        self._answer = _given_sample(task.answer, 1)
        if self._same is not None:
            self._same = _given_sample(self._same, 2)

    @property
    def grading(self) -> dict[str, int] | None:
        return getattr(self._task, "grading", None)

    @property
    def has_loss(self) -> bool:
        return self._loss is not None

    @property
    def compares(self) -> bool:
        return self._correct is None and self._score is None

    @property
    def scores_batches(self) -> bool:
        return self._score is not None

    def samples(self, split: str) -> Iterable[Sample]:
        for sample in self._task.samples(split):
            if not (hasattr(sample, "id") and hasattr(sample, "prompt")):
                raise InputError(
                    f"task {self.name!r}: samples gave {sample!r:.60}, which is no "
                    f"Sample; {DOCS}"
                )
            if self._fits(sample):
                yield sample
            else:
                self.left_out.add(sample.id)

    def only(self, fits: Callable[[Sample], bool]) -> CheckedTask:
        """Return a copy of the task with only the samples for which `fits` returns True."""
        task = copy(self)
        task.left_out = set()
        task._fits = fits
        return task

    def reference(self, given: str) -> str:
        return self._reference(given) if self._reference else super().reference(given)

    def answer(self, text: str, sample: Sample | None = None) -> str | None:
        found = self._call(
            "answer", [sample], partial(self._answer, text, sample), wrong=None
        )
        if not isinstance(found, get_args(AnswerValue)):
            raise self._wrong("answer", found, sample, "give text, a number or None")
        return found

    def same(
        self, a: str | None, b: str | None, sample: Sample | None = None
    ) -> bool | None:
        if self._same is None:
            return super().same(a, b, sample)
        wrong = None if a is None or b is None else False
        agree = self._call(
            "same", [sample], partial(self._same, a, b, sample), wrong=wrong
        )
        return None if agree is None else bool(agree)

    def correct(self, text: str, sample: Sample) -> bool:
        if self._correct is None:
            return super().correct(text, sample)
        right = self._call(
            "correct", [sample], partial(self._correct, text, sample), wrong=False
        )
        if right not in (True, False, None):
            raise self._wrong("correct", right, sample, "give True or False")
        return bool(right)

    def score(self, pairs: Sequence[tuple[str, Sample]]) -> list[Score]:
        if self._score is None:
            return super().score(pairs)
        samples = [sample for _, sample in pairs]
        given = partial(self._score, pairs)
        if self.failures_are_wrong and len(pairs) > 1:
            given = partial(self._scores_or_wrong, pairs)
        scores = list(self._call("score", samples, given, wrong=[Score(False, 1.0)]))
        if len(scores) != len(pairs):
            raise RuntimeError(
                f"task {self.name!r}: score gave {len(scores)} scores for {len(pairs)} "
                "responses"
            )
        for score, sample in zip(scores, samples):
            if not isinstance(score, Score) or score.correct not in (True, False):
                raise self._wrong(
                    "score", score, sample, "give a Score(correct, loss) for each"
                )
            if not 0 <= score.loss <= 1:
                raise self._wrong("score", score, sample, "a loss is from 0 to 1")
        return scores

    def _scores_or_wrong(self, pairs: Sequence[tuple[str, Sample]]) -> list[Score]:
        """Score all responses at once or, if that raises, one by one, so that one failure does not
        affect the others."""
        try:
            return list(self._score(pairs))
        except Exception:
            return [score for pair in pairs for score in self.score([pair])]

    def points(self, triples: Sequence[tuple[str, str, Sample]]) -> list[float]:
        if self._points is None:
            return super().points(triples)
        samples = [sample for _, _, sample in triples]
        wrong = [0.0] * len(triples)
        points = list(
            self._call("points", samples, partial(self._points, triples), wrong)
        )
        if len(points) != len(triples) or not all(0 <= point <= 1 for point in points):
            raise self._wrong(
                "points", points, samples[0], "give a number from 0 to 1 for each"
            )
        return points

    def attach(self, own_answers: Callable[[Sequence[Messages]], list[str]]) -> None:
        if self._attach is not None:
            self._attach(own_answers)

    def loss(self, text: str, target_text: str, sample: Sample) -> float:
        loss = self._loss or super().loss
        return self._call(
            "loss", [sample], partial(loss, text, target_text, sample), wrong=1.0
        )

    @property
    def reads(self) -> str:
        return self._reads or self.known_as

    def _call(
        self,
        part: str,
        samples: Sequence[Sample | None],
        method: Callable[[], Any],
        wrong: Any,
    ) -> Any:
        """Return a method's result. If it raises, return `wrong` if the task counts failures as
        wrong, and warn the first time; otherwise raise RuntimeError that names the samples."""
        try:
            return method()
        except (InputError, RunError):
            raise
        except Exception as error:
            why = f"{type(error).__name__}: {first_line(error)}"
            failed = f"{self._at(samples)}: {part} failed with {why}"
            if not self.failures_are_wrong:
                raise RuntimeError(failed) from error
            if not self._told:
                warnings.warn(
                    f"{failed}; counted as wrong, like further ones", stacklevel=2
                )
                self._told = True
            return wrong

    def _wrong(
        self, part: str, given: object, sample: Sample | None, fix: str
    ) -> InputError:
        return InputError(f"{self._at([sample])}: {part} gave {given!r:.60}; {fix}")

    def _at(self, samples: Sequence[Sample | None]) -> str:
        ids = [str(sample.id) for sample in samples if sample is not None]
        more = f" and {len(ids) - 1} more" if len(ids) > 1 else ""
        return f"task {self.name!r}" + (f", sample {ids[0]}{more}" if ids else "")


def _own(task: Any, part: str) -> Any:
    """Return an object's own definition of a task's method or property; None for the default."""
    inherited = getattr(type(task), part, None) is getattr(Task, part)
    return None if inherited else getattr(task, part, None)


def _given_sample(method: Callable[..., Any], place: int) -> Callable[..., Any]:
    """Return a wrapper that takes the sample as its last argument, whether the user's method takes
    the sample by position, by keyword or not at all. A parameter with a default and another name is
    the user's own option."""
    parameters = list(inspect.signature(method).parameters.values())
    if any(
        parameter.kind is parameter.KEYWORD_ONLY and parameter.name == "sample"
        for parameter in parameters
    ):
        return lambda *args: method(*args[:-1], sample=args[-1])
    first = parameters[: place + 1]
    if any(parameter.kind is parameter.VAR_POSITIONAL for parameter in first):
        return method
    if len(first) > place and first[place].kind is not inspect.Parameter.KEYWORD_ONLY:
        parameter = first[place]
        if parameter.name == "sample" or parameter.default is inspect.Parameter.empty:
            return method
    return lambda *args: method(*args[:-1])


def task_in_file(path: Path, name: str) -> Task:
    """Run a user's Python file and return its class or object `name` as a task. Raises InputError
    if either fails."""
    module_spec = importlib.util.spec_from_file_location(
        f"lenience_task_{path.stem}", path
    )
    if not path.is_file() or module_spec is None or module_spec.loader is None:
        raise InputError(f"task file {path}: there is no such file")
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[module_spec.name] = module  # where dataclasses look their types up
    try:
        module_spec.loader.exec_module(module)
        found = getattr(module, name, None)
        task = found() if isinstance(found, type) else found
    except Exception as error:
        why = f"{type(error).__name__}: {first_line(error)}"
        raise InputError(f"task file {path}: {why}") from error
    if task is None:
        raise InputError(f"task file {path}: there is no {name!r} in it")
    # a run does not resume after its task has changed
    return as_task(task, f"{path}:{name}", version=digest_bytes(path.read_bytes(), 6))
