"""Probes of Judge Decoding (Bachmann 2025) on the built-in pair: layers, heads, self-correction and
exchanged roles.

    python studies/judge_probes.py OUT [--rows 500] [--probes 200]

Writes OUT/judge_probes.json and prints it:

- `layers`: the AUC out of fold of a linear head on the target's state after each of its layers and
  after the final norm, and of an MLP on two of them, on the annotated answers of
  studies/judge_decoding.py;
- `self_correction`: how often the target's final answer is right if it continues a solution from
  just after a slip, from the same place of the right solution, and from the question alone. The
  paper's reason for judging by states is that a target corrects errors that it reads;
- `exchanged`: strict decoding with the target as the draft of the draft: how many tokens of the
  better model the weaker one accepts.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from judge_decoding import FIRST, annotated, aucs
from numpy.typing import NDArray
from rich.progress import track
from scipy.stats import binomtest

from lenience import load_pair
from lenience.core.files import EMBEDDED
from lenience.decoding.pair import Pair
from lenience.heads.fitting import (
    Examples,
    FitConfig,
    Hyperparameters,
    fit_mlp,
    fit_stopped,
)
from lenience.heads.head import Inputs
from lenience.tasks import load_task
from lenience.training.annotated import Annotated, annotated_examples

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
from recording import write_results

FOLDS = 5
WINDOW = 8


def given_answers(rows: list[dict[str, Any]]) -> list[Annotated]:
    return [
        Annotated(
            row["question"], row["correct"], row["wrong"], tuple(row["error"]), "row"
        )
        for row in rows
    ]


def layers(pair: Pair, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the AUC of heads by layer."""
    answers = given_answers(rows)
    count: int = pair.target.model.config.num_hidden_layers
    found = []
    for layer in track((*range(1, count + 1), None), "layers"):
        inputs = Inputs(("target",), ("draft",), (layer,))
        examples = standardised(annotated_examples(pair.target, answers, inputs))
        heads = ("linear", "mlp") if layer in (count, None) else ("linear",)
        for head in heads:
            scores = out_of_fold(examples, head)
            name = "norm" if layer is None else layer
            found.append({"layer": name, "head": head, **aucs("auc", scores, examples)})
    return found


def standardised(examples: Examples) -> Examples:
    x = examples.in_memory
    scaled = ((x - x.mean(0)) / (x.std(0) + 1e-6)).astype(np.float32)
    return replace(examples, x=scaled)


def out_of_fold(examples: Examples, head: str) -> NDArray:
    """Return the scores [m] of heads that did not learn from a row's question."""
    scores = np.zeros(len(examples.harmless))
    for k in range(FOLDS):
        held = examples.samples % FOLDS == k
        inside = examples.rows(~held)
        if head == "linear":
            setting = Hyperparameters(decay=0.01)
            trained = fit_stopped(inside, FitConfig("adamw"), setting)
        else:
            labels = torch.from_numpy(inside.harmless.astype(np.float32))
            x = torch.from_numpy(inside.in_memory)
            trained = fit_mlp(x, labels, torch.ones_like(labels), seed=0)
        scores[held] = trained.logits(examples.in_memory[held])
    return scores


def self_correction(pair: Pair, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Let the target continue after a slip, and after as much of the right solution, to the
    last whole word."""
    task = load_task("wordmath")
    right: dict[str, list[bool]] = {"slip": [], "right solution": [], "question": []}
    for row in track(rows, "self-correction"):
        wanted = task.answer(row["correct"])
        cut = row["error"][1]
        starts = {
            "slip": row["wrong"][:cut],
            "right solution": row["correct"][:cut].rpartition(" ")[0],
            "question": "",
        }
        for name, start in starts.items():
            out = pair.generate(
                row["question"] + start, rule="exact", window=WINDOW, max_new_tokens=320
            )
            answer = task.answer(start + out.text)
            right[name].append(answer == wanted)
    told: dict[str, Any] = {"n": len(rows)}
    for name, outcomes in right.items():
        told[f"right after {name}"] = shares(outcomes)
    return told


def shares(outcomes: list[bool]) -> dict[str, Any]:
    interval = binomtest(sum(outcomes), len(outcomes)).proportion_ci()
    return {
        "share": float(np.mean(outcomes)),
        "interval": [interval.low, interval.high],
    }


def exchanged(probes: int) -> list[dict[str, Any]]:
    """Return tokens per pass of strict decoding in both roles, on the same problems."""
    names = [str(EMBEDDED / "target"), str(EMBEDDED / "draft")]
    task = load_task("wordmath")
    samples = [
        sample for _, sample in zip(range(probes), task.samples("test"), strict=False)
    ]
    found = []
    for target, draft in (names, names[::-1]):
        pair = load_pair(target, draft, compile=False, chat=False)
        outs = pair.generate_batch(
            [sample.prompt for sample in samples],
            rule="exact",
            window=WINDOW,
            max_new_tokens=task.max_new_tokens,
        )
        accepted = sum(out.accepted_exact for out in outs)
        passes = sum(out.target_passes for out in outs)
        right = [task.correct(out.text, each) for out, each in zip(outs, samples)]
        found.append(
            {
                "target": Path(target).name,
                "draft": Path(draft).name,
                "n": len(samples),
                "accepted_per_pass": accepted / passes,
                "right": shares(right),
            }
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--rows", type=int, default=500)
    parser.add_argument("--probes", type=int, default=200)
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    pair = load_pair(compile=False)
    about = {
        "exchanged": exchanged(given.probes),
        "self_correction": self_correction(pair, annotated("test", 0, given.probes)),
        "layers": layers(pair, annotated("train", FIRST, given.rows)),
    }
    write_results(given.out / "judge_probes.json", about)
    print(json.dumps(about, indent=1))


if __name__ == "__main__":
    main()
