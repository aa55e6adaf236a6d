"""Search for the target's layers that a self-draft can skip."""

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
TRIED_TOKENS = 2000
"""Number of the target's own answers, and number of their tokens in total, on which layers are
tried."""
LONGEST_WINDOW = 16
"""Largest window for which a speed-up is estimated."""


@dataclass(frozen=True)
class Skipped:
    """Value of skipping some layers."""

    layers: tuple[int, ...]
    """Skipped layers, counted from 1."""
    agreement: float
    """Share of the target's own tokens that it still predicts without these layers."""
    times: float
    """Expected speed-up over the target alone at the best window, if tokens agree independently and
    a pass costs in proportion to its layers."""
    window: int
    """Best window; 0 if drafting never pays."""


def search_layers(
    pair: Pair, samples: list[MinedSample], progress: Progress = silent
) -> list[Skipped]:
    """Search, for each number of skipped layers, a set without which the target still predicts most
    of its own tokens. Return the sets with their value as drafters. Each set is the previous set
    plus the best further layer (after SWIFT, Xia 2025, which searches at random and by Bayesian
    optimisation). Raises InputError if no sample has an answer."""
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
    """Return the expected speed-up over the target alone and the best window, if each token is
    accepted with probability `agreement` and a draft pass costs `cost` target passes (Leviathan
    2023, theorem 3.8)."""
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
        answer = sample.response_ids[: TRIED_TOKENS // len(samples)]
        read = Session(lm).read([sample.prompt_ids + answer], len(answer) + 1)
        said = read.greedy_tokens[0, :-1].cpu()
        same += int((said == torch.tensor(answer)).sum())
        total += len(answer)
    return same / total
