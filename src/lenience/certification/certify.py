"""Choosing the most lenient setting of a rule whose loss of quality is bounded, on prompts that nothing has been chosen on."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lenience.certification.calibration import Calibration, Show, calibration
from lenience.certification.question import LOSSES, Question
from lenience.certification.sequential_tests import Test, climb, needed
from lenience.core.files import read_json, write_json
from lenience.decoding.certified import FILE
from lenience.decoding.options import learned
from lenience.decoding.pair import Pair
from lenience.evaluation.pages import write_certificate
from lenience.rules.registry import terms
from lenience.runs.uses import locked
from lenience.tasks import Task

if TYPE_CHECKING:
    from numpy.typing import NDArray

PROMISES_NOT = (
    "more than its confidence where several certificates were asked for until one came out: count all of them",
    "prompts of another kind than those it was calibrated on: it holds on average over prompts like them, not for each of them",
    "other models, heads, dtypes, templates, windows, temperatures or length limits than those it binds",
    "that an answer which is right is worded as the target would have worded it",
)


# ---- the certificate


def certify(pair: Pair, task: Task, folder: Path, question: Question, show: Show = lambda *_: None) -> dict[str, Any]:
    """The most lenient of the rules' settings whose loss is at most `max_drop` with the wanted confidence, or none; written to
    the run folder, see `lenience.decoding.certified`.

    Learn-then-Test (Angelopoulos 2021): each rule's settings are tested from strict to lenient until one does not pass, each on
    growing batches of prompts. Of several rules that pass, the one with the most tokens per pass is certified. The same
    question asked again goes on where it stopped, or gets the answer that it got. Raises InputError, see `Question` and
    `fresh`.
    """
    with calibration(pair, task, folder, question, "calibration", show) as on:
        made = read_json(on.place / FILE) if (on.place / FILE).exists() else _certificate(on, folder)
    with locked(folder):
        write_certificate(keep(folder, made).with_suffix(".html"), made)
    return made


def _certificate(on: Calibration, folder: Path) -> dict[str, Any]:
    began = time.perf_counter()
    question, n = on.question, len(on.samples)
    test, chains = question.test(n), list[list[dict[str, Any]]]()
    for settings in question.ladders:

        def losses(j: int, seen: int, settings: list[str] = settings) -> NDArray:
            return on.losses(settings[j], seen, f"setting {j + 1} of {len(settings)}")

        chains.append([on.told(test, settings[one.setting], one) for one in climb(test, len(settings), losses)])
    last = [[row for row in chain if row["passed"]][-1] for chain in chains if chain[0]["passed"]]
    best = max(last, key=lambda row: row["tokens_per_pass"], default=None)
    shown = best or min((chain[0] for chain in chains), key=lambda row: row["upper_bound"])
    made = {
        "certified": {**best, "threshold": _threshold(best["rule"]), "heads": places(best["rule"], question.stop, folder)}
        if best
        else None,
        "max_drop": question.max_drop,
        "confidence": question.confidence,
        "loss": question.loss,
        "loss_is": LOSSES[question.loss],
        "n": shown["n"],
        "losses": shown["losses"],
        "upper_bound": shown["upper_bound"],
        "procedure": _procedure(question, test),
        "binds": on.binds(shown["rule"]),
        "promises_not": list(PROMISES_NOT),
        "tried": [row for chain in chains for row in chain],
        "lost": on.lost(shown["rule"], shown["n"]),
        "reason": None if best else _reason(question, shown),
        "needed": None if best else question.needed(on.losses(shown["rule"], shown["n"])),
        "decoded": on.decoded,
        "seconds": round(time.perf_counter() - began, 1),
    }
    write_json(on.place / FILE, made)
    return made


def _threshold(rule: str) -> float | None:
    given = (getattr(term, "threshold", None) for term in terms(rule))
    return next((threshold for threshold in given if threshold is not None), None)


def _procedure(question: Question, test: Test) -> str:
    several = f", the error shared by {len(question.rules)} rules" if len(question.rules) > 1 else ""
    return (
        f"Learn-then-Test: settings tested from strict to lenient until one fails, each by {test.said} "
        f"looked at after {', '.join(map(str, test.looks))} fresh prompts drawn at random, so that the last setting to "
        f"pass loses more than max_drop with a chance of at most {1 - question.confidence:.3g} in all{several}."
    )


def _reason(question: Question, row: dict[str, Any]) -> str:
    rate = row["losses"] / row["n"]
    if row["hopeless"] and rate >= question.max_drop:
        return f"the loss is too high: already the strictest setting, {row['rule']}, lost {rate:.2%} of {row['n']} prompts"
    more = ", more than is allowed, but on too few to be sure" if rate >= question.max_drop else ""
    return f"too few prompts: the strictest setting, {row['rule']}, lost {row['losses']:g} of {row['n']}{more}"


def plan(
    pair: Pair, task: Task, folder: Path, question: Question, pilot: int = 40, show: Show = lambda *_: None
) -> dict[str, Any]:
    """From a pilot of fresh prompts, which are then used up: for each setting, how many calibration prompts it would take to
    certify it four times in five if it loses what it lost in the pilot (at least a quarter of what is allowed), and how many
    target passes and minutes, with all stricter settings and the target alone."""
    asked = replace(question, limit=pilot, ids=question.ids[:pilot])
    with calibration(pair, task, folder, asked, "pilot", show) as on:
        rows = [row for settings in question.ladders for row in _planned(on, question, settings)]
    return {
        "plan": rows,
        "pilot": len(on.samples),
        "max_drop": question.max_drop,
        "confidence": question.confidence,
        "least": needed(question.max_drop, question.alpha, 0.0),
    }


def _planned(on: Calibration, question: Question, settings: list[str]) -> Iterator[dict[str, Any]]:
    pilot = len(on.samples)
    decoded = on.answers("target", pilot, "the target alone")
    for setting in settings:
        lenient, losses = on.answers(setting, pilot, setting), on.losses(setting, pilot)
        decoded = [*decoded, *lenient]
        n = question.needed(losses, question.max_drop / 4)
        yield {
            "rule": setting,
            "pilot_loss": float((2 * losses - 1).mean() if question.loss == "net" else losses.mean()),
            "tokens_per_pass": sum(r["tokens"] for r in lenient) / max(1, sum(r["target_passes"] for r in lenient)),
            "prompts": n,
            "target_passes": None if n is None else round(sum(r["target_passes"] for r in decoded) / pilot * n),
            "minutes": None if n is None else round(sum(r["seconds"] for r in decoded) / pilot * n / 60, 2),
        }


def keep(folder: Path, made: dict[str, Any]) -> Path:
    """Write a run's certificate. One that certifies something is never written over: by another one it is moved, with its page,
    to certificate-N.json, and one that certifies nothing is then written beside it."""
    made, path = json.loads(json.dumps(made)), folder / FILE
    known = {other: read_json(other) for other in sorted(folder.glob("certificate-*.json"))}
    free = next(one for n in range(1, len(known) + 2) if not (one := folder / f"certificate-{n}.json").exists())
    before = read_json(path) if path.exists() else {}
    if before.get("certified") and before != made:
        if not made["certified"]:
            path = next((other for other, told in known.items() if told == made), free)
        elif before not in known.values():
            os.replace(path, free)
            if path.with_suffix(".html").exists():
                os.replace(path.with_suffix(".html"), free.with_suffix(".html"))
    write_json(path, made)
    return path


def places(rule: str, stop: str, folder: Path) -> dict[str, str]:
    """Where the heads of a rule and of a stop condition lie, by their paths in these: within the run folder, or else on this
    machine."""
    found = {}
    for head in learned(rule, stop):
        within = os.path.relpath(Path(head.path).resolve(), folder.resolve())
        found[head.path] = str(Path(head.path).resolve()) if within.startswith("..") else within
    return found
