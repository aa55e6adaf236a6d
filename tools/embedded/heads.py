"""Fit the heads that draft for the built-in target (`lenience.drafting.heads`) to its own answers
to many more problems than a run mines.

    python tools/embedded/heads.py --work heads-work

Decoder and fitting go on where they were. On two cores that have nothing else to do decoding 5,000
answers takes some five minutes, and fitting the heads a quarter of an hour.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import cast

from lenience.decoding.loading import load_pair
from lenience.decoding.pair import Pair
from lenience.tasks.wordmath_problems import problem, prompt
from lenience.training.fit_drafter import DrafterKind, DrafterPlan, fit_to_answers
from lenience.training.trainer import Answer

BATCH = 200


def answered(pair: Pair, kept: Path, n: int) -> list[Answer]:
    """Return the target's own answers to n problems of a split of their own, so that no prompt of
    the task is used; those that are kept in a file are not decoded again."""
    answers = (
        [cast(Answer, json.loads(line)) for line in kept.open()]
        if kept.exists()
        else []
    )
    while len(answers) < n:
        batch = range(len(answers), min(n, len(answers) + BATCH))
        outs = pair.generate_batch(
            [prompt(problem("heads", i)) for i in batch], window=4
        )
        with kept.open("a") as file:
            for out in outs:
                answers.append((out.prompt_tokens, out.tokens))
                file.write(json.dumps(answers[-1]) + "\n")
        print(f"{len(answers)} answers", flush=True)
    return answers[:n]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, default=Path("heads-work"))
    parser.add_argument(
        "--kind", default="medusa", choices=("medusa", "blockwise", "eagle")
    )
    parser.add_argument(
        "--answers", type=int, default=5000, help="how many to learn from"
    )
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--epochs", type=int, help="by default as fit --drafter has it")
    given = parser.parse_args()
    given.work.mkdir(parents=True, exist_ok=True)
    pair = load_pair(compile=True)
    answers = answered(pair, given.work / "answers.jsonl", given.answers)

    def progress(what: str, done: float, total: float) -> None:
        if what.startswith("fitting"):
            print(f"{what}: {done:g} of {total:g}", flush=True)

    name = given.kind if given.kind == "eagle" else f"{given.kind}-{given.heads}"
    folder = given.work / name
    plan = DrafterPlan(
        cast(DrafterKind, given.kind), folder, given.heads, epochs=given.epochs
    )
    heads = fit_to_answers(pair, answers, plan, progress)
    replace(heads, prompts=None).save(folder)
    print(json.dumps(heads.metrics))


if __name__ == "__main__":
    main()
