"""Models and a task, by what is named on the command line and what a run folder says of itself."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from cyclopts import Parameter

from lenience.cli.console import loading
from lenience.cli.steps import compile_pair
from lenience.core.errors import InputError
from lenience.core.files import read_json

if TYPE_CHECKING:
    from lenience.decoding.pair import Pair
    from lenience.tasks import Task


@Parameter(name="*")
@dataclass
class Models:
    target: str | None = None
    """Hub name or folder of the target; without it the built-in pair is used."""
    draft: str | None = None
    """Hub name or folder of the draft."""
    dtype: str | None = None
    """float32, bfloat16, …; by default the checkpoint's own."""
    device: str = "auto"
    """cpu, cuda, cuda:1, …; auto takes a GPU if there is one."""
    compile: bool | None = None
    """Export the models for ONNX Runtime, kept for the next time; by default where the work is long
    and they are small."""

    def load(self, long: bool = False, needs_draft: bool = True) -> Pair:
        """`long`: there is so much to decode that exporting the models pays. Raises InputError
        where a draft is needed and none is named."""
        if self.target is not None and self.draft is None and needs_draft:
            raise InputError("--draft: name the draft too, or a --drafter that needs none")
        with loading():
            from lenience.decoding.loading import load_pair

            options = {"dtype": self.dtype, "device": self.device, "compile": False}
            pair = load_pair(self.target, self.draft, **options)
        compile_pair(pair, self.compile, long)
        return pair


@Parameter(name="*")
@dataclass
class TaskChoice:
    task: str | None = None
    """A built-in task's name, wordmath by default, a FILE.jsonl, or file.py:Name."""
    answer: str | None = None
    """How a JSONL task's answer is found: regex:PATTERN or after:MARKER."""
    same: str | None = None
    """How a JSONL task's answers are compared: number, text or choice."""

    def load(self, default: str = "wordmath") -> Task:
        from lenience.tasks import load_task

        return load_task(self.task or default, answer=self.answer, same=self.same)


def mined_with(run: Path, target: str | None, draft: str | None, device: str) -> Models:
    """The models that a run was mined with, where they are now."""
    from lenience.runs.record import read_run

    if not (run / "run.json").is_file():
        raise InputError(f"{run}: holds no mining run; lenience mine --out {run} makes one")
    record = read_run(run)
    if lacking := {"target", "draft"} - record.models.keys():
        raise InputError(f"{run / 'run.json'}: its models lack {lacking.pop()}; mine anew")
    if record.pair != "built-in":
        target = target or record.models["target"].name
        draft = draft or record.models["draft"].name
    dtypes = {model.dtype for model in record.models.values()}
    return Models(target, draft, dtypes.pop() if len(dtypes) == 1 else "auto", device)


def task_of(run: Path, choice: TaskChoice) -> Task:
    """The task that was named, or else the built-in one that the run was mined on."""
    from lenience.tasks import TASKS

    mined = "wordmath"
    if (run / "run.json").exists():
        mined = str(read_json(run / "run.json").get("task"))
    if choice.task is None and mined not in TASKS:
        raise InputError(f"--task: {run} was mined on {mined!r}; name that task's file")
    return choice.load(mined)


def models_of(run: Path, models: Models | None) -> Models:
    """The models that were named, or else those that the run was mined with."""
    named = models or Models()
    if named.target or named.draft or not (run / "run.json").exists():
        return named
    return mined_with(run, None, None, named.device)
