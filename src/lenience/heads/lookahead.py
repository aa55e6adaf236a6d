"""What logits say of a drafted token and of those drafted after it, as numbers that a head reads.
The target reads a window in one pass, so what it says of the later tokens costs nothing."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

Find = Callable[[str, Tensor], Tensor]
"""[…] bool: in which tokens' […] texts a regular expression is found."""

FLOOR = -30.0
"""No log-probability is taken to be lower."""
SURE = math.log(0.9)
"""From this log-probability of its best token on the target is sure."""
DIGIT, LETTER = r"\d", r"[^\W\d_]"
OWN, BEST, AGREES, HAS_LETTER = 0, 1, 5, -3
"""Which of a token's numbers are: the target's log-probability of it and that of its best one,
whether they are the same token, and whether a letter is in it."""


def token_values(target: Tensor, draft: Tensor | None, tokens: Tensor, find: Find) -> Tensor:
    """[…, S] numbers of drafted `tokens` […] by the logits […, V] of the target and perhaps of the
    draft, where they were drafted.

    The target's log-probability of the token, of its best and of its second token, the logarithm of
    how many it finds as likely, its entropy, and whether its best token is the drafted one; the
    draft's log-probability of the token and of its best, its entropy, the divergence of each
    from the other, and the draft's log-probability of the target's best; and whether there is a
    digit and a letter in the token, and in the target's best.
    """
    log_p = target.float().log_softmax(-1).clamp(min=FLOOR)
    p, own = log_p.exp(), log_p.gather(-1, tokens[..., None])
    best, index = log_p.topk(2)
    agrees = index[..., :1] == tokens[..., None]
    rank = (log_p >= own).sum(-1, keepdim=True).log()
    parts = [own, best, rank, -(p * log_p).sum(-1, keepdim=True), agrees]
    if draft is not None:
        log_q = draft.float().log_softmax(-1).clamp(min=FLOOR)
        q, difference = log_q.exp(), log_p - log_q
        parts += [
            log_q.gather(-1, tokens[..., None]),
            log_q.amax(-1, keepdim=True),
            -(q * log_q).sum(-1, keepdim=True),
            (p * difference).sum(-1, keepdim=True),
            -(q * difference).sum(-1, keepdim=True),
            log_q.gather(-1, index[..., :1]),
        ]
    both = (tokens, index[..., 0])
    parts += [find(pattern, ids)[..., None] for ids in both for pattern in (DIGIT, LETTER)]
    return torch.cat([part.float() for part in parts], -1)


def with_later(here: Tensor, later: Tensor, known: Tensor) -> Tensor:
    """[m, F]: what a head reads of m tokens: their own numbers [m, S] and those of the n tokens
    after each [m, n, S], as far as they are `known` [m, n]: each one's, and pooled over all, over
    those without a letter, and over those of which the target is sure."""
    later = later * known[..., None]
    n = max(1, known.shape[-1])
    agrees = later[..., AGREES]
    parts = [here, known.float(), later.flatten(-2)]
    if known.shape[-1]:
        parts += [later.amin(-2), later.amax(-2), agrees.cumprod(-1).sum(-1, keepdim=True) / n]
        wordless = known & (later[..., HAS_LETTER] == 0)
        for among in (known, wordless, known & (later[..., BEST] >= SURE)):
            count = among.sum(-1, keepdim=True)
            own = later[..., OWN] * among
            parts += [count / n, (agrees * among).sum(-1, keepdim=True) / count.clamp(min=1)]
            parts += [own.sum(-1, keepdim=True) / count.clamp(min=1), own.amin(-1, keepdim=True)]
    return torch.cat(parts, -1)


def of_windows(values: Tensor, lengths: Tensor, n: int) -> Tensor:
    """[B, W, F]: what a head reads of every token of windows of `lengths` [B] tokens that looks up
    to `n` tokens ahead, by the tokens' numbers [B, W, S]."""
    width = values.shape[1]
    padded = torch.nn.functional.pad(values, (0, 0, 0, n))
    later = padded[:, 1:].unfold(1, n, 1).transpose(2, 3) if n else padded[:, :, None][:, :, :0]
    places = torch.arange(width + n + 1, device=values.device)
    after = places[1 : width + 1, None] + places[:n]  # [W, n]
    return with_later(values, later[:, :width], after < lengths[:, None, None])


@cache
def numbers(with_draft: bool) -> int:
    """S, with what the draft's logits say or without."""
    logits, tokens = torch.zeros(1, 2), torch.zeros(1, dtype=torch.long)
    draft = logits if with_draft else None
    return token_values(logits, draft, tokens, lambda _, ids: torch.zeros_like(ids)).shape[-1]


@cache
def width(with_draft: bool, n: int) -> int:
    """F, with what the draft's logits say or without."""
    values = torch.zeros(1, 1, numbers(with_draft))
    return of_windows(values, torch.ones(1), n).shape[-1]
