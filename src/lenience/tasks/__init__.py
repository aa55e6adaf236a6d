"""Tasks: prompts with known answers, and how an answer is found and compared. No torch."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from pathlib import Path

from lenience.core.errors import InputError
from lenience.tasks.base import Sample, Score, Task, ungradable
from lenience.tasks.jsonl import SUFFIXES, JsonlTask
from lenience.tasks.rows import Fields
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


def load_task(
    spec: str,
    *,
    answer: str | None = None,
    same: str | None = None,
    prompt_field: str | None = None,
    reference_field: str | None = None,
    prompt_template: str | None = None,
) -> Task:
    """Load a task by its built-in name, from JSON files ("rows.jsonl", "train.jsonl.gz,test.json"),
    or from a class or object in a file: "file.py:Name".

    The others are for JSON files. `answer` and `same` say how answers are found and compared, see
    JsonlTask; `prompt_field` and `reference_field` where a row says its prompt and its reference,
    by default "prompt" and "reference"; `prompt_template` makes a prompt of several fields: "Q:
    {question}\\nA:". Raises InputError.
    """
    files = spec.split(",")
    if all(file.endswith(SUFFIXES) for file in files):
        named = {"prompt": prompt_field, "reference": reference_field, "template": prompt_template}
        if prompt_field is not None and prompt_template is not None:
            raise InputError("prompt_field and prompt_template: both say the prompt; give one")
        fields = Fields(**{name: value for name, value in named.items() if value is not None})
        return JsonlTask([Path(file) for file in files], answer, same, fields)
    options = dict(answer=answer, same=same, prompt_field=prompt_field)
    options |= dict(reference_field=reference_field, prompt_template=prompt_template)
    if given := [name for name, value in options.items() if value is not None]:
        raise InputError(f"task {spec!r}: {given[0]} is for tasks from JSON files")
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
