"""The nouns of a decoding cycle, and the protocols Drafter and Rule.

Rows: of a window of n drafted tokens, row 0 of logits and hidden states is the one after the prefix, which predicts
the first drafted token, and row i + 1 the one after the i-th drafted token was read.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol, cast

import torch
from torch import Tensor

if TYPE_CHECKING:
    from transformers import LogitsProcessorList

Finish = Literal["eos", "stop", "length", "context"]
Origin = Literal["draft", "draft-lenient", "correction", "bonus"]


@dataclass(frozen=True)
class Draft:
    """A proposed window: a chain of n tokens, perhaps empty."""

    tokens: list[int]
    logits: Tensor | None = None
    """[n, V]: what each token was picked from, after the logits processors; None where nothing was drafted."""
    hidden: Tensor | None = None
    """[n + 1, H]: the draft's states, see the module's rows; None unless a rule asked for them."""


@dataclass(frozen=True)
class Reading:
    """What one pass of a model over a prefix and n tokens gave."""

    logits: Tensor
    """[n + 1, V]"""
    hidden: Tensor
    """[n + 1, H]: the states that the LM head reads, after the final norm."""


@dataclass(frozen=True)
class Verdict:
    """A rule's answer for one window."""

    accepted: int
    """How many drafted tokens are kept."""
    token: int
    """The correction or, where the window was accepted whole, the bonus token."""
    exact: list[bool]
    """For each drafted position, whether the strict rule accepts it there."""
    scores: list[float | None]
    """For each drafted position, the judge's score where one was asked."""


@dataclass(frozen=True)
class Trace:
    """Where one new token came from; `score` is the judge's for the drafted token at this place, where it was asked."""

    token: int
    origin: Origin
    score: float | None = None


@dataclass(frozen=True)
class Step:
    """What one cycle kept."""

    trace: list[Trace]
    drafted: int
    accepted_exact: int
    """How many of the kept tokens the strict rule alone would have accepted from the same window."""
    accepted_lenient: int
    """How many drafted tokens were kept beyond those."""
    draft_passes: int
    text: str
    """The text that this step adds, incomplete characters and possible stop strings held back until they are decided."""
    finish: Finish | None = None

    @property
    def tokens(self) -> list[int]:
        return [entry.token for entry in self.trace]


@dataclass(frozen=True)
class Noise:
    """Random draws keyed by (seed, request, position, purpose): a prompt gets the same ones alone or among others."""

    seed: int
    request: bytes

    @classmethod
    def for_prompt(cls, seed: int, prompt: Sequence[int]) -> Noise:
        return cls(seed, hashlib.blake2b(struct.pack(f"<{len(prompt)}q", *prompt), digest_size=16).digest())

    def key(self, position: int, purpose: str) -> int:
        message = struct.pack("<qq", self.seed, position) + self.request + purpose.encode()
        return int.from_bytes(hashlib.blake2b(message, digest_size=8).digest(), "little")

    def uniform(self, position: int, purpose: str) -> float:
        """A number in [0, 1)."""
        return (self.key(position, purpose) >> 11) / 2**53

    def draw(self, probs: Tensor, position: int, purpose: str) -> int:
        """A token from `probs` [V] (need not sum to 1) by the exponential race, the Gumbel trick without logarithms: two
        distributions raced on the same key mostly give the same token."""
        generator = torch.Generator().manual_seed(self.key(position, purpose) >> 1)
        times = torch.empty(probs.shape[-1], dtype=torch.float64).exponential_(generator=generator)
        return int((probs.double() / times.to(probs.device)).argmax())


@dataclass
class Context:
    """What a rule and a drafter need besides the models' readings: sampling parameters, history, randomness."""

    noise: Noise
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    processors: LogitsProcessorList | None = None
    prefix: list[int] = field(default_factory=list)
    """All tokens so far, the prompt's included."""
    position: int = 0
    """How many new tokens there are so far."""

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    def process(self, logits: Tensor, tokens: Sequence[int]) -> Tensor:
        """Apply the model's logits processors to `logits` [m, V], whose last row follows `tokens` after the prefix."""
        if not self.processors:
            return logits
        rows, end = [], len(self.prefix) + len(tokens)
        history = torch.tensor([*self.prefix, *tokens], device=logits.device)[None]  # [1, T]
        for i, row in enumerate(logits):
            seen = history[:, : end - len(logits) + 1 + i]
            rows.append(self.processors(cast(torch.LongTensor, seen), cast(torch.FloatTensor, row[None].float())))
        return torch.cat(rows)

    def probs(self, logits: Tensor) -> Tensor:
        """[m, V] processed logits → the distributions that sampling really uses, in float32; one-hot when greedy.

        Temperature, then top-k, then top-p, as `transformers` defines them.
        """
        logits = logits.float()
        if self.greedy:
            return torch.nn.functional.one_hot(logits.argmax(-1), logits.shape[-1]).float()
        return torch.softmax(self._warp(logits), -1)

    def _warp(self, logits: Tensor) -> Tensor:
        from transformers import TopKLogitsWarper, TopPLogitsWarper

        logits = logits / self.temperature
        nothing: Any = torch.empty(0)
        if self.top_k:
            logits = TopKLogitsWarper(self.top_k)(nothing, cast(torch.FloatTensor, logits))
        if self.top_p is not None and self.top_p < 1:
            logits = TopPLogitsWarper(self.top_p)(nothing, cast(torch.FloatTensor, logits))
        return logits

    def forbidden(self, logits: Tensor) -> Tensor:
        """[m, V] processed logits → which tokens a processor or the truncation rules out."""
        if self.greedy:
            return torch.isneginf(logits)
        return torch.isneginf(self._warp(logits.float()))

    def draw(self, logits: Tensor, ahead: int) -> int:
        """The token that plain decoding takes from processed `logits` [V], `ahead` tokens after the present position."""
        if self.greedy:
            return int(logits.argmax())
        return self.noise.draw(self.probs(logits[None])[0], self.position + ahead, "token")


class Drafter(Protocol):
    """Proposes windows."""

    @property
    def passes(self) -> int:
        """How many passes of a model proposing has taken so far."""
        ...

    def propose(self, tokens: list[int], ctx: Context, room: int) -> Draft:
        """A window of at most `room` tokens to follow `tokens`; it may be empty."""
        ...


class Rule(Protocol):
    """Decides what of a window is kept. A rule is data: `str(rule)` is its spec."""

    def __call__(self, draft: Draft, reading: Reading, ctx: Context) -> Verdict: ...
