"""Features from the logits of a drafted token and of later tokens in its window.

The target reads a window in one pass, so its logits of later tokens cost nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

FLOOR = -30.0
"""Lower bound to which log-probabilities are clamped."""
SURE = math.log(0.9)
"""Minimum log-probability of the target's top token at which the target counts as sure."""
OWN = 0
BEST = 1
AGREES = 5
HAS_LETTER = -3
"""Indices into a token's numbers: the target's log-probability of the token and of its top token,
whether both are the same token, and whether the token has a letter."""


def kinds_of(token_mask: Callable[[str], Tensor]) -> Tensor:
    """Return [V, 2]: 1 if the text of a token has a digit, and 1 if the text has a letter.
    `token_mask` returns the tokens that match a regular expression."""
    return torch.stack([token_mask(r"\d"), token_mask(r"[^\W\d_]")], -1).float()


def token_values(
    target: Tensor, draft: Tensor | None, tokens: Tensor, kinds: Tensor
) -> Tensor:
    """Return S numbers […, S] for each drafted token in `tokens` […], from the logits […, V] of the
    target and, if given, of the draft at its position, and from the `kinds` [V, 2] of all tokens.

    From the target: the log-probabilities of the token, of the top and of the second token, the
    logarithm of the token's rank, the entropy, and whether the token is the top token. From the
    draft: the log-probabilities of the token and of the draft's top token, the entropy, both KL
    divergences, and the log-probability of the target's top token. Last, whether the token has a
    digit and a letter, and the same for the target's top token.
    """
    models = [target.float()] if draft is None else [target.float(), draft.float()]
    logs = torch.stack(models).log_softmax(-1).clamp_(min=FLOOR)  # [1 or 2, …, V]
    probs = logs.exp()
    (best, second), (index, _) = (part.unbind(-1) for part in logs[0].topk(2))
    # for the drafted token and for the target's top token
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
    """Return the features […, F] of tokens: their own numbers […, S], and the numbers of the n
    tokens after each […, n, S], as far as these are `known` […, n].

    The later tokens add which of them are known, all their numbers, the minimum and maximum of each
    number, and the length of the run in which the target agrees. Three groups of later tokens
    follow (all, those without a letter, those that the target is sure of): their count, the share
    of agreements, and the mean and the minimum of the target's log-probabilities.
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
    """Return the features [B, W, F] of every token in windows of `lengths` [B] tokens, looking up
    to `n` tokens ahead. `values` [B, W, S] are the tokens' numbers."""
    after = _places_after(values.shape[1], n, values.device)
    later = torch.nn.functional.pad(values, (0, 0, 0, n + 1))[:, after]
    return with_later(values, later, after < lengths[:, None, None])


@cache
def _places_after(width: int, n: int, device: torch.device) -> Tensor:
    """Return [width, n]: the n positions after each position of a window."""
    return (
        1 + torch.arange(width, device=device)[:, None] + torch.arange(n, device=device)
    )


@cache
def numbers(with_draft: bool) -> int:
    """Return S, the number of values per token, with or without the draft's logits."""
    logits = torch.zeros(1, 2)
    tokens = torch.zeros(1, dtype=torch.long)
    draft = logits if with_draft else None
    return token_values(logits, draft, tokens, torch.zeros(2, 2)).shape[-1]


@cache
def width(with_draft: bool, n: int) -> int:
    """Return F, the number of features per token, with or without the draft's logits."""
    values = torch.zeros(1, 1, numbers(with_draft))
    return of_windows(values, torch.ones(1), n).shape[-1]
