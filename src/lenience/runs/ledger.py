"""Ledger of every certification attempt: prompts used and error budget spent. No torch.

One ledger covers all run folders of a user.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from filelock import FileLock

from lenience.core.errors import InputError
from lenience.core.files import data_folder, digest
from lenience.core.records import Record
from lenience.runs.journal import Journal, JournalTail
from lenience.runs.uses import Draw, Use, draw_rows, locked, use_of, uses_in, uses_of
from lenience.tasks import Sample, Task, take

if TYPE_CHECKING:
    from lenience.models.lm import LM

FIRST = 0.9
"""Share of the error budget that the first attempt gets."""


class Attempt(Record):
    """A line of attempts.jsonl: an attempt to certify."""

    key: str
    """Digest that identifies the question."""
    pair: str
    """Digest of the fingerprints of models and tokenizer."""
    task: str
    """Task, see `Task.label`."""
    number: int
    """Number of the attempt among those on the same kind of prompts, counted from 1."""

    @property
    def share(self) -> float:
        """Return the share of the error budget that this attempt may spend. The shares of all
        attempts add up to 1, so the probability that any certificate is wrong is at most the budget
        (alpha-spending, Foster and Stine 2008; for the familywise error Tian and Ramdas 2021,
        section 2)."""
        if self.number == 1:
            return FIRST
        return (1 - FIRST) * 6 / (math.pi * (self.number - 1)) ** 2


class Outcome(Record):
    """A line of outcomes.jsonl: the state of a certified setting."""

    key: str
    pair: str
    setting: str
    """Spec of the decoder, without its heads' folders."""
    binds: str
    """Digest of the bound facts, except the data."""
    max_drop: float
    confidence: float
    n: int
    folder: str
    """Folder of the certificate."""
    withdrawn: str | None = None
    """Reason for the withdrawal; None while in force."""


@dataclass(frozen=True)
class Drawn:
    """Rows of a draw at one time."""

    rows: list[Sample]
    others: int
    """Number of rows that were used for anything but the draw."""


class Ledger:
    """A pair's ledger in the user's data folder, with a copy of each run's part in its run folder.
    Entries of both are counted."""

    def __init__(
        self,
        folder: Path | None,
        fingerprints: Mapping[str, str],
        home: Path | None = None,
    ):
        """Open the ledger of a pair. `folder` is the run folder, if any; `home` replaces the user's
        data folder."""
        self.pair = digest(dict(fingerprints), sort_keys=True)
        target = {}
        for part, value in fingerprints.items():
            if part != "draft":
                target[part] = value
        # a prompt that was used with another draft counts as used
        self.place = (home or data_folder()) / "ledger" / digest(target, sort_keys=True)
        self.folder = folder or self.place
        self._uses = {place: _Uses(place) for place in (self.place, self.folder)}

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hold the ledger's lock, so that no other process draws or counts prompts. Calls may be
        nested. Raises InputError if the data folder cannot be written."""
        try:
            self.place.mkdir(parents=True, exist_ok=True)
            (self.place / "lock").touch()
        except OSError as error:
            fix = "name a writable folder (LENIENCE_HOME)"
            raise InputError(
                f"{self.place}: cannot be written ({error}); {fix}"
            ) from None
        with FileLock(self.place / "lock", is_singleton=True), locked(self.folder):
            self._merge()
            yield

    def _merge(self) -> None:
        """Add the run folder's entries to the user's ledger."""
        ours = self._uses[self.place]
        brought = self._uses[self.folder]
        ours.read()
        ours.add(outcome for outcome in brought.read() if outcome.row not in ours.rows)
        for name in ("attempts.jsonl", "outcomes.jsonl"):
            known = Journal(self.place / name).resume()
            for record in Journal(self.folder / name).resume():
                if record not in known:
                    Journal(self.place / name).write(record)

    def rows(self, lm: LM, task: Task, draw: Draw) -> list[Sample]:
        """Return the rows of a draw, as `draw_rows` does."""
        with self.held():
            return draw_rows(lm, task, draw, uses_of(self.place, self.folder, draw))

    def drawn(
        self, lm: LM, task: Task, draw: Draw, before: Drawn | None = None
    ) -> Drawn:
        """Return the rows of a draw; those drawn `before` if nothing else has used rows since."""
        with self.held():
            uses = self._uses[self.place].rows.values()
            others = sum((use.key, use.use) != (draw.key, draw.use) for use in uses)
            if before and before.others == others:
                return before
            return Drawn(self.rows(lm, task, draw), others)

    def note(
        self, lm: LM, samples: Sequence[Sample], *, use: str, key: str, task: Task
    ) -> None:
        """Record rows as used. Must be called before they are used."""
        prompts = [(sample.id, sample.prompt) for sample in samples]
        with self.held():
            noted = []
            for prompt in prompts:
                noted.append(use_of(lm, *prompt, use=use, key=key, task=task.known_as))
            for uses in self._uses.values():
                uses.add(entry for entry in noted if entry.row not in uses.rows)

    def attempt(
        self, key: str, task: Task, split: str, *, counts: bool = True
    ) -> Attempt:
        """Return the attempt that a question is. Attempts are numbered across all questions on a
        task with this label, or that used prompts of this split. A new attempt is recorded only if
        it `counts`."""
        with self.held():
            found = self._attempt(key, task, split)
            if counts:
                for folder in (self.place, self.folder):
                    journal = Journal(folder / "attempts.jsonl")
                    if found.to_json() not in journal.resume():
                        journal.write(found.to_json())
        return found

    def _attempt(self, key: str, task: Task, split: str) -> Attempt:
        journal = Journal(self.place / "attempts.jsonl")
        known = [Attempt.read(record, str(journal.path)) for record in journal.resume()]
        found = next((outcome for outcome in known if outcome.key == key), None)
        if found is None:
            alike = self._alike(known, task, split)
            number = max([len(alike), *(outcome.number for outcome in alike)]) + 1
            found = Attempt(key=key, pair=self.pair, task=task.label, number=number)
        return found

    def _alike(self, known: Iterable[Attempt], task: Task, split: str) -> list[Attempt]:
        sources = {digest(sample.prompt) for sample in take(task, split, None)}
        on_these = {use.key for use in uses_in(self.place) if use.source in sources}
        ours = (outcome for outcome in known if outcome.pair == self.pair)
        found = list[Attempt]()
        for outcome in ours:
            if outcome.task == task.label or outcome.key in on_these:
                found.append(outcome)
        return found

    def outcomes(self) -> list[Outcome]:
        """Return the latest outcome of each question and setting; a withdrawal is final."""
        journal = Journal(self.place / "outcomes.jsonl")
        found = dict[tuple[str, str], Outcome]()
        for record in journal.resume():
            outcome = Outcome.read(record, str(journal.path))
            before = found.get((outcome.key, outcome.setting))
            if before is None or outcome.withdrawn or not before.withdrawn:
                found[outcome.key, outcome.setting] = outcome
        return list(found.values())

    def keep(self, outcome: Outcome) -> None:
        """Record an outcome or its withdrawal, unless it is recorded already."""
        for folder in (self.place, self.folder):
            journal = Journal(folder / "outcomes.jsonl")
            if outcome.to_json() not in journal.resume():
                journal.write(outcome.to_json())


class _Uses:
    """The entries of a folder's uses.jsonl, read incrementally."""

    def __init__(self, folder: Path):
        self._tail = JournalTail(folder / "uses.jsonl")
        self.rows = dict[tuple[str, str, str], Use]()

    def read(self) -> list[Use]:
        """Return the entries added since the last call."""
        where = str(self._tail.journal.path)
        new = [Use.read(record, where) for record in self._tail.new()]
        for outcome in new:
            self.rows.setdefault(outcome.row, outcome)
        return new

    def add(self, uses: Iterable[Use]) -> None:
        lines = [use.to_json() for use in uses]
        if lines:
            self._tail.journal.write(*lines)
            self.read()
