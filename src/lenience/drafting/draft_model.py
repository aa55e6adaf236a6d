"""Drafters: what proposes a window."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from lenience.core.context import Context
from lenience.core.transfer import sent
from lenience.core.types import Draft
from lenience.drafting.stops import Fixed, Stop
from lenience.models.lm import LM
from lenience.models.session import Session

CHUNK, CHUNK_ASKED = 8, 2
"""How many tokens are drafted at most before EOS is looked for, and where a stop condition asks about each."""


class ModelDrafter:
    """Drafts with an independent model of the same vocabulary, `window` tokens at most and none past an EOS.

    What it proposes is as wide as the target's logits and on their device: embeddings of one vocabulary may be padded
    differently, and an id that only the draft's has is never proposed. `keep_states` keeps the draft's hidden states for a
    rule that reads them.
    """

    def __init__(self, session: Session, window: int, target: LM, keep_states: bool = False, stop: Stop | None = None):
        self.session, self.window, self.keep_states, self.stop = session, window, keep_states, stop or Fixed()
        self.width, self.device, self.eos_ids = target.width, target.device, target.eos_ids
        self.eos = torch.tensor(sorted(self.eos_ids), device=self.device)

    def propose(self, ctx: Context, room: Sequence[int]) -> Draft:
        prefixes = [row.prefix for row in ctx.rows]
        most = self._most(ctx, room)
        tokens = torch.empty(len(most), 0, dtype=torch.long, device=self.device)
        logits, hidden, chances = list[Tensor](), list[Tensor](), list[Tensor]()
        read, ends = [0] * len(most), torch.empty(len(most), 0, dtype=torch.bool, device=self.device)
        reads_on = ctx.greedy and not ctx.processors and self.session.lm.width <= self.width
        blind = reads_on and not self.stop.asks and not self.session.cache.waits  # drafts to the end without a look at it
        chunk = 1 if not reads_on else CHUNK_ASKED if self.stop.asks else CHUNK
        extra = self.keep_states or self.stop.looks_back  # the state after the last drafted token takes one more pass
        drafted, lengths = list[list[int]](), None
        while (wanted := max(most)) and (left := wanted + extra - tokens.shape[1]) > 0:
            sequences = [prefix + row for prefix, row in zip(prefixes, drafted)] if logits else prefixes
            # what is drafted blind is rounded up, as each length is recorded
            step = min(-(-left // CHUNK) * CHUNK, self.window + extra) if blind else min(left, chunk)
            reading = self.session.read(sequences, on=step - 1)
            read = [n + new + reading.logits.shape[1] - 1 for n, new in zip(read, reading.read)]
            logits.append(ctx.process(self._as_target(reading.logits), tokens))  # [B, n, V]
            hidden.append(reading.hidden)
            drawn = (reading.best if reads_on else ctx.draw(logits[-1], tokens.shape[1])).to(self.device)
            tokens = torch.cat([tokens, drawn], 1) if tokens.shape[1] else drawn
            if blind and drawn.shape[1] >= left:
                lengths = self._to_eos(tokens, most)
                break
            drafted = looked = tokens.tolist()
            if self.stop.asks:
                # of a condition that looks back, the first state belongs to the token before the first
                seen = reading.hidden[:, 1:] if self.stop.looks_back and len(logits) == 1 else reading.hidden
                if seen.shape[1]:
                    chances.append(self.stop.chances(logits[-1], seen, drawn, ctx))
                    ends = self.stop.ends(torch.cat(chances, 1)).to(self.device)  # [B, tokens so far, or one fewer]
                later = tokens.shape[1] - ends.shape[1]
                looked = tokens.where(~torch.nn.functional.pad(ends, (0, later)), _END).tolist()
            for b, row in enumerate(looked):
                # nothing after an EOS could be kept
                last = (i for i, token in enumerate(row[: most[b]], 1) if token == _END or token in self.eos_ids)
                most[b] = next(last, most[b])
        lengths = sent(most, self.device) if lengths is None else lengths
        if not logits:
            return Draft(tokens, lengths, trusted=torch.zeros_like(lengths) if self.stop.trusts else None)
        states = _first(hidden, wanted + 1).to(self.device) if self.keep_states else None  # [B, W + 1, H]
        passes, tokens = tokens.shape[1], tokens[:, :wanted]
        draft = Draft(tokens, lengths, _first(logits, wanted), states, passes, read)
        if not self.stop.trusts:
            return draft
        doubted = (ends[:, :wanted] & draft.proposed).any(1)
        return replace(draft, trusted=lengths - doubted.long())

    def _most(self, ctx: Context, room: Sequence[int]) -> list[int]:
        """[B]: how many tokens may be drafted for each row."""
        prefixes = [row.prefix for row in ctx.rows]
        asked = [self.stop.most(row, self.window) for row in ctx.rows]
        follows = not self.stop.trusts  # whether a token of the target's follows in any case
        most = [max(0, min(n, r - follows, self.session.room(p) - 1)) for n, p, r in zip(asked, prefixes, room)]
        if self.session.lm.width < self.width:  # ids that only the target's embedding has
            most = [0 if max(p) >= self.session.lm.width else m for p, m in zip(prefixes, most)]
        return most

    def _to_eos(self, tokens: Tensor, most: list[int]) -> Tensor:
        """[B]: how many of the first tokens, at most `most` [B], there are to an EOS; found where the tokens are."""
        n = tokens.shape[1]
        places = torch.arange(1, n + 1, device=tokens.device)
        last = places.where((tokens[..., None] == self.eos).any(-1), n).amin(1)
        return last.minimum(sent(most, tokens.device))

    def move(self, source: int, to: int) -> None:
        self.session.move(source, to)

    def _as_target(self, logits: Tensor) -> Tensor:
        missing = self.width - logits.shape[-1]
        wide = torch.nn.functional.pad(logits, (0, missing), value=float("-inf")) if missing else logits
        return wide.to(self.device)


_END = -1


def _first(parts: list[Tensor], n: int) -> Tensor:
    """The first `n` columns of parts that stand side by side."""
    return (torch.cat(parts, 1) if len(parts) > 1 else parts[0])[:, :n]
