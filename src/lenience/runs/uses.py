"""Which prompts have been used for what: a certificate needs ones that nothing was chosen on. No torch."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from filelock import FileLock

from lenience.core.errors import InputError
from lenience.core.files import read_json
from lenience.runs.journal import Journal
from lenience.tasks import Sample, Task, known_as, take

if TYPE_CHECKING:
    from lenience.heads.head import Learned
    from lenience.models.lm import LM, Prompt


def digest(ids: Sequence[int]) -> str:
    """A prompt by its tokens."""
    return hashlib.blake2b(json.dumps(list(ids)).encode(), digest_size=8).hexdigest()


def locked(folder: Path) -> FileLock:
    """Held while prompts of a run are drawn and noted and while its certificates change places; may be taken again inside."""
    folder.mkdir(parents=True, exist_ok=True)
    return FileLock(folder / "run.lock", is_singleton=True)


def note_uses(folder: Path, lm: LM, prompts: Iterable[tuple[str, Prompt]], use: str, key: str, task: str = "") -> None:
    """Record in RUN/uses.jsonl what prompts, each with its id in a task, are about to be used for. `key` is of what uses them,
    which may use them again."""
    journal = Journal(folder / "uses.jsonl")
    with locked(folder):
        seen = {record["prompt"] for record in journal.resume()}
        first = {content: id for id, prompt in prompts if (content := digest(lm.encode(prompt))) not in seen}
        journal.append(*({"id": id, "task": task, "prompt": content, "use": use, "key": key} for content, id in first.items()))


class Uses:
    """What prompts have been used for, by the records of a run folder and of `others` whose heads are used with it. A prompt is
    known by its tokens or, as a chat template may tell the date, by its task and its id."""

    def __init__(self, folder: Path, others: Iterable[Path] = ()):
        self._by_content, self._by_id = dict[str, dict[str, Any]](), dict[tuple[str, str], dict[str, Any]]()
        for run in (folder, *others):
            mined = read_json(run / "run.json") if (run / "run.json").exists() else {}
            task = f"{mined['task']} {mined.get('task_version')}" if "task" in mined else ""  # as `known_as` puts it
            for record in Journal(run / "journal.jsonl"):
                content = digest(record["prompt_ids"])
                self._add({"id": record["id"], "task": task, "prompt": content, "use": "mining", "key": None})
            for use in Journal(run / "uses.jsonl"):
                self._add(use if run == folder else {**use, "key": None})

    def _add(self, use: dict[str, Any]) -> None:
        self._by_content.setdefault(use["prompt"], use)
        if use.get("task"):
            self._by_id.setdefault((use["task"], use["id"]), use)

    def of(self, task: str, id: str, content: str) -> dict[str, Any] | None:
        """The first use of a prompt, whose `key` is of what may use it again."""
        return self._by_content.get(content) or self._by_id.get((task, id))


def fresh(
    lm: LM, task: Task, folder: Path, key: str, n: int, *,
    split: str = "train", seed: int = 0, ids: Sequence[str] = (), learned: Iterable[Learned] = (),
) -> list[Sample]:  # fmt: skip
    """Up to n prompts, drawn at random, that neither mining nor fitting nor an earlier certificate nor a choice of window has
    used, in the run or in those that the `learned` heads come from; what this key has used before is its own, and comes in
    the same order. Raises InputError where one of the `ids` was used, or none are left."""
    spent = Uses(folder, _runs_of(learned, folder))
    samples = take(task, split, None)
    if unknown := set(ids) - {sample.id for sample in samples}:
        raise InputError(f"prompt {sorted(unknown)[0]!r}: task {task.name!r} has no such one in its split {split!r}")
    random.Random(seed).shuffle(samples)
    found = dict[str, Sample]()
    for sample in samples:
        if len(found) == n or (ids and sample.id not in ids):
            continue
        content = digest(lm.encode(sample.prompt))
        use = spent.of(known_as(task), sample.id, content) or {"use": "this certificate already", "key": key}
        if use["use"] == "mining" and use["id"] != sample.id and split != "train":
            raise InputError(f"overlapping splits: {sample.id} of {split!r} is {use['id']}, which was mined; separate them")
        if use["key"] != key or content in found:
            if ids:
                raise InputError(f"prompt {sample.id}: has been used for {use['use']}; a certificate needs fresh ones")
            continue
        found[content] = sample
    if not found:
        raise InputError(
            f"task {task.name!r}: none of the {len(samples)} prompts of its split {split!r} is fresh; name a file of "
            "others (--task), or another --split"
        )
    return list(found.values())


def fitted_in(head: Learned) -> Path | None:
    """The run folder that a head was fitted in; None where nothing beside it says so."""
    run = Path(head.path).parent
    return run if any((run / name).exists() for name in ("run.json", "journal.jsonl", "uses.jsonl")) else None


def _runs_of(learned: Iterable[Learned], folder: Path) -> set[Path]:
    """The other run folders. Raises InputError for a head of which nothing says what it was fitted on."""
    found = set()
    for head in learned:
        run = fitted_in(head)
        if run is None:
            raise InputError(
                f"{head.path}: no run.json, journal.jsonl or uses.jsonl lies beside it to say what it was fitted on, so no "
                "prompt is known to be fresh; use the head in the run folder that it was fitted in"
            )
        found |= {run} if run.resolve() != folder.resolve() else set()
    return found
