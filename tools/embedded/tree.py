"""Measure how the built-in pair's draft is accepted (`lenience.drafting.trees.planning` reads it),
and keep it where `--tree planned:16` looks.

    python tools/embedded/tree.py
"""

from __future__ import annotations

from lenience.decoding.loading import load_pair
from lenience.drafting.model import DraftModel
from lenience.drafting.trees.planning import BUILT_IN_TREE
from lenience.tasks.wordmath_problems import problem, prompt
from lenience.training.acceptance import PROMPTS, measure_acceptance


def main() -> None:
    pair = load_pair(compile=True)
    # of no split of the task
    prompts = [prompt(problem("heads", i)) for i in range(PROMPTS)]
    found = measure_acceptance(pair, prompts, DraftModel())
    found.save(BUILT_IN_TREE)
    print([round(row[0], 3) for row in found.shares], found.places)


if __name__ == "__main__":
    main()
