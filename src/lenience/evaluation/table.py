"""The rows of a comparison: figures of each setting with intervals."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from scipy.stats import binomtest

from lenience.decoding.pair import Pair
from lenience.rules.registry import ALONE

if TYPE_CHECKING:
    from numpy.typing import NDArray


SHARES = tuple(i / 20 for i in range(21))
"""Of the prompts that random allocation gives to the draft."""


@dataclass(frozen=True)
class Setting:
    """A rule at a draft window, and why it is in the comparison: "fastest", "widest" or "window of RULE"; "given" where there
    was nothing to choose."""

    rule: str
    window: int
    why: str = "given"


def rows(
    settings: Sequence[Setting], answers: Sequence[Sequence[dict[str, Any]]], timings: Sequence[Sequence[float]]
) -> list[dict[str, Any]]:
    """The table: one row a setting, each figure with its 95 % interval (exact binomial for shares, bootstrap over prompts
    for ratios). `answers` holds each setting's results on n samples, `timings` the seconds of each of the first `timed_n`
    of them by setting. `paired_loss` is the share of prompts that the target alone gets right and this decoder wrong;
    `share_of_cap` the tokens per second as a share of the draft's alone, which nothing exceeds."""

    def column(i: int, key: str) -> NDArray:
        return np.array([result[key] for result in answers[i]], dtype=float)

    def draws(n: int) -> NDArray:
        return np.random.default_rng(0).integers(0, n, (1000, n))

    seconds = np.array(timings, dtype=float)  # [timed_n, settings]
    n, timed = len(answers[0]), len(seconds)
    alone = {setting.rule: i for i, setting in enumerate(settings) if setting.rule in ALONE}
    target_right = column(alone["target"], "correct").astype(bool)
    table = []
    for i, setting in enumerate(settings):
        right, tokens, passes = column(i, "correct").astype(bool), column(i, "tokens"), column(i, "target_passes")
        row: dict[str, Any] = {**vars(setting), "n": n, "timed_n": timed}
        row |= _share("accuracy", int(right.sum()), n)
        row |= _share("paired_loss", int((target_right & ~right).sum()), n)
        row |= _share("paired_gain", int((~target_right & right).sum()), n)
        row |= _ratio("tokens_per_pass", tokens, passes, draws(n))
        row |= _ratio("accepted_exact_per_pass", column(i, "accepted_exact"), passes, draws(n))
        row |= _ratio("tokens_per_second", tokens[:timed], seconds[:, i], draws(timed))
        row |= _ratio("seconds_per_correct", seconds[:, i], right[:timed].astype(float), draws(timed))
        table.append(row)
    cap = table[alone["draft"]]["tokens_per_second"]
    return [{**row, "share_of_cap": row["tokens_per_second"] / cap} for row in table]


def allocation(
    settings: Sequence[Setting], answers: Sequence[Sequence[dict[str, Any]]], timings: Sequence[Sequence[float]]
) -> list[dict[str, Any]]:
    """What random allocation is expected to give: each prompt answered by the draft with the chance `share`, else by the
    target alone. Any rule must beat this line (Holsman 2025)."""
    alone = [next(i for i, setting in enumerate(settings) if setting.rule == name) for name in ("target", "draft")]
    seconds = np.array(timings, dtype=float)[:, alone]  # [timed_n, 2]
    right, tokens, passes = (
        np.array([[result[key] for result in answers[i]] for i in alone], dtype=float).T  # [n, 2]
        for key in ("correct", "tokens", "target_passes")
    )
    line = []
    for share in SHARES:
        mix = np.array([1 - share, share])
        timed = [float((part[: len(seconds)] @ mix).sum()) for part in (right, tokens, seconds)]
        read = float((passes @ mix).sum())
        line.append({
            "share": share,
            "accuracy": float((right @ mix).mean()),
            "paired_loss": share * float((right[:, 0] * (1 - right[:, 1])).mean()),
            "tokens_per_pass": float((tokens @ mix).sum()) / read if read else None,
            "tokens_per_second": timed[1] / timed[2],
            "seconds_per_correct": timed[2] / timed[0] if timed[0] else None,
        })  # fmt: skip
    return line


def _share(name: str, hits: int, n: int) -> dict[str, Any]:
    interval = binomtest(hits, n).proportion_ci(0.95)
    return {name: hits / n, f"{name}_interval": [float(interval.low), float(interval.high)]}


def _ratio(name: str, above: NDArray, below: NDArray, draws: NDArray) -> dict[str, Any]:
    """Σ above / Σ below; None where nothing is below."""
    if not below.sum():
        return {name: None, f"{name}_interval": None}
    sums = below[draws].sum(1)
    spread = above[draws].sum(1)[sums > 0] / sums[sums > 0]
    low, high = np.quantile(spread, [0.025, 0.975])
    return {name: float(above.sum() / below.sum()), f"{name}_interval": [float(low), float(high)]}


def machine(pair: Pair) -> str:
    """What the figures were measured on."""
    if pair.target.device.type == "cuda":
        return torch.cuda.get_device_name(pair.target.device) + (", recorded passes" if pair.compiled else "")
    name = platform.processor() or platform.machine()
    try:
        with open("/proc/cpuinfo") as file:
            name = next(line.split(":")[1].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        pass
    engine = "ONNX Runtime" if pair.compiled else f"torch, {torch.get_num_threads()} threads"
    return f"{name}, {os.cpu_count()} cores, {platform.system()}, {engine}"
