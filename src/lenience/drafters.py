"""Drafters: what proposes a window."""

from __future__ import annotations

import torch
from torch import Tensor

from lenience.core import Context, Draft
from lenience.model import LM, Session


class ModelDrafter:
    """Drafts with an independent model of the same vocabulary, `window` tokens at most and none past an EOS.

    What it proposes is as wide as the target's logits and on their device: embeddings of one vocabulary may be padded
    differently, and an id that only the draft's has is never proposed. `keep_states` keeps the draft's hidden states for a
    rule that reads them.
    """

    def __init__(self, session: Session, window: int, target: LM, keep_states: bool = False):
        self.session, self.window, self.keep_states = session, window, keep_states
        self.width, self.device, self.eos_ids = target.width, target.device, target.eos_ids

    @property
    def passes(self) -> int:
        return self.session.passes

    def propose(self, tokens: list[int], ctx: Context, room: int) -> Draft:
        n = min(self.window, room, self.session.room(tokens) - 1)
        if n < 1 or max(tokens) >= self.session.lm.width:  # an id that only the target's embedding has
            return Draft([])
        drafted: list[int] = []
        logits, hidden = [], []
        for ahead in range(n):
            reading = self.session.read([*tokens, *drafted])
            logits.append(ctx.process(self._as_target(reading.logits), drafted))  # [1, V]
            hidden.append(reading.hidden)
            drafted.append(ctx.draw(logits[-1][0], ahead))
            if drafted[-1] in self.eos_ids:
                break  # nothing after it could be kept
        states = None
        if self.keep_states:
            # the state after the last drafted token costs one more pass, which the next window would have to make anyway
            # wherever this one is accepted whole
            hidden.append(self.session.read([*tokens, *drafted]).hidden)
            states = torch.cat(hidden).to(self.device)  # [n + 1, H]
        return Draft(drafted, torch.cat(logits), states)

    def _as_target(self, logits: Tensor) -> Tensor:
        missing = self.width - logits.shape[-1]
        wide = torch.nn.functional.pad(logits, (0, missing), value=float("-inf")) if missing else logits
        return wide.to(self.device)
