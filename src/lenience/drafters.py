"""Drafters: what proposes a window."""

from __future__ import annotations

import torch

from lenience.core import Context, Draft
from lenience.model import Session


class ModelDrafter:
    """Drafts with an independent model of the same vocabulary, `window` tokens at most."""

    def __init__(self, session: Session, window: int, keep_states: bool = False):
        self.session, self.window, self.keep_states = session, window, keep_states

    @property
    def passes(self) -> int:
        return self.session.passes

    def propose(self, tokens: list[int], ctx: Context, room: int) -> Draft:
        n = min(self.window, room, self.session.room(tokens) - 1)
        width = self.session.lm.width
        if n < 1 or max(tokens) >= width:  # an id that only the target's padded embedding has
            return Draft([])
        drafted: list[int] = []
        logits, hidden = [], []
        for ahead in range(n):
            reading = self.session.read([*tokens, *drafted])
            logits.append(ctx.process(reading.logits, drafted))
            hidden.append(reading.hidden)
            drafted.append(ctx.draw(logits[-1][0], ahead))
            if drafted[-1] >= width:
                break
        states = None
        if self.keep_states:
            # the state after the last drafted token costs one more pass, which the next window would have to make anyway
            # wherever this one is accepted whole
            hidden.append(self.session.read([*tokens, *drafted]).hidden)
            states = torch.cat(hidden)  # [n + 1, H]
        return Draft(drafted, torch.cat(logits), states)
