"""Whether certificates keep their word: simulated calibrations with known loss curves, repeated
calibrations on a pool of the built-in pair's answers, and the audit's false alarms and delays.

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
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import track
from rich.table import Table
from scipy.stats import binomtest

from lenience.certification.sequential_tests import (
    TESTS,
    Alarm,
    Test,
    fixed_sequence_test,
    look_schedule,
    wealth,
)

ALPHA, REPEATS = 0.05, 2000
POOLED = ((0.005, 2000), (0.01, 1000), (0.01, 2000), (0.015, 2000))
"""Limits and prompts of the calibrations on the pool, two of them just under what a setting really
loses."""
STREAMS = (
    (0.01, 0.01, 3000, 3000),
    (0.005, 0.03, 500, 4500),
    (0.005, 0.1, 500, 2500),
    (0.0, 0.1, 2000, 4000),
)
"""Of audited losses: the mean before, the mean after, when it changes, and the length."""


def rare(means: list[float]) -> Callable[[np.random.Generator, int], NDArray]:
    """0/1 losses, of one prompt more likely in every setting that loses more."""
    return lambda rng, n: (rng.random((1, n)) < np.array(means)[:, None]).astype(float)


def apart(means: list[float]) -> Callable[[np.random.Generator, int], NDArray]:
    """0/1 losses that have nothing to do with one another."""
    return lambda rng, n: (rng.random((len(means), n)) < np.array(means)[:, None]).astype(float)


def skewed(means: list[float]) -> Callable[[np.random.Generator, int], NDArray]:
    """Mostly nothing or next to nothing, rarely all: as skewed as losses in [0, 1] of these means
    can be, and a floor."""

    def draw(rng: np.random.Generator, n: int) -> NDArray:
        floor = np.array(means)[:, None] / 4
        chance = (np.array(means)[:, None] - floor) / (1 - floor)
        return np.where(rng.random((1, n)) < chance, 1.0, floor)

    return draw


def spread(means: list[float]) -> Callable[[np.random.Generator, int], NDArray]:
    """Beta-distributed losses."""
    return lambda rng, n: rng.beta(
        4 * np.array(means)[:, None], 4 * (1 - np.array(means)[:, None]), (len(means), n)
    )


RISING = [0.0005, 0.001, 0.002, 0.004, 0.007, 0.0101, 0.02, 0.05]
CURVES: dict[str, tuple[list[float], Callable[[list[float]], Any], float, int, bool]] = {
    "rising": (RISING, rare, 0.01, 1000, True),
    "rising, apart": (RISING, apart, 0.01, 1000, True),
    "all just above the limit": ([0.010001] * 8, rare, 0.01, 1000, True),
    "all just above, apart": ([0.010001] * 8, apart, 0.01, 1000, True),
    "up and down": ([0.002, 0.02, 0.001, 0.012, 0.001, 0.03, 0.002, 0.05], apart, 0.01, 1000, True),
    "above after a good start": (
        [0.0, 0.010001, 0.0, 0.010001, 0.0, 0.0, 0.0, 0.010001],
        apart,
        0.01,
        1000,
        True,
    ),
    "60 prompts": ([0.050001] * 4, rare, 0.05, 60, True),
    "5 % allowed": ([0.005, 0.01, 0.02, 0.03, 0.04, 0.050001, 0.1], rare, 0.05, 500, True),
    "skewed": (RISING, skewed, 0.01, 1000, False),
    "skewed, at the limit": ([0.010001] * 8, skewed, 0.01, 1000, False),
    "spread": ([0.02, 0.05, 0.08, 0.100001, 0.2], spread, 0.1, 400, False),
    "net drop": ([0.5, 0.502, 0.505001, 0.51], lambda means: _net(means), 0.505, 2000, False),
}
"""Name → true means from strict to lenient, how losses are drawn, the limit, prompts, whether
losses are 0 or 1."""


def _net(means: list[float]) -> Callable[[np.random.Generator, int], NDArray]:
    """0 for a gain, 1/2 for a tie, 1 for a loss; gains are 1 %."""

    def draw(rng: np.random.Generator, n: int) -> NDArray:
        u, lost = rng.random((1, n)), 2 * np.array(means)[:, None] - 1 + 0.01
        return np.where(u < 0.01, 0.0, np.where(u < 0.01 + lost, 1.0, 0.5))

    return draw


def simulate(name: str, procedure: str) -> dict[str, Any]:
    means, kind, limit, n, _ = CURVES[name]
    draw, rng = kind(means), np.random.default_rng(0)
    test = TESTS[procedure](limit, ALPHA, look_schedule(n))
    best = next(
        (i for i, mean in enumerate(means) if mean > limit), len(means)
    )  # settings before the first that loses more
    false, ranks, seen = 0, [], 0
    for _ in range(REPEATS // 100):
        drawn = np.stack([draw(rng, n) for _ in range(100)])  # [100, settings, n]
        verdicts = _verdicts(test, drawn) if procedure == "betting" else None
        for one, losses in enumerate(drawn):
            tried = fixed_sequence_test(
                _Table(test, verdicts[one]) if verdicts is not None else test,
                len(means),
                _oracle(losses),
            )
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


def _oracle(losses: NDArray) -> Callable[[int, int], NDArray]:
    def of(setting: int, n: int) -> NDArray:
        seen = losses[setting, :n].view(Seen)
        seen.setting = setting
        return seen

    return of


class Seen(np.ndarray):
    """Losses that know which setting's they are."""

    setting = 0


class _Table:
    """A betting test with its verdicts [settings, looks] worked out for many calibrations at once,
    by the same wealth."""

    def __init__(self, test: Test, verdicts: NDArray):
        self.test, self.verdicts, self.looks = test, verdicts, test.looks

    def passes(self, look: int, losses: NDArray) -> bool:
        return bool(self.verdicts[losses.setting, look])

    def futile(self, look: int, losses: NDArray) -> bool:
        return self.test.futile(look, losses)


def _verdicts(test: Test, drawn: NDArray) -> NDArray:
    highest = np.maximum.accumulate(wealth(drawn, test.limit), -1)  # [100, settings, n]
    return highest[..., np.array(test.looks) - 1] >= 1 / test.alpha


def collect(folder: Path, path: Path) -> None:
    """The pool: for each setting from strict to lenient which prompts it lost, its tokens per pass,
    and how many prompts there are."""
    by_rule: dict[str, dict[str, dict[str, Any]]] = {}
    for line in (folder / "compare.jsonl").read_text().splitlines():
        record = json.loads(line)
        by_rule.setdefault(record["rule"], {})[record["id"]] = record
    alone = by_rule.pop("target")
    by_rule.pop("draft")
    ids, settings = sorted(alone, key=lambda id: int(id.split("-")[1])), []
    for rule, found in by_rule.items():
        lost = [i for i, id in enumerate(ids) if alone[id]["correct"] and not found[id]["correct"]]
        passes = sum(record["tokens"] for record in found.values()) / sum(
            r["target_passes"] for r in found.values()
        )
        settings.append(
            {
                "threshold": float(rule.split("@")[1]),
                "tokens_per_pass": round(passes, 4),
                "lost": lost,
            }
        )
    settings.sort(key=lambda setting: -setting["threshold"])
    right = sum(record["correct"] for record in alone.values())
    path.write_text(json.dumps({"prompts": len(ids), "target_right": right, "settings": settings}))


class Pool:
    """What each setting loses on every prompt of a pool, strict first, and its speed."""

    def __init__(self, path: Path):
        pool = json.loads(path.read_text())
        self.prompts = int(pool["prompts"])
        self.lost = np.zeros((len(pool["settings"]), self.prompts))
        for row, setting in zip(self.lost, pool["settings"]):
            row[setting["lost"]] = 1
        speeds = [setting["tokens_per_pass"] for setting in pool["settings"]]
        self.speed = np.array([1.0, *speeds])
        """In tokens per pass; the first is that of nothing certified."""

    def best(self, limit: float) -> float | None:
        """The speed of the most lenient setting that may be certified."""
        means = self.lost.mean(1)
        allowed = [i for i in range(len(means)) if (means[: i + 1] <= limit).all()]
        return float(self.speed[allowed[-1] + 1]) if allowed else None

    def recalibrate(
        self, test: Test, n: int, rng: np.random.Generator
    ) -> tuple[NDArray, float] | None:
        """Calibrate on n prompts: the mean losses of the settings that passed on all the other
        prompts, and the speed of the last of them."""
        order = rng.permutation(self.prompts)
        tried = fixed_sequence_test(test, len(self.lost), _oracle(self.lost[:, order[:n]]))
        passed = [row.setting for row in tried if row.passed]
        if not passed:
            return None
        return self.lost[passed][:, order[n:]].mean(1), float(self.speed[passed[-1] + 1])


def on_pool(pool: Pool, limit: float, n: int, repeats: int = 200) -> list[dict[str, Any]]:
    """Calibrations on n prompts of the pool, drawn anew each time; what is certified is held
    against all the other prompts."""
    told = []
    for procedure in TESTS:
        test, rng = TESTS[procedure](limit, ALPHA, look_schedule(n)), np.random.default_rng(1)
        made = [pool.recalibrate(test, n, rng) for _ in range(repeats)]
        passed = [one for one in made if one is not None]
        false = sum(bool((outside > limit).any()) for outside, _ in passed)
        told.append(
            {
                "limit": limit,
                "n": n,
                "procedure": procedure,
                "share": false / repeats,
                "none": 1 - len(passed) / repeats,
                "tokens_per_pass": _mean([speed for _, speed in passed]),
                "best": pool.best(limit),
                "loss_on_the_rest": _mean([float(outside[-1]) for outside, _ in passed]),
            }
        )
    return told


def _mean(values: list[float]) -> float | None:
    return float(np.mean(values)) if values else None


def audits(
    before: float, after: float, at: int, length: int, limit: float = 0.01, streams: int = 400
) -> dict[str, Any]:
    """Streams of audited losses whose mean changes after `at`: how many alarms come before, and how
    late they come after."""
    rng, early, delays = np.random.default_rng(2), 0, []
    for _ in range(streams):
        losses = rng.random(length) < np.where(np.arange(length) < at, before, after)
        alarm, when = Alarm(limit, ALPHA), length
        for i, loss in enumerate(losses.astype(float)):
            if alarm.add(loss):
                when = i
                break
        early += when < at
        if when >= at:
            delays.append(when - at if when < length else np.inf)
    told = {
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
        "--pool", type=Path, default=Path(__file__).parent / "results" / "certificate_pool.json"
    )
    parser.add_argument("--collect", type=Path)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    if given.collect:
        collect(given.collect, given.pool)
        return
    began, told = time.perf_counter(), {}
    wanted = [
        (name, procedure)
        for name in CURVES
        for procedure in TESTS
        if CURVES[name][4] or procedure != "binomial"
    ]
    told["simulated"] = [simulate(*one) for one in track(wanted, "simulated calibrations")]
    if given.pool.exists():
        pool = Pool(given.pool)
        told["pool"] = [row for limit, n in POOLED for row in on_pool(pool, limit, n)]
    told["audits"] = [audits(*one) for one in track(STREAMS, "audits")]
    for name, rows in told.items():
        show(name, rows)
    if given.out:
        seconds = round(time.perf_counter() - began, 1)
        given.out.write_text(json.dumps(told | {"seconds": seconds}, indent=1))


def show(name: str, rows: list[dict[str, Any]]) -> None:
    """Print rows as a table."""
    table, keys = Table(title=name), dict.fromkeys(key for row in rows for key in row)
    for key in keys:
        table.add_column(key.replace("_", " "), justify="right")
    for row in rows:
        table.add_row(*(_cell(row.get(key)) for key in keys))
    Console(width=150).print(table)


def _cell(value: Any) -> str:
    if isinstance(value, list):
        return "–".join(f"{one:.3f}" for one in value)
    return "–" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    main()
