"""Uses of prompts; a certificate needs unused ones. No torch."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from filelock import FileLock

from lenience.core.errors import InputError
from lenience.core.files import digest, read_json
from lenience.core.records import Record
from lenience.runs.journal import Journal
from lenience.runs.record import encoded, mined_samples
from lenience.tasks import Sample, Task, take

if TYPE_CHECKING:
    from lenience.core.protocols import TrainedPart
    from lenience.models.lm import LM
    from lenience.models.prompts import Prompt

RUN_FILES = ("run.json", "journal.jsonl", "uses.jsonl")
"""Files that identify a run folder."""
ALIGNED = "distilled.json"
"""File with a model folder's training record."""


class Use(Record):
    """A line of uses.jsonl: the use of a task's row."""

    id: str
    task: str = ""
    """Task, see `Task.known_as`; "" if unknown."""
    prompt: str
    """The digest of its tokens."""
    source: str = ""
    """The digest of it as the task gives it; "" where it is not known."""
    use: str
    key: str | None
    """Identity of the user, which may use the prompt again."""

    @property
    def row(self) -> tuple[str, str, str]:
        """Return the row's identity."""
        return self.task, self.id, self.prompt


@dataclass(frozen=True)
class Draw:
    """Which rows are drawn."""

    key: str
    """Identity of the user; its earlier prompts come again, in the same order."""
    n: int
    """Maximum number of prompts."""
    use: str
    """Purpose of the prompts."""
    split: str = "train"
    ids: tuple[str, ...] = ()
    """Ids to choose from; None for all."""
    heads: tuple[TrainedPart, ...] = ()
    """The prompts that they were fitted on are used ones, in their own run folders too."""


@dataclass(frozen=True)
class AlignedDraft:
    """A draft model that `lenience fit RUN --drafter model` made, as something fitted."""

    path: str
    prompts: tuple[str, ...]

    @property
    def head(self) -> AlignedDraft:
        return self

    @property
    def fingerprint(self) -> str:
        return digest([*self.prompts])


def aligned(draft: LM | None) -> tuple[TrainedPart, ...]:
    """Return a draft as something fitted, where it is one that was aligned with its target."""
    file = Path(draft.name) / ALIGNED if draft else None
    if file is None or not file.is_file():
        return ()
    return (AlignedDraft(str(file.parent), tuple(read_json(file)["prompts"])),)


def prompt_digest(ids: Sequence[int]) -> str:
    """Return a prompt by its tokens."""
    return digest(list(ids))


def locked(folder: Path) -> FileLock:
    """Return a lock to hold while prompts of a run are drawn and noted and while its certificates
    change places; may be taken again inside."""
    folder.mkdir(parents=True, exist_ok=True)
    return FileLock(folder / "run.lock", is_singleton=True)


def use_of(lm: LM, id: str, prompt: Prompt, *, use: str, key: str, task: str) -> Use:
    """Return the record of a prompt's use."""
    content = prompt_digest(lm.encode(prompt))
    return Use(
        id=id, task=task, prompt=content, source=digest(prompt), use=use, key=key
    )


def note_uses(
    folder: Path,
    lm: LM,
    prompts: Iterable[tuple[str, Prompt]],
    *,
    use: str,
    key: str,
    task: str = "",
) -> None:
    """Record in RUN/uses.jsonl that prompts, each with its id in a task, are about to be used.
    `key` identifies the user, which may use them again."""
    journal = Journal(folder / "uses.jsonl")
    with locked(folder):
        noted = {Use.read(record, str(journal.path)).row for record in journal.resume()}
        fresh = []
        for id, prompt in prompts:
            new = use_of(lm, id, prompt, use=use, key=key, task=task)
            if new.row not in noted:
                noted.add(new.row)
                fresh.append(new)
        journal.write(*(line.to_json() for line in fresh))


def uses_in(run: Path) -> Iterator[Use]:
    """Yield the uses that a run folder records: mining, and others."""
    task = _task_of(run)
    for mined in mined_samples(Journal(run / "journal.jsonl")):
        content = prompt_digest(mined.prompt_ids)
        yield Use(id=mined.id, task=task, prompt=content, use="mining", key=None)
    journal = Journal(run / "uses.jsonl")
    for number, record in journal.numbered():
        yield Use.read(record, f"{journal.path}, line {number}")


def _task_of(run: Path) -> str:
    """Return the task that a run was mined on, as `Task.known_as` puts it; "" where nothing was
    mined."""
    if not (run / "run.json").exists():
        return ""
    mined = read_json(run / "run.json")
    return f"{mined['task']} {mined.get('task_version')}" if "task" in mined else ""


def uses_of(ledger: Path, folder: Path, draw: Draw) -> list[Use]:
    """Return all uses that a draw must respect: those of the ledger and the run, whose keys show
    the draw's own, and those of the heads, wherever they were trained."""
    uses = dict[tuple[str, str, str], Use]()
    for use in (*uses_in(ledger), *uses_in(folder)):
        uses.setdefault(use.row, use)
    for run in _runs_of(draw.heads, folder):
        for use in uses_in(run):
            uses.setdefault(use.row, use.model_copy(update={"key": None}))
    known = {use.prompt for use in uses.values()}
    fitted_on = {
        content for head in draw.heads for content in head.head.prompts or ()
    } - known
    return [
        *uses.values(),
        *(Use(id="", prompt=content, use="fitting", key=None) for content in fitted_on),
    ]


def draw_rows(lm: LM, task: Task, draw: Draw, uses: Iterable[Use]) -> list[Sample]:
    """Return rows of a task: those that are the draw's own, as they were noted, and then fresh ones
    at random, which neither mining nor fitting nor another certificate nor a choice of window has
    used.

    A row is known by its id and task. Of a prompt that was used under other names, as many rows
    count as used; the rest are drawn as often as they come, so that a frequent prompt weighs as it
    does in the data. Groups are drawn as often as single rows, a row of each, and none of which any
    row was used. Raises
    InputError where one of those that are named was used, or none are left.
    """
    samples = take(task, draw.split, None)
    where = f"task {task.name!r}"
    unknown = set(draw.ids) - {sample.id for sample in samples}
    if unknown:
        first = sorted(unknown)[0]
        raise InputError(
            f"prompt {first!r}: {where} has no such prompt in its split {draw.split!r}"
        )
    rows = _Rows(task, samples, uses)
    drawn = rows.own(draw)
    rows.spend_groups(lm)
    spent = Counter[str]()
    named = (
        [sample for sample in samples if sample.id in draw.ids] if draw.ids else samples
    )
    for sample in _units(named, draw.key):
        if len(drawn) >= draw.n:
            break
        if sample.id in rows.by_id and rows.by_id[sample.id].key == draw.key:
            continue  # its own already, for this or another use
        used_for = rows.take(sample, prompt_digest(encoded(lm, task, sample)))
        if used_for is None:
            drawn.append(sample)
        elif draw.ids:
            raise InputError(
                f"prompt {sample.id}: has been used for {used_for}; a certificate "
                "needs unused prompts"
            )
        else:
            spent[used_for] += 1
    if not drawn:
        by_use = ", ".join(f"{count} for {use}" for use, count in spent.most_common())
        raise InputError(
            f"{where}: none of the {len(samples)} prompts of its split {draw.split!r} "
            "is fresh"
            f"{f' (used: {by_use})' if by_use else ''}; name a file of other prompts "
            "(--task), or another --split"
        )
    return drawn[: draw.n]


def _units(samples: Sequence[Sample], key: str) -> list[Sample]:
    """Return rows in random order, of each group a random one."""
    rng = random.Random(key)
    units = dict[str, Sample]()
    for number, sample in enumerate(rng.sample(samples, len(samples))):
        group = group_of(sample)
        units.setdefault(f"row {number}" if group is None else f"group {group}", sample)
    return rng.sample(list(units.values()), len(units))  # large groups had come first


class _Rows:
    """Which rows of a task are used."""

    def __init__(self, task: Task, samples: Sequence[Sample], uses: Iterable[Use]):
        self._task = task
        self._samples = {sample.id: sample for sample in samples}
        self.by_id = dict[str, Use]()
        self._elsewhere: Counter[str] = Counter()
        """Number of rows of a prompt used under other names."""
        self._use_of = dict[str, str]()
        for use in uses:
            if use.task == task.known_as and use.id in self._samples:
                self.by_id.setdefault(use.id, use)
            else:
                self._elsewhere[use.prompt] += 1
                self._use_of.setdefault(use.prompt, use.use)
        self._groups = {group_of(self._samples[id]) for id in self.by_id}

    def spend_groups(self, lm: LM) -> None:
        """Mark the groups of prompts that were used under other names as used."""
        if self._elsewhere:
            grouped = [
                sample
                for sample in self._samples.values()
                if group_of(sample) is not None
            ]
            for sample in grouped:
                if self._elsewhere[prompt_digest(encoded(lm, self._task, sample))]:
                    self._groups.add(group_of(sample))

    def own(self, draw: Draw) -> list[Sample]:
        """Return those that were noted for the same."""
        noted = (
            use
            for use in self.by_id.values()
            if (use.key, use.use) == (draw.key, draw.use)
        )
        return [self._samples[use.id] for use in noted]

    def take(self, sample: Sample, content: str) -> str | None:
        """Return the earlier use of a row; None for an unused one, which is taken now."""
        if sample.id in self.by_id:
            return self.by_id[sample.id].use
        group = group_of(sample)
        if self._elsewhere[content] > 0:
            self._elsewhere[content] -= 1
            return self._use_of[content]
        if group is not None and group in self._groups:
            return f"something else, in its group {group!r}"
        return None


def group_of(sample: Sample) -> str | None:
    """Return a sample's group; None where it is by itself."""
    return getattr(sample, "group", None)


def fitted_in(head: TrainedPart) -> Path | None:
    """Return the run folder that a head was trained in; None if unknown."""
    run = Path(head.path).parent
    return run if any((run / name).exists() for name in RUN_FILES) else None


def _runs_of(heads: Iterable[TrainedPart], folder: Path) -> set[Path]:
    """Return the other run folders. Raises InputError for a head whose training prompts are
    unknown."""
    runs = set()
    for head in heads:
        run = fitted_in(head)
        if run is None:
            if head.head.prompts or head.head.prompts is None:
                continue
            raise InputError(
                f"{head.path}: no run.json, journal.jsonl or uses.jsonl lies next to "
                "it, so its training prompts are unknown and no prompt is known to be "
                "unused; use the head in its own run folder"
            )
        if run.resolve() != folder.resolve():
            runs.add(run)
    return runs
