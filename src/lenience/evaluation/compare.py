"""Compare decoders on a task: quality and speed of each rule on the same prompts, paired, with intervals."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from lenience.core.errors import InputError
from lenience.core.files import read_json, write_json
from lenience.decoding.certified import refuse_certified
from lenience.decoding.generation import Generation
from lenience.decoding.options import Options, check_options, learned
from lenience.decoding.pair import Pair
from lenience.decoding.response import pieces
from lenience.evaluation.table import Setting, allocation, machine, rows
from lenience.rules.judge import Judge
from lenience.rules.registry import ALONE, terms
from lenience.rules.settings import expand
from lenience.runs.journal import Journal, open_run
from lenience.runs.record import check_prompts, describe
from lenience.runs.uses import fitted_in, note_uses
from lenience.tasks import JsonlTask, Sample, Task, known_as, take

WINDOWS = (2, 4, 8, 16, 32)
EXAMPLES = 3
"""How many prompts' answers are kept for the report, token by token."""


@dataclass(frozen=True)
class Progress:
    phase: str
    done: int
    total: int


@dataclass(frozen=True)
class Estimate:
    """How long what is left will take, from an answer and a batch of answers decoded beforehand."""

    seconds: float
    answers: int


def compare(
    pair: Pair,
    task: Task,
    rules: Sequence[str],
    *,
    windows: Sequence[int] = WINDOWS,
    stop: str = "fixed",
    limit: int | None = None,
    tuning: int = 20,
    timed: int = 50,
    repeats: int = 3,
    batch_size: int = 32,
    max_new_tokens: int | None = None,
    temperature: float = 0.0,
    seed: int = 0,
    out: Path | None = None,
) -> Iterator[Progress | Estimate | dict[str, Any]]:
    """Decode the first `limit` test samples by every rule; yields an Estimate, Progress and, at last, the frontier.

    The target and the draft alone are always among the rules; "all" stands for GRID, and for each judge that is named
    without a threshold at those that it was fitted with. Above `temperature` 0 all sample, keyed by `seed`.

    Each rule runs at two windows: the one of `windows` that gives it the most tokens per second on `tuning` other samples, the
    last ones of the training split, and the widest, for what it gains where only the target's passes cost; the strict rule
    also at each window that a judge got. Quality and passes are counted while `batch_size` samples are decoded together;
    seconds are measured one by one on the first `timed` samples, medians of `repeats`, the rules taking turns so that a
    machine's moods fall on all of them alike. With `out`, finished answers are kept there and a second call goes on from
    them. Raises InputError for a wrong rule, task or folder.
    """
    refuse_certified(rules)
    rules = list(dict.fromkeys(["target", "draft", *expand(rules, temperature)]))
    for rule in rules:
        pair.check(rule, stop, temperature)  # a wrong rule or head is told before any work
    for window in windows:
        check_options(window, temperature=temperature, seed=seed)
    for name, value in (("tuning", tuning), ("timed", timed), ("repeats", repeats), ("batch_size", batch_size)):
        if value < 1:
            raise InputError(f"{name} {value}: must be 1 or more")
    samples = take(task, "test", limit)
    others = take(task, "train", None)[-tuning:] if len(windows) > 1 else []
    max_new_tokens = check_prompts(pair, task, [*samples, *others], max_new_tokens)
    unknown = [sample.id for sample in samples if sample.reference is None] if isinstance(task, JsonlTask) else []
    if unknown:
        raise InputError(f"task {task.name!r}: sample {unknown[0]} has no reference, and accuracy cannot be told without one")
    sampling: Options = {"temperature": temperature, "seed": seed}
    asked = describe(pair, task, split="test", max_new_tokens=max_new_tokens, rules=rules, windows=list(windows),
                     stop=stop, tuning=tuning, heads=heads(rules, stop),
                     generation_config=pair.binding("exact")["generation_config"], **sampling)  # fmt: skip
    with _folder(out, asked) as folder:
        run = _Run(pair, task, folder, {"max_new_tokens": max_new_tokens, "stop": stop, **sampling})
        yield run.estimate(rules, windows, len(others), samples, min(timed, len(samples)) * repeats, batch_size)
        run.note_uses(rules, {"window": others, "comparison": samples})
        settings = yield from run.settings(rules, windows, others)
        answers = yield from run.answers(settings, samples, batch_size)
        timings = yield from run.timings(settings, samples[:timed], repeats)
    examples = [
        {"id": sample.id, "prompt": sample.prompt, "reference": sample.reference, "results": [row[i] for row in answers]}
        for i, sample in enumerate(samples[:EXAMPLES])
    ]
    frontier = {
        **describe(pair, task, split="test", max_new_tokens=max_new_tokens, stop=stop, **sampling),
        "machine": machine(pair),
        "rows": rows(settings, answers, timings),
        "allocation": allocation(settings, answers, timings),
        "examples": examples,
    }
    if out is not None:
        write_json(out / "frontier.json", frontier)
    yield frontier


@contextmanager
def _folder(out: Path | None, asked: dict[str, Any]) -> Iterator[Path]:
    """Where finished work is kept: `out`, if it was asked for the same, or a folder for the time being."""
    if out is not None:
        open_run(out, asked, "compare.json")
        yield out
    else:
        with TemporaryDirectory() as temporary:
            yield Path(temporary)


def discard(out: Path) -> None:
    """Forget a comparison, so that its folder takes another one."""
    for name in ("compare.json", "compare.jsonl", "timings.jsonl", "windows.json"):
        (out / name).unlink(missing_ok=True)


class _Run:
    """Answers samples under settings; what `folder` holds is not done again."""

    def __init__(self, pair: Pair, task: Task, folder: Path, options: Options):
        self.pair, self.task, self.folder, self.options = pair, task, folder, options

    def estimate(
        self, rules: Sequence[str], windows: Sequence[int], tuned: int, samples: Sequence[Sample], timed: int, size: int
    ) -> Estimate:
        """What is left to do of `tuned` samples at each window, of all `samples` in batches of `size`, and of `timed` answers
        one by one, by the settings' number."""
        drafting = sum(rule not in ALONE for rule in rules)
        settings = len(rules) + (drafting if len(windows) > 1 else 0)
        chosen = (self.folder / "windows.json").exists()
        kept, known = (sum(1 for _ in Journal(self.folder / f"{name}.jsonl")) for name in ("compare", "timings"))
        one_by_one = (0 if chosen else drafting * len(windows) * tuned) + settings * max(0, timed - known)
        together = max(0, settings * len(samples) - kept)
        if not one_by_one + together:
            return Estimate(0.0, 0)
        batch = [sample.prompt for sample in samples[:size]]
        self.pair.generate_batch(batch[:1], batch_size=1, **self._options("target", 0))  # warm-up
        began = time.perf_counter()
        self.pair.generate_batch(batch[:1], batch_size=1, **self._options("target", 0))
        middle = time.perf_counter()
        self.pair.generate_batch(batch, batch_size=size, **self._options("target", 0))
        each = middle - began, (time.perf_counter() - middle) / len(batch)
        return Estimate(one_by_one * each[0] + together * each[1], one_by_one + together)

    def note_uses(self, rules: Sequence[str], used: dict[str, list[Sample]]) -> None:
        """In the run folders of the heads that are compared: a certificate must not use prompts that a choice was made on."""
        stop = self.options.get("stop", "fixed")
        for run in {run for rule in rules for head in learned(rule, stop) if (run := fitted_in(head))}:
            for use, samples in used.items():
                prompts = [(sample.id, sample.prompt) for sample in samples]
                note_uses(run, self.pair.target, prompts, use, "compare", known_as(self.task))

    def settings(
        self, rules: Sequence[str], windows: Sequence[int], samples: Sequence[Sample]
    ) -> Generator[Progress, None, list[Setting]]:
        """Each rule at its fastest and at the widest window, the strict rule also at the judges'."""
        chosen = self.folder / "windows.json"
        if chosen.exists():
            return [Setting(**setting) for setting in read_json(chosen)["settings"]]
        drafting = [rule for rule in rules if rule not in ALONE]
        found = {(rule, 0): Setting(rule, 0) for rule in rules if rule in ALONE}
        if len(windows) == 1:
            found |= {(rule, windows[0]): Setting(rule, windows[0]) for rule in drafting}
        else:
            speed = yield from self._speeds([(rule, window) for rule in drafting for window in windows], samples)
            fastest = {rule: max(windows, key=lambda window: speed[rule, window]) for rule in drafting}
            found |= {(rule, window): Setting(rule, window, "fastest") for rule, window in fastest.items()}
            for rule in drafting:
                found.setdefault((rule, max(windows)), Setting(rule, max(windows), "widest"))
            if "exact" in rules:
                for rule in filter(_judges, drafting):
                    at = fastest[rule]
                    found.setdefault(("exact", at), Setting("exact", at, f"window of {rule}"))
        settings = list(found.values())
        write_json(chosen, {"settings": [vars(setting) for setting in settings]})
        return settings

    def _speeds(
        self, tried: Sequence[tuple[str, int]], samples: Sequence[Sample]
    ) -> Generator[Progress, None, dict[tuple[str, int], float]]:
        """Tokens per second of each rule and window, taking turns; the first sample is a warm-up too."""
        tokens, seconds = dict.fromkeys(tried, 0), dict.fromkeys(tried, 0.0)
        for rule, window in tried:
            self._generate(samples[0], rule, window)
        for done, sample in enumerate(samples):
            for each, key in enumerate(tried):
                yield Progress("choosing windows", done * len(tried) + each, len(samples) * len(tried))
                out = self._generate(sample, *key)
                tokens[key] += len(out.tokens)
                seconds[key] += out.seconds
        yield Progress("choosing windows", len(samples) * len(tried), len(samples) * len(tried))
        return {key: tokens[key] / seconds[key] for key in tried}

    def answers(
        self, settings: Sequence[Setting], samples: Sequence[Sample], batch_size: int
    ) -> Generator[Progress, None, list[list[dict[str, Any]]]]:
        """Each setting's results on the samples, in their order."""
        journal = Journal(self.folder / "compare.jsonl")
        finished = {(record["rule"], record["window"], record["id"]): record for record in journal.resume()}
        places = [[(setting.rule, setting.window, sample.id) for sample in samples] for setting in settings]
        total = len(settings) * len(samples)
        done = sum(place in finished for row in places for place in row)
        for setting, row in zip(settings, places):
            left = [i for i, place in enumerate(row) if place not in finished]
            decoding = self.pair.as_completed(
                [samples[i].prompt for i in left], batch_size=batch_size, **self._options(setting.rule, setting.window)
            )
            for number, out in decoding:
                yield Progress("decoding", done, total)
                i, done = left[number], done + 1
                finished[row[i]] = self._result(setting, samples[i], out, keep=i < EXAMPLES)
                journal.append(finished[row[i]])
        yield Progress("decoding", total, total)
        return [[finished[place] for place in row] for row in places]

    def timings(
        self, settings: Sequence[Setting], samples: Sequence[Sample], repeats: int
    ) -> Generator[Progress, None, list[list[float]]]:
        """For each sample, every setting's seconds. Those of another machine or of other repeats are measured again."""
        journal, here = Journal(self.folder / "timings.jsonl"), {"machine": machine(self.pair), "repeats": repeats}
        finished = {record["id"]: record for record in journal.resume() if here.items() <= record.items()}
        if len(finished) < len(samples):
            for setting in settings:
                self._generate(samples[0], setting.rule, setting.window)  # warm-up
        for done, sample in enumerate(samples):
            yield Progress("timing", done, len(samples))
            if sample.id not in finished:
                turns = [
                    [self._generate(sample, setting.rule, setting.window).seconds for setting in settings]
                    for _ in range(repeats)
                ]
                finished[sample.id] = {"id": sample.id, **here, "seconds": np.median(turns, 0).round(6).tolist()}
                journal.append(finished[sample.id])
        yield Progress("timing", len(samples), len(samples))
        return [finished[sample.id]["seconds"] for sample in samples]

    def _generate(self, sample: Sample, rule: str, window: int) -> Generation:
        return self.pair.generate(sample.prompt, **self._options(rule, window))

    def _options(self, rule: str, window: int) -> Options:
        return {**self.options, "rule": rule, "window": window}

    def _result(self, setting: Setting, sample: Sample, out: Generation, keep: bool) -> dict[str, Any]:
        """One journal record; `keep` keeps where every token came from."""
        result: dict[str, Any] = {
            "id": sample.id,
            "rule": setting.rule,
            "window": setting.window,
            "tokens": len(out.tokens),
            "target_passes": out.target_passes,
            "draft_passes": out.draft_passes,
            "accepted_exact": out.accepted_exact,
            "accepted_lenient": out.accepted_lenient,
            "answer": self.task.answer(out.text),
            "correct": self.task.correct(out.text, sample),
        }
        if keep:
            text = pieces(self.pair.target, out.tokens)
            result["trace"] = [[piece, entry.origin, entry.score] for piece, entry in zip(text, out.trace)]
        return result


def _judges(rule: str) -> list[Judge]:
    return [term for term in terms(rule) if isinstance(term, Judge)]


def heads(rules: Sequence[str], stop: str) -> dict[str, str]:
    """Identifies the heads of the rules and of the stop condition: a head that was fitted anew, or has another threshold, is
    another one. Raises InputError for a wrong spec."""
    return {head.path: head.head.fingerprint for rule in rules for head in learned(rule, stop)}
