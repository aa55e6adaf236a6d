"""The data types of a decoding cycle: drafts, the target's readings, verdicts and steps.

Everything is batched: B rows are decoded together, each with its own history and its own number of
accepted tokens. For a window of W drafted tokens there are W + 1 logits and hidden states. State 0
follows the prefix and predicts the first drafted token; state i + 1 follows drafted token i.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor

from lenience.core.numeric import argmax

Finish = Literal["eos", "stop", "length", "context"]
Origin = Literal["draft", "draft-lenient", "draft-trusted", "correction", "bonus"]
Alternatives = Sequence[tuple[int, float]]
"""Tokens with their log-probabilities, the most probable first."""
Draws = Literal["with-replacement", "without-replacement"]
"""Ways of drawing the sibling tokens of a tree."""


@dataclass(frozen=True)
class Draft:
    """A proposed window of at most W tokens for each row; windows may be empty."""

    tokens: Tensor
    """[B, W]; entries from a row's length on are padding."""
    lengths: Tensor
    """[B]: number of tokens proposed for each row."""
    logits: Tensor | None = None
    """[B, W, V]: logits that each token was picked from, after the logits processors; None if the
    tokens are proposed with probability 1."""
    hidden: Tensor | None = None
    """[B, W + 1, H]: hidden states of the draft model, numbered as in the module's docstring; None
    unless requested."""
    parents: Sequence[Sequence[int]] | None = None
    """[B][W]: index of each token's parent in the window, an earlier token, or -1 for the prefix;
    None for a chain."""
    draws: Draws | None = None
    """Way in which a tree's tokens were drawn from `logits`, siblings in order; None if they were
    chosen."""
    passes: int = 0
    """Number of model passes that this draft took."""
    tokens_read: Sequence[int] = ()
    """[B]: number of tokens that these passes read for each row."""
    trusted: Tensor | None = None
    """[B]: number of tokens at the start of each window that are kept without verification. The
    target does not read a window whose tokens are all trusted."""
    bonus: bool = True
    """True if a bonus token of the target follows a window that is accepted whole."""
    probs: Tensor | None = None
    """[B, W, V]: distributions that the tokens were drawn from; None if they follow from `logits`
    by the request's temperature and truncation."""
    cut: Callable[[], list[bool]] | None = None
    """Function that returns [B] bool: True for each row cut because of non-finite logits; None if
    no row was cut."""

    @property
    def width(self) -> int:
        return self.tokens.shape[1]

    @cached_property
    def proposed(self) -> Tensor:
        """Return [B, W] bool: True at positions that hold a proposed token."""
        return (
            torch.arange(self.width, device=self.tokens.device) < self.lengths[:, None]
        )

    @cached_property
    def kept_unasked(self) -> Tensor | None:
        """Return [B, W] bool: True at positions that hold a trusted token; None if no token is
        trusted."""
        if self.trusted is None:
            return None
        return (
            torch.arange(self.width, device=self.tokens.device) < self.trusted[:, None]
        )

    def rows(self, which: Sequence[int]) -> Draft:
        """Return the draft for the rows of these indices alone."""
        parts = dict[str, Any]()
        for item in fields(self):
            parts[item.name] = getattr(self, item.name)
        for name, value in parts.items():
            if isinstance(value, Tensor):
                parts[name] = value[list(which)]
        for name in ("tokens_read", "parents"):
            if parts[name]:
                parts[name] = [parts[name][b] for b in which]
        return Draft(**parts)


@dataclass(frozen=True)
class Reading:
    """Output of a model's pass over B prefixes and the W tokens after each prefix."""

    logits: Tensor
    """[B, W + 1, V]"""
    hidden: Tensor
    """[B, W + 1, H]: hidden states of the requested layers; by default those after the final norm,
    which the LM head reads."""
    tokens_read: Sequence[int] = ()
    """[B]: number of tokens that the pass read for each row; earlier tokens were in the cache."""

    @cached_property
    def greedy_tokens(self) -> Tensor:
        """Return [B, W + 1]: the most probable token at each state."""
        return argmax(self.logits)

    def rows(self, which: Sequence[int]) -> Reading:
        """Return the reading of the rows of these indices alone."""
        rows = list(which)
        counts = [self.tokens_read[b] for b in rows] if self.tokens_read else ()
        return Reading(self.logits[rows], self.hidden[rows], counts)


@dataclass(frozen=True)
class Verdict:
    """A rule's answer for one row's window."""

    drafted: list[int]
    path: list[int]
    """Indices of the accepted drafted tokens, each the child of the one before; 0, 1, 2, … in a
    chain."""
    next_token: int | None
    """Correction token, or the bonus token after a window accepted whole; None if no token
    follows."""
    exact: list[bool]
    """True for each drafted token that the strict rule accepts at its position; False if the target
    did not read it."""
    scores: list[float | None]
    """Judge's score of each drafted token that the strict rule rejects; None for other tokens and
    for rules without a judge."""
    parents: Sequence[int] | None = None
    """Index of each drafted token's parent, see `Draft.parents`."""
    logprobs: Sequence[float] | None = None
    """Log-probabilities of the accepted tokens and of `next_token`, if requested."""
    alternatives: Sequence[Alternatives] | None = None
    """The target's most probable tokens in place of each of the same tokens, if requested."""
    read: bool = True
    """True if the target read the window."""

    @property
    def num_accepted(self) -> int:
        return len(self.path)

    @cached_property
    def rejected(self) -> int | None:
        """Return the index of the first drafted token that continues the accepted path but was not
        accepted; None if the path ends at a leaf."""
        last = self.path[-1] if self.path else -1
        if self.parents is None:
            return last + 1 if last + 1 < len(self.drafted) else None
        return next(
            (i for i, parent in enumerate(self.parents) if parent == last), None
        )

    def kept_exactly(self, most: int) -> int:
        """Return the number of drafted tokens that the strict rule alone would keep, at most
        `most`."""
        if self.parents is None:
            return next((i for i in range(most) if not self.exact[i]), most)
        depth = [0] * len(self.drafted)
        for i, parent in enumerate(self.parents):
            before = depth[parent] if parent >= 0 else 0
            follows = parent < 0 or before > 0
            depth[i] = before + 1 if self.exact[i] and follows else 0
        return min(most, max(depth, default=0))


@dataclass(frozen=True)
class Trace:
    """Origin of one new token. `score` is the judge's score of the drafted token at this position.
    `logprob` is the log-probability that the target gave the token, and `alternatives` are its most
    probable tokens there. All are None if missing."""

    token: int
    origin: Origin
    score: float | None = None
    logprob: float | None = None
    alternatives: Alternatives | None = None


@dataclass(frozen=True, repr=False)
class Step:
    """Tokens that one cycle kept, with counts."""

    trace: list[Trace]
    drafted: int
    accepted_exact: int
    """Number of tokens of the window that the strict rule alone would accept."""
    accepted_lenient: int
    """Number of further drafted tokens accepted; below 0 for a rule that rejects tokens that the
    strict rule accepts."""
    text: str
    """Text that this step adds. Incomplete characters and possible beginnings of stop strings are
    held back until they are decided."""
    finish: Finish | None = None
    target_passes: int = 1
    """Number of target passes; 0 if the whole window was trusted."""
    target_tokens: int = 0
    """Number of tokens that the target read."""
    draft_passes: int = 0
    draft_tokens: int = 0

    def __repr__(self) -> str:
        end = f", ended by {self.finish}" if self.finish else ""
        return f"<Step {self.text!r}: {len(self.trace)} tokens, {self.drafted} drafted{end}>"

    @property
    def tokens(self) -> list[int]:
        return [entry.token for entry in self.trace]

    @property
    def kept(self) -> int:
        """Return the number of drafted tokens kept."""
        return sum(entry.origin.startswith("draft") for entry in self.trace)
