"""Models and a task, by what is named on the command line and what a run folder says of itself."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

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
    engine: Literal["lenience", "vllm"] = "lenience"
    """What runs the models: our own loop, or vLLM with the rules inside it (docs/vllm.md)."""
    engine_arg: Annotated[tuple[str, ...], Parameter(negative="")] = ()
    """An argument of vLLM's own, NAME=VALUE, such as tensor_parallel_size=2; may be given
    again."""

    def load(self, long: bool = False, needs_draft: bool = True) -> Pair:
        """`long`: there is so much to decode that exporting the models pays. Raises InputError
        where a draft is needed and none is named, or vLLM is not installed."""
        if self.target is not None and self.draft is None and needs_draft:
            raise InputError("--draft: name the draft too, or a --drafter that needs none")
        with loading():
            from lenience.decoding.loading import load_pair

            options = {"dtype": self.dtype, "device": self.device, "compile": False}
            if self.engine == "vllm":
                return self._in_vllm(load_pair(self.target, self.draft, **options))
            pair = load_pair(self.target, self.draft, **options)
        if self.engine_arg:
            raise InputError(f"--engine-arg {self.engine_arg[0]}: is for --engine vllm")
        compile_pair(pair, self.compile, long)
        return pair

    def refuse_vllm(self, command: str) -> None:
        """Raise InputError where vLLM is asked to do what it does not do for us."""
        if self.engine == "vllm":
            raise InputError(
                f"--engine vllm: {command} runs in our own loop; generate, mine, compare, "
                "certify and audit run in vLLM"
            )

    def _in_vllm(self, pair: Pair) -> Pair:
        try:
            from lenience.integrations.vllm.engine import VllmPair
        except ImportError as error:
            raise InputError(f"--engine vllm: {error}; docs/vllm.md says how it comes") from None

        return VllmPair(pair, dict(map(_argument, self.engine_arg)))


def _argument(text: str) -> tuple[str, Any]:
    """The name and the value of NAME=VALUE, which is JSON where it can be read as such."""
    name, found, value = text.partition("=")
    if not (name and found):
        raise InputError(f"--engine-arg {text!r}: write NAME=VALUE")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


@Parameter(name="*")
@dataclass
class TaskChoice:
    task: str | None = None
    """A built-in task's name, wordmath by default, a FILE.jsonl, or file.py:Name."""
    answer: str | None = None
    """How a JSONL task's answer is found: number-after:MARKER, last-number, boxed, choice,
    after:MARKER or regex:PATTERN."""
    same: str | None = None
    """How a JSONL task's answers are compared: number, text or choice; by default as fits
    --answer."""

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
    mined = mined_with(run, None, None, named.device)
    return replace(mined, engine=named.engine, engine_arg=named.engine_arg)
