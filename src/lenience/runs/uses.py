"""Prompts of a task and the records of their use; a certificate needs unused prompts. No torch."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from filelock import FileLock

from lenience.core.errors import InputError, TooLong
from lenience.core.files import digest, read_json
from lenience.core.records import Record
from lenience.runs.journal import Journal
from lenience.runs.record import mined_samples
from lenience.tasks import Sample, Task, take

if TYPE_CHECKING:
    from lenience.core.protocols import TrainedPart
    from lenience.decoding.pair import Pair
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
    """Digest of the prompt's token ids."""
    source: str = ""
    """Digest of the prompt as the task returns it; "" if unknown."""
    use: str
    key: str | None
    """Identity of the question or command that may use the prompt again; None if nothing may."""

    @property
    def row(self) -> tuple[str, str, str]:
        """Return the row's identity: task, id and prompt digest."""
        return self.task, self.id, self.prompt


@dataclass(frozen=True)
class Draw:
    """A request for unused rows of a task."""

    key: str
    """Identity of the question; its earlier prompts are drawn again, in the same order."""
    n: int
    """Maximum number of prompts."""
    use: str
    """Purpose of the prompts."""
    split: str = "train"
    ids: tuple[str, ...] = ()
    """Ids to choose from; None for all."""
    heads: tuple[TrainedPart, ...] = ()
    """Heads whose training prompts count as used, wherever their run folders are."""


@dataclass(frozen=True)
class AlignedDraft:
    """A draft model trained by `lenience fit RUN --drafter model`, as a `TrainedPart`."""

    path: str
    prompts: tuple[str, ...]

    @property
    def head(self) -> AlignedDraft:
        return self

    @property
    def fingerprint(self) -> str:
        return digest([*self.prompts])


def aligned(draft: LM | None) -> tuple[TrainedPart, ...]:
    """Return the draft as a `TrainedPart` if `lenience fit` aligned it with its target; otherwise
    an empty tuple."""
    file = Path(draft.name) / ALIGNED if draft else None
    if file is None or not file.is_file():
        return ()
    return (AlignedDraft(str(file.parent), tuple(read_json(file)["prompts"])),)


def encoded(task: Task, sample: Sample, lm: LM, draft: LM | None = None) -> list[int]:
    """Return the token ids of a sample's prompt, which must leave room in the contexts of `lm` and
    of a `draft` that reads the same ids. Raises InputError with the sample's id."""
    try:
        ids = lm.encode(sample.prompt)
        return ids if draft is None else draft.encode(ids)
    except InputError as error:
        fix = (
            ", or leave out long prompts (--skip-long)"
            if isinstance(error, TooLong)
            else ""
        )
        raise InputError(
            f"task {task.name!r}, sample {sample.id}: {error}{fix}"
        ) from None


def check_prompts(pair: Pair, task: Task, samples: Sequence[Sample]) -> None:
    """Raise InputError for the first sample whose prompt a model cannot process, such as one that
    exceeds its context."""
    draft = pair.draft if pair.shares_vocabulary else None
    for sample in samples:
        encoded(task, sample, pair.target, draft)


def prompt_digest(ids: Sequence[int]) -> str:
    """Return the digest of a prompt's token ids."""
    return digest(list(ids))


def locked(folder: Path) -> FileLock:
    """Return the lock of a run folder, to hold while prompts are drawn and recorded and while
    certificates are moved. The lock is reentrant."""
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
    """Record prompts, given as (id, prompt), as used in RUN/uses.jsonl. Must be called before they
    are used. `key` identifies the question, which may use them again."""
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
    """Yield all uses recorded in a run folder: its mined samples, then the lines of uses.jsonl.
    Raises InputError for a broken line."""
    task = _task_of(run)
    for mined in mined_samples(Journal(run / "journal.jsonl")):
        content = prompt_digest(mined.prompt_ids)
        yield Use(id=mined.id, task=task, prompt=content, use="mining", key=None)
    journal = Journal(run / "uses.jsonl")
    for number, record in journal.numbered():
        yield Use.read(record, f"{journal.path}, line {number}")


def _task_of(run: Path) -> str:
    """Return the task that a run was mined on, in the form of `Task.known_as`; "" if nothing was
    mined."""
    if not (run / "run.json").exists():
        return ""
    mined = read_json(run / "run.json")
    return f"{mined['task']} {mined.get('task_version')}" if "task" in mined else ""


def uses_of(ledger: Path, folder: Path, draw: Draw) -> list[Use]:
    """Return all uses that a draw must respect: those in the ledger and the run folder, and the
    training prompts of the draw's heads. The key identifies the draw's own uses."""
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
    """Return up to `draw.n` rows of a task: first the rows already recorded for this draw, in
    order, then unused rows at random. Mining, training, other certificates and window selection are
    uses.

    A row is identified by task and id. If a prompt was used on k rows of another task or id, k of
    its rows count as used here. Its other rows may be drawn, so a frequent prompt keeps its weight
    in the data. A group is drawn as often as a single row, and yields one random row; a group with
    a used row is left out. Raises InputError if an id in `draw.ids` is unknown or used, or no row
    is left.
    """
    samples = take(task, draw.split, None)
    where = f"task {task.name!r}"
    unknown = set(draw.ids) - {sample.id for sample in samples}
    if unknown:
        first = sorted(unknown)[0]
        raise InputError(
            f"prompt {first!r}: {where} has no such prompt in its split {draw.split!r}"
        )
    rows = _Rows(lm, task, samples, uses)
    drawn = rows.own(draw)
    rows.spend_groups()
    spent = Counter[str]()
    named = (
        [sample for sample in samples if sample.id in draw.ids] if draw.ids else samples
    )
    for sample in _units(named, draw.key):
        if len(drawn) >= draw.n:
            break
        if sample.id in rows.by_id and rows.by_id[sample.id].key == draw.key:
            continue  # the draw's own row already, for this or another use
        used_for = rows.take(sample)
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
    """Return the rows in random order, with one random row of each group."""
    rng = random.Random(key)
    units = dict[str, Sample]()
    for number, sample in enumerate(rng.sample(samples, len(samples))):
        group = group_of(sample)
        units.setdefault(f"row {number}" if group is None else f"group {group}", sample)
    return rng.sample(list(units.values()), len(units))  # large groups came first


class _Rows:
    """The used rows of a task."""

    def __init__(
        self, lm: LM, task: Task, samples: Sequence[Sample], uses: Iterable[Use]
    ):
        self._lm = lm
        self._task = task
        self._samples = {sample.id: sample for sample in samples}
        self.by_id = dict[str, Use]()
        self._elsewhere: Counter[str] = Counter()
        """Number of rows used under another task or id, by prompt."""
        self._use_of = dict[str, str]()
        for use in uses:
            if use.task == task.known_as and use.id in self._samples:
                self.by_id.setdefault(use.id, use)
            else:
                self._elsewhere[use.prompt] += 1
                self._use_of.setdefault(use.prompt, use.use)
        self._groups = {group_of(self._samples[id]) for id in self.by_id}

    def spend_groups(self) -> None:
        """Mark a group as used if one of its prompts was used under another task or id."""
        if self._elsewhere:
            grouped = []
            for sample in self._samples.values():
                if group_of(sample) is not None:
                    grouped.append(sample)
            for sample in grouped:
                if self._elsewhere[self._content(sample)]:
                    self._groups.add(group_of(sample))

    def own(self, draw: Draw) -> list[Sample]:
        """Return the rows already recorded for the draw's key and use."""
        noted = (
            use
            for use in self.by_id.values()
            if (use.key, use.use) == (draw.key, draw.use)
        )
        return [self._samples[use.id] for use in noted]

    def _content(self, sample: Sample) -> str:
        return prompt_digest(encoded(self._task, sample, self._lm))

    def take(self, sample: Sample) -> str | None:
        """Return the earlier use of a row, or None if the row is unused. A use of the same prompt
        under another task or id excludes one row only."""
        if sample.id in self.by_id:
            return self.by_id[sample.id].use
        group = group_of(sample)
        content = self._content(sample)
        if self._elsewhere[content] > 0:
            self._elsewhere[content] -= 1
            return self._use_of[content]
        if group is not None and group in self._groups:
            return f"something else, in its group {group!r}"
        return None


def group_of(sample: Sample) -> str | None:
    """Return a sample's group; None if it has none."""
    return getattr(sample, "group", None)


def fitted_in(head: TrainedPart) -> Path | None:
    """Return the run folder that a head was trained in; None if unknown."""
    run = Path(head.path).parent
    return run if any((run / name).exists() for name in RUN_FILES) else None


def _runs_of(heads: Iterable[TrainedPart], folder: Path) -> set[Path]:
    """Return the run folders other than `folder` in which heads were trained. Raises InputError for
    a head whose training prompts are unknown."""
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
