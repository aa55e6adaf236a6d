"""Which prompts have been used for what: a certificate needs ones that nothing was chosen on. No
torch."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from filelock import FileLock

from lenience.core.errors import InputError
from lenience.core.files import digest, read_json
from lenience.core.records import Record
from lenience.runs.journal import Journal
from lenience.runs.record import mined_samples
from lenience.tasks import Sample, Task, take

if TYPE_CHECKING:
    from lenience.heads.head import Learned
    from lenience.models.lm import LM, Prompt

RUN_FILES = ("run.json", "journal.jsonl", "uses.jsonl")
"""What says of a folder that it is a run's."""


class Use(Record):
    """A line of uses.jsonl: what a prompt was used for."""

    id: str
    task: str = ""
    """As `Task.known_as` puts it; "" where it is not known."""
    prompt: str
    """The digest of its tokens."""
    use: str
    key: str | None
    """Of what used it, which may use it again."""


@dataclass(frozen=True)
class Draw:
    """Which prompts are drawn."""

    key: str
    """Of what draws them: what it has used before is its own, and comes in the same order."""
    n: int
    """How many at most."""
    split: str = "train"
    seed: int = 0
    ids: tuple[str, ...] = ()
    """None but these, where any are named."""
    heads: tuple[Learned, ...] = ()
    """The prompts that they were fitted on are used ones, in their own run folders too."""


def prompt_digest(ids: Sequence[int]) -> str:
    """A prompt by its tokens."""
    return digest(list(ids))


def locked(folder: Path) -> FileLock:
    """A lock to hold while prompts of a run are drawn and noted and while its certificates change
    places; may be taken again inside."""
    folder.mkdir(parents=True, exist_ok=True)
    return FileLock(folder / "run.lock", is_singleton=True)


def note_uses(
    folder: Path,
    lm: LM,
    prompts: Iterable[tuple[str, Prompt]],
    *,
    use: str,
    key: str,
    task: str = "",
) -> None:
    """Record in RUN/uses.jsonl what prompts, each with its id in a task, are about to be used for.
    `key` is of what uses them, which may use them again."""
    journal = Journal(folder / "uses.jsonl")
    with locked(folder):
        noted = {record["prompt"] for record in journal.resume()}
        uses = []
        for id, prompt in prompts:
            content = prompt_digest(lm.encode(prompt))
            if content not in noted:
                noted.add(content)
                uses.append(Use(id=id, task=task, prompt=content, use=use, key=key))
        journal.append(*(one.to_json() for one in uses))


class Uses:
    """What prompts have been used for, by the records of a run folder and of `others` whose heads
    are used with it. A prompt is known by its tokens or, as a chat template may tell the date, by
    its task and its id."""

    def __init__(self, folder: Path, others: Iterable[Path] = (), fitted_on: Iterable[str] = ()):
        """`fitted_on`: digests of prompts that heads say they were fitted on."""
        self._by_content: dict[str, Use] = {}
        self._by_id: dict[tuple[str, str], Use] = {}
        for run in (folder, *others):
            task = _task_of(run)
            for mined in mined_samples(Journal(run / "journal.jsonl")):
                content = prompt_digest(mined.prompt_ids)
                self._add(Use(id=mined.id, task=task, prompt=content, use="mining", key=None))
            journal = Journal(run / "uses.jsonl")
            for number, record in journal.numbered():
                use = Use.read(record, f"{journal.path}, line {number}")
                self._add(use if run == folder else use.model_copy(update={"key": None}))
        for content in fitted_on:
            self._add(Use(id="", prompt=content, use="fitting", key=None))

    def _add(self, use: Use) -> None:
        self._by_content.setdefault(use.prompt, use)
        if use.task:
            self._by_id.setdefault((use.task, use.id), use)

    def of(self, task: str, id: str, content: str) -> Use | None:
        """The first use of a prompt; None where it is fresh."""
        return self._by_content.get(content) or self._by_id.get((task, id))


def _task_of(run: Path) -> str:
    """The task that a run was mined on, as `Task.known_as` puts it; "" where nothing was mined."""
    if not (run / "run.json").exists():
        return ""
    mined = read_json(run / "run.json")
    return f"{mined['task']} {mined.get('task_version')}" if "task" in mined else ""


def fresh(lm: LM, task: Task, folder: Path, draw: Draw) -> list[Sample]:
    """Prompts, drawn at random, that neither mining nor fitting nor an earlier certificate nor a
    choice of window has used, in the run or in those that its heads come from. Raises InputError
    where one of those that are named was used, or none are left."""
    fitted_on = [content for head in draw.heads for content in head.head.prompts]
    uses = Uses(folder, _runs_of(draw.heads, folder), fitted_on)
    samples = take(task, draw.split, None)
    where = f"task {task.name!r}"
    if unknown := set(draw.ids) - {sample.id for sample in samples}:
        first = sorted(unknown)[0]
        raise InputError(f"prompt {first!r}: {where} has no such one in its split {draw.split!r}")
    random.Random(draw.seed).shuffle(samples)
    drawn: dict[str, Sample] = {}
    for sample in samples:
        if len(drawn) == draw.n or (draw.ids and sample.id not in draw.ids):
            continue
        content = prompt_digest(lm.encode(sample.prompt))
        use = uses.of(task.known_as, sample.id, content)
        _refuse_overlap(sample, use, draw.split)
        if content not in drawn and (use is None or use.key == draw.key):
            drawn[content] = sample
        elif draw.ids:
            why = "this certificate already" if use is None or use.key == draw.key else use.use
            raise InputError(
                f"prompt {sample.id}: has been used for {why}; a certificate needs fresh ones"
            )
    if not drawn:
        raise InputError(
            f"{where}: none of the {len(samples)} prompts of its split {draw.split!r} is fresh; "
            "name a file of others (--task), or another --split"
        )
    return list(drawn.values())


def _refuse_overlap(sample: Sample, use: Use | None, split: str) -> None:
    """Raise InputError where a sample of a test split was mined under another name."""
    if use and use.use == "mining" and use.id != sample.id and split != "train":
        raise InputError(
            f"overlapping splits: {sample.id} of {split!r} is {use.id}, which was mined; separate "
            "them"
        )


def fitted_in(head: Learned) -> Path | None:
    """The run folder that a head was fitted in; None where nothing beside it says so."""
    run = Path(head.path).parent
    return run if any((run / name).exists() for name in RUN_FILES) else None


def _runs_of(heads: Iterable[Learned], folder: Path) -> set[Path]:
    """The other run folders. Raises InputError for a head of which nothing says what it was fitted
    on."""
    runs = set()
    for head in heads:
        run = fitted_in(head)
        if run is None:
            if head.head.prompts:
                continue
            raise InputError(
                f"{head.path}: no run.json, journal.jsonl or uses.jsonl lies beside it to say "
                "what it was fitted on, so no prompt is known to be fresh; use the head in the "
                "run folder that it was fitted in"
            )
        if run.resolve() != folder.resolve():
            runs.add(run)
    return runs
