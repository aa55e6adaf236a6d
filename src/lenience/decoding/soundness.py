"""Checks for NaN and infinite logits. The target's raise RunError; a drafter's end its window."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lenience.core.errors import RunError
from lenience.core.transfer import looks_cheaply, to_host_async
from lenience.core.types import Draft, Verdict
from lenience.models.lm import CAUSES, LM


def have_finite_max(logits: Tensor) -> Tensor:
    """Return bool […]: True where the maximum of logits […, V] is finite. The maximum is NaN if any
    entry is. Single entries may be −inf, as for forbidden tokens."""
    return logits.amax(-1).isfinite()


def check_predictions(logits: Tensor, start: int, lm: LM) -> None:
    """Raise RunError if logits [n, V] of the draft that mining uses have no finite maximum. The
    first are at position `start`."""
    sound = have_finite_max(logits).tolist()
    if not all(sound):
        raise RunError(
            f"{lm.role} {lm.name!r}: its logits are NaN or infinite at position "
            f"{start + sound.index(False)}, so its tokens cannot be labelled; {CAUSES} (try dtype "
            "float32)"
        )


def check_states(states: Tensor, what: str) -> None:
    """Raise RunError if hidden states [n, H] that a head would learn from are NaN or infinite;
    `what` names the sample and the models."""
    if not bool(states.isfinite().all()):
        raise RunError(f"{what}: its hidden states are NaN or infinite; {CAUSES}")


Numbers = Callable[[], list[Any]]
"""Function that returns numbers of a device as a list, called after a synchronisation that happens
anyway."""


def cut_non_finite(draft: Draft) -> Draft:
    """Cut chains before the first token with non-finite logits, and empty trees that contain such a
    token. `Draft.cut` then returns which rows were cut."""
    if draft.logits is None or not draft.width:
        return draft
    best = draft.logits.amax(-1)  # [B, W]
    if looks_cheaply(best) and all(map(math.isfinite, best.flatten().tolist())):
        return draft
    sound = best.isfinite()
    broken = ~sound & draft.proposed  # [B, W]
    cut = broken.any(1)
    if looks_cheaply(cut) and not cut.any():
        return draft
    whole = torch.full_like(draft.lengths, draft.width)
    first = torch.where(cut, broken.int().argmax(1).to(whole.dtype), whole)
    if draft.parents is not None:
        first = torch.where(cut, torch.zeros_like(first), whole)
    lengths = torch.minimum(draft.lengths, first)
    sound = sound[..., None]
    return replace(
        draft,
        lengths=lengths,
        logits=torch.where(sound, draft.logits, 0.0),
        trusted=None
        if draft.trusted is None
        else torch.minimum(draft.trusted, lengths),
        probs=None
        if draft.probs is None
        else torch.where(sound, draft.probs, 1 / draft.probs.shape[-1]),
        cut=to_host_async(cut),
    )


def warn_of_non_finite(cut: Numbers | None, lm: LM) -> None:
    """Warn, once per target, that windows of its drafter were cut."""
    if cut is not None and any(cut()):
        lm.once("non-finite drafter", lambda: warnings.warn(_told(lm), stacklevel=6))


def _told(lm: LM) -> str:
    return (
        f"{lm.role} {lm.name!r}: its drafter's logits are NaN or infinite; windows end before "
        f"them, which costs speed alone ({CAUSES})"
    )


def check_target(
    best: Numbers,
    verdicts: Sequence[Verdict],
    prefixes: Sequence[Sequence[int]],
    lm: LM,
) -> None:
    """Raise RunError if a verdict depends on non-finite logits. `best` returns [B, W + 1]: the
    maximum of each state's logits."""
    for row, verdict, prefix in zip(best(), verdicts, prefixes):
        if all(map(math.isfinite, row)):
            continue
        for state in (0, *(node + 1 for node in verdict.path)):
            if verdict.read and not math.isfinite(row[state]):
                raise RunError(
                    f"{lm.role} {lm.name!r}: its logits are NaN or infinite at position "
                    f"{len(prefix) + state}; {CAUSES} (try dtype float32)"
                )
