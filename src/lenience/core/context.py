"""Sampling parameters, row histories and random draws for rules and drafters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor

from lenience.core.noise import Noise, gumbel_argmax
from lenience.core.numeric import argmax
from lenience.core.transfer import to_device
from lenience.core.types import Step

if TYPE_CHECKING:
    from transformers import LogitsProcessorList


class _Span(NamedTuple):
    """The key of `Row.memory` for spans between the texts `begin` and `end`. The value is the
    number of tokens covered and whether a span is open after them."""

    begin: str
    end: str


@dataclass
class Row:
    """One sequence of a batch that is decoded together."""

    noise: Noise
    prefix: list[int] = field(default_factory=list)
    """All tokens so far, including the prompt."""
    position: int = 0
    """Number of new tokens so far."""
    ahead: int = 0
    """Number of tokens at the end of `prefix` that are drafted but not yet verified; another
    drafter continues from them."""
    last: Step | None = None
    """Step of the last cycle."""
    lenient: int = 0
    """Number of accepted tokens that the strict rule would reject at their position."""
    memory: dict[Any, Any] = field(default_factory=dict)
    """State that stop conditions, drafters and other owners keep between cycles, keyed by owner."""
    sampling: Context | None = None
    """Context with the sampling parameters of this row; None for those of the batch."""

    def keep(self, step: Step) -> None:
        """Record the step of a cycle."""
        self.prefix += step.tokens
        self.position += len(step.tokens)
        self.lenient += sum(entry.origin == "draft-lenient" for entry in step.trace)
        self.last = step


@dataclass
class Context:
    """Sampling parameters, and each row's history and random draws, for rules and drafters.

    Rows may have sampling parameters of their own (`Row.sampling`). Results that depend on them are
    then computed for each group of rows with the same parameters.
    """

    rows: list[Row] = field(default_factory=list)
    temperature: float = 0.0
    draft_temperature: float | None = None
    """Sampling temperature of the draft; None for the target's temperature."""
    top_k: int | None = None
    top_p: float | None = None
    processors: LogitsProcessorList | None = None
    decode: Callable[[Sequence[int]], str] | None = None
    """Function that returns the text of tokens, including special tokens."""
    token_mask: Callable[[str], Tensor] | None = None
    """Function that returns [V] bool: True for each token whose text contains a match of a regular
    expression."""
    fresh_noise_per_window: bool = False
    """True if each window has its own random draws. A lossless rule that decides on a token by
    later tokens needs them: a draw that has decided must not be used again."""
    window: int = 8
    """Maximum number of drafted tokens in a chain, or of levels in a tree, per cycle."""
    on_trees: bool = False
    """True if the windows are paths of trees whose tokens were chosen, not sampled."""
    logprobs: bool = False
    """True if log-probabilities of the accepted tokens are reported."""
    alternatives: int = 0
    """Number of the target's most probable tokens that are reported with each token."""
    is_group: bool = False
    """True if the parameters are those that the rows themselves name."""
    is_drafting: bool = False
    """True if each group of rows has its draft temperature."""

    @property
    def is_mixed(self) -> bool:
        """Return True if rows name sampling parameters of their own."""
        return not self.is_group and any(row.sampling for row in self.rows)

    @property
    def processes(self) -> bool:
        """Return True if logits processors apply to any row."""
        if self.is_mixed:
            return any(ctx.processes for _, ctx in self.groups())
        return bool(self.processors)

    @property
    def greedy(self) -> bool:
        """Return True if all rows are decoded greedily."""
        if self.is_mixed:
            return all(ctx.greedy for _, ctx in self.groups())
        return self.temperature == 0

    def groups(self) -> list[tuple[list[int], Context]]:
        """Return the groups of rows with the same sampling parameters: the indices of their rows,
        and a context of these rows."""
        found: dict[int, list[int]] = {}
        for b, row in enumerate(self.rows):
            found.setdefault(id(row.sampling), []).append(b)
        return [(places, self.group(places)) for places in found.values()]

    def group(self, places: list[int]) -> Context:
        """Return the context of rows with the same sampling parameters."""
        rows = [self.rows[b] for b in places]
        of_batch = replace(self, is_drafting=False)
        own = rows[0].sampling or of_batch
        ctx = replace(
            own,
            rows=rows,
            window=self.window,
            on_trees=self.on_trees,
            logprobs=self.logprobs,
            alternatives=self.alternatives,
            is_group=True,
        )
        return ctx.drafting() if self.is_drafting else ctx

    def _by_group(self, result: Callable[[Context, list[int]], Tensor]) -> Tensor:
        """Return the results [B, …] for the groups of rows, in the order of the rows."""
        groups = self.groups()
        parts = [result(ctx, places) for places, ctx in groups]
        order = [b for places, _ in groups for b in places]
        return torch.cat(parts)[to_device(order, parts[0].device).argsort()]

    def drafting(self) -> Context:
        """Return the context of a model that drafts: the same rows, with the draft temperature."""
        if self.is_mixed:
            changes = any(ctx.drafting() is not ctx for _, ctx in self.groups())
            return replace(self, is_drafting=True) if changes else self
        if self.draft_temperature in (None, self.temperature):
            return self
        assert self.draft_temperature is not None
        return replace(self, temperature=self.draft_temperature)

    def process(self, logits: Tensor, ahead: Tensor) -> Tensor:
        """Apply the model's logits processors to `logits` [B, m, V]. The last of the m positions
        follows the row's prefix and all of its `ahead` tokens [B, a]."""
        if not self.processes:
            return logits
        if self.is_mixed:
            return self._by_group(
                lambda ctx, rows: ctx.process(logits[rows], ahead[rows]).float()
            )
        assert self.processors
        m = logits.shape[1]
        done = []
        for row, tokens, scores in zip(self.rows, ahead.tolist(), logits.float()):
            history = torch.tensor(  # [1, T]
                [[*row.prefix, *tokens]], device=logits.device
            )
            for i in range(m):
                seen = history[:, : history.shape[1] - m + 1 + i]
                done.append(
                    self.processors(
                        cast(torch.LongTensor, seen),
                        cast(torch.FloatTensor, scores[i : i + 1]),
                    )
                )
        return torch.cat(done).view(logits.shape)

    def probs(self, logits: Tensor) -> Tensor:
        """Convert processed logits [B, …, V] to the float32 distributions that sampling uses;
        one-hot when greedy.

        The order is temperature, top-k, top-p, as in `transformers`.
        """
        if self.is_mixed:
            return self._by_group(lambda ctx, rows: ctx.probs(logits[rows]))
        logits = logits.float()
        if self.greedy:
            return torch.nn.functional.one_hot(argmax(logits), logits.shape[-1]).float()
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

    def allowed(self, logits: Tensor, tokens: Tensor) -> Tensor:
        """Return [B, W] bool: True for each token that no processor and no truncation rule forbids,
        from processed logits [B, W, V] and `tokens` [B, W]."""
        logits = logits if self.greedy else self._warp(logits.float())
        return logits.gather(2, tokens[..., None])[..., 0] > -torch.inf

    def found_in(self, pattern: str, tokens: Tensor) -> Tensor:
        """Return [B, W] bool: True for each of the `tokens` [B, W] whose text contains a match of a
        regular expression."""
        if self.token_mask is None:
            raise RuntimeError(
                "tokens are told apart by text, and the context has no tokenizer"
            )
        return self.token_mask(pattern).to(tokens.device)[tokens]

    def log_probs(self, logits: Tensor) -> Tensor:
        """Map processed logits [B, …, V] to log-probabilities at the request's temperature (1 when
        greedy), before truncation."""
        return torch.log_softmax(self.tempered(logits), -1)

    def tempered(self, logits: Tensor) -> Tensor:
        """Divide processed logits [B, …, V] by the request's temperature (1 when greedy)."""
        if self.is_mixed:
            return self._by_group(lambda ctx, rows: ctx.tempered(logits[rows]))
        return logits.float() / (self.temperature or 1)

    def lenient_used(self, device: torch.device) -> Tensor:
        """Return [B]: the number of tokens accepted so far for each request that the strict rule
        would reject."""
        return to_device([row.lenient for row in self.rows], device)

    def in_span(self, begin: str, end: str, tokens: Tensor) -> Tensor:
        """Return [B, W] bool: True for each of the drafted `tokens` [B, W] inside a span that the
        text `begin` opens and `end` closes."""
        inside = []
        for row, drafted in zip(self.rows, tokens.tolist()):
            inside.append(self._open_spans(row, drafted, begin, end))
        return to_device(inside, tokens.device).bool().view(tokens.shape)

    def _open_spans(
        self, row: Row, drafted: list[int], begin: str, end: str
    ) -> list[bool]:
        """Return one bool per drafted token: True if a span is open at its position.

        The prompt is searched as a whole. The text after the prompt is followed token by token; a
        marker counts from the token that completes it.
        """
        if self.decode is None:
            raise RuntimeError(
                "spans are marked by text, and the context has no tokenizer"
            )
        known, is_open = row.memory.get(_Span(begin, end), (0, False))
        # in bytes, because a token may be a part of a character
        reach = len(max(begin, end, key=len).encode()) + 1
        ids = [*row.prefix, *drafted]
        open_at = []
        for n in range(known or len(row.prefix) - row.position, len(ids)):
            if n != known:
                text = self.decode(ids[max(0, n - reach) if known else 0 : n])
                opened = _end_of_last(begin, text)
                closed = _end_of_last(end, text)
                if (
                    opened or closed
                ):  # compare the ends, because one mark may contain the other
                    is_open = opened > closed
                known = known or n
            if n == len(row.prefix):
                row.memory[_Span(begin, end)] = n, is_open
            if n >= len(row.prefix):
                open_at.append(is_open)
        return open_at

    def noise_keys(
        self, n: int, purpose: str, ahead: int = 0, device: torch.device | None = None
    ) -> Tensor:
        """Return [B, n] int64 noise keys for n positions of each row. The first key is for the
        position `ahead` tokens after the row's current position."""
        if self.is_mixed:
            return self._by_group(
                lambda ctx, _: ctx.noise_keys(n, purpose, ahead, device)
            )
        keys = []
        for row in self.rows:
            began = row.position - row.ahead
            what = f"{purpose}@{began}" if self.fresh_noise_per_window else purpose
            keys.append(
                [row.noise.key(row.position + ahead + i, what) for i in range(n)]
            )
        return to_device(keys, device or torch.device("cpu")).long().view(len(keys), n)

    def draw(self, logits: Tensor, ahead: int = 0) -> Tensor:
        """Return [B, m]: the tokens that plain decoding picks from processed logits [B, m, V]. The
        first position is `ahead` tokens after the row's current position."""
        if self.is_mixed:
            return self._by_group(lambda ctx, rows: ctx.draw(logits[rows], ahead))
        if self.greedy:
            return argmax(logits)
        keys = self.noise_keys(logits.shape[1], "token", ahead, logits.device)
        return gumbel_argmax(self.probs(logits), keys)


def _end_of_last(mark: str, text: str) -> int:
    """Return the number of characters up to the end of the last `mark` in a text; 0 if there is
    none."""
    at = text.rfind(mark)
    return at + len(mark) if at >= 0 else 0
