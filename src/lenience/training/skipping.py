"""Which of the target's layers a draft of its own can leave out."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from lenience.core.errors import InputError
from lenience.core.progress import Progress, silent
from lenience.decoding.pair import Pair
from lenience.drafting.self_draft import take_apart
from lenience.models.lm import LM
from lenience.models.session import Session
from lenience.runs.record import MinedSample

SAMPLES = 20
TOKENS = 2000
"""On how many of the target's own answers layers are tried, and on how many of their tokens."""
LONGEST_WINDOW = 16
"""Largest window at which skipped layers are valued."""


@dataclass(frozen=True)
class Skipped:
    """Value of skipping some layers."""

    layers: tuple[int, ...]
    """1 the first."""
    agreement: float
    """The share of the target's own tokens that it says without them."""
    times: float
    """The target alone's speed, times so much, where tokens agree independently of each other and
    passes cost by their layers, at the best window."""
    window: int
    """Best window."""


def search_layers(
    pair: Pair, samples: list[MinedSample], progress: Progress = silent
) -> list[Skipped]:
    """Search, for each number of layers, the set without which the target still predicts most of
    its own tokens, and return the sets with their value as drafters. Each set is the previous one
    plus the best further layer (after SWIFT, Xia 2025, whose search draws at random and by Bayesian
    optimisation). Raises InputError if there is nothing to try it on."""
    tried = [sample for sample in samples[:SAMPLES] if sample.response_ids]
    if not tried:
        raise InputError("no sample of the run has an answer; mine more")
    target = pair.target
    left_out = tuple[int, ...]()
    found = list[Skipped]()
    total = sum(range(2, target.num_layers + 1))
    done = 0
    for _ in range(target.num_layers - 1):
        best = 0
        agreement = -1.0
        for layer in range(1, target.num_layers + 1):
            if layer in left_out:
                continue
            progress("trying layers", done, total)
            share = _agreement(take_apart(target, (*left_out, layer)), tried)
            done += 1
            if share > agreement:
                best = layer
                agreement = share
        left_out = tuple(sorted((*left_out, best)))
        times, window = worth(agreement, 1 - len(left_out) / target.num_layers)
        found.append(Skipped(left_out, agreement, times, window))
    progress("trying layers", total, total)
    return found


def worth(agreement: float, cost: float) -> tuple[float, int]:
    """Return the expected speed-up over the target alone and its window, if each token is accepted
    with probability `agreement` and a draft pass costs `cost` of a target pass (Leviathan 2023,
    theorem 3.8)."""
    kept = 1.0
    best = (1.0, 0)
    for window in range(1, LONGEST_WINDOW + 1):
        kept += agreement**window
        best = max(best, (kept / (cost * window + 1), window))
    return best


@torch.inference_mode()
def _agreement(lm: LM, samples: list[MinedSample]) -> float:
    same = total = 0
    for sample in samples:
        answer = sample.response_ids[: TOKENS // len(samples)]
        read = Session(lm).read([sample.prompt_ids + answer], len(answer) + 1)
        said = read.greedy_tokens[0, :-1].cpu()
        same += int((said == torch.tensor(answer)).sum())
        total += len(answer)
    return same / total
