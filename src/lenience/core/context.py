"""What rules and drafters need besides readings: sampling, and the rows with their history and randomness."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from lenience.core.noise import Noise, race
from lenience.core.transfer import sent
from lenience.core.types import Step

if TYPE_CHECKING:
    from transformers import LogitsProcessorList


@dataclass
class Row:
    """One of the sequences that are decoded together."""

    noise: Noise
    prefix: list[int] = field(default_factory=list)
    """All tokens so far, the prompt's included."""
    position: int = 0
    """How many new tokens there are so far."""
    last: Step | None = None
    """What its last cycle kept."""
    schedule: int = 0
    """How many tokens a stop condition's schedule has come to allow."""
    lenient: int = 0
    """How many tokens have been kept that the strict rule rejects at their own place."""
    spans: dict[tuple[str, str], tuple[int, bool]] = field(default_factory=dict)
    """By the texts that open and close a span: of how many tokens it is known, and whether one is open after these."""


@dataclass
class Context:
    """What a rule and a drafter need besides the models' readings: sampling parameters, and each row's history and
    randomness."""

    rows: list[Row] = field(default_factory=list)
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    processors: LogitsProcessorList | None = None
    decode: Callable[[Sequence[int]], str] | None = None
    """The text of tokens, special ones included."""
    anew: bool = False
    """Whether each window has draws of its own, as a lossless rule needs whose decision on a token depends on those after it:
    a draw that helped to decide must not come again."""

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    def process(self, logits: Tensor, ahead: Tensor) -> Tensor:
        """Apply the model's logits processors to `logits` [B, m, V], the last of which follow `ahead` [B, a] after the
        prefixes."""
        if not self.processors:
            return logits
        m, done = logits.shape[1], []
        for row, tokens, scores in zip(self.rows, ahead.tolist(), logits.float()):
            history = torch.tensor([[*row.prefix, *tokens]], device=logits.device)  # [1, T]
            for i in range(m):
                seen = history[:, : history.shape[1] - m + 1 + i]
                done.append(self.processors(cast(torch.LongTensor, seen), cast(torch.FloatTensor, scores[i : i + 1])))
        return torch.cat(done).view(logits.shape)

    def probs(self, logits: Tensor) -> Tensor:
        """[…, V] processed logits → the distributions that sampling really uses, in float32; one-hot when greedy.

        Temperature, then top-k, then top-p, as `transformers` defines them.
        """
        logits = logits.float()
        if self.greedy:
            return torch.nn.functional.one_hot(logits.argmax(-1), logits.shape[-1]).float()
        return torch.softmax(self._warp(logits), -1)

    def _warp(self, logits: Tensor) -> Tensor:
        from transformers import TopKLogitsWarper, TopPLogitsWarper

        flat = logits.reshape(-1, logits.shape[-1]) / self.temperature
        nothing: Any = torch.empty(0)
        if self.top_k:
            flat = TopKLogitsWarper(self.top_k)(nothing, cast(torch.FloatTensor, flat))
        if self.top_p is not None and self.top_p < 1:
            flat = TopPLogitsWarper(self.top_p)(nothing, cast(torch.FloatTensor, flat))
        return flat.view(logits.shape)

    def allows(self, logits: Tensor, tokens: Tensor) -> Tensor:
        """[B, W, V] processed logits and [B, W] tokens → whether neither a processor nor the truncation rules each out."""
        logits = logits if self.greedy else self._warp(logits.float())
        return logits.gather(2, tokens[..., None])[..., 0] > -torch.inf

    def logs(self, logits: Tensor) -> Tensor:
        """[…, V] processed logits → log-probabilities at the request's temperature (1 when greedy), before truncation, in
        float32."""
        return torch.log_softmax(logits.float() / (self.temperature or 1), -1)

    def used(self, device: torch.device) -> Tensor:
        """[B]: how many tokens each row's request has kept that the strict rule rejects."""
        return sent([row.lenient for row in self.rows], device)

    def inside(self, begin: str, end: str, tokens: Tensor) -> Tensor:
        """[B, W] bool: whether each of the drafted `tokens` stands in a span that the text `begin` opens and `end` closes."""
        if self.decode is None:
            raise RuntimeError("spans are marked by text, and the context has no tokenizer")
        reach = len(max(begin, end, key=len).encode()) + 1  # a token may be less than a character
        found = []
        for row, drafted in zip(self.rows, tokens.tolist()):
            known, open = row.spans.get((begin, end), (0, False))
            ids, states = [*row.prefix, *drafted], []
            # after the prompt, which is looked at whole, token by token: what one completes stands among the last few
            for n in range(known or len(row.prefix) - row.position, len(ids)):
                if n != known:
                    text = self.decode(ids[max(0, n - reach) if known else 0 : n])
                    opened, closed = (at + len(mark) if (at := text.rfind(mark)) >= 0 else 0 for mark in (begin, end))
                    open = opened > closed if opened or closed else open  # by where they end: one may contain the other
                    known = known or n
                if n == len(row.prefix):
                    row.spans[begin, end] = n, open
                if n >= len(row.prefix):
                    states.append(open)
            found.append(states)
        return sent(found, tokens.device).bool().view(tokens.shape)

    def keys(self, n: int, purpose: str, ahead: int = 0, device: torch.device | None = None) -> Tensor:
        """[B, n] int64: each row's keys for n positions, the first of them `ahead` of where it stands."""
        whose = [(row, f"{purpose}@{row.position}" if self.anew else purpose) for row in self.rows]
        keys = [[row.noise.key(row.position + ahead + i, purpose) for i in range(n)] for row, purpose in whose]
        return sent(keys, device or torch.device("cpu")).long().view(len(keys), n)

    def draw(self, logits: Tensor, ahead: int = 0) -> Tensor:
        """[B, m, V] processed logits → [B, m]: the tokens that plain decoding takes, the first of them `ahead` tokens after
        where the rows stand."""
        if self.greedy:
            return logits.argmax(-1)
        return race(self.probs(logits), self.keys(logits.shape[1], "token", ahead, logits.device))
