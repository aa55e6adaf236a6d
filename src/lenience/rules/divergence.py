"""Entropies and divergences of log-probabilities in nats, and mentored decoding's distribution."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor


def entropy(logs: Tensor) -> Tensor:
    """Return the entropy […] in nats of log-probabilities […, V]."""
    return -weighted(logs, logs).sum(-1)


def lump(logs: Tensor, tokens: Tensor) -> Tensor:
    """Return log-probabilities […, k + 1] from log-probabilities […, V]: those of `tokens` […, k],
    and last that of all other tokens together."""
    # 1 minus the sum of the others would be rounding error alone
    rest = logs.scatter(-1, tokens, -torch.inf).logsumexp(-1, keepdim=True)
    return torch.cat([logs.gather(-1, tokens), rest], -1)


def weighted(logs: Tensor, values: Tensor) -> Tensor:
    """Return exp(logs) · values, or 0 where the probability is 0."""
    return torch.where(logs > -torch.inf, logs.exp() * values, 0.0)


def kl(p: Tensor, q: Tensor) -> Tensor:
    """Return KL(p ‖ q) […] in nats for log-probabilities […, V]. A token that q cannot predict, for
    example because only p's model has it in its vocabulary, counts with probability exp(−1000)."""
    return weighted(p, p - q.clamp(min=-1000)).sum(-1).clamp(min=0)


def js(p: Tensor, q: Tensor) -> Tensor:
    """Return the Jensen–Shannon divergence […] in nats of log-probabilities […, V]."""
    middle = torch.logaddexp(p, q) - math.log(2)
    return ((weighted(p, p - middle) + weighted(q, q - middle)).sum(-1) / 2).clamp(
        0, math.log(2)
    )


def tv(p: Tensor, q: Tensor) -> Tensor:
    """Return the total variation distance […] of log-probabilities […, V]."""
    return (p.exp() - q.exp()).abs().sum(-1).clamp(max=2) / 2


DIVERGENCES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "kl": kl,
    "js": js,
    "tv": tv,
}


def mentor(target: Tensor, drafted: Tensor, most: float) -> Tensor:
    """Return π […, V] float64: the distribution with the largest acceptance Σ min(π, drafted) among
    those with KL(target ‖ π) ≤ `most` (mentored decoding, Tran-Thien 2023). It has the form
    clip(drafted, low · target, high · target).

    A smaller `low` moves less mass away from the draft's distribution and gives a larger
    divergence. `high` follows from Σ π = 1, and `low` is found by bisection.
    """
    p = target.double()
    q = drafted.double()
    if most == 0:
        return p
    clipping = _Clipping(p, q)
    worst = torch.full_like(p[..., :1], -70.0)  # bounds on log(low)
    best = torch.zeros_like(worst)
    for _ in range(60):
        middle = (worst + best) / 2
        within = clipping.divergence(middle.exp())[0] <= most
        worst = torch.where(within, worst, middle)
        best = torch.where(within, middle, best)
    low = best.exp()
    return torch.where(p > 0, q.clamp(low * p, clipping.divergence(low)[1] * p), 0.0)


class _Clipping:
    """Divergence of p […, V] from clip(q, low · p, high · p), computed from cumulative sums over
    the tokens sorted by their ratio q / p."""

    def __init__(self, p: Tensor, q: Tensor):
        self.ratio, order = torch.where(p > 0, q / p, torch.inf).sort(-1)
        p_sorted = p.gather(-1, order)
        q_sorted = q.gather(-1, order)
        both = (p_sorted > 0) & (q_sorted > 0)
        gain = torch.where(both, -p_sorted * self.ratio.log(), 0.0)  # p log(p / q)
        self.below_p, self.below_q, self.below_gain = map(
            _below, (p_sorted, q_sorted, gain)
        )
        self.above_p = _above(p_sorted)
        self.above_q = _above(q_sorted)
        taken = self.above_q[..., 1:] - self.ratio * self.above_p[..., 1:]
        # mass above `high` if `high` is a token's ratio; falls from token to token
        self.taken = torch.where(p_sorted > 0, taken, -1.0).nan_to_num(-1.0)
        # q's mass on tokens that p forbids, which must always move
        self.forbidden = q.masked_fill(p > 0, 0).sum(-1, keepdim=True)

    def divergence(self, low: Tensor) -> tuple[Tensor, Tensor]:
        """Return KL(p ‖ clipped) […, 1] and `high` […, 1]. The divergence is infinite if some mass
        would be left on tokens that p forbids."""
        i = torch.searchsorted(self.ratio, low)
        moved = low * self.below_p.gather(-1, i) - self.below_q.gather(-1, i)
        j = torch.searchsorted(-self.taken, -moved)
        rest = self.above_p.gather(-1, j)
        high = torch.where(
            rest > 0, (self.above_q.gather(-1, j) - moved) / rest, torch.inf
        )
        raised = -low.log() * self.below_p.gather(-1, i)
        left = self.below_gain.gather(-1, j) - self.below_gain.gather(-1, i)
        lowered = torch.where(rest > 0, rest * high.log(), 0.0)
        return torch.where(
            moved < self.forbidden - 1e-12, torch.inf, raised + left - lowered
        ), high


def _below(values: Tensor) -> Tensor:
    """Return […, V + 1]: the sum of the values before each index."""
    return torch.nn.functional.pad(values.cumsum(-1), (1, 0))


def _above(values: Tensor) -> Tensor:
    """Return […, V + 1]: the sum of the values from each index on."""
    return torch.nn.functional.pad(values.flip(-1).cumsum(-1).flip(-1), (0, 1))
