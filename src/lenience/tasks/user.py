"""Tasks that users write: a class or an object with a task's methods, in a file or at hand."""

from __future__ import annotations

import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from lenience.core.errors import InputError, first_line
from lenience.core.files import digest_bytes
from lenience.tasks.base import Sample, Score, Task

NEEDED = ("name", "samples", "answer")


def as_task(task: Any, where: str = "", version: str | None = None) -> Task:
    """A task from any object with a task's methods; `answer(text)` and `same(a, b)` may leave out
    the sample. A `version` takes the place of the task's own. Raises InputError that names what is
    missing, and `where`."""
    if isinstance(task, Task) and _sees_samples(task) and version is None:
        return task
    if lacking := [part for part in NEEDED if not hasattr(task, part)]:
        name = where or type(task).__name__
        raise InputError(f"task {name}: lacks {', '.join(lacking)}; see docs/your-own-task.md")
    return _UserTask(task, version)


class _UserTask(Task):
    """A user's object behind the methods of a task."""

    def __init__(self, task: Any, version: str | None):
        self.name = task.name
        self.max_new_tokens = getattr(task, "max_new_tokens", Task.max_new_tokens)
        self.version = getattr(task, "version", None) if version is None else version
        self._task = task
        self.scores_by_reference = getattr(task, "scores_by_reference", False)
        self._same, self._correct, self._score, self._loss, self._reads, self._reference = (
            _own(task, part) for part in ("same", "correct", "score", "loss", "reads", "reference")
        )
        self._answer_sees_sample = _takes_sample(task.answer, 1)
        self._same_sees_sample = self._same is not None and _takes_sample(self._same, 2)

    @property
    def has_loss(self) -> bool:
        return self._loss is not None

    @property
    def scores_batches(self) -> bool:
        return self._score is not None

    def samples(self, split: str) -> Iterable[Sample]:
        return self._task.samples(split)

    def reference(self, given: str) -> str:
        return self._reference(given) if self._reference else super().reference(given)

    def answer(self, text: str, sample: Sample | None = None) -> str | None:
        return self._task.answer(text, *([sample] if self._answer_sees_sample else []))

    def same(self, a: str | None, b: str | None, sample: Sample | None = None) -> bool | None:
        if self._same is None:
            return super().same(a, b, sample)
        return self._same(a, b, *([sample] if self._same_sees_sample else []))

    def correct(self, text: str, sample: Sample) -> bool:
        return self._correct(text, sample) if self._correct else super().correct(text, sample)

    def score(self, pairs: Sequence[tuple[str, Sample]]) -> list[Score]:
        return self._score(pairs) if self._score else super().score(pairs)

    def loss(self, text: str, target_text: str, sample: Sample) -> float:
        loss = self._loss or super().loss
        return loss(text, target_text, sample)

    @property
    def reads(self) -> str:
        return self._reads or self.known_as


def _sees_samples(task: Any) -> bool:
    return _takes_sample(task.answer, 1) and _takes_sample(task.same, 2)


def _own(task: Any, part: str) -> Any:
    """What an object says itself of a part of a task; None where it has only what all tasks
    have."""
    inherited = getattr(type(task), part, None) is getattr(Task, part)
    return None if inherited else getattr(task, part, None)


def _takes_sample(method: Callable[..., Any], place: int) -> bool:
    """Whether a method's argument at a place is the sample: an option of its own has a default and
    another name."""
    parameters = list(inspect.signature(method).parameters.values())[: place + 1]
    if any(one.kind is one.VAR_POSITIONAL for one in parameters):
        return True
    if len(parameters) <= place or parameters[place].kind is inspect.Parameter.KEYWORD_ONLY:
        return False
    return parameters[place].name == "sample" or parameters[place].default is inspect._empty


def task_in_file(path: Path, name: str) -> Task:
    """Run a user's own file and take the class or object `name` from it. Raises InputError."""
    module_spec = importlib.util.spec_from_file_location(f"lenience_task_{path.stem}", path)
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
    # a run is not gone on with after its task has changed
    return as_task(task, f"{path}:{name}", version=digest_bytes(path.read_bytes(), 6))
