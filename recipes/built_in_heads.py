"""Fit the heads that draft for the built-in target (`lenience.drafting.heads`) to its own answers
to many more problems than a run mines.

    python recipes/built_in_heads.py --work heads-work

Decoding and fitting go on where they were. On two cores decoding 8,000 answers takes some ten
minutes, and fitting a kind of heads half an hour.
"""

from __future__ import annotations

import argparse
import json
from itertools import islice
from pathlib import Path
from typing import cast

from lenience.decoding.loading import load_pair
from lenience.mining.drafters import Answer, DrafterPlan, Kind, fit_to_answers
from lenience.tasks import WordMath

BATCH = 200


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, default=Path("heads-work"))
    parser.add_argument("--kind", default="medusa", choices=("medusa", "blockwise"))
    parser.add_argument("--answers", type=int, default=8000, help="how many to learn from")
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--epochs", type=int, default=20)
    given = parser.parse_args()
    given.work.mkdir(parents=True, exist_ok=True)
    pair, kept = load_pair(compile=True), given.work / "answers.jsonl"
    prompts = [sample.prompt for sample in islice(WordMath().samples("train"), given.answers)]
    answers = [json.loads(line) for line in kept.open()] if kept.exists() else []
    while len(answers) < len(prompts):
        outs = pair.generate_batch(prompts[len(answers) : len(answers) + BATCH], window=4)
        with kept.open("a") as file:
            for out in outs:
                answers.append([out.prompt_tokens, out.tokens])
                file.write(json.dumps(answers[-1]) + "\n")
        print(f"{len(answers)} answers", flush=True)

    def progress(what: str, done: float, total: float) -> None:
        if what.startswith("fitting"):
            print(f"{what}: {done:g} of {total:g}", flush=True)

    folder = given.work / f"{given.kind}-{given.heads}"
    plan = DrafterPlan(cast(Kind, given.kind), folder, given.heads, given.epochs)
    learned = [cast(Answer, tuple(one)) for one in answers[: given.answers]]
    heads = fit_to_answers(pair, learned, plan, progress)
    print(json.dumps(heads.metrics))


if __name__ == "__main__":
    main()
