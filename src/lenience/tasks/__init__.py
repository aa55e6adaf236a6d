"""Tasks: prompts with known answers, and how an answer is found and compared. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

from lenience.core.errors import InputError
from lenience.core.spec import parse_term
from lenience.tasks.base import Sample, Score, Task, ungradable
from lenience.tasks.chat import MtBench
from lenience.tasks.choice import Arc, CommonsenseQa, Mmlu
from lenience.tasks.code import HumanEval, LiveCodeBench
from lenience.tasks.grader import Endpoint, Graded, Grader
from lenience.tasks.jsonl import SUFFIXES, JsonlTask
from lenience.tasks.math import Gsm8k, Math
from lenience.tasks.published import Published
from lenience.tasks.rows import Fields
from lenience.tasks.summary import Continuation, Summary
from lenience.tasks.user import as_task, task_in_file
from lenience.tasks.wordmath import WordMath

__all__ = [
    "BENCHMARKS",
    "TASKS",
    "Graded",
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
BENCHMARKS: dict[str, type[Published]] = {
    kind.title: kind
    for kind in (
        Gsm8k,
        Math,
        HumanEval,
        LiveCodeBench,
        Mmlu,
        Arc,
        CommonsenseQa,
        MtBench,
        Summary,
        Continuation,
    )
}
"""Tasks that read the files of a published benchmark."""


def load_task(
    spec: str,
    *,
    answer: str | None = None,
    same: str | None = None,
    prompt_field: str | None = None,
    reference_field: str | None = None,
    prompt_template: str | None = None,
    data: str | Path | None = None,
    grader: str | Grader | None = None,
    **options: Any,
) -> Task:
    """Load a task by its built-in name, as a benchmark with its files ("gsm8k:shots=8", see
    docs/tasks.md), from JSON files ("rows.jsonl", "train.jsonl.gz,test.json"), or from a class or
    object in a file: "file.py:Name".

    `data` is where a benchmark's files are: a file, several with commas, a folder, or a dataset of
    the Hub; `options` are its options, as in its spec. A `grader` compares answers with the
    target's own: the address of a server with OpenAI's API, or what answers prompts (Grader).

    The others are for JSON files. `answer` and `same` say how answers are found and compared, see
    JsonlTask; `prompt_field` and `reference_field` where a row says its prompt and its reference,
    by default "prompt" and "reference"; `prompt_template` makes a prompt of several fields: "Q:
    {question}\\nA:". Raises InputError.
    """
    if grader is not None:
        inner = {"answer": answer, "same": same, "prompt_field": prompt_field}
        inner |= {"reference_field": reference_field, "prompt_template": prompt_template}
        if spec.endswith(SUFFIXES) and answer is None:
            inner["answer"] = "last-number"  # which a grader does not ask for
        task = load_task(spec, data=data, **inner, **options)
        return Graded(task, Endpoint(grader) if isinstance(grader, str) else grader)
    if spec.partition(":")[0] in BENCHMARKS:
        given = dict(answer=answer, same=same, prompt_field=prompt_field)
        given |= dict(reference_field=reference_field, prompt_template=prompt_template)
        return _benchmark(spec, data, options, given)
    if data is not None:
        raise InputError(f"data {data}: is for benchmarks: {', '.join(BENCHMARKS)}")
    if options:
        raise InputError(f"task {spec!r}: has no option {next(iter(options))!r}")
    files = spec.split(",")
    if all(file.endswith(SUFFIXES) for file in files):
        named = {"prompt": prompt_field, "reference": reference_field, "template": prompt_template}
        if prompt_field is not None and prompt_template is not None:
            raise InputError("prompt_field and prompt_template: both say the prompt; give one")
        fields = Fields(**{name: value for name, value in named.items() if value is not None})
        return JsonlTask([Path(file) for file in files], answer, same, fields)
    given = dict(answer=answer, same=same, prompt_field=prompt_field)
    given |= dict(reference_field=reference_field, prompt_template=prompt_template)
    _refuse(spec, given)
    if spec in TASKS:
        return TASKS[spec]()
    file, _, name = spec.rpartition(":")
    if file.endswith(".py"):
        return task_in_file(Path(file), name)
    known = ", ".join([*TASKS, *BENCHMARKS])
    raise InputError(
        f"there is no task {spec!r}; name one of {known}, a FILE.jsonl or a file.py:Name"
    )


def _benchmark(
    spec: str, data: str | Path | None, options: Mapping[str, Any], given: Mapping[str, str | None]
) -> Task:
    """A benchmark from its spec with further options, and its files."""
    _refuse(spec, given)
    more = [f"{name}={str(value).lower()}" for name, value in options.items()]
    if more:
        spec += ("," if ":" in spec else ":") + ",".join(more)
    try:
        task = parse_term(spec, "task", BENCHMARKS)
    except InputError as error:
        raise InputError(f"task {spec!r}: {error}") from None
    if data is None:
        raise InputError(f"task {spec!r}: name its files (--data FILE|FOLDER); see docs/tasks.md")
    return task.open(str(data))


def _refuse(spec: str, given: Mapping[str, str | None]) -> None:
    """Raise InputError for what is said of JSON files and these are none."""
    if said := [name for name, value in given.items() if value is not None]:
        raise InputError(f"task {spec!r}: {said[0]} is for tasks from JSON files")


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
