"""Features of the logits of a drafted token and of later tokens in its window.

The target reads a window in one pass, so its logits of later tokens cost nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

FLOOR = -30.0
"""No log-probability is taken to be lower."""
SURE = math.log(0.9)
"""Log-probability of its best token from which the target is sure."""
OWN = 0
BEST = 1
AGREES = 5
HAS_LETTER = -3
"""Indices of a token's features: the target's log-probability of the token and of its best token,
whether they are the same token, and whether it has a letter."""


def kinds_of(token_mask: Callable[[str], Tensor]) -> Tensor:
    """Return [V, 2]: 1 for tokens whose text has a digit, and a letter. `token_mask` returns the
    tokens that match a regular expression."""
    return torch.stack([token_mask(r"\d"), token_mask(r"[^\W\d_]")], -1).float()


def token_values(
    target: Tensor, draft: Tensor | None, tokens: Tensor, kinds: Tensor
) -> Tensor:
    """Return […, S] numbers of drafted `tokens` […] by the logits […, V] of the target and perhaps
    of the draft, where they were drafted, and by the `kinds` [V, 2] of tokens.

    The target's log-probability of the token, of its best and of its second token, the logarithm of
    how many it finds as likely, its entropy, and whether its best token is the drafted one; the
    draft's log-probability of the token and of its best, its entropy, the divergence of each
    from the other, and the draft's log-probability of the target's best; and whether there is a
    digit and a letter in the token, and in the target's best.
    """
    models = [target.float()] if draft is None else [target.float(), draft.float()]
    logs = torch.stack(models).log_softmax(-1).clamp_(min=FLOOR)  # [1 or 2, …, V]
    probs = logs.exp()
    (best, second), (index, _) = (part.unbind(-1) for part in logs[0].topk(2))
    # of the drafted token and of the target's best one
    named = torch.stack([tokens, index], -1)  # […, 2]
    own, of_best = logs.gather(-1, named.expand(len(models), *named.shape)).unbind(-1)
    rank = (logs[0] >= own[0, ..., None]).sum(-1).log()
    entropy = (probs * logs).sum(-1).neg_()
    parts = [own[0], best, second, rank, entropy[0], (index == tokens).float()]
    if draft is not None:
        divergence = -(probs * logs.flip(0)).sum(-1) - entropy
        parts += [own[1], logs[1].amax(-1), entropy[1], *divergence, of_best[1]]
    return torch.cat([torch.stack(parts, -1), kinds[named].flatten(-2)], -1)


def with_later(here: Tensor, later: Tensor, known: Tensor) -> Tensor:
    """Return the features […, F] of tokens: their own numbers […, S] and those of the n tokens
    after each […, n, S], as far as they are `known` […, n].

    For the later tokens these are each one's numbers, their extremes, and the length of the
    target's agreement. Over all later tokens, those without a letter and those of which the target
    is sure, these are their count, the count of agreements, and the mean and the lowest of the
    target's log-probabilities.
    """
    n = known.shape[-1]
    if not n:
        return here
    seen = known.to(later.dtype)
    later = later * seen[..., None]
    own = later[..., OWN]
    agrees = later[..., AGREES]
    wordless = seen * (later[..., HAS_LETTER] == 0)
    among = torch.stack(  # […, 3, n]
        [seen, wordless, seen * (later[..., BEST] >= SURE)], -2
    )
    counts = among.sum(-1)
    means = (  # […, 3, 2]
        among @ torch.stack([agrees, own], -1) / counts.clamp(min=1)[..., None]
    )
    lowest = (among * own[..., None, :]).amin(-1)
    run = ((1 - agrees).cumsum(-1) == 0).sum(-1, keepdim=True) / n
    ends = [later.amin(-2), later.amax(-2), run, counts / n]
    return torch.cat(
        [here, seen, later.flatten(-2), *ends, *means.unbind(-1), lowest], -1
    )


def of_windows(values: Tensor, lengths: Tensor, n: int) -> Tensor:
    """Return the features [B, W, F] of every token of windows of `lengths` [B] tokens, looking up
    to `n` tokens ahead, by the tokens' numbers [B, W, S]."""
    after = _places_after(values.shape[1], n, values.device)
    later = torch.nn.functional.pad(values, (0, 0, 0, n + 1))[:, after]
    return with_later(values, later, after < lengths[:, None, None])


@cache
def _places_after(width: int, n: int, device: torch.device) -> Tensor:
    """Return [width, n]: which places follow each."""
    return (
        1 + torch.arange(width, device=device)[:, None] + torch.arange(n, device=device)
    )


@cache
def numbers(with_draft: bool) -> int:
    """Return S, the count of a token's numbers, with or without the draft's logits."""
    logits = torch.zeros(1, 2)
    tokens = torch.zeros(1, dtype=torch.long)
    draft = logits if with_draft else None
    return token_values(logits, draft, tokens, torch.zeros(2, 2)).shape[-1]


@cache
def width(with_draft: bool, n: int) -> int:
    """Return F, the count of features, with or without the draft's logits."""
    values = torch.zeros(1, 1, numbers(with_draft))
    return of_windows(values, torch.ones(1), n).shape[-1]
