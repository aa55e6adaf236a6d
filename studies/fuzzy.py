"""Fuzzy speculative decoding (FSD, Holsman 2025) on any pair and task.

    python studies/fuzzy.py OUT [--target T --draft D --task TASK --data FILES] [--problems 200]
        [--windows 5 10 15 20] [--temperature 0]

Writes OUT/fuzzy.json and prints it:

- `divergences`: KL, JS and TV between the models along the target's own answers, where the draft's
  most probable token is the target's and where it is not; nats, but TV;
- `rows`: strict decoding, `fuzzy` with each divergence at the thresholds that the shares `--below`
  of all places are under, and `random` at the same shares, at each window; `right` has a 1 per
  problem that was answered correctly. With `--temperature` above 0 the draft drafts greedily and
  corrections are sampled, which is the paper's main setting;
- `paired`: the exact McNemar test of JS against KL, TV and random acceptance at each share and
  window, and of every rule against strict decoding.

Thresholds are chosen on other problems than those that are compared.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from paired import Paired, mcnemar, right_answers
from rich.progress import track

from lenience import load_pair
from lenience.cli.console import progress_bars
from lenience.decoding.generation import Generation
from lenience.decoding.pair import Pair
from lenience.evaluation.compare import CompareConfig, compare
from lenience.models.session import Session
from lenience.rules.divergence import DIVERGENCES
from lenience.tasks import Sample, Task, load_task, take

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
from recording import write_results

QUANTILES = (0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99)
KEPT = (
    "rule", "window", "n", "accuracy", "accuracy_interval", "paired_loss", "paired_loss_interval",
    "accepted_per_pass", "accepted_per_pass_interval", "draft_share", "draft_share_interval",
    "tokens_per_pass", "tokens_per_pass_interval", "tokens_per_second",
    "tokens_per_second_interval", "timed_n",
)  # fmt: skip


@dataclass(frozen=True)
class Positions:
    """The positions of the target's own answers."""

    values: Mapping[str, NDArray]
    """[n] of each divergence."""
    same: NDArray
    """[n] bool: True where both models' most probable tokens are the same."""
    likely: NDArray
    """[n]: the target's probability of the draft's most probable token."""
    answers: NDArray
    """[n]: the number of the answer, from 0."""


@torch.inference_mode()
def positions(pair: Pair, samples: list[Sample], temperature: float) -> Positions:
    """Return what the models' distributions are at all positions of the target's own answers."""
    values: dict[str, list[torch.Tensor]] = {name: [] for name in DIVERGENCES}
    same: list[torch.Tensor] = []
    likely: list[torch.Tensor] = []
    prompts = [sample.prompt for sample in samples]
    outs = pair.generate_batch(prompts, rule="target", temperature=temperature, seed=0)
    for out in track(outs, "divergences"):
        target, drafted = log_probs(pair, out, temperature or 1)
        for name, divergence in DIVERGENCES.items():
            values[name].append(divergence(target, drafted))
        best = drafted.argmax(-1)
        same.append(target.argmax(-1) == best)
        likely.append(target.gather(1, best[:, None])[:, 0].exp())
    counts = [len(part) for part in same]
    return Positions(
        {name: torch.cat(parts).numpy() for name, parts in values.items()},
        torch.cat(same).numpy(),
        torch.cat(likely).numpy(),
        np.repeat(np.arange(len(counts)), counts),
    )


def log_probs(pair: Pair, out: Generation, temperature: float) -> list[torch.Tensor]:
    """Return [n, V] log-probabilities of the target and the draft before each token of an answer,
    over the tokens that both have."""
    n = len(out.tokens)
    ids = [out.prompt_tokens + out.tokens]
    read = [
        Session(lm).read(ids, n + 1).logits[0, :n].float()
        for lm in (pair.target, pair.require_draft("FSD"))
    ]
    width = min(logits.shape[-1] for logits in read)
    return [(logits[:, :width] / temperature).log_softmax(-1).cpu() for logits in read]


def told(found: Positions, answers: int) -> dict[str, Any]:
    """Return quantiles of each divergence where the models agree, and where they do not."""
    same = found.same
    kinds = {"all": np.ones_like(same), "same token": same, "another token": ~same}
    return {
        "answers": answers,
        "places": len(same),
        "same": float(same.mean()),
        "quantiles": list(QUANTILES),
        **{
            name: {
                kind: np.quantile(values[which], QUANTILES).round(5).tolist()
                for kind, which in kinds.items()
            }
            for name, values in found.values.items()
        },
    }


def decoders(found: Positions, given: argparse.Namespace) -> list[str]:
    """Return the settings that are compared; greedily `speculative` is `exact`."""
    below = given.below
    windows = given.windows
    rules = ["exact", "speculative"] if given.temperature else ["exact"]
    for share in below:
        rules += [
            f"fuzzy:{name}@{np.quantile(found.values[name], share):.4g}"
            for name in DIVERGENCES
        ]
        rules.append(f"random:{share:g}")
    return [f"{rule}; window={window}" for rule in rules for window in windows]


def measured(
    pair: Pair, task: Task, settings: list[str], given: argparse.Namespace
) -> list[dict[str, Any]]:
    options: dict[str, Any] = {"temperature": given.temperature}
    if given.temperature:
        options |= {"draft_temperature": 0.0, "seed": 0}
    config = CompareConfig(
        settings=tuple(settings),
        windows=(given.windows[0],),
        options=options,
        limit=given.problems,
        timed=given.timed,
        repeats=1,
    )
    with progress_bars() as progress:
        rows = compare(pair, task, config, given.out / "compare", progress).rows
    right = right_answers(given.out / "compare" / "compare.jsonl")
    return [
        {key: value for key, value in row.to_json().items() if key in KEPT}
        | {"right": right[row.rule, row.window]}
        for row in rows
    ]


def tests(rows: list[dict[str, Any]], windows: list[int]) -> list[Paired]:
    """Compare, at each window, every rule with strict decoding and JS with what accepts as many
    places: `decoders` lists KL, JS, TV and random acceptance of each share in this order."""
    found = []
    for window in windows:
        at = [row for row in rows if row["window"] == window]
        right = {f"{row['rule']}; window={window}": row["right"] for row in at}
        strict, *lenient = (
            name for name in right if not name.startswith("speculative")
        )
        found += [mcnemar(strict, name, right) for name in lenient]
        for first in range(0, len(lenient), 4):
            kl, js, tv, random = lenient[first : first + 4]
            found += [mcnemar(js, other, right) for other in (kl, tv, random)]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--target")
    parser.add_argument("--draft")
    parser.add_argument("--task", default="wordmath")
    parser.add_argument("--data", help="where a benchmark's files are")
    parser.add_argument("--problems", type=int, default=200)
    parser.add_argument(
        "--chosen-on", type=int, default=100, help="problems for the thresholds"
    )
    parser.add_argument("--timed", type=int, default=12)
    parser.add_argument("--windows", type=int, nargs="+", default=[5, 10, 15, 20])
    parser.add_argument("--below", type=float, nargs="+", default=[0.8, 0.9, 0.95])
    parser.add_argument("--temperature", type=float, default=0.0)
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    pair = load_pair(given.target, given.draft)
    task = load_task(given.task, data=given.data)
    samples = take(task, "train", None)[-given.chosen_on :]
    found = positions(pair, samples, given.temperature)
    about: dict[str, Any] = {
        "temperature": given.temperature,
        "pair": pair.name,
        "task": task.name,
    }
    about["divergences"] = told(found, len(samples))
    settings = decoders(found, given)
    about["rows"] = measured(pair, task, settings, given)
    about["paired"] = [test.to_json() for test in tests(about["rows"], given.windows)]
    write_results(given.out / "fuzzy.json", about)
    print(json.dumps(about, indent=1))


if __name__ == "__main__":
    main()
