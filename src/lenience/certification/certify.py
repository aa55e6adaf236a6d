"""Certify the most lenient setting whose loss is bounded, on unused prompts."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scipy.stats import binom

from lenience.certification.calibration import (
    ACCURACY_PROMPTS,
    Calibration,
    calibration,
    tokens_per_pass,
)
from lenience.certification.certificate import (
    FILE,
    Certificate,
    Certified,
    TriedSetting,
    head_paths,
)
from lenience.certification.page import write_page
from lenience.certification.question import CertifyConfig
from lenience.certification.sequential_tests import FUTILITY, fixed_sequence_test
from lenience.certification.withdrawal import account, as_it_stands, mark
from lenience.core.files import read_json, write_json
from lenience.core.progress import Progress, silent
from lenience.core.protocols import Rule
from lenience.core.records import Record
from lenience.decoding.decoder import Decoder
from lenience.decoding.pair import Pair
from lenience.rules.combine import AnyOf
from lenience.runs.answers import Answer
from lenience.runs.record import mined_first
from lenience.runs.uses import fitted_in, group_of
from lenience.tasks import Task

if TYPE_CHECKING:
    from numpy.typing import NDArray

PILOT = 40
"""Number of prompts in a pilot."""
PROMISES_NOT = (
    "prompts of another kind than those it was calibrated on: it holds on average over "
    "prompts "
    "like them, not for each of them",
    "other models, heads, dtypes, templates, windows, temperatures or length limits "
    "than those "
    "it binds",
    "that an answer which is right is worded as the target would have worded it",
)

MIXED = "an answer during which the window changes; each tested answer has one window"
"""Gap in the promise of a certificate for several windows."""


class PlannedSetting(Record):
    """The estimated cost of certifying a setting; None if that takes more than the horizon."""

    rule: str
    pilot_loss: float
    tokens_per_pass: float
    prompts: int | None
    target_passes: int | None
    minutes: float | None


class Plan(Record):
    """The estimated cost of certificates, from a pilot."""

    plan: list[PlannedSetting]
    pilot: int
    max_drop: float
    confidence: float
    least: int | None
    """Number of prompts for a setting that never loses anything."""


def certify(
    pair: Pair,
    task: Task,
    folder: Path,
    config: CertifyConfig,
    progress: Progress = silent,
    *,
    choose: Callable[[list[Decoder]], Decoder] | None = None,
) -> Certificate:
    """Find the most lenient of the rules' settings whose loss is at most `max_drop` with the given
    confidence, if any, and write the certificate to the run folder, see
    `lenience.certification.certificate`.

    Learn-then-Test (Angelopoulos 2021): each rule's settings are tested from strict to lenient
    until one does not pass, each on growing batches of prompts. If several rules pass, the one with
    the most tokens per pass is certified. `choose` may pick another among all settings that passed,
    whose bounds hold jointly.

    The same question resumes, on more prompts if allowed, or returns its answer. Another question
    is tested with the error budget that the ledger has left, and withdraws certificates that it
    contradicts. Raises InputError, see `CertifyConfig`, `draw_rows` and `Labels`.
    """
    with calibration(
        pair, task, folder, config, use="calibration", progress=progress
    ) as on:
        path = on.folder / FILE
        made = Certificate.read(read_json(path), str(path)) if path.exists() else None
        if made is None or not (made.certified or made.most == on.most):
            made = _certificate(on, folder, choose)
            account(on, folder, made)
            write_json(path, made.to_json())
        with on.ledger.held():
            made = as_it_stands(on.ledger, made)
            saved = save(folder, made)
            write_page(saved.with_suffix(".html"), made)
            mark(on.ledger, folder)
    return made


def save(folder: Path, certificate: Certificate) -> Path:
    """Write a run's certificate and return its path. A certificate that certifies a setting is
    never overwritten: a new one moves it, with its page, to certificate-N.json, and one that
    certifies nothing is written next to it."""
    new = certificate.to_json()
    path = folder / FILE
    known = {}
    for other in sorted(folder.glob("certificate-*.json")):
        known[other] = _as_now(read_json(other), other)
    numbers = range(1, len(known) + 2)
    free = next(
        p for n in numbers if not (p := folder / f"certificate-{n}.json").exists()
    )
    before = _as_now(read_json(path), path) if path.exists() else {}
    if before.get("certified") and before != new:
        if certificate.certified is None:
            path = next(
                (other for other, content in known.items() if content == new), free
            )
        elif before not in known.values():
            os.replace(path, free)
            if path.with_suffix(".html").exists():
                os.replace(path.with_suffix(".html"), free.with_suffix(".html"))
    write_json(path, new)
    return path


def _as_now(content: Any, path: Path) -> dict[str, Any]:
    """Return a saved certificate with the fields of this version, to compare it with a new one."""
    return Certificate.read(content, str(path)).to_json()


@dataclass(frozen=True)
class _Outcomes:
    """The outcomes of all settings' tests."""

    tried: list[list[TriedSetting]]
    """Tested settings of each chain."""

    @property
    def passed(self) -> list[list[TriedSetting]]:
        """Return each chain's settings that passed."""
        return [[row for row in chain if row.passed] for chain in self.tried]

    @property
    def best(self) -> TriedSetting | None:
        """Return the setting with the most tokens per pass among the chains' most lenient settings
        that passed; None if none passed."""
        last = [chain[-1] for chain in self.passed if chain]
        return max(last, key=lambda row: row.tokens_per_pass, default=None)

    @property
    def nearest(self) -> TriedSetting:
        """Return the setting that came nearest to passing among the chains' strictest settings."""
        return min((chain[0] for chain in self.tried), key=lambda row: row.upper_bound)


def _certificate(
    on: Calibration, folder: Path, choose: Callable[[list[Decoder]], Decoder] | None
) -> Certificate:
    began = time.perf_counter()
    config = on.config
    outcome = _Outcomes([_test_chain(on, chain) for chain in on.chains()])
    seconds = round(time.perf_counter() - began, 1)
    best = outcome.best
    if best and choose:
        passed = {on.decoding_of(row): row for chain in outcome.passed for row in chain}
        best = passed[choose(list(passed))]
    shown = best or outcome.nearest
    setting = on.decoding_of(shown)
    return Certificate(
        certified=_certified(best, on, folder) if best else None,
        max_drop=config.max_drop,
        confidence=config.confidence,
        loss=config.loss,
        loss_is=config.loss_of(on.task),
        n=shown.n,
        losses=shown.losses,
        upper_bound=shown.upper_bound,
        attempt=on.attempt.number,
        level=round((1 - config.confidence) * on.attempt.share, 12),
        key=on.attempt.key,
        most=on.most,
        drawn=_drawn(on, folder),
        procedure=_procedure(on),
        binds=on.binds(setting, shown.n),
        promises_not=_promises_not(config),
        tried=tuple(itertools.chain.from_iterable(outcome.tried)),
        lost=tuple(on.lost_samples(setting, shown.n)),
        gained=tuple(on.gained_samples(setting, shown.n)),
        command=config.command,
        grading=on.task.grading,
        noise=on.pair.noise,
        candidate_noise=on.pair.candidate_noise,
        reason=None if best else _reason(config, shown),
        needed=None if best else _needed(on, setting, shown),
        decoded=on.decoded,
        seconds=seconds,
    )


def _test_chain(on: Calibration, settings: list[Decoder]) -> list[TriedSetting]:
    """Test settings from strict to lenient. Raises InputError if a setting passes while references
    of some of its prompts are missing."""

    def losses(j: int, n: int) -> NDArray:
        on.labels.wanted.clear()
        return on.losses(settings[j], n, f"setting {j + 1} of {len(settings)}")

    tried = []
    for result in fixed_sequence_test(on.test, len(settings), losses, on.most):
        if result.passed:
            on.labels.ask()
        tried.append(on.result(settings[result.setting], result))
    return tried


def _needed(on: Calibration, setting: Decoder, row: TriedSetting) -> int | None:
    return on.config.sample_size(on.losses(setting, row.n), on.attempt.share)


def _drawn(on: Calibration, folder: Path) -> str:
    """Return a description of how the prompts were chosen."""
    config = on.config
    said = "at random"
    if config.ids:
        said = (
            f"at random from {len(config.ids)} that were named (--ids), not at random"
        )
    where = f"{said} from the rows of split {config.split!r}"
    if any(
        group_of(sample) is not None for sample in on.prompts.first(ACCURACY_PROMPTS)
    ):
        where += ", one of each group, so that each group counts once"
    runs = {
        fitted_in(head)
        for chain in on.chains()
        for decoder in chain
        for head in decoder.heads
    }
    if any(map(mined_first, (folder, *filter(None, runs)))):
        where += "; those that were mined before were the first of the data, not drawn"
    return where


def _certified(best: TriedSetting, on: Calibration, folder: Path) -> Certified:
    return Certified(
        **best.model_dump(),
        threshold=_threshold(on.decoding_of(best).rule),
        heads=head_paths(on.decoding_of(best), folder),
    )


def _threshold(rule: Rule) -> float | None:
    """Return the threshold of a rule's first term that has one."""
    terms = rule.terms if isinstance(rule, AnyOf) else ()
    return next((vars(term)["threshold"] for term in terms if term.has_threshold), None)


def _promises_not(config: CertifyConfig) -> tuple[str, ...]:
    return (*PROMISES_NOT, MIXED) if config.windows else PROMISES_NOT


def _procedure(on: Calibration) -> str:
    config = on.config
    test = on.test
    chains = len(config.rules) + len(config.settings)
    several = f", shared by {chains} rules" if chains > 1 else ""
    error = 1 - config.confidence
    number = on.attempt.number
    windows = ", ".join(map(str, config.windows))
    largest = f"Each answer counts with its largest loss over the windows {windows}. "
    return (
        f"{largest if windows else ''}Learn-then-Test: settings tested from strict to "
        "lenient until one fails, each by "
        f"{test.said} on growing numbers of fresh prompts, so that any setting that "
        "passed loses "
        "more than max_drop with a chance of at most "
        f"{error * on.attempt.share:.3g}{several}. "
        f"This is attempt {number}: all attempts on such prompts together are wrong "
        "with a chance "
        f"of at most {error:.3g}."
    )


def _reason(config: CertifyConfig, row: TriedSetting) -> str:
    """Return the reason why nothing is certified."""
    rate = row.losses / row.n
    strictest = f"the strictest setting, {row.shown_name}"
    if row.hopeless and _too_high(config, row):
        return f"the loss is too high: already {strictest}, lost {rate:.2%} of {row.n} prompts"
    more = (
        ", more than is allowed, but on too few to be sure"
        if rate >= config.max_drop
        else ""
    )
    if row.hopeless and not row.losses:
        more = ", and no setting could pass on the allowed number"
    return f"too few prompts: {strictest}, lost {row.losses:g} of {row.n}{more}"


def _too_high(config: CertifyConfig, row: TriedSetting) -> bool:
    """Return True if a setting that was given up loses too much, at significance level FUTILITY,
    and does not just lack prompts."""
    if not config.is_binary:
        return row.losses / row.n >= config.max_drop
    return bool(binom.sf(row.losses - 1, row.n, config.max_drop) <= FUTILITY)


def plan(
    pair: Pair,
    task: Task,
    folder: Path,
    config: CertifyConfig,
    pilot: int = PILOT,
    progress: Progress = silent,
) -> Plan:
    """Estimate the cost of certificates from a `pilot` of unused prompts, which are then used up.

    For each setting, return the number of prompts that certify it four times in five if it loses as
    much as in the pilot (at least a quarter of the limit), and the target passes and minutes,
    including all stricter settings and the target alone. Raises InputError as `certify` does.
    """
    asked = replace(config, limit=pilot, ids=config.ids[:pilot])
    with calibration(pair, task, folder, asked, use="pilot", progress=progress) as on:
        least = config.least_prompts(on.attempt.share)
        rows = [row for chain in on.chains() for row in _planned(on, config, chain)]
    return Plan(
        plan=rows,
        pilot=on.most,
        max_drop=config.max_drop,
        confidence=config.confidence,
        least=least,
    )


def _planned(
    on: Calibration, config: CertifyConfig, settings: list[Decoder]
) -> Iterator[PlannedSetting]:
    pilot = on.most
    decoded = dict[tuple[str, str], Answer]()
    for setting in settings:
        rule = str(setting.rule)
        losses = on.losses(setting, pilot, rule)
        lenient = on.answers(setting, pilot)
        needed = []
        for at in on.at_windows(setting):
            for answer in itertools.chain(
                on.answers(at, pilot), on.beside(at, on.answers(at, pilot))
            ):
                if answer:
                    needed.append(answer)
        decoded |= {(answer.setting, answer.id): answer for answer in needed}
        speed = tokens_per_pass(lenient)
        n = config.sample_size(losses, on.attempt.share, config.max_drop / 4)
        each = config.draws / pilot
        passes = sum(answer.target_passes for answer in decoded.values()) * each
        seconds = sum(answer.seconds or 0.0 for answer in decoded.values()) * each
        lost = (2 * losses - 1).mean() if config.loss == "net" else losses.mean()
        yield PlannedSetting(
            rule=rule,
            pilot_loss=float(lost),
            tokens_per_pass=speed,
            prompts=n,
            target_passes=None if n is None else round(passes * n),
            minutes=None if n is None else round(seconds * n / 60, 2),
        )
