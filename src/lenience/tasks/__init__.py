"""Tasks: prompts with known answers, and ways to find and compare answers. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
from lenience.tasks.grader import Graded, Grader, GraderServer
from lenience.tasks.jsonl import SUFFIXES, JsonlTask
from lenience.tasks.math import Gsm8k, Math
from lenience.tasks.published import Published
from lenience.tasks.rows import Fields
from lenience.tasks.summary import ContinuationTask, Summary
from lenience.tasks.user import as_task, task_in_file
from lenience.tasks.wordmath import WordMath

__all__ = [
    "BENCHMARKS",
    "TASKS",
    "Graded",
    "JsonlTask",
    "Published",
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
"""Built-in tasks by name. The tests of all tasks cover each task added here."""
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
        ContinuationTask,
    )
}
"""Tasks that read the files of a published benchmark."""
JSON_OPTIONS = ("answer", "same", "prompt_field", "reference_field", "prompt_template")


def load_task(
    spec: str,
    *,
    data: str | Path | None = None,
    grader: str | Grader | None = None,
    stop_strings: Sequence[str] | None = None,
    **options: Any,
) -> Task:
    r"""Load a task by its built-in name, as a benchmark with its files ("gsm8k:shots=8", see
    docs/tasks.md), from JSON files ("rows.jsonl", "train.jsonl.gz,test.json"), or from a class or
    object in a file: "file.py:Name".

    `data` locates a benchmark's files: a file, several files separated by commas, a folder, or a
    Hub dataset. `grader` compares answers with the target's own: the address of a server with
    OpenAI's API, or a Grader. Responses end before the first of `stop_strings`.

    `options` are the options of the benchmark's spec, or those of JSON files. `answer` and `same`
    set how answers are found and compared, see JsonlTask. `prompt_field` and `reference_field` name
    the fields of a row, by default "prompt" and "reference". `prompt_template` builds the prompt
    from several fields: "Q: {question}\nA:".

    Raises InputError for an unknown task or option, and for missing or broken files.
    """
    task = _load(spec, data, grader, options)
    if stop_strings:
        task.stop_strings = tuple(stop_strings)
    return task


def _load(
    spec: str,
    data: str | Path | None,
    grader: str | Grader | None,
    options: Mapping[str, Any],
) -> Task:
    options = {name: value for name, value in options.items() if value is not None}
    files = spec.split(",")
    from_json = all(file.endswith(SUFFIXES) for file in files)
    if grader is not None:
        if from_json:
            # JSON tasks require it, although a grader never uses it
            options.setdefault("answer", "last-number")
        task = load_task(spec, data=data, **options)
        return Graded(task, GraderServer(grader) if isinstance(grader, str) else grader)
    if spec.partition(":")[0] in BENCHMARKS:
        return _benchmark(spec, data, options)
    known = ", ".join([*TASKS, *BENCHMARKS])
    file, _, name = spec.rpartition(":")
    if not (from_json or spec in TASKS or file.endswith(".py")):
        raise InputError(
            f"there is no task {spec!r}; name one of {known}, a FILE.jsonl or a "
            "file.py:Name"
        )
    if data is not None:
        raise InputError(
            f"data {data}: is for benchmarks, {', '.join(BENCHMARKS)}, and the task is "
            f"{spec!r}"
        )
    if from_json:
        return _from_json(list(map(Path, files)), options)
    if options:
        raise InputError(
            f"task {spec!r}: {next(iter(options))} is for tasks from JSON files"
        )
    return TASKS[spec]() if spec in TASKS else task_in_file(Path(file), name)


def _from_json(paths: list[Path], options: Mapping[str, Any]) -> Task:
    """Return a task from JSON files."""
    unknown = options.keys() - JSON_OPTIONS
    if unknown:
        raise InputError(
            f"task {paths[0]}: has no option {min(unknown)!r}; it has "
            f"{', '.join(JSON_OPTIONS)}"
        )
    if {"prompt_field", "prompt_template"} <= options.keys():
        raise InputError(
            "prompt_field and prompt_template: both name the prompt; give one"
        )
    fields = {"prompt_field": "prompt", "reference_field": "reference"}
    fields["prompt_template"] = "template"
    said = {fields[name]: value for name, value in options.items() if name in fields}
    return JsonlTask(paths, options.get("answer"), options.get("same"), Fields(**said))


def _benchmark(spec: str, data: str | Path | None, options: Mapping[str, Any]) -> Task:
    """Return a benchmark from its spec with further options, and its files."""
    more = [f"{name}={str(value).lower()}" for name, value in options.items()]
    if more:
        spec += ("," if ":" in spec else ":") + ",".join(more)
    try:
        task = parse_term(spec, "task", BENCHMARKS)
    except InputError as error:
        raise InputError(f"task {spec!r}: {error}") from None
    if data is None:
        raise InputError(
            f"task {spec!r}: name its files (--data FILE|FOLDER); see docs/tasks.md"
        )
    return task.open(str(data))


def _named(sample: Sample) -> Sample:
    return sample if isinstance(sample.id, str) else replace(sample, id=str(sample.id))


def take(task: Task, split: str, limit: int | None) -> list[Sample]:
    """Return the first `limit` samples of a split, or all if None. Raises InputError if there are
    none."""
    if limit is not None and limit < 1:
        raise InputError(f"limit {limit}: must be 1 or more")
    samples = list(map(_named, islice(task.samples(split), limit)))
    if not samples:
        rows = isinstance(task, JsonlTask) and split == "test"
        fix = "; give 5 rows or more, or rows with a split" if rows else ""
        raise InputError(
            f"task {task.name!r} has no samples in its split {split!r}{fix}"
        )
    return samples
