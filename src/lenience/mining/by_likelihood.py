"""Labels by the target's own likelihoods, which need no answer to compare (SelfJudge 2026)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lenience.models.session import Session
from lenience.runs.record import Mismatch

AHEAD = 20
"""Number of the response's tokens after a mismatch whose likelihoods are compared."""


def scores(
    session: Session, prompt: list[int], response: list[int], swaps: Sequence[Mismatch]
) -> tuple[list[float], int]:
    """Return a score in nats for each mismatch of the target's own response, and the number of
    tokens that the target ran over.

    The score is log p(draft's token) − log p(target's token), plus the change of the log-likelihood
    of up to AHEAD tokens that follow in the response if the draft's token stands before them. A
    swap after which the target finds its own words as likely as before has a score near the first
    difference. `session` has one row on the target.
    """
    before = len(prompt)
    whole = [*prompt, *response]
    found: dict[int, float] = {}
    # from the state that predicts the response's first token on
    own = _logits(session, whole, len(response) + 1)
    tokens = len(whole)
    likely = _log_probs(own, response)
    changes = {
        swap.position: float(
            own[swap.position, swap.draft_token] - own[swap.position, swap.target_token]
        )
        for swap in swaps
    }
    # from the right, each prefix is still in the cache
    for swap in sorted(swaps, key=lambda swap: swap.position, reverse=True):
        i = swap.position
        after = response[i + 1 : i + 1 + AHEAD]
        found[i] = changes[i]
        if after:
            swapped = [*whole[: before + i], swap.draft_token, *after]
            anew = _log_probs(_logits(session, swapped, len(after) + 1), after)
            found[i] += float(anew.sum() - likely[i + 1 : i + 1 + AHEAD].sum())
            tokens += 1 + len(after)
    return [found[swap.position] for swap in swaps], tokens


def _logits(session: Session, ids: list[int], count: int) -> Tensor:
    """Return [count, V]: the target's logits after each of the last `count` tokens."""
    with torch.inference_mode():
        return session.read([ids], count).logits[0].float()


def _log_probs(logits: Tensor, tokens: Sequence[int]) -> Tensor:
    """Return [n]: the log-probability of each token, which the state before it predicts."""
    ids = torch.tensor(tokens, device=logits.device)
    logits = logits[: len(ids)]
    return logits.gather(1, ids[:, None])[:, 0] - logits.logsumexp(1)
