"""Find and certify the fastest decoding on this machine.

Settings of rule, window, stop and drafter race on separate prompts and are tested from strict to
lenient. Settings that pass are timed on further prompts to choose the fastest. The last prompts
measure the gain.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from pathlib import Path

from pydantic import Field

from lenience.certification.calibration import check_question, warn_of_too_few
from lenience.certification.certificate import Certificate
from lenience.certification.certify import certify
from lenience.certification.question import CertifyConfig
from lenience.certification.races import Budget, Race, RaceResult, Turns, heats_of
from lenience.certification.speeds import Speeds, Timed
from lenience.core.errors import InputError
from lenience.core.files import digest, read_json, write_json
from lenience.core.progress import Progress, silent
from lenience.core.protocols import Rule
from lenience.core.records import Record
from lenience.decoding.decoder import Decoder
from lenience.decoding.machine import machine
from lenience.decoding.pair import Pair
from lenience.decoding.task_models import task_for
from lenience.drafting.base import DrafterSpec
from lenience.drafting.eagle import Eagle
from lenience.drafting.heads import Blockwise, Medusa
from lenience.drafting.registry import DRAFTERS
from lenience.drafting.stops import Stop
from lenience.runs.answers import for_task
from lenience.runs.ledger import Ledger
from lenience.runs.uses import Draw, aligned, check_prompts
from lenience.tasks import Sample, Task
from lenience.tasks.base import Messages

FORMAT = 5
"""Format version of saved races; races of other versions run again."""
WINDOWS = (2, 4, 8, 16, 32)
PROMPTS = 80
"""Default number of prompts of tuning."""
LEAST_PROMPTS = 16
"""Minimum number of prompts for the heats, the final, the choice and its measurement."""
SLOWER = 0.85
"""Share of a stricter setting's speed below which a setting is left out. A setting above it may
have been unlucky in the race."""
ALIKE = 0.97
"""Share of another setting's speed that counts as equally fast; a smaller gain is not worth a
loss."""
GRID = (*(spec for drafter in DRAFTERS.values() for spec in drafter.grid), Medusa.name)
"""Drafters that need no training, and the heads that come with the built-in target."""
FITTED = (Medusa, Blockwise, Eagle)
"""Drafters that also race if they were trained in the run folder."""


@dataclass(frozen=True)
class TuneConfig:
    """Settings to race, and the question for the fastest."""

    question: CertifyConfig
    """Question to certify. Its rules race with all their settings, strict decoding and the target
    alone."""
    windows: tuple[int, ...] = WINDOWS
    stops: tuple[str, ...] = ("fixed",)
    drafters: tuple[str, ...] = ()
    """Drafters that race. Default: GRID, and the drafters trained in the run folder."""
    prompts: int | None = None
    """Number of prompts for the races, for the choice among settings that passed, and for its
    timing. Default: 80, or 16 for each prompt of a batch if those are more."""
    batch_size: int = 1
    """Number of prompts per batch while decoders are timed."""
    minutes: float = math.inf
    """Time limit of the first heat in minutes: no further engine starts. Without effect if one
    engine serves all decoders."""

    def __post_init__(self) -> None:
        for name in ("windows", "stops"):
            if not getattr(self, name):
                raise InputError(f"{name}: name at least one")
        if not self.question.rules or self.question.settings:
            raise InputError("rule: name the rules to tune")
        for name in ("window", "stop", "drafter"):
            if name in self.question.options:
                raise InputError(f"options: {name} is chosen by tuning; leave it out")
        if self.question.decoder.temperature:
            raise InputError(
                "temperature: tune is for greedy decoding; leave temperature out"
            )
        if self.batch_size < 1:
            raise InputError(f"batch_size {self.batch_size}: must be 1 or more")
        if not self.minutes > 0:
            raise InputError(f"minutes {self.minutes:g}: must be above 0")
        if self.num_prompts < self.least_prompts:
            batches = (
                f" with batches of {self.batch_size}" if self.batch_size > 1 else ""
            )
            raise InputError(
                f"prompts {self.prompts}: must be {self.least_prompts} or more{batches}"
            )
        for window in self.windows:
            if Decoder(window=window).window in (0, "auto"):
                raise InputError(f"window {window}: must be 1 or more")

    @cached_property
    def named_drafters(self) -> list[DrafterSpec]:
        """Return the drafters that are named. Raises InputError for a wrong spec."""
        return read_drafters(self.drafters)

    @cached_property
    def stop_conditions(self) -> list[Stop]:
        """Return the stop conditions. Raises InputError for a wrong spec."""
        return [Decoder.of(stop=stop).stop for stop in self.stops]

    @property
    def least_prompts(self) -> int:
        """Return the minimum number of prompts."""
        return LEAST_PROMPTS * self.batch_size

    @property
    def num_prompts(self) -> int:
        """Return the number of prompts to draw."""
        if self.prompts is None:
            return max(PROMPTS, self.least_prompts)
        return self.prompts


class Races(Record):
    """races.json: the results of the races, with the machine."""

    machine: str
    alone: RaceResult
    """The target alone, as strict decoding with a window of 0."""
    strict: RaceResult
    """The fastest strict decoding that drafts."""
    lenient: list[list[RaceResult]]
    """Settings of each rule from strict to lenient, each in its fastest form."""
    refused: list[str] = Field(default_factory=list)
    """Reasons why drafters trained in the run folder did not race."""
    late: list[str] = Field(default_factory=list)
    """Windows and drafters that did not race, as the minutes were used up."""
    minutes: float | None = None
    """Minutes that were given; None without a limit."""

    def is_short_of(self, minutes: float) -> bool:
        """Return True if further decoders would race in this number of minutes."""
        return bool(self.late) and minutes > (self.minutes or math.inf)


@dataclass(frozen=True)
class Tuned:
    """The result of tuning."""

    races: Races
    certificate: Certificate
    speeds: Speeds | None
    """Measured speeds; None if nothing is certified."""


def tune(
    pair: Pair,
    task: Task,
    folder: Path,
    config: TuneConfig,
    progress: Progress = silent,
) -> Tuned:
    """Race settings on unused prompts, which are used up, and certify the fastest.

    Each of a rule's settings from strict to lenient races at every window, stop and drafter; a
    setting that is clearly slower than a stricter one is left out. The tested chain begins with the
    fastest lossless decoding. The bounds of all settings that pass hold jointly. Settings that may
    be the fastest are timed again on other prompts, since a race of many on few prompts does not
    separate them. The fastest is certified, or lossless decoding if lenience gains nothing. The
    gain is measured on the last prompts, on which nothing was chosen.

    Timings on this machine and certificates are kept. Raises InputError as `certify` does.
    """
    task = task_for(pair, task, progress)
    question = config.question
    contest = _contest(pair, task, folder, config)
    races = _races(contest, progress)
    lossless = max(races.alone, races.strict, key=lambda raced: raced.tokens_per_second)
    chains = [_fast(lossless, raced) for raced in races.lenient]
    chains[0].insert(0, lossless)
    settings = tuple(tuple(step.setting for step in chain) for chain in chains if chain)
    choice = _Choice(
        raced={
            step.setting: step.tokens_per_second for chain in chains for step in chain
        },
        lossless=lossless.setting,
        turns=contest.turns("choosing", contest.prompts_to_choose, races.machine),
        progress=progress,
    )
    asked = replace(
        question, rules=(), thresholds=(), settings=settings, speeds=choice.raced
    )
    certificate = certify(pair, task, folder, asked, progress, choose=choice.fastest)
    if not certificate.holds:
        return Tuned(races, certificate, None)
    shared = for_task(question.decoder, question.options, task)
    passed = [row.decoder(shared) for row in certificate.tried if row.passed]
    certified = certificate.decoder(folder)
    turns = contest.turns("telling", contest.prompts_to_tell, races.machine)
    known = choice.turns.known(choice.perhaps_fastest(passed)) or []
    return Tuned(races, certificate, _told(races, certified, known, turns, progress))


def _told(
    races: Races,
    certified: Decoder,
    passed: list[Timed],
    turns: Turns,
    progress: Progress,
) -> Speeds:
    """Return the speed of the certified setting compared with lossless decoding; `passed` are the
    timings of the settings that it was chosen from."""
    strict = Decoder.parse(races.strict.setting)
    alone = Decoder.parse(races.alone.setting)
    timed = turns.take((certified, strict, alone), "timing", progress)
    return Speeds(
        machine=races.machine,
        certified=timed[certified],
        strict=timed[strict],
        alone=timed[alone],
        passed=passed,
        batch_size=turns.batch_size,
    )


def _fast(lossless: RaceResult, chain: Iterable[RaceResult]) -> list[RaceResult]:
    """Return the settings of a chain that are not clearly slower than an earlier one or than
    `lossless` (SLOWER), up to the last that is about as fast as `lossless` (ALIKE)."""
    kept = list[RaceResult]()
    best = lossless.tokens_per_second
    end = 0
    for raced in chain:
        if raced.tokens_per_second >= SLOWER * best:
            kept.append(raced)
            best = max(best, raced.tokens_per_second)
            if raced.tokens_per_second > ALIKE * lossless.tokens_per_second:
                end = len(kept)
    return kept[:end]


@dataclass(frozen=True)
class _Contest:
    """The contestants and the prompts of a race."""

    pair: Pair
    groups: list[list[Decoder]]
    """The target alone, strict decoding, and each setting of each chain, all but the first at every
    window, stop and drafter."""
    chains: list[list[Decoder]]
    refused: list[str]
    prompts: list[str | Messages]
    place: Path
    """Folder of the results."""

    config: TuneConfig
    heats: int
    """Number of turns of all heats."""

    @property
    def prompts_to_race(self) -> list[str | Messages]:
        """Return the prompts for the race: those of the heats and a quarter of the others, because
        many settings run on them."""
        turns = len(self.prompts) // self.config.batch_size
        raced = self.heats + (turns - self.heats) // 4
        return self.prompts[: raced * self.config.batch_size]

    @property
    def prompts_to_choose(self) -> list[str | Messages]:
        """Return half of the prompts that are left after the race."""
        raced = len(self.prompts_to_race)
        turns = (len(self.prompts) - raced) // self.config.batch_size
        return self.prompts[raced : raced + turns // 2 * self.config.batch_size]

    @property
    def prompts_to_tell(self) -> list[str | Messages]:
        """Return the remaining prompts."""
        return self.prompts[len(self.prompts_to_race) + len(self.prompts_to_choose) :]

    def turns(
        self, name: str, prompts: Sequence[str | Messages], machine: str
    ) -> Turns:
        """Return timings that are kept under a name."""
        place = self.place / name
        return Turns(self.pair, place, machine, prompts, self.config.batch_size)


def _contest(pair: Pair, task: Task, folder: Path, config: TuneConfig) -> _Contest:
    question = config.question
    shared = for_task(question.decoder, question.options, task)
    chains = question.chains(shared)
    check_question(task, folder, question)
    ledger = Ledger(folder, pair.fingerprints, question.home)
    next_one = ledger.attempt("", task, question.split, counts=False)
    warn_of_too_few(question, next_one.share)
    strict = shared.for_strict()
    drafters = config.named_drafters
    refused = list[str]()
    for drafter in drafters:
        pair.check(strict.with_parts(drafter=drafter))
    if not drafters:
        fitted, refused = fitted_drafters(pair, folder, strict)
        drafters = [*read_drafters(GRID), *fitted]
    groups = [[replace(strict, window=0)]]
    for raced in (strict, *itertools.chain.from_iterable(chains)):
        groups.append(group_of(pair, config, raced, _drafters_of(raced.rule, drafters)))
    samples, place = _prompts(pair, task, folder, config, groups)
    return _Contest(
        pair,
        groups,
        chains,
        refused,
        prompts=[sample.prompt for sample in samples],
        place=place,
        config=config,
        heats=sum(turns for turns, _ in heats_of(pair, groups)),
    )


def _races(contest: _Contest, progress: Progress) -> Races:
    """Return the races: saved ones of this machine, or new ones. Decoders for which no minutes were
    left race if more are given."""
    config = contest.config
    path = contest.place / "races.json"
    here = machine(contest.pair)
    if path.exists():
        before = Races.read(read_json(path), str(path))
        if before.machine == here and not before.is_short_of(config.minutes):
            return before
    race = Race(
        contest.pair, contest.place, here, contest.prompts_to_race, config.batch_size
    )
    budget = Budget(config.minutes)
    won = iter(race.run(contest.groups, budget, progress))
    races = Races(
        machine=here,
        alone=next(won),
        strict=next(won),
        lenient=[[next(won) for _ in chain] for chain in contest.chains],
        refused=contest.refused,
        late=list(dict.fromkeys(map(_window_and_drafter, budget.late))),
        minutes=None if math.isinf(config.minutes) else config.minutes,
    )
    write_json(path, races.to_json())
    return races


def _window_and_drafter(decoder: Decoder) -> str:
    return f"window {decoder.window}, drafter {decoder.without_paths().drafter}"


@dataclass(frozen=True)
class _Choice:
    """The choice of the setting to certify among those that pass."""

    raced: Mapping[str, float]
    """Tokens per second of each setting in the race."""
    lossless: str
    turns: Turns
    progress: Progress

    def fastest(self, passed: Iterable[Decoder]) -> Decoder:
        """Return the fastest setting, or the lossless one if that is about as fast (ALIKE)."""
        left = self.perhaps_fastest(passed)
        if len(left) == 1:
            return left[0]
        timed = self.turns.take(left, "timing what passed", self.progress)
        fastest = max(left, key=lambda setting: timed[setting].tokens_per_second)
        enough = ALIKE * timed[fastest].tokens_per_second
        as_fast = [
            setting for setting in left if timed[setting].tokens_per_second >= enough
        ]
        return next(
            (setting for setting in as_fast if str(setting) == self.lossless), fastest
        )

    def perhaps_fastest(self, passed: Iterable[Decoder]) -> list[Decoder]:
        """Return the settings that were not clearly slower in the race than the fastest (SLOWER),
        and the lossless one."""
        speeds = {setting: self.raced[str(setting)] for setting in passed}
        least = SLOWER * max(speeds.values())
        found = list[Decoder]()
        for setting in speeds:
            if speeds[setting] >= least or str(setting) == self.lossless:
                found.append(setting)
        return found


def fitted_drafters(
    pair: Pair, folder: Path, strict: Decoder
) -> tuple[list[DrafterSpec], list[str]]:
    """Return the drafters trained in a run folder that can draft for this target, and the reasons
    why others cannot."""
    fitted = list[DrafterSpec]()
    refused = list[str]()
    for kind in FITTED:
        if not (folder / kind.name / f"{kind.name}.json").exists():
            continue
        drafter = kind(str(folder / kind.name))
        try:
            pair.check(strict.with_parts(drafter=drafter))
        except InputError as error:
            refused.append(str(error))
        else:
            fitted.append(drafter)
    return fitted, refused


def read_drafters(specs: Sequence[str]) -> list[DrafterSpec]:
    """Return the drafters of specs. Raises InputError for a wrong spec."""
    return [Decoder.of(drafter=spec).drafter for spec in specs]


def drafters_for(rule: Rule, drafters: Sequence[DrafterSpec]) -> list[DrafterSpec]:
    """Return the drafters that race with a rule. A judge races only with the drafter that it was
    mined with, as it is unreliable on other drafters' tokens."""
    if not rule.heads:
        return list(drafters)
    mined = [part.head.drafter for part in rule.heads]
    found = list[DrafterSpec]()
    for drafter in drafters:
        if all(drafter.record == record for record in mined):
            found.append(drafter)
    return found


def _drafters_of(rule: Rule, drafters: Sequence[DrafterSpec]) -> list[DrafterSpec]:
    """Return `drafters_for` a rule. Raises InputError if there is none."""
    found = drafters_for(rule, drafters)
    if not found:
        raise InputError(
            f"drafter {', '.join(map(str, drafters))}: {rule} was mined with another "
            "drafter; name that one too"
        )
    return found


def group_of(
    pair: Pair, config: TuneConfig, setting: Decoder, drafters: Sequence[DrafterSpec]
) -> list[Decoder]:
    """Return a setting at every window, stop and drafter that it can run with. Raises InputError if
    there is none."""
    group = list[Decoder]()
    refusals = list[InputError]()
    for drafter, stop in product(drafters, config.stop_conditions):
        named = setting.with_parts(drafter=drafter, stop=stop)
        for window in _windows_for(named.drafter, config.windows):
            decoder = replace(named, window=window)
            try:
                pair.check(decoder)
            except InputError as refused:
                refusals.append(refused)
            else:
                group.append(decoder)
    if not group:
        raise refusals[0]
    return group


def _windows_for(drafter: DrafterSpec, windows: Sequence[int]) -> list[int]:
    """Return the windows at which a drafter's proposals differ: those up to the first that covers
    its longest proposal."""
    longest = drafter.longest or max(windows)
    enough = min(
        (window for window in windows if window >= longest), default=max(windows)
    )
    return [window for window in windows if window <= enough]


def _prompts(
    pair: Pair,
    task: Task,
    folder: Path,
    config: TuneConfig,
    groups: Sequence[Sequence[Decoder]],
) -> tuple[list[Sample], Path]:
    """Return the prompts to race on, recorded as used, and the folder of the races. Raises
    InputError if too few are unused."""
    question = config.question
    settings = list(itertools.chain.from_iterable(groups))
    heads = {head.path: head for setting in settings for head in setting.heads}
    asked = [str(setting.without_paths()) for setting in settings]
    prints = [head.head.fingerprint for head in heads.values()]
    parts = [
        asked,
        prints,
        pair.fingerprints,
        config.num_prompts,
        question.split,
        task.known_as,
    ]
    if config.batch_size > 1:
        parts.append(config.batch_size)
    key = digest([FORMAT, *parts])
    fitted = (*heads.values(), *aligned(pair.draft))
    draw = Draw(key, config.num_prompts, "tuning", split=question.split, heads=fitted)
    ledger = Ledger(folder, pair.fingerprints, question.home)
    with ledger.held():
        samples = ledger.rows(pair.target, task, draw)
        if len(samples) < config.least_prompts:
            raise InputError(
                f"task {task.name!r}: {len(samples)} of the prompts of its split "
                f"{question.split!r} are unused, and a race needs {config.least_prompts}; "
                "name another "
                "--split"
            )
        check_prompts(pair, task, samples)
        ledger.note(pair.target, samples, use="tuning", key=key, task=task)
    return samples, folder / "tuning" / key
