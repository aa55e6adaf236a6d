"""Whether certificates keep their word: simulated calibrations with known loss curves, attacks by
asking again and by unlike prompts, repeated calibrations on a pool of the built-in pair's answers,
what the net loss costs, and the audit's false alarms and delays.

    python benchmarks/certificates.py [--pool benchmarks/results/certificate_pool.json] [--out FILE]
    python benchmarks/certificates.py --collect COMPARE [--pool FILE]

A calibration is false where any setting that passed has a true loss above the limit. `share` is how
many of all are, with an exact 95 % interval; it should be at most 5 %. `reached` is the mean true
tokens-per-pass rank that is certified, as a share of the rank of the most lenient setting that may
be. --collect makes the pool from a folder of `lenience compare --limit 5000 --rule judge:…@…` at
several thresholds.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from numpy.typing import NDArray
from recording import write_results
from rich.console import Console
from rich.progress import track
from rich.table import Table
from scipy.stats import binomtest

from lenience.certification.question import CertifyConfig
from lenience.certification.sequential_tests import (
    COMMON,
    TESTS,
    Alarm,
    Binomial,
    SettingResult,
    Test,
    fixed_sequence_test,
    paired_wealth,
    wealth,
)
from lenience.runs.ledger import FIRST, Ledger
from lenience.runs.uses import Draw, draw_rows
from lenience.tasks import JsonlTask, Sample, Task, ungradable

ALPHA = 0.05
REPEATS = 2000
MANY = 50_000
"""The error that is allowed, how many simulations there are, and how many where they are cheap."""
POOLED = ((0.0045, 3000), (0.01, 1000), (0.01, 2000), (0.01, 3000), (0.011, 3000))
"""Limits and prompts of the calibrations on the pool, two of them just under what a setting really
loses."""
ENOUGH = 50
TOKENS = 102
"""On how many prompts the target's accuracy is looked at, and how many tokens an answer has."""
STREAMS = (
    (0.01, 0.01, 3000, 3000),
    (0.003, 0.03, 500, 4500),
    (0.003, 0.03, 5000, 9500),
    (0.005, 0.1, 500, 2500),
    (0.0, 0.1, 2000, 4000),
)
"""Of audited losses: the mean before, the mean after, when it changes, and the length."""


def rare(means: list[float]) -> Callable[[np.random.Generator, int], NDArray]:
    """Return 0/1 losses, of one prompt more likely in every setting that loses more."""
    return lambda rng, n: (rng.random((1, n)) < np.array(means)[:, None]).astype(float)


def apart(means: list[float]) -> Callable[[np.random.Generator, int], NDArray]:
    """Return 0/1 losses that have nothing to do with one another."""
    return lambda rng, n: (
        rng.random((len(means), n)) < np.array(means)[:, None]
    ).astype(float)


def skewed(means: list[float]) -> Callable[[np.random.Generator, int], NDArray]:
    """Return mostly nothing or next to nothing, rarely all: as skewed as losses in [0, 1] of these
    means can be, and a floor."""

    def draw(rng: np.random.Generator, n: int) -> NDArray:
        floor = np.array(means)[:, None] / 4
        chance = (np.array(means)[:, None] - floor) / (1 - floor)
        return np.where(rng.random((1, n)) < chance, 1.0, floor)

    return draw


def spread(means: list[float]) -> Callable[[np.random.Generator, int], NDArray]:
    """Return beta-distributed losses."""
    return lambda rng, n: rng.beta(
        4 * np.array(means)[:, None],
        4 * (1 - np.array(means)[:, None]),
        (len(means), n),
    )


RISING = [0.0005, 0.001, 0.002, 0.004, 0.007, 0.0101, 0.02, 0.05]
CURVES: dict[
    str, tuple[list[float], Callable[[list[float]], Any], float, int, bool]
] = {
    "rising": (RISING, rare, 0.01, 1000, True),
    "rising, apart": (RISING, apart, 0.01, 1000, True),
    "all just above the limit": ([0.010001] * 8, rare, 0.01, 1000, True),
    "all just above, apart": ([0.010001] * 8, apart, 0.01, 1000, True),
    "up and down": (
        [0.002, 0.02, 0.001, 0.012, 0.001, 0.03, 0.002, 0.05],
        apart,
        0.01,
        1000,
        True,
    ),
    "above after a good start": (
        [0.0, 0.010001, 0.0, 0.010001, 0.0, 0.0, 0.0, 0.010001],
        apart,
        0.01,
        1000,
        True,
    ),
    "60 prompts": ([0.050001] * 4, rare, 0.05, 60, True),
    "5 % allowed": (
        [0.005, 0.01, 0.02, 0.03, 0.04, 0.050001, 0.1],
        rare,
        0.05,
        500,
        True,
    ),
    "skewed": (RISING, skewed, 0.01, 1000, False),
    "skewed, at the limit": ([0.010001] * 8, skewed, 0.01, 1000, False),
    "spread": ([0.02, 0.05, 0.08, 0.100001, 0.2], spread, 0.1, 400, False),
    "net drop": (
        [0.5, 0.502, 0.505001, 0.51],
        lambda means: _net(means),
        0.505,
        2000,
        False,
    ),
}
"""Name → true means from strict to lenient, how losses are drawn, the limit, prompts, whether
losses are 0 or 1."""


def _net(means: list[float]) -> Callable[[np.random.Generator, int], NDArray]:
    """Return 0 for a gain, 1/2 for a tie, 1 for a loss; gains are 1 %."""

    def draw(rng: np.random.Generator, n: int) -> NDArray:
        u = rng.random((1, n))
        lost = 2 * np.array(means)[:, None] - 1 + 0.01
        return np.where(u < 0.01, 0.0, np.where(u < 0.01 + lost, 1.0, 0.5))

    return draw


def simulate(name: str, procedure: str) -> dict[str, Any]:
    means, kind, limit, n, _ = CURVES[name]
    draw = kind(means)
    rng = np.random.default_rng(0)
    test = TESTS[procedure](limit, ALPHA, round(n / COMMON))
    # settings before the first that loses more
    best = next((i for i, mean in enumerate(means) if mean > limit), len(means))
    false = 0
    ranks = []
    seen = 0
    for _ in range(REPEATS // 100):
        drawn = np.stack([draw(rng, n) for _ in range(100)])  # [100, settings, n]
        for losses in drawn:
            tried = climb(test, losses)
            passed = [row.setting for row in tried if row.passed]
            false += any(means[setting] > limit for setting in passed)
            ranks.append(min(len(passed), best))
            seen += sum(row.n for row in tried)
    interval = binomtest(false, REPEATS).proportion_ci(0.95)
    return {
        "curve": name,
        "procedure": procedure,
        "share": false / REPEATS,
        "interval": [interval.low, interval.high],
        "reached": float(np.mean(ranks) / best) if best else None,
        "answers": seen / REPEATS,
        "of": len(means) * n,
    }


def climb(test: Test, losses: NDArray) -> list[SettingResult]:
    """Return the fixed-sequence test of settings with losses [settings, n]."""
    ends = [test.passed_at(row) for row in losses]

    def of(setting: int, n: int) -> NDArray:
        seen: Seen = losses[setting, :n].view(Seen)
        seen.passed_at = ends[setting]
        return seen

    return list(fixed_sequence_test(_Told(test), len(losses), of, losses.shape[1]))


class Seen(np.ndarray):
    """Losses that know when they pass."""

    passed_at: int | None = None


class _Told(Test):
    """A test that is told when losses pass, and does not work it out anew with each batch."""

    test: Test

    def __init__(self, test: Test):
        self.__dict__.update(test=test, limit=test.limit)

    def passed_at(self, losses: NDArray) -> int | None:
        assert isinstance(losses, Seen)
        at = losses.passed_at
        return at if at and at <= len(losses) else None

    def futile(self, losses: NDArray, most: int) -> bool:
        return self.test.futile(losses, most)


def collect(folder: Path, path: Path) -> None:
    """Decode the pool: for each setting, from strict to lenient, the prompts it lost, its tokens
    per pass, and the share of its answers that the setting before does not give."""
    by_rule: dict[str, dict[str, dict[str, Any]]] = {}
    for line in (folder / "compare.jsonl").read_text().splitlines():
        record = json.loads(line)
        by_rule.setdefault(record["rule"], {})[record["id"]] = record
    alone = by_rule.pop("target")
    by_rule.pop("draft")
    ids = sorted(alone, key=lambda id: int(id.split("-")[1]))
    settings = []
    strict_to_lenient = sorted(by_rule, key=_threshold, reverse=True)
    for before, rule in pairwise(["", *strict_to_lenient]):
        found = by_rule[rule]
        stricter = by_rule.get(before, {}).values()
        tokens = sum(record["tokens"] for record in found.values())
        passes = sum(record["target_passes"] for record in found.values())
        anew = [
            record["closest"] is None or record["closest"] >= _threshold(rule)
            for record in stricter
        ]
        lost = _lost(ids, alone, found)
        settings.append(
            {
                "threshold": _threshold(rule),
                "tokens_per_pass": round(tokens / passes, 4),
                "anew": round(float(np.mean(anew)), 4) if before else 1.0,
                "loss": len(lost) / len(ids),
                "lost": lost,
            }
        )
    right = sum(record["correct"] for record in alone.values())
    write_results(
        path, {"prompts": len(ids), "target_right": right, "settings": settings}
    )


def _lost(ids: list[str], alone: dict[str, Any], found: dict[str, Any]) -> list[int]:
    """Return which of the prompts the target alone answers rightly, and a setting does not."""
    return [
        i
        for i, id in enumerate(ids)
        if alone[id]["correct"] and not found[id]["correct"]
    ]


def _threshold(rule: str) -> float:
    return float(rule.split("@")[1])


@dataclass(frozen=True)
class Recalibrated:
    outside: NDArray
    """What each setting that passed loses on the prompts that were not used."""
    speed: float
    prompts: int
    passes: float


class CandidatePool:
    """What each setting loses on every prompt of a pool, strict first, and its speed."""

    def __init__(self, path: Path):
        pool = json.loads(path.read_text())
        self.prompts = int(pool["prompts"])
        self.target_right = int(pool["target_right"])
        self.lost = np.zeros((len(pool["settings"]), self.prompts))
        for row, setting in zip(self.lost, pool["settings"]):
            row[setting["lost"]] = 1
        self.anew = [setting["anew"] for setting in pool["settings"]]
        speeds = [setting["tokens_per_pass"] for setting in pool["settings"]]
        self.speed = np.array([1.0, *speeds])
        """In tokens per pass; the first is that of nothing certified."""

    def best(self, limit: float) -> float | None:
        """Return the speed of the most lenient setting that may be certified."""
        means = self.lost.mean(1)
        allowed = [i for i in range(len(means)) if (means[: i + 1] <= limit).all()]
        return float(self.speed[allowed[-1] + 1]) if allowed else None

    def recalibrate(self, test: Test, n: int, rng: np.random.Generator) -> Recalibrated:
        """Calibrate on at most n prompts: the mean losses of the settings that passed on all the
        other prompts, the speed of the last of them, and what it took."""
        order = rng.permutation(self.prompts)
        tried = climb(test, self.lost[:, order[:n]])
        passed = [row.setting for row in tried if row.passed]
        outside = self.lost[passed][:, order[n:]].mean(1)
        speed = float(self.speed[passed[-1] + 1]) if passed else 1.0
        return Recalibrated(
            outside, speed, max(row.n for row in tried), self._passes(tried)
        )

    def _passes(self, tried: list[SettingResult]) -> float:
        """Return an upper bound of the target's passes: of each setting that was tried, where the
        one before does not give its answer, and of the target alone where the setting may lose."""
        lenient = sum(
            self.anew[row.setting] * row.n / self.speed[row.setting + 1]
            for row in tried
        )
        wrong = 1 - self.target_right / self.prompts
        alone = ENOUGH + max(
            row.n * (wrong + self.lost[row.setting].mean()) for row in tried
        )
        return TOKENS * (lenient + alone)


def on_pool(
    pool: CandidatePool, limit: float, n: int, repeats: int = 1000
) -> list[dict[str, Any]]:
    """Return calibrations on n prompts of the pool, drawn anew each time; what is certified is held
    against all the other prompts."""
    told = []
    for procedure in TESTS:
        test = TESTS[procedure](limit, FIRST * ALPHA, round(50 / limit))
        rng = _seeded(1)
        made = [pool.recalibrate(test, n, rng) for _ in range(repeats)]
        false = sum(bool((calibration.outside > limit).any()) for calibration in made)
        told.append(
            {
                "limit": limit,
                "n": n,
                "procedure": procedure,
                "false": false / repeats,
                "none": sum(not len(calibration.outside) for calibration in made)
                / repeats,
                "tokens_per_pass": float(
                    np.mean([calibration.speed for calibration in made])
                ),
                "best": pool.best(limit),
                "prompts": float(
                    np.mean([calibration.prompts for calibration in made])
                ),
                "target_passes": float(
                    np.mean([calibration.passes for calibration in made])
                ),
            }
        )
    return told


def _seeded(number: int) -> np.random.Generator:
    return np.random.default_rng(number)


def share_of(false: int, repeats: int = REPEATS) -> dict[str, Any]:
    """Return how many of all, with an exact 95 % interval."""
    interval = binomtest(false, repeats).proportion_ci(0.95)
    return {"false": false / repeats, "interval": [interval.low, interval.high]}


def first_passed(
    test: Binomial,
    mean: float,
    most: int,
    rng: np.random.Generator,
    repeats: int = MANY,
) -> NDArray:
    """Return [repeats]: whether losses of this mean pass within `most` prompts."""
    losses = np.zeros(repeats, int)
    passed = np.zeros(repeats, bool)
    before = 0
    for fits, n in enumerate(n for n in test.boundary if n <= most):
        losses += rng.binomial(n - before, mean, repeats)
        passed = passed | (losses <= fits)
        before = n
    return passed


def asked_again(mean: float, folders: int, questions: int) -> dict[str, Any]:
    """Return questions from so many folders, which share a ledger, until one passes."""
    rng = _seeded(3)
    any_passed = np.zeros(MANY, bool)
    with TemporaryDirectory() as place:
        for number in range(questions):
            folder = Path(place) / f"run {number % folders}"
            ledger = Ledger(folder, {"target": "any"}, Path(place) / "home")
            attempt = ledger.attempt(
                f"question {number}", Rows([Sample("", "", "")]), "train"
            )
            test = CertifyConfig(("topk:2",)).test(attempt.share)
            assert isinstance(test, Binomial)
            any_passed |= first_passed(test, mean, 3000, rng)
    said = f"{questions} questions from {folders} folders"
    return {
        "attack": said,
        "true": mean,
        "limit": 0.01,
        **share_of(int(any_passed.sum()), MANY),
    }


def grown(mean: float) -> dict[str, Any]:
    """Return the same question, allowed ever more prompts until it passes."""
    test = Binomial(0.01, FIRST * ALPHA, 5000)
    passed = first_passed(test, mean, 4316, _seeded(4))
    said = "299, 1,079, 2,158, 4,316 prompts"
    return {
        "attack": said,
        "true": mean,
        "limit": 0.01,
        **share_of(int(passed.sum()), MANY),
    }


class Rows(Task):
    """A task of given rows."""

    name = "rows"

    def __init__(self, rows: list[Sample]):
        self.rows = rows

    def samples(self, split: str) -> list[Sample]:
        return self.rows


class Encoder:
    """As much of a model as a draw needs."""

    def encode(self, prompt: str) -> list[str]:
        return [prompt]


def drawn(
    said: str, mean: float, rows: Callable[[np.random.Generator], Any]
) -> dict[str, Any]:
    """Return calibrations on rows, drawn as the library draws them, with their losses by prompt;
    the limit is 5 %."""
    test = Binomial(0.05, FIRST * ALPHA, 1000)
    rng = _seeded(5)
    false = 0
    encoder: Any = Encoder()
    for number in range(REPEATS):
        samples, lost = rows(rng)
        draw = Draw(str(number), 600, "calibration")
        used = draw_rows(encoder, Rows(samples), draw, ())
        losses = np.array([lost[sample.prompt] for sample in used], float)
        false += test.passed_at(losses) is not None
    return {"attack": said, "true": mean, "limit": 0.05, **share_of(false)}


def clusters(size: int, mean: float = 0.050005) -> dict[str, Any]:
    """Return 150 groups of so many prompts that are never lost, and 150 single ones that are."""

    def rows(rng: np.random.Generator) -> tuple[list[Sample], dict[str, bool]]:
        lost = (rng.random(300) < 2 * mean) & (np.arange(300) < 150)
        sizes = [1 if group < 150 else size for group in range(300)]
        names = [
            (f"{group} {i}", str(group))
            for group in range(300)
            for i in range(sizes[group])
        ]
        samples = [Sample(name, name, None, group=group) for name, group in names]
        return samples, {name: bool(lost[int(group)]) for name, group in names}

    return drawn(f"groups of {size}, single ones are lost", mean, rows)


def together(size: int, mean: float = 0.050005) -> dict[str, Any]:
    """Return 300 groups of so many prompts that are lost together."""

    def rows(rng: np.random.Generator) -> tuple[list[Sample], dict[str, bool]]:
        lost = rng.random(300) < mean
        names = [
            (f"{group} {i}", str(group)) for group in range(300) for i in range(size)
        ]
        samples = [Sample(name, name, None, group=group) for name, group in names]
        return samples, {name: bool(lost[int(group)]) for name, group in names}

    return drawn(f"groups of {size}, lost together", mean, rows)


def popular(share: float) -> dict[str, Any]:
    """Return 600 rows, of which one prompt, which is lost, makes up so many on average."""

    def rows(rng: np.random.Generator) -> tuple[list[Sample], dict[str, bool]]:
        names = [
            "often" if chance < share else str(i)
            for i, chance in enumerate(rng.random(600))
        ]
        samples = [Sample(str(i), name, None) for i, name in enumerate(names)]
        return samples, {name: name == "often" for name in names}

    return drawn(f"one prompt is {share:.1%} of all, and lost", share, rows)


def half_ungradable() -> dict[str, Any]:
    """Return a file in which every second reference is none."""
    with TemporaryDirectory() as place:
        path = Path(place) / "rows.jsonl"
        rows = [
            {"prompt": str(i), "reference": "N/A" if i % 2 else "7"}
            for i in range(1000)
        ]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        task = JsonlTask(path, "regex:([0-9]+)", "number")
        samples = list(task.samples("train"))
        refused = len(ungradable(task, samples))
    return {"attack": f"half ungradable: {refused} of {len(samples)} named, refused"}


def four_audits() -> dict[str, Any]:
    """Return four processes that audit 2,000 prompts each, at exactly the limit."""
    rng = _seeded(6)
    false = 0
    for _ in track(range(REPEATS), "four audits"):
        alarm = Alarm(0.01, ALPHA)
        false += any(
            alarm.add(loss) for loss in (rng.random(8000) < 0.01).astype(float)
        )
    return {
        "attack": "four audits of 2,000",
        "true": 0.01,
        "limit": 0.01,
        **share_of(false),
    }


def attacks() -> list[dict[str, Any]]:
    told = [
        asked_again(mean, folders, 20)
        for mean in (0.010001, 0.012)
        for folders in (1, 10)
    ]
    told += [grown(0.010001), grown(0.012)]
    told += [together(size) for size in track((2, 5, 10, 20), "groups")]
    told += [clusters(size) for size in track((5, 20), "unlike groups")]
    told += [popular(share) for share in track((0.050005, 0.1, 0.3), "popular prompts")]
    return [*told, half_ungradable(), four_audits()]


def exact() -> list[dict[str, Any]]:
    """Return the chance of a false certificate by recursion, at the limit, and when nothing is
    lost; by default, and with `--horizon 500`."""
    shares = {1: FIRST, 2: (1 - FIRST) * 6 / np.pi**2}
    asked = [
        (limit, round(50 / limit), n) for limit in (0.001, 0.01, 0.05) for n in shares
    ]
    told = []
    for limit, horizon, number in [*asked, (0.01, 500, 1)]:
        level = shares[number] * ALPHA
        test = Binomial(limit, level, horizon)
        row = {"limit": limit, "horizon": horizon, "attempt": number, "level": level}
        told.append(
            row
            | {"false": test.power(limit, horizon), "lost_nothing": test.boundary[0]}
        )
    return told


def net(
    lost: float, gained: float, drop: float = 0.01, streams: int = 1000
) -> dict[str, Any]:
    """Return how many prompts the net loss takes four times in five, beside the best stake in
    hindsight."""
    u = _seeded(7).random((streams, 12_000))
    limit = (1 + drop) / 2
    losses = np.where(u < lost, 1.0, np.where(u < lost + gained, 0.0, 0.5))
    ours = _four_in_five(paired_wealth(losses, limit, limit))
    stakes = np.geomspace(1 / 64, 0.99, 14)
    best = min(
        _four_in_five(wealth(losses, limit, np.array([stake]))) for stake in stakes
    )
    spread = _four_in_five(wealth(losses, limit))
    told = {"lost": lost, "gained": gained, "prompts": ours, "best_stake": best}
    return told | {"ratio": ours / best, "even_stakes": spread}


def _four_in_five(rich: NDArray) -> float:
    reached = rich >= 1 / ALPHA
    ends = np.where(reached.any(1), reached.argmax(1) + 1, np.inf)
    return float(np.quantile(ends, 0.8, method="higher"))


def audits(
    before: float,
    after: float,
    at: int,
    length: int,
    limit: float = 0.01,
    streams: int = 400,
) -> dict[str, Any]:
    """Return streams of audited losses whose mean changes after `at`: how many alarms come before,
    and how late they come after."""
    rng = np.random.default_rng(2)
    early = 0
    delays = []
    for _ in range(streams):
        losses = rng.random(length) < np.where(np.arange(length) < at, before, after)
        alarm = Alarm(limit, ALPHA)
        when = length
        for i, loss in enumerate(losses.astype(float)):
            if alarm.add(loss):
                when = i
                break
        early += when < at
        if when >= at:
            delays.append(when - at if when < length else np.inf)
    told: dict[str, float | None] = {
        "limit": limit,
        "before": before,
        "after": after,
        "at": at,
        "length": length,
        "alarms_before": early / streams,
    }
    if after > limit and delays:
        late = np.quantile(delays, [0.5, 0.9], method="lower")
        told |= {
            "median_delay": float(late[0]),
            "delay_of_9_in_10": float(late[1]) if np.isfinite(late[1]) else None,
        }
    return told


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--pool",
        type=Path,
        default=Path(__file__).parent / "results" / "certificate_pool.json",
    )
    parser.add_argument("--collect", type=Path)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    if given.collect:
        collect(given.collect, given.pool)
        return
    began = time.perf_counter()
    told = {}
    wanted = [
        (name, procedure)
        for name in CURVES
        for procedure in TESTS
        if CURVES[name][4] or procedure != "binomial"
    ]
    told["simulated"] = [
        simulate(*case) for case in track(wanted, "simulated calibrations")
    ]
    told["exact"] = exact()
    told["attacks"] = attacks()
    told["net"] = [net(0.003, 0.001), net(0.02, 0.018)]
    if given.pool.exists():
        pool = CandidatePool(given.pool)
        told["pool"] = [row for limit, n in POOLED for row in on_pool(pool, limit, n)]
    told["audits"] = [audits(*stream) for stream in track(STREAMS, "audits")]
    for name, rows in told.items():
        show(name, rows)
    if given.out:
        seconds = round(time.perf_counter() - began, 1)
        write_results(given.out, told | {"seconds": seconds})


def show(name: str, rows: list[dict[str, Any]]) -> None:
    """Print rows as a table."""
    table = Table(title=name)
    keys = dict.fromkeys(key for row in rows for key in row)
    for key in keys:
        table.add_column(key.replace("_", " "), justify="right")
    for row in rows:
        table.add_row(*(_cell(row.get(key)) for key in keys))
    Console(width=150).print(table)


def _cell(value: Any) -> str:
    if isinstance(value, list):
        return "–".join(f"{part:.3f}" for part in value)
    return (
        "–"
        if value is None
        else f"{value:.4g}"
        if isinstance(value, float)
        else str(value)
    )


if __name__ == "__main__":
    main()
