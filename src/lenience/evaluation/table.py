"""The rows of a comparison: figures of each setting with intervals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from pydantic import Field
from scipy.stats import binomtest

from lenience.core.records import Record
from lenience.decoding.decoder import Decoder
from lenience.evaluation.quality import Quality, qualities
from lenience.rules.baselines import BASELINES
from lenience.runs.answers import Answer
from lenience.runs.record import ModelRecord

if TYPE_CHECKING:
    from numpy.typing import NDArray

SHARES = tuple(i / 20 for i in range(21))
"""Shares of the prompts that random allocation gives to the draft."""
BOOTSTRAPS = 1000
"""Number of bootstrap draws of prompts for an interval."""
Interval = tuple[float, float]


@dataclass(frozen=True)
class ComparedSetting:
    """A decoder in a comparison, and the reason for its window: "fastest", "widest" or "window of
    RULE"; "given" if there was nothing to choose."""

    decoder: Decoder
    why: str = "given"


class HumanGrades(Record):
    """People's grades of a setting's answers that differ from the target's."""

    n: int
    wins: int
    ties: int
    losses: int
    win_rate: float
    """Share of wins; a tie counts as half."""
    win_rate_interval: Interval


class FrontierRow(Record):
    """The figures of one setting, each with its 95 % interval: exact binomial for shares, bootstrap
    over prompts for ratios and for quality by degree."""

    rule: str
    window: int
    options: dict[str, Any] = Field(default_factory=dict)
    """Options that differ from those shared by the comparison."""
    why: str
    n: int
    timed_n: int
    accuracy: float
    """Share of right answers; for a task with another measure, the mean quality."""
    accuracy_interval: Interval
    paired_loss: float
    """Share of prompts that the target alone gets right and this decoder wrong; by degree, the mean
    shortfall of its answers against the target's own."""
    paired_loss_interval: Interval
    paired_gain: float
    paired_gain_interval: Interval
    tokens_per_pass: float | None
    """Tokens per target pass; None without target passes."""
    tokens_per_pass_interval: Interval | None
    accepted_per_pass: float | None = None
    """Accepted drafted tokens per target pass, without corrections and bonus tokens: AutoJudge's
    accepted tokens per cycle, FSD's average accepted length."""
    accepted_per_pass_interval: Interval | None = None
    draft_share: float | None = None
    """Share of the answers' tokens that were drafted (FSD)."""
    draft_share_interval: Interval | None = None
    flops_per_token: float | None = None
    """Floating-point operations per token of the answers, including attention and rejected tokens;
    None if unknown."""
    flops_per_token_interval: Interval | None = None
    flops_per_token_as_sprinter: float | None = None
    """FLOPs per token by SPRINTER's count: embeddings count as matrix products, and tokens that a
    gate let through cost the target nothing."""
    flops_per_token_as_sprinter_interval: Interval | None = None
    accepted_exact_per_pass: float | None
    accepted_exact_per_pass_interval: Interval | None
    tokens_per_second: float
    tokens_per_second_interval: Interval
    seconds_per_correct: float | None
    seconds_per_correct_interval: Interval | None
    verdicts: dict[str, int] | None = None
    """Counts of the task's verdicts on the answers, such as reasons why programs failed."""
    human: HumanGrades | None = None
    share_of_cap: float | None
    """Tokens per second as a share of the draft's alone, which nothing exceeds; None without a
    draft."""


class AllocationPoint(Record):
    """Expected figures of random allocation: the draft answers each prompt with probability
    `share`, and the target alone answers the others."""

    share: float
    accuracy: float
    paired_loss: float
    tokens_per_pass: float | None
    tokens_per_second: float
    seconds_per_correct: float | None


class Example(Record):
    """A prompt whose answers, one per row, are kept token by token."""

    id: str
    prompt: Any
    reference: str | None
    results: list[Answer]


class MinedToken(Record):
    """A token of a mined answer."""

    text: str
    kind: Literal["", "harmless", "important"] = ""
    """Label of the mismatch at this position; empty without a labelled mismatch."""
    other: str = ""
    """The token that is not in the answer: the target's at a harmless mismatch, the drafted one at
    an important one."""


class MinedText(Record):
    """A mined answer, shown token by token."""

    id: str
    """Id of the sample."""
    prompt: str
    tokens: tuple[MinedToken, ...]


class Frontier(Record, extra="allow"):
    """frontier.json: a comparison. Its further fields are the decoding options that all settings
    share, by name."""

    versions: dict[str, str]
    pair: str
    models: dict[str, ModelRecord]
    tokenizer: str
    chat: dict[str, Any] | None = None
    task: str
    task_version: int | str | None
    measure: str = "accuracy"
    """Meaning of `accuracy` and the losses: "accuracy", "pass@1", "ROUGE-L", "win rate" or
    "agreement"."""
    grading: dict[str, int] | None = None
    """Counts of a grader's judgements, see `lenience.tasks.grader.GradingCounts`."""
    learned_from: int = 0
    """Number of prompts on which a compared head or the draft was trained, and does better than on
    others."""
    split: str
    machine: str
    rows: list[FrontierRow]
    allocation: list[AllocationPoint]
    examples: list[Example]
    endpoints: tuple[dict[str, Any], ...] = ()
    """Speed of each server with several requests in flight; empty for a pair. See
    `lenience.integrations.endpoints.speed.EndpointSpeed`."""
    mined: tuple[MinedText, ...] = ()
    """Answers of the mined run, with their important tokens."""


def table(
    settings: Sequence[ComparedSetting],
    answers: Sequence[Sequence[Answer]],
    timings: Sequence[Sequence[float]],
    shared: Decoder,
    quality: Sequence[Quality] | None = None,
) -> list[FrontierRow]:
    """Return one row per setting. `answers` [settings][n] are the answers to n samples, `timings`
    [timed_n][settings] the seconds of the first samples. `shared` has the options common to all
    settings. `quality` is needed if answers are not just right or wrong."""
    seconds = np.array(timings, dtype=float)  # [timed_n, settings]
    rules = [setting.decoder.alone for setting in settings]
    of_settings = quality or qualities(None, answers, rules.index("target"))
    figures = []
    for i, given in enumerate(answers):
        figures.append(_figures(given, seconds[:, i], of_settings[i]))
    cap = (
        figures[rules.index("draft")]["tokens_per_second"] if "draft" in rules else None
    )
    rows = []
    for setting, of_setting in zip(settings, figures):
        rows.append(
            FrontierRow(
                rule=str(setting.decoder.rule),
                window=int(setting.decoder.window),
                options=setting.decoder.differing(shared),
                why=setting.why,
                share_of_cap=cap and of_setting["tokens_per_second"] / cap,
                **of_setting,
            )
        )
    return rows


def _column(answers: Sequence[Answer], key: str) -> NDArray:
    return np.array([getattr(answer, key) for answer in answers], dtype=float)


def _figures(
    answers: Sequence[Answer], seconds: NDArray, quality: Quality
) -> dict[str, Any]:
    """Return the figures of one setting, by field name of FrontierRow."""
    n = len(answers)
    timed = len(seconds)
    tokens = _column(answers, "tokens")
    passes = _column(answers, "target_passes")
    draws = np.random.default_rng(0).integers(0, n, (BOOTSTRAPS, n))
    timed_draws = np.random.default_rng(0).integers(0, timed, (BOOTSTRAPS, timed))
    # an answer by degree never counts as right
    right_when_timed = quality.values[:timed] * quality.counts
    figures: dict[str, Any] = {"n": n, "timed_n": timed, "verdicts": quality.verdicts}
    figures |= _mean("accuracy", quality.values, draws)
    figures |= _mean("paired_loss", quality.lost, draws)
    figures |= _mean("paired_gain", quality.gained, draws)
    figures |= _ratio("tokens_per_pass", tokens, passes, draws)
    exact = _column(answers, "accepted_exact")
    kept = exact + _column(answers, "accepted_lenient")
    # without target passes all tokens are the draft's
    drafted = np.where(passes > 0, kept, tokens)
    figures |= _ratio("accepted_per_pass", drafted, passes, draws)
    figures |= _ratio("draft_share", drafted, tokens, draws)
    figures |= _flops_per_token(answers, draws)
    figures |= _ratio("accepted_exact_per_pass", exact, passes, draws)
    figures |= _ratio("tokens_per_second", tokens[:timed], seconds, timed_draws)
    figures |= _ratio("seconds_per_correct", seconds, right_when_timed, timed_draws)
    return figures


def _flops_per_token(answers: Sequence[Answer], draws: NDArray) -> dict[str, Any]:
    """Return the operations per token by both counts; None if unknown for an answer."""
    figures = dict[str, Any]()
    tokens = _column(answers, "tokens")
    for count in ("flops", "flops_as_sprinter"):
        known = all(getattr(answer, count) is not None for answer in answers)
        spent, of = (
            (_column(answers, count), tokens)
            if known
            else (tokens, np.zeros(len(tokens)))
        )
        figures |= _ratio(count.replace("flops", "flops_per_token"), spent, of, draws)
    return figures


def allocation(
    settings: Sequence[ComparedSetting],
    answers: Sequence[Sequence[Answer]],
    timings: Sequence[Sequence[float]],
    quality: Sequence[Quality] | None = None,
) -> list[AllocationPoint]:
    """Return the line of random allocation between target and draft, which any rule must beat
    (Holsman 2025); no points without a draft."""
    rules = [setting.decoder.alone for setting in settings]
    if "draft" not in rules:
        return []
    alone = list(map(rules.index, BASELINES))
    seconds = np.array(timings, dtype=float)[:, alone]  # [timed_n, 2]
    tokens, passes = (
        np.array([_column(answers[i], key) for i in alone]).T  # [n, 2]
        for key in ("tokens", "target_passes")
    )
    of_settings = quality or qualities(None, answers, rules.index("target"))
    good, right, lost = _alone([of_settings[i] for i in alone])
    points = []
    for share in SHARES:
        mix = np.array([1 - share, share])
        timed_right = float((right[: len(seconds)] @ mix).sum())
        timed_tokens = float((tokens[: len(seconds)] @ mix).sum())
        timed_seconds = float((seconds[: len(seconds)] @ mix).sum())
        read = float((passes @ mix).sum())
        points.append(
            AllocationPoint(
                share=share,
                accuracy=float((good @ mix).mean()),
                paired_loss=share * lost,
                tokens_per_pass=float((tokens @ mix).sum()) / read if read else None,
                tokens_per_second=timed_tokens / timed_seconds,
                seconds_per_correct=timed_seconds / timed_right
                if timed_right
                else None,
            )
        )
    return points


def _alone(quality: Sequence[Quality]) -> tuple[NDArray, NDArray, float]:
    """Return the quality [n, 2] of the target's and the draft's answers, a 1 for each right answer
    [n, 2] (all 0 if unknown), and the draft's mean loss."""
    good = np.array([each.values for each in quality]).T
    right = good if all(each.counts for each in quality) else np.zeros_like(good)
    return good, right, float(quality[1].lost.mean())


def _mean(name: str, values: NDArray, draws: NDArray) -> dict[str, Any]:
    """Return a share with its exact interval if all values are 0 or 1; otherwise a mean with its
    bootstrap interval."""
    if np.isin(values, (0.0, 1.0)).all():
        hits = int(values.sum())
        n = len(values)
        interval = binomtest(hits, n).proportion_ci(0.95)
        return {
            name: hits / n,
            f"{name}_interval": (float(interval.low), float(interval.high)),
        }
    low, high = np.quantile(values[draws].mean(1), [0.025, 0.975])
    return {name: float(values.mean()), f"{name}_interval": (float(low), float(high))}


def _ratio(name: str, above: NDArray, below: NDArray, draws: NDArray) -> dict[str, Any]:
    """Return Σ above / Σ below with its bootstrap interval; None if Σ below is 0."""
    if not below.sum():
        return {name: None, f"{name}_interval": None}
    sums = below[draws].sum(1)
    spread = above[draws].sum(1)[sums > 0] / sums[sums > 0]
    low, high = np.quantile(spread, [0.025, 0.975])
    return {
        name: float(above.sum() / below.sum()),
        f"{name}_interval": (float(low), float(high)),
    }
