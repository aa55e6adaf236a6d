"""Drafting with a model of another tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from lenience.core.context import Context
from lenience.core.protocols import Drafter
from lenience.core.types import Draft, Reading
from lenience.drafting.base import DrafterSetup
from lenience.drafting.trees.growing import GrowingTree, as_draft
from lenience.models.lm import LM
from lenience.models.session import Session
from lenience.models.translation import Translation


class TranslatedDrafter(Drafter):
    """A drafter of chains with a model of another tokenizer.

    A greedy request takes the text that the draft continues with, in the target's tokens (universal
    assisted generation). A request with a temperature draws the tokens that both vocabularies share
    (token-level intersection, Timor 2025, algorithm 4). Rows are drafted for one by one.
    """

    def __init__(self, draft: LM, setup: DrafterSetup):
        self.target = setup.target
        self.stop = setup.stop
        known = (draft.tokenizer_fingerprint, draft.vocab_size, draft.eos_ids)
        self.translation: Translation = self.target.once(
            ("translation", *known), lambda: Translation(self.target, draft)
        )
        # a text may take more tokens in the draft's vocabulary
        capacity = min(2 * setup.capacity, draft.context_length or 2 * setup.capacity)
        self.session = Session(draft, setup.rows, capacity, profile=setup.profile)
        self._tokens_read: list[int] = []
        """[B]: number of the draft's tokens read in this cycle."""
        self._passes: list[int] = []

    @torch.inference_mode()
    def propose(self, ctx: Context, room: Sequence[int]) -> Draft:
        own = ctx.drafting()
        grown = []
        parts: list[Tensor] = []
        self._tokens_read = [0] * len(own.rows)
        self._passes = [0] * len(own.rows)
        for b, (row, left) in enumerate(zip(own.rows, room)):
            limit = min(self.stop.max_tokens(row, own.window), left - 1)
            before = self.translation.to_draft(row.prefix)
            limit = max(0, min(limit, self.session.room(before))) if before else 0
            if replace(own, rows=[row]).greedy:
                tokens = self._by_text(b, row.prefix, before, limit)
                logits = self._certain(tokens)
            else:
                tokens, logits = self._by_shared(own, b, before, limit)
            parts.append(logits)
            grown.append(GrowingTree.chain(tokens).cut(limit, self.target.eos_ids))
        padded = None if own.greedy else torch.nn.utils.rnn.pad_sequence(parts, True)
        draft = as_draft(grown, self.target.device, padded, trees=False)
        return replace(draft, passes=max(self._passes), tokens_read=self._tokens_read)

    def _read(self, b: int, tokens: list[int]) -> Reading:
        """Read the draft's tokens in a row, and count what was read."""
        reading = self.session.read([tokens], rows=[b])
        self._tokens_read[b] += reading.tokens_read[0]
        self._passes[b] += 1
        return reading

    def _certain(self, tokens: list[int]) -> Tensor:
        """Return logits [n, V] of tokens that are proposed with probability 1."""
        device = self.target.device
        blank = torch.full(
            (len(tokens), self.target.vocab_size), -torch.inf, device=device
        )
        at = torch.tensor(tokens, dtype=torch.long, device=device)
        return blank.scatter(1, at[:, None], 0.0)

    def _by_text(
        self, b: int, prefix: list[int], before: list[int], limit: int
    ) -> list[int]:
        """Return the target's tokens of a greedy continuation of the draft's tokens `before`."""
        drafted: list[int] = []
        ended = False
        while len(drafted) < limit and not ended:
            token = int(self._read(b, before + drafted).greedy_tokens[0, -1])
            ended = token in self.session.lm.eos_ids
            drafted += [] if ended else [token]
        tokens = self.translation.to_target(prefix, before, drafted) if drafted else []
        whole = bool(tokens) or not drafted
        if ended and whole:
            tokens = tokens + sorted(self.target.eos_ids)[:1]
        return tokens

    def _by_shared(
        self, ctx: Context, b: int, before: list[int], limit: int
    ) -> tuple[list[int], Tensor]:
        """Return tokens drawn from those that both vocabularies share, and the logits [n, V] that
        they were drawn from."""
        one_row = replace(ctx, rows=[ctx.rows[b]])
        tokens: list[int] = []
        parts = [torch.zeros(0, self.target.vocab_size, device=self.target.device)]
        drafted = torch.empty(1, 0, dtype=torch.long, device=self.target.device)
        own = list(before)
        while len(tokens) < limit:
            reading = self._read(b, own)
            logits = self.translation.to_target_logits(reading.logits)
            logits = one_row.process(logits.to(self.target.device), drafted)
            drawn = one_row.draw(logits, len(tokens))
            drafted = torch.cat([drafted, drawn.to(drafted.device)], 1)
            token = int(drawn[0, 0])
            parts.append(logits[0])
            tokens.append(token)
            if token in self.target.eos_ids:
                break
            own.append(int(self.translation.shared[token]))
        return tokens, torch.cat(parts)

    def move(self, source: int, to: int) -> None:
        self.session.move(source, to)
