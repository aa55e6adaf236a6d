"""Drafters: what proposes a window."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lenience.core import Context, Draft
from lenience.model import LM
from lenience.session import Session


class ModelDrafter:
    """Drafts with an independent model of the same vocabulary, `window` tokens at most and none past an EOS.

    What it proposes is as wide as the target's logits and on their device: embeddings of one vocabulary may be padded
    differently, and an id that only the draft's has is never proposed. `keep_states` keeps the draft's hidden states for a
    rule that reads them.
    """

    def __init__(self, session: Session, window: int, target: LM, keep_states: bool = False):
        self.session, self.window, self.keep_states = session, window, keep_states
        self.width, self.device, self.eos_ids = target.width, target.device, target.eos_ids

    def propose(self, ctx: Context, room: Sequence[int]) -> Draft:
        prefixes = [row.prefix for row in ctx.rows]
        most = [max(0, min(self.window, r, self.session.room(p) - 1)) for p, r in zip(prefixes, room)]
        if self.session.lm.width < self.width:  # ids that only the target's embedding has
            most = [0 if max(p) >= self.session.lm.width else m for p, m in zip(prefixes, most)]
        drafted: list[list[int]] = [[] for _ in prefixes]
        logits, hidden = [], []
        for ahead in range(max(most)):
            reading = self.session.read([p + d for p, d in zip(prefixes, drafted)])
            logits.append(ctx.process(self._as_target(reading.logits), torch.tensor(drafted)))  # [B, 1, V]
            hidden.append(reading.hidden)
            for b, (token,) in enumerate(ctx.draw(logits[-1], ahead).tolist()):
                drafted[b].append(token)
                if token in self.eos_ids:
                    most[b] = min(most[b], ahead + 1)  # nothing after it could be kept
            if all(ahead + 1 >= m for m in most):
                break
        lengths = torch.tensor(most, device=self.device)
        tokens = torch.tensor(drafted, dtype=torch.long, device=self.device)
        if not logits:
            return Draft(tokens, lengths)
        states = None
        if self.keep_states:
            # the state after the last drafted token: one more pass
            reading = self.session.read([p + d for p, d in zip(prefixes, drafted)])
            states = torch.cat([*hidden, reading.hidden], 1).to(self.device)  # [B, W + 1, H]
        return Draft(tokens, lengths, torch.cat(logits, 1), states, len(logits) + self.keep_states)

    def move(self, source: int, to: int) -> None:
        self.session.move(source, to)

    def _as_target(self, logits: Tensor) -> Tensor:
        missing = self.width - logits.shape[-1]
        wide = torch.nn.functional.pad(logits, (0, missing), value=float("-inf")) if missing else logits
        return wide.to(self.device)
