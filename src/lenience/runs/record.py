"""The records of a run folder: what was asked, and what was mined."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lenience.core.errors import InputError, TooLong
from lenience.core.files import read_json
from lenience.core.records import Record
from lenience.core.version import VERSION
from lenience.decoding.options import OWN
from lenience.runs.journal import Journal
from lenience.tasks import Sample, Task
from lenience.tasks.base import AnswerValue

if TYPE_CHECKING:
    from lenience.decoding.pair import Pair
    from lenience.models.lm import LM


class ModelRecord(Record):
    """A model as a run remembers it."""

    name: str
    fingerprint: str
    dtype: str


class RunRecord(Record):
    """run.json: the settings of a mining run."""

    engine: str | None = None
    """Engine with its version, if not lenience's own loop."""
    versions: dict[str, str]
    pair: str
    models: dict[str, ModelRecord]
    tokenizer: str
    chat: dict[str, Any] | None = None
    """Chat template settings, if not the default."""
    task: str
    task_version: int | str | None = None
    split: str
    max_new_tokens: int
    stop_strings: tuple[str, ...] | None = None
    """Texts before which responses end."""
    seed: int
    temperature: float = 0.0
    """Sampling temperature of target and draft, with truncation and seed."""
    top_k: int | None = None
    top_p: float | None = None
    draw_seed: int | None = None
    drawn: str | None = None
    """Choice of the split's samples: "random" by the seed, or its "first"."""
    drafter: dict[str, Any] | None = None
    """Drafter whose tokens were swapped in, if not the draft model, see `DrafterSpec.record`."""
    answers_only: bool = False
    """True if the target's answers were written without a search."""
    policy: dict[str, Any] | None = None
    """Setting and head fingerprints of the rule whose own answers were mined."""


class Mismatch(Record):
    """A position, counted in new tokens from 0, where the draft would have put another token."""

    position: int
    target_token: int
    draft_token: int
    important: bool | None
    """Label; None if the target's own response has no answer."""


class MinedAnswers(Record):
    """The answers found in a sample's responses, and its reference."""

    target: AnswerValue
    final: AnswerValue
    reference: AnswerValue


class MiningCost(Record):
    """Cost of a sample as if it were searched alone; `seconds` are shared among concurrent
    searches."""

    target_passes: int
    target_tokens: int
    unused_tokens: int = 0
    """Number of the target's tokens in continuations that were started and then not needed."""
    draft_tokens: int
    seconds: float


class MinedSample(Record):
    """A line of journal.jsonl: the result of the search on one sample."""

    id: str
    prompt_ids: list[int]
    response_ids: list[int]
    """The target's own response."""
    final_ids: list[int]
    """The response after all harmless swaps."""
    mismatches: list[Mismatch]
    """Mismatches in order."""
    answers: MinedAnswers
    cost: MiningCost


class Resample(Record):
    """A line of resamples.jsonl: a continuation after a swap, drawn by chance."""

    id: str
    position: int
    number: int
    """The seed of the draw, from 1 on."""
    same: bool | None
    """True if the answer equals the target's own; null if unknown."""


def read_run(folder: Path) -> RunRecord:
    """Return the settings of a run. Raises InputError if run.json is missing or broken."""
    path = folder / "run.json"
    return RunRecord.read(read_json(path), str(path))


def mined_first(folder: Path) -> bool:
    """Return whether the first samples of a split were mined, and not random ones."""
    path = folder / "run.json"
    return path.exists() and read_json(path).get("drawn", "first") == "first"


def mined_samples(journal: Journal) -> Iterator[MinedSample]:
    """Yield the lines of a mining journal. Raises InputError that names the line and its faulty
    fields."""
    for number, record in journal.numbered():
        yield MinedSample.read(record, f"{journal.path}, line {number}")


def describe(pair: Pair, task: Task, **options: Any) -> dict[str, Any]:
    """Return the identity of a run: versions, models with fingerprints, task and options."""
    import torch
    import transformers

    versions = {
        "lenience": VERSION,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    models = {
        role: {"name": lm.name, "fingerprint": lm.fingerprint, "dtype": lm.dtype}
        for role, lm in pair.models.items()
    }
    return {
        "engine": None if pair.engine_name == OWN else pair.engine_name,
        "versions": versions,
        "pair": pair.name,
        "models": models,
        "tokenizer": pair.target.tokenizer_fingerprint,
        "chat": pair.target.chat.spec,
        "task": task.name,
        "task_version": task.version,
        **options,
    }


def encoded(
    lm: LM, task: Task, sample: Sample, prompt: list[int] | None = None
) -> list[int]:
    """Return the token ids of a sample's prompt, or of a `prompt` in its place. Raises InputError
    that names the sample."""
    try:
        return lm.encode(prompt or sample.prompt)
    except InputError as error:
        mend = (
            ", or leave out long prompts (--skip-long)"
            if isinstance(error, TooLong)
            else ""
        )
        raise InputError(
            f"task {task.name!r}, sample {sample.id}: {error}{mend}"
        ) from None


def check_prompts(pair: Pair, task: Task, samples: Sequence[Sample]) -> None:
    """Raise InputError, before any work, for the first sample whose prompt a model cannot
    read."""
    for sample in samples:
        ids = encoded(pair.target, task, sample)
        if pair.draft is not None:  # both must have room for it
            encoded(pair.draft, task, sample, ids)
