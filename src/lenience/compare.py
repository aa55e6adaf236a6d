"""Compare decoders on a task: quality and speed of each rule on the same prompts, paired, with intervals."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from scipy.stats import binomtest

from lenience.decode import pieces
from lenience.errors import InputError
from lenience.journal import Journal, open_run, read_json, write_json
from lenience.mining import check_prompts, describe
from lenience.pair import Generation, Pair
from lenience.rules import AnyOf, Judge, parse_rule
from lenience.tasks import JsonlTask, Sample, Task, take

if TYPE_CHECKING:
    from numpy.typing import NDArray

WINDOWS = (2, 4, 8, 16, 32)
ALONE = ("target", "draft")
"""Stand for decoding with that model alone."""
EXAMPLES = 3
"""How many prompts' answers are kept for the report, token by token."""


@dataclass(frozen=True)
class Setting:
    """A rule at a draft window, and why it is in the comparison: "given" or "window of RULE"."""

    rule: str
    window: int
    why: str = "given"


@dataclass(frozen=True)
class Progress:
    phase: str
    done: int
    total: int


def compare(
    pair: Pair,
    task: Task,
    rules: Sequence[str],
    *,
    windows: Sequence[int] = WINDOWS,
    limit: int | None = None,
    tuning: int = 20,
    max_new_tokens: int | None = None,
    out: Path | None = None,
) -> Iterator[Progress | dict[str, Any]]:
    """Decode the first `limit` test samples greedily by every rule; yields Progress and, at last, the frontier.

    Each rule runs at the window of `windows` that gives it the most tokens per second on `tuning` other samples, the last
    ones of the training split; the strict rule also at each window that a judge got. The rules take turns on every
    prompt, so that a machine's moods fall on all of them alike. With `out`, finished prompts are kept there and a
    second call goes on from them. Raises InputError for a wrong rule, task or folder.
    """
    for rule in rules:
        pair.check(rule)  # a wrong rule or judge is told before any work
    if tuning < 1:
        raise InputError(f"tuning {tuning}: must be 1 or more")
    samples = take(task, "test", limit)
    max_new_tokens = check_prompts(pair, task, samples, max_new_tokens)
    unknown = [sample.id for sample in samples if sample.reference is None] if isinstance(task, JsonlTask) else []
    if unknown:
        raise InputError(f"task {task.name!r}: sample {unknown[0]} has no reference, and accuracy cannot be told without one")
    rules = list(dict.fromkeys(["target", *rules]))
    journal = None
    if out is not None:
        asked = describe(pair, task, split="test", max_new_tokens=max_new_tokens, rules=rules, windows=list(windows),
                         tuning=tuning, heads=_heads(rules))  # fmt: skip
        open_run(out, asked, "compare.json")
        journal = Journal(out / "compare.jsonl")
    run = _Run(pair, task, max_new_tokens)
    chosen = out / "windows.json" if out else None
    if chosen and chosen.exists():
        settings = [Setting(**setting) for setting in read_json(chosen)["settings"]]
    else:
        others = take(task, "train", None)[-tuning:] if len(windows) > 1 else []
        settings = yield from run.tune(rules, windows, others)
        if chosen:
            write_json(chosen, {"settings": [vars(setting) for setting in settings]})
    finished = {record["id"]: record for record in (journal.resume() if journal else [])}
    for setting in settings:
        run.answer(samples[0], setting)  # warm-up
    for done, sample in enumerate(samples):
        yield Progress("comparing", done, len(samples))
        if sample.id not in finished:
            finished[sample.id] = run.sample(sample, settings, keep=done < EXAMPLES)
            if journal:
                journal.append(finished[sample.id])
    yield Progress("comparing", len(samples), len(samples))
    frontier = {
        **describe(pair, task, split="test", max_new_tokens=max_new_tokens),
        "machine": machine(pair),
        "rows": rows(settings, [finished[sample.id] for sample in samples]),
        "examples": [{"prompt": sample.prompt, **finished[sample.id]} for sample in samples[:EXAMPLES]],
    }
    if out is not None:
        write_json(out / "frontier.json", frontier)
    yield frontier


def discard(out: Path) -> None:
    """Forget a comparison, so that its folder takes another one."""
    for name in ("compare.json", "compare.jsonl", "windows.json"):
        (out / name).unlink(missing_ok=True)


class _Run:
    """Answers samples under settings."""

    def __init__(self, pair: Pair, task: Task, max_new_tokens: int):
        self.pair, self.task, self.max_new_tokens = pair, task, max_new_tokens

    def answer(self, sample: Sample, setting: Setting) -> Generation:
        return self.pair.generate(sample.prompt, rule=setting.rule, window=setting.window, max_new_tokens=self.max_new_tokens)

    def tune(self, rules: Sequence[str], windows: Sequence[int], samples: Sequence[Sample]) -> Any:
        """The settings to compare: each rule at its fastest window."""
        total, done = len([rule for rule in rules if rule not in ALONE]) * len(windows) * len(samples), 0
        settings = []
        for rule in rules:
            if rule in ALONE or len(windows) == 1:
                settings.append(Setting(rule, 0 if rule in ALONE else windows[0]))
                continue
            self.answer(samples[0], Setting(rule, windows[0]))  # warm-up
            tokens, seconds = np.zeros(len(windows)), np.zeros(len(windows))
            for sample in samples:
                for i, window in enumerate(windows):
                    out = self.answer(sample, Setting(rule, window))
                    tokens[i] += len(out.tokens)
                    seconds[i] += out.seconds
                    done += 1
                    yield Progress("choosing windows", done, total)
            settings.append(Setting(rule, windows[int((tokens / seconds).argmax())]))
        if "exact" in rules:
            taken = {setting.window for setting in settings if setting.rule == "exact"}
            for setting in list(settings):
                if _judges(setting.rule) and setting.window not in taken:
                    taken.add(setting.window)
                    settings.append(Setting("exact", setting.window, f"window of {setting.rule}"))
        return settings

    def sample(self, sample: Sample, settings: Sequence[Setting], keep: bool) -> dict[str, Any]:
        """One journal record: every setting's result on one sample."""
        results = []
        for setting in settings:
            out = self.answer(sample, setting)
            result: dict[str, Any] = {
                "tokens": len(out.tokens),
                "target_passes": out.target_passes,
                "draft_passes": out.draft_passes,
                "accepted_exact": out.accepted_exact,
                "accepted_lenient": out.accepted_lenient,
                "seconds": round(out.seconds, 5),
                "answer": self.task.answer(out.text),
                "correct": self.task.correct(out.text, sample),
            }
            if keep:
                text = pieces(self.pair.target, out.tokens)
                result["trace"] = [[piece, entry.origin, entry.score] for piece, entry in zip(text, out.trace)]
            results.append(result)
        return {"id": sample.id, "reference": sample.reference, "results": results}


def _judges(rule: str) -> list[Judge]:
    if rule in ALONE:
        return []
    parsed = parse_rule(rule)
    terms = parsed.terms if isinstance(parsed, AnyOf) else (parsed,)
    return [term for term in terms if isinstance(term, Judge)]


def _heads(rules: Sequence[str]) -> dict[str, str]:
    """Identifies the heads of the rules: a head that was fitted anew, or has another threshold, is another one."""
    return {judge.path: judge.head.fingerprint for rule in rules for judge in _judges(rule)}


def rows(settings: Sequence[Setting], records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The table: one row a setting, each figure with its 95 % interval (exact binomial for shares, bootstrap over prompts
    for ratios). `paired_loss` is the share of prompts that the target alone gets right and this decoder wrong."""
    n = len(records)

    def column(i: int, key: str) -> NDArray:
        return np.array([record["results"][i][key] for record in records], dtype=float)

    base = next(i for i, setting in enumerate(settings) if setting.rule == "target")
    alone = column(base, "correct").astype(bool)
    draws = np.random.default_rng(0).integers(0, n, (1000, n))
    table = []
    for i, setting in enumerate(settings):
        right, tokens, seconds = column(i, "correct").astype(bool), column(i, "tokens"), column(i, "seconds")
        passes = column(i, "target_passes")
        row: dict[str, Any] = {"rule": setting.rule, "window": setting.window, "why": setting.why, "n": n}
        row |= _share("accuracy", int(right.sum()), n)
        row |= _share("paired_loss", int((alone & ~right).sum()), n)
        row |= _share("paired_gain", int((~alone & right).sum()), n)
        row |= _ratio("tokens_per_pass", tokens, passes, draws)
        row |= _ratio("tokens_per_second", tokens, seconds, draws)
        row |= _ratio("seconds_per_correct", seconds, right.astype(float), draws)
        row |= _ratio("accepted_exact_per_pass", column(i, "accepted_exact"), passes, draws)
        table.append(row)
    return table


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
        return torch.cuda.get_device_name(pair.target.device)
    name = platform.processor() or platform.machine()
    try:
        with open("/proc/cpuinfo") as file:
            name = next(line.split(":")[1].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        pass
    return f"{name}, {os.cpu_count()} cores, {torch.get_num_threads()} threads, {platform.system()}"
