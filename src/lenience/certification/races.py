"""Races of decoders in heats, and timings that are saved for a machine."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from lenience.certification.speeds import Timed, TimedTurns, take_turns
from lenience.core.errors import RunError
from lenience.core.files import digest, read_json, write_json
from lenience.core.progress import Progress, silent
from lenience.core.records import Record
from lenience.decoding.decoder import Decoder
from lenience.decoding.pair import Pair
from lenience.tasks.base import Messages

HEATS = ((1, 0.5), (1, 0.6), (4, 0.3))
"""Number of turns of each heat, and the share of each group that stays after it. The first heats
are short, as some settings are many times slower than others."""
HEATS_OF_ENGINES = ((4, 0.25),)
"""The same if several engines serve the settings: each heat starts them again."""


class RaceResult(Record):
    """The winner of a group's final."""

    setting: str
    """Decoder as text, see `Decoder.parse`."""
    tokens_per_second: float


@dataclass
class Budget:
    """The minutes within which engines may start to race."""

    minutes: float = math.inf
    late: list[Decoder] = field(default_factory=list)
    """Decoders that did not race, as the minutes were used up."""

    def __post_init__(self) -> None:
        self._ends = time.monotonic() + 60 * self.minutes
        self._longest = 0.0

    def allows(self, served: Sequence[Decoder]) -> bool:
        """Return True if as much time is left as the slowest engine took. The first engine, and
        the target alone, always race."""
        if not _drafts(served) or not self._longest:
            return True
        allowed = time.monotonic() + self._longest <= self._ends
        if not allowed:
            self.late += served
        return allowed

    def took(self, served: Sequence[Decoder], seconds: float) -> None:
        """Record the time that an engine took."""
        if _drafts(served):
            self._longest = max(self._longest, seconds)


def _drafts(served: Sequence[Decoder]) -> bool:
    return any(decoder.window for decoder in served)


@dataclass(frozen=True)
class Turns:
    """Timings of decoders on some prompts, saved for this machine.

    Decoders that one engine serves take turns on each prompt. If they need several engines, the
    engines run one after another. With `returns`, they run in reverse order on the second half of
    the prompts, so that a steady change of the machine's speed affects all alike.
    """

    pair: Pair
    path: Path
    """File name, without the part that identifies a set of decoders."""
    machine: str
    prompts: Sequence[str | Messages]
    batch_size: int = 1
    """Number of prompts that are decoded together in one turn."""
    returns: bool = True

    def take(
        self,
        settings: Iterable[Decoder],
        phase: str,
        progress: Progress = silent,
        budget: Budget | None = None,
    ) -> dict[Decoder, Timed]:
        """Return the timings of decoders, saved or measured now. Decoders for which the budget has
        no time left are missing."""
        settings = list(dict.fromkeys(settings))
        runs = self._runs(settings)
        timed = dict[str, Timed]()
        for number, (part, served) in enumerate(runs, 1):
            engine = f", engine {number} of {len(runs)}" if len(runs) > 1 else ""
            for measured in self._of_engine(
                served, part, phase + engine, progress, budget
            ):
                before = timed.get(measured.setting)
                timed[measured.setting] = (
                    before.joined(measured) if before else measured
                )
        found = dict[Decoder, Timed]()
        for setting in settings:
            if str(setting) in timed:
                found[setting] = timed[str(setting)]
        return found

    def _runs(self, settings: Sequence[Decoder]) -> list[tuple[slice, list[Decoder]]]:
        """Return the decoders of each engine, with their part of the prompts, in running order."""
        by_engine = self.pair.by_engine(settings)
        n = len(self.prompts)
        half = n // self.batch_size // 2 * self.batch_size
        if not self.returns or len(by_engine) == 1 or not half:
            return [(slice(0, n), served) for served in by_engine]
        there = [(slice(0, half), served) for served in by_engine]
        return there + [(slice(half, n), served) for served in reversed(by_engine)]

    def _of_engine(
        self,
        served: Sequence[Decoder],
        part: slice,
        phase: str,
        progress: Progress,
        budget: Budget | None,
    ) -> list[Timed]:
        """Return the timings of the decoders of one engine on a part of the prompts, saved or
        measured now; none if the budget has no time left."""
        known = self._known(served, part)
        if known is not None:
            return known
        if budget and not budget.allows(served):
            return []
        began = time.monotonic()
        taken = take_turns(
            self.pair,
            served,
            self.prompts[part],
            phase,
            progress,
            batch_size=self.batch_size,
        )
        if budget:
            budget.took(served, time.monotonic() - began)
        timed = list(taken.values())
        turns = TimedTurns(machine=self.machine, timed=timed)
        write_json(self._path(served, part), turns.to_json())
        return timed

    def known(self, settings: Sequence[Decoder]) -> list[Timed] | None:
        """Return the saved timings; None if some decoders have not been timed on this machine."""
        settings = list(dict.fromkeys(settings))
        runs = self._runs(settings)
        if any(self._known(served, part) is None for part, served in runs):
            return None
        return list(self.take(settings, "").values())

    def _known(self, served: Sequence[Decoder], part: slice) -> list[Timed] | None:
        path = self._path(served, part)
        turns = TimedTurns.read(read_json(path), str(path)) if path.exists() else None
        return turns.timed if turns and turns.machine == self.machine else None

    def _path(self, served: Sequence[Decoder], part: slice) -> Path:
        identity: list[object] = [*map(str, served)]
        if (part.start, part.stop) != (0, len(self.prompts)):
            identity += [part.start, part.stop]
        return self.path.with_name(f"{self.path.name}-{digest(identity)}.json")


@dataclass(frozen=True)
class Race:
    """A race of groups of decoders on this machine."""

    pair: Pair
    place: Path
    """Folder of the timings."""
    machine: str
    prompts: Sequence[str | Messages]
    batch_size: int = 1

    def run(
        self,
        groups: Sequence[Sequence[Decoder]],
        budget: Budget,
        progress: Progress = silent,
    ) -> list[RaceResult]:
        """Return the fastest decoder of each group.

        In heats on a few prompts the slower decoders of each group drop out. The rest run on all
        other prompts, and only these timings are reported: decoders that survive a heat by luck
        look too fast in it. The budget limits the first heat, in which all decoders run. Raises
        RunError if it is used up before each group has raced.
        """
        left = list(map(list, groups))
        heats = heats_of(self.pair, groups)
        first = 0
        for heat, (turns, share) in enumerate(heats, 1):
            last = first + turns * self.batch_size
            timed = self._turns(f"heat-{heat}", first, last).take(
                itertools.chain.from_iterable(left),
                f"racing, heat {heat}",
                progress,
                budget if heat == 1 else None,
            )
            left = [_best(group, timed, share, budget) for group in left]
            first = last
        timed = self._turns("final", first, len(self.prompts)).take(
            itertools.chain.from_iterable(left), "racing, final", progress
        )
        won = [_best(group, timed, 0.0, budget)[0] for group in left]
        found = list[RaceResult]()
        for setting in won:
            found.append(
                RaceResult(
                    setting=str(setting),
                    tokens_per_second=timed[setting].tokens_per_second,
                )
            )
        return found

    def _turns(self, name: str, first: int, last: int) -> Turns:
        return Turns(
            self.pair,
            self.place / name,
            self.machine,
            self.prompts[first:last],
            self.batch_size,
            returns=False,
        )


def heats_of(
    pair: Pair, groups: Iterable[Iterable[Decoder]]
) -> tuple[tuple[int, float], ...]:
    """Return the number of turns of each heat, and the share that stays after it."""
    settings = list(dict.fromkeys(itertools.chain.from_iterable(groups)))
    return HEATS if len(pair.by_engine(settings)) == 1 else HEATS_OF_ENGINES


def _best(
    group: Sequence[Decoder], timed: dict[Decoder, Timed], share: float, budget: Budget
) -> list[Decoder]:
    """Return a share of a group, the fastest first, and at least one decoder. Raises RunError if
    none was timed."""
    raced = [setting for setting in group if setting in timed]
    if not raced:
        raise RunError(
            f"--minutes {budget.minutes:g}: were used up before {group[0]} raced; give "
            "more, or fewer windows and drafters"
        )
    raced.sort(key=lambda setting: -timed[setting].tokens_per_second)
    return raced[: max(1, math.ceil(share * len(raced)))]
