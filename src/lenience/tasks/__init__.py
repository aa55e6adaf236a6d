"""Tasks: prompts with known answers, and how an answer is found and compared. No torch."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from pathlib import Path

from lenience.core.errors import InputError
from lenience.tasks.base import Sample, Score, Task, ungradable
from lenience.tasks.jsonl import JsonlTask
from lenience.tasks.user import as_task, task_in_file
from lenience.tasks.wordmath import WordMath

__all__ = [
    "TASKS",
    "JsonlTask",
    "Sample",
    "Score",
    "Task",
    "WordMath",
    "as_task",
    "load_task",
    "take",
    "ungradable",
]

TASKS: dict[str, type[Task]] = {"wordmath": WordMath}
"""A built-in task is added here, and is then known by its name and to the tests of all tasks."""


def load_task(spec: str, *, answer: str | None = None, same: str | None = None) -> Task:
    """Load a task by its built-in name, from a JSONL file, or from a class or object in a file:
    "file.py:Name".

    `answer` and `same` say how a JSONL file's answers are found and compared, see JsonlTask. Raises
    InputError.
    """
    if spec.endswith((".jsonl", ".json")):
        return JsonlTask(Path(spec), answer, same)
    if answer or same:
        raise InputError(f"task {spec!r}: answer and same are for tasks from a JSONL file")
    if spec in TASKS:
        return TASKS[spec]()
    file, _, name = spec.rpartition(":")
    if file.endswith(".py"):
        return task_in_file(Path(file), name)
    known = ", ".join(TASKS)
    raise InputError(
        f"there is no task {spec!r}; name one of {known}, a FILE.jsonl or a file.py:Name"
    )


def _named(sample: Sample) -> Sample:
    return sample if isinstance(sample.id, str) else replace(sample, id=str(sample.id))


def take(task: Task, split: str, limit: int | None) -> list[Sample]:
    """The first `limit` samples of a split; all of them if None. Raises InputError where there are
    none."""
    if limit is not None and limit < 1:
        raise InputError(f"limit {limit}: must be 1 or more")
    samples = [_named(sample) for sample in islice(task.samples(split), limit)]
    if not samples:
        raise InputError(f"task {task.name!r} has no samples in its split {split!r}")
    return samples
