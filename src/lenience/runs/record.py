"""Records of a run folder: its settings and its mined samples."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field

from lenience.core.files import read_json
from lenience.core.records import Record
from lenience.core.version import VERSION
from lenience.decoding.options import OWN
from lenience.runs.journal import Journal
from lenience.tasks import Task
from lenience.tasks.base import AnswerValue

if TYPE_CHECKING:
    from lenience.decoding.pair import Pair


class ModelRecord(Record):
    """The identity of a model in a run."""

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
    """Sampling temperature of target and draft; 0 is greedy."""
    top_k: int | None = None
    top_p: float | None = None
    draw_seed: int | None = None
    drawn: str | None = None
    """Choice of samples from the split: "random" (by the seed) or "first"."""
    drafter: dict[str, Any] | None = None
    """Drafter whose tokens were swapped in, if not the draft model, see `DrafterSpec.record`."""
    answers_only: bool = False
    """True if the target's answers were written without a search."""
    labels: dict[str, Any] | None = None
    """Method of labelling mismatches and its limit, if not by answers."""
    policy: dict[str, Any] | None = None
    """Setting and head fingerprints of the decoder whose answers were mined instead of the
    target's."""


class Mismatch(Record):
    """A position, counted in new tokens from 0, at which the draft proposes another token than the
    target's."""

    position: int
    target_token: int
    draft_token: int
    important: bool | None
    """True if the draft's token changes the answer; None if the target's own response has none."""
    score: float | None = Field(default=None, exclude_if=lambda score: score is None)
    """Score in nats of a label by likelihood, see `lenience.mining.by_likelihood`."""


class MinedAnswers(Record):
    """The answers found in a sample's responses, and its reference."""

    target: AnswerValue
    final: AnswerValue
    reference: AnswerValue


class MiningCost(Record):
    """Cost of a sample's search, counted as if it ran alone; only `seconds` are divided among
    concurrent searches."""

    target_passes: int
    target_tokens: int
    unused_tokens: int = 0
    """Number of target tokens in continuations that turned out not to be needed."""
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
    """A line of resamples.jsonl: a sampled continuation after a swap."""

    id: str
    position: int
    number: int
    """Seed of the continuation, counted from 1."""
    same: bool | None
    """True if the answer equals the target's own; null if unknown."""


def read_run(folder: Path) -> RunRecord:
    """Return the settings of a run. Raises InputError if run.json is missing or broken."""
    path = folder / "run.json"
    return RunRecord.read(read_json(path), str(path))


def mined_first(folder: Path) -> bool:
    """Return True if a run mined the first samples of its split instead of random ones."""
    path = folder / "run.json"
    return path.exists() and read_json(path).get("drawn", "first") == "first"


def mined_samples(journal: Journal) -> Iterator[MinedSample]:
    """Yield the records of a mining journal. Raises InputError with the line and its faulty
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
    models = {}
    for role, lm in pair.models.items():
        models[role] = {
            "name": lm.name,
            "fingerprint": lm.fingerprint,
            "dtype": lm.dtype,
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
