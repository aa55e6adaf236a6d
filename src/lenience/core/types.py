"""The nouns of a decoding cycle: what is drafted, what the target reads, what is decided and kept.

Everything is batched: B rows are decoded together, each with its own history and its own
acceptance. Of a window of W drafted tokens, state 0 of logits and hidden states is the one after
the prefix, which predicts the first drafted token, and state i + 1 the one after the i-th drafted
token was read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor

Finish = Literal["eos", "stop", "length", "context"]
Origin = Literal["draft", "draft-lenient", "draft-trusted", "correction", "bonus"]
Draws = Literal["with-replacement", "without-replacement"]
"""Ways in which sibling tokens of a tree are drawn."""


@dataclass(frozen=True)
class Draft:
    """A proposed window for each row: at most W tokens, perhaps none."""

    tokens: Tensor
    """[B, W]; what stands from a row's length on is not proposed."""
    lengths: Tensor
    """[B]: how many tokens are proposed for each row."""
    logits: Tensor | None = None
    """[B, W, V]: what each token was picked from, after the logits processors; None where the
    tokens are proposed for certain, with probability 1."""
    hidden: Tensor | None = None
    """[B, W + 1, H]: the draft's states, see the module; None unless a rule asked for them."""
    parents: Sequence[Sequence[int]] | None = None
    """[B][W]: which of the window's tokens each one follows, one before it, or -1 for the prefix;
    None for a chain, where each follows the one before it."""
    draws: Draws | None = None
    """Way in which a tree's tokens were drawn from `logits`, siblings in their order; None if they
    were chosen."""
    passes: int = 0
    """Number of model passes for this draft."""
    tokens_read: Sequence[int] = ()
    """[B]: how many tokens these passes read for each row."""
    trusted: Tensor | None = None
    """[B]: how many of the first tokens are kept without asking the target, which does not read a
    window that is trusted whole."""
    bonus: bool = True
    """True if the target's own token follows a window that is kept whole."""
    probs: Tensor | None = None
    """[B, W, V]: what each token was drawn from, where that is not what the request's temperature
    and truncation make of `logits`."""
    cut: Callable[[], list[bool]] | None = None
    """Tells which rows [B] were cut, as their logits were not finite; None where none was."""

    @property
    def width(self) -> int:
        return self.tokens.shape[1]

    @cached_property
    def proposed(self) -> Tensor:
        """Return [B, W] bool: which places hold a proposed token."""
        return (
            torch.arange(self.width, device=self.tokens.device) < self.lengths[:, None]
        )

    @cached_property
    def kept_unasked(self) -> Tensor | None:
        """Return [B, W] bool: which places hold a trusted token; None where nothing is trusted."""
        if self.trusted is None:
            return None
        return (
            torch.arange(self.width, device=self.tokens.device) < self.trusted[:, None]
        )

    def rows(self, which: Sequence[int]) -> Draft:
        """Return the windows of some of the rows."""
        parts: dict[str, Any] = {
            item.name: getattr(self, item.name) for item in fields(self)
        }
        for name, value in parts.items():
            if isinstance(value, Tensor):
                parts[name] = value[list(which)]
        for name in ("tokens_read", "parents"):
            if parts[name]:
                parts[name] = [parts[name][b] for b in which]
        return Draft(**parts)


@dataclass(frozen=True)
class Reading:
    """Output of one pass of a model over B prefixes and the W tokens after each."""

    logits: Tensor
    """[B, W + 1, V]"""
    hidden: Tensor
    """[B, W + 1, H]: the states that the LM head reads, after the final norm."""
    tokens_read: Sequence[int] = ()
    """[B]: how many tokens the pass read for each row; the others were in the cache."""

    @cached_property
    def greedy_tokens(self) -> Tensor:
        """Return [B, W + 1]: the most probable tokens."""
        return self.logits.argmax(-1)


@dataclass(frozen=True)
class Verdict:
    """A rule's answer for one row's window."""

    drafted: list[int]
    path: list[int]
    """Indices of the accepted drafted tokens, each the child of the one before: 0, 1, 2, … in a
    chain."""
    next_token: int | None
    """The correction or, where the window was accepted whole, the bonus token; None where nothing
    follows."""
    exact: list[bool]
    """True for each drafted token that the strict rule accepts at its position; False if the target
    did not read it."""
    scores: list[float | None]
    """The judge's score of each drafted token that the strict rule rejects; None for the others,
    and without a judge."""
    parents: Sequence[int] | None = None
    """Index of the token that each drafted token follows, see `Draft.parents`."""
    logprobs: Sequence[float] | None = None
    """Log-probabilities of the accepted tokens and the next one, if requested."""
    read: bool = True
    """True if the target read the window."""

    @property
    def num_accepted(self) -> int:
        return len(self.path)

    @cached_property
    def rejected(self) -> int | None:
        """Return the first drafted token that follows those kept, and is not; None where there is
        none."""
        last = self.path[-1] if self.path else -1
        if self.parents is None:
            return last + 1 if last + 1 < len(self.drafted) else None
        return next(
            (i for i, parent in enumerate(self.parents) if parent == last), None
        )

    def kept_exactly(self, most: int) -> int:
        """Return how many tokens the strict rule alone keeps, counted to at most `most`."""
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
    """Where one new token came from; `score` is the judge's for the drafted token at this place,
    and `logprob` the logarithm of the target's probability, where they were asked."""

    token: int
    origin: Origin
    score: float | None = None
    logprob: float | None = None


@dataclass(frozen=True, repr=False)
class Step:
    """Tokens that one cycle kept, with counts."""

    trace: list[Trace]
    drafted: int
    accepted_exact: int
    """Number of tokens of the window that the strict rule alone would accept."""
    accepted_lenient: int
    """Number of further drafted tokens accepted; below 0 for a rule that rejects tokens that the
    strict one accepts."""
    text: str
    """The text that this step adds, incomplete characters and possible stop strings held back until
    they are decided."""
    finish: Finish | None = None
    target_passes: int = 1
    """0 where the window was trusted."""
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
        """Return how many drafted tokens."""
        return sum(entry.origin.startswith("draft") for entry in self.trace)
