"""What the command line's options stand for: models, a task, what a head reads, and what a run folder says of itself."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from cyclopts import Parameter

from lenience.cli.console import loading
from lenience.cli.steps import compile_pair
from lenience.core.errors import InputError

if TYPE_CHECKING:
    from lenience.decoding.pair import Pair
    from lenience.heads.head import Inputs, Role
    from lenience.tasks import Task


@Parameter(name="*")
@dataclass
class Models:
    target: str | None = None
    "Hub name or folder of the target; without it the built-in pair is used."
    draft: str | None = None
    "Hub name or folder of the draft."
    dtype: str | None = None
    "float32, bfloat16, …; by default the checkpoint's own."
    device: str = "auto"
    "cpu, cuda, cuda:1, …; auto takes a GPU if there is one."
    compile: bool | None = None
    "Export the models for ONNX Runtime, kept for the next time; by default where the work is long and they are small."

    def load(self, long: bool = False) -> Pair:
        """`long`: there is so much to decode that exporting the models pays."""
        with loading():
            from lenience.decoding.loading import load_pair

            pair = load_pair(self.target, self.draft, dtype=self.dtype, device=self.device, compile=False)
        compile_pair(pair, self.compile, long)
        return pair


@Parameter(name="*")
@dataclass
class TaskChoice:
    task: str | None = None
    "A built-in task's name, wordmath by default, a FILE.jsonl, or file.py:Name."
    answer: str | None = None
    "How a JSONL task's answer is found: regex:PATTERN or after:MARKER."
    same: str | None = None
    "How a JSONL task's answers are compared: number, text or choice."
    max_new_tokens: int | None = None
    "The length limit of an answer; by default the task's own."

    def load(self, default: str = "wordmath") -> Task:
        from lenience.tasks import load_task

        return load_task(self.task or default, answer=self.answer, same=self.same)


def inputs_of(role: Role, annotated: bool, models: str | None, tokens: str | None, layer: int | None) -> Inputs:
    """What a head of a role reads, by what was said and else by default."""
    from lenience.heads.head import Inputs

    if annotated:
        if role != "judge" or models not in (None, "target") or tokens not in (None, "draft"):
            raise InputError("--from annotated: fits a judge to the target's states after each token; leave the others out")
        return Inputs(("target",), ("draft",), -1 if layer is None else layer)
    if (role != "judge" and models) or (role == "stop" and tokens):
        left_out = "--models and --tokens" if role == "stop" else "--models"
        raise InputError(f"--{role}: is fitted to the draft's own states; leave {left_out} out")
    if role == "gate" and tokens not in (None, "draft", "previous"):
        raise InputError(f"--tokens {tokens}: a gate reads the state after draft or after previous")
    given = tokens or {"judge": "draft,previous", "stop": "previous", "gate": "draft"}[role]
    whose = models or ("target,draft" if role == "judge" else "draft")
    return Inputs(tuple(whose.split(",")), tuple(given.split(",")), layer)


def mined_with(run: Path, target: str | None, draft: str | None, device: str) -> Models:
    """The models that a run was mined with, where they are now."""
    from lenience.core.files import read_json

    made = read_json(run / "run.json")
    if not made.keys() >= {"pair", "models"}:
        raise InputError(f"{run / 'run.json'}: does not say which models it was mined with; mine into another folder")
    if made["pair"] != "built-in":
        target, draft = target or made["models"]["target"]["name"], draft or made["models"]["draft"]["name"]
    dtypes = {model["dtype"] for model in made["models"].values()}
    return Models(target, draft, dtypes.pop() if len(dtypes) == 1 else "auto", device)


def judge_of(run: Path) -> str:
    if not run.exists():
        raise InputError(f"{run}: there is no such folder; lenience mine makes one")
    if not (run / "judge" / "judge.json").is_file():
        raise InputError(f"{run}: has no judge; fit one (lenience fit {run}) or name a --rule")
    from lenience.rules.judge import Judge

    return str(Judge(str(run / "judge")))


def read_ids(path: Path | None) -> tuple[str, ...]:
    if path is None:
        return ()
    try:
        return tuple(dict.fromkeys(path.read_text(encoding="utf-8").split()))
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"--ids {path}: cannot be read ({error})") from None


def task_of(run: Path, choice: TaskChoice) -> Task:
    """The task that was named, or else the built-in one that the run was mined on."""
    from lenience.core.files import read_json
    from lenience.tasks import TASKS

    mined = read_json(run / "run.json").get("task") if (run / "run.json").exists() else "wordmath"
    if choice.task is None and mined not in TASKS:
        raise InputError(f"--task: {run} was mined on {mined!r}; name that task's file")
    return choice.load(str(mined))


def models_of(run: Path, models: Models | None) -> Models:
    """The models that were named, or else those that the run was mined with."""
    given = models or Models()
    if given.target or given.draft or not (run / "run.json").exists():
        return given
    return mined_with(run, None, None, given.device)
