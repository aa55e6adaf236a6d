"""Tasks: prompts with known answers, and how an answer is found and compared."""

from __future__ import annotations

import hashlib
import importlib.util
import sys
from itertools import islice
from pathlib import Path

from lenience.core.errors import InputError, first_line
from lenience.tasks.base import Sample, Task
from lenience.tasks.jsonl import JsonlTask
from lenience.tasks.wordmath import WordMath

__all__ = ["TASKS", "JsonlTask", "Sample", "Task", "WordMath", "load_task", "take"]

TASKS: dict[str, type[Task]] = {"wordmath": WordMath}


def load_task(spec: str, *, answer: str | None = None, same: str | None = None) -> Task:
    """A task by its built-in name, from a JSONL file, or from a class or object in a file: "file.py:Name".

    `answer` and `same` say how a JSONL file's answers are found and compared, see JsonlTask. Raises InputError.
    """
    if spec.endswith((".jsonl", ".json")):
        return JsonlTask(Path(spec), answer or "regex:(-?[0-9.,]*[0-9])", same or "number")
    if answer or same:
        raise InputError(f"task {spec!r}: answer and same are for tasks from a JSONL file")
    if spec in TASKS:
        return TASKS[spec]()
    file, _, name = spec.rpartition(":")
    if file.endswith(".py"):
        return _from_file(Path(file), name)
    raise InputError(f"there is no task {spec!r}; name one of {', '.join(TASKS)}, a FILE.jsonl or a file.py:Name")


def take(task: Task, split: str, limit: int | None) -> list[Sample]:
    """The first `limit` samples of a split; all of them if None. Raises InputError where there are none."""
    if limit is not None and limit < 1:
        raise InputError(f"limit {limit}: must be 1 or more")
    found = list(islice(task.samples(split), limit))
    if not found:
        raise InputError(f"task {task.name!r} has no samples in its split {split!r}")
    return found


def reads(task: Task) -> str:
    """How a task finds and compares answers, whatever its samples are."""
    return getattr(task, "reads", None) or known_as(task)


def known_as(task: Task) -> str:
    """A task with its version."""
    return f"{task.name} {getattr(task, 'version', None)}"


def _from_file(path: Path, name: str) -> Task:
    """Run a user's own file and take `name` from it."""
    module_spec = importlib.util.spec_from_file_location(f"lenience_task_{path.stem}", path)
    if not path.is_file() or module_spec is None or module_spec.loader is None:
        raise InputError(f"task file {path}: there is no such file")
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[module_spec.name] = module  # where dataclasses look their types up
    try:
        module_spec.loader.exec_module(module)
        found = getattr(module, name, None)
        task = found() if isinstance(found, type) else found
        if task is not None and hasattr(task, "name"):  # a run is not gone on with after its task has changed
            task.version = hashlib.blake2b(path.read_bytes(), digest_size=6).hexdigest()
    except Exception as error:
        raise InputError(f"task file {path}: {type(error).__name__}: {first_line(error)}") from error
    if task is None:
        raise InputError(f"task file {path}: there is no {name!r} in it")
    lacking = [part for part in ("name", "max_new_tokens", "samples", "answer", "same", "correct") if not hasattr(task, part)]
    if lacking:
        raise InputError(f"task {path}:{name}: lacks {', '.join(lacking)}; see docs/your-own-task.md")
    return task
