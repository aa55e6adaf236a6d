"""How far distributions are apart: entropies and divergences in nats, of log-probabilities, and
what lies between two."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor


def entropy(logs: Tensor) -> Tensor:
    """[…] nats, of log-probabilities […, V]."""
    return -weighted(logs, logs).sum(-1)


def lump(logs: Tensor, tokens: Tensor) -> Tensor:
    """[…, V] log-probabilities → […, k + 1]: those of some `tokens` […, k], and the last of all
    others together."""
    rest = logs.scatter(-1, tokens, -torch.inf).logsumexp(
        -1, keepdim=True
    )  # 1 less the others' sum would be rounding alone
    return torch.cat([logs.gather(-1, tokens), rest], -1)


def weighted(logs: Tensor, values: Tensor) -> Tensor:
    """exp(logs) · values, 0 where the probability is 0."""
    return torch.where(logs > -torch.inf, logs.exp() * values, 0.0)


def kl(p: Tensor, q: Tensor) -> Tensor:
    """[…] KL(p ‖ q) in nats, of log-probabilities […, V]. What q cannot give, such as a token that
    only p's embedding has a row for, counts as if q gave it exp(−1000)."""
    return weighted(p, p - q.clamp(min=-1000)).sum(-1).clamp(min=0)


def js(p: Tensor, q: Tensor) -> Tensor:
    """[…] Jensen–Shannon divergence in nats, of log-probabilities […, V]."""
    middle = torch.logaddexp(p, q) - math.log(2)
    return ((weighted(p, p - middle) + weighted(q, q - middle)).sum(-1) / 2).clamp(0, math.log(2))


def tv(p: Tensor, q: Tensor) -> Tensor:
    """[…] total variation distance, of log-probabilities […, V]."""
    return (p.exp() - q.exp()).abs().sum(-1).clamp(max=2) / 2


DIVERGENCES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"kl": kl, "js": js, "tv": tv}


def mentor(target: Tensor, drafted: Tensor, most: float) -> Tensor:
    """[…, V] float64: of the distributions π with KL(target ‖ π) ≤ `most`, the one with the largest
    Σ min(π, drafted), so that most of the draft's tokens are accepted: clip(drafted, low · target,
    high · target).

    The smaller `low`, the less mass moves from the tokens that the draft thinks too much of to the
    others, and the larger the divergence; `high` follows, as π sums to 1. `low` is searched for, on
    sums over the tokens sorted by their ratio.
    """
    p, q = target.double(), drafted.double()
    if most == 0:
        return p
    ratio, order = torch.where(p > 0, q / p, torch.inf).sort(-1)
    sorted_p, sorted_q = p.gather(-1, order), q.gather(-1, order)
    gain = torch.where(
        (sorted_p > 0) & (sorted_q > 0), -sorted_p * ratio.log(), 0.0
    )  # p log(p / q)
    below_p, below_q, below_gain = (
        torch.nn.functional.pad(x.cumsum(-1), (1, 0)) for x in (sorted_p, sorted_q, gain)
    )
    above_p, above_q = (
        torch.nn.functional.pad(x.flip(-1).cumsum(-1).flip(-1), (0, 1))
        for x in (sorted_p, sorted_q)
    )
    # what `high` takes away where it is the ratio of a token; falls from token to token
    taken = torch.where(sorted_p > 0, above_q[..., 1:] - ratio * above_p[..., 1:], -1.0).nan_to_num(
        -1.0
    )
    forbidden = q.masked_fill(p > 0, 0).sum(-1, keepdim=True)  # must move in any case

    def divergence(low: Tensor) -> tuple[Tensor, Tensor]:
        """[…, 1]: KL(target ‖ π), infinite where π would give something to forbidden tokens, and
        `high`."""
        i = torch.searchsorted(ratio, low)
        moved = low * below_p.gather(-1, i) - below_q.gather(-1, i)
        j = torch.searchsorted(-taken, -moved)
        rest = above_p.gather(-1, j)
        high = torch.where(rest > 0, (above_q.gather(-1, j) - moved) / rest, torch.inf)
        found = (
            -low.log() * below_p.gather(-1, i) + below_gain.gather(-1, j) - below_gain.gather(-1, i)
        )
        found = found - torch.where(rest > 0, rest * high.log(), 0.0)
        return torch.where(moved < forbidden - 1e-12, torch.inf, found), high

    worst, best = torch.full_like(forbidden, -70.0), torch.zeros_like(forbidden)  # of log(low)
    for _ in range(60):
        middle = (worst + best) / 2
        within = divergence(middle.exp())[0] <= most
        worst, best = torch.where(within, worst, middle), torch.where(within, middle, best)
    low = best.exp()
    return torch.where(p > 0, q.clamp(low * p, divergence(low)[1] * p), 0.0)
