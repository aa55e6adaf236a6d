"""Rows of a model whose cache only the model itself can continue, rolled back by copies of it."""

from __future__ import annotations

import copy

import torch
from torch import Tensor

from lenience.core.profile import Profile
from lenience.models.kv_cache import Forward, PlainCache
from lenience.models.lm import LM
from lenience.models.pass_cache import LAST, PassCache, States, new_cache
from lenience.models.recurrent import CHECKPOINTS, Checkpoints

MEASURED = 16
"""Number of tokens from which the memory per token is measured."""


class CopiedCache(PlainCache):
    """A cache of transformers' own layers, with copies of it as checkpoints of each row.

    A pass takes two calls of the model where a window follows: the first reads the tokens before
    the window, which are certain, so that a copy can be kept there. Rows are read one by one.
    """

    def __init__(self, lm: LM, rows: int, capacity: int, states: States = LAST):
        super().__init__(lm, rows, capacity, states, reads_ragged=False)
        self._copies: Checkpoints[PassCache] = Checkpoints(rows)

    @torch.inference_mode()
    def token_bytes(self) -> dict[torch.device, int]:
        read = [[0] * MEASURED]
        forward = Forward([0], read, [0], [0], kv_length=MEASURED, num_states=1)
        self.read(forward, Profile())
        size = _bytes_of(self._cache) // MEASURED
        # the checkpoints, the present cache, and the copy of it that is made next
        taken = {self.lm.device: size * (CHECKPOINTS + 2)}
        for states in self.kept():
            features = states[0, :, 0].nbytes
            taken[states.device] = taken.get(states.device, 0) + features
        return taken

    def resumable(self, row: int, length: int) -> int:
        return self._copies.resumable(row, length)

    def copy(self, source: int, to: int, length: int) -> None:
        self._copies.copy(source, to, length)
        super().copy(source, to, length)

    def read(self, forward: Forward, profile: Profile) -> tuple[Tensor, Tensor]:
        row = forward.rows[0]
        start = forward.cached_lengths[0]
        ids = forward.ids_on(self.lm.device).clamp(max=self.lm.vocab_size - 1)
        self.slots.make_room(forward.kv_length)
        held = self._copies.at(row, start)
        self._cache = new_cache(self.lm.model) if held is None else copy.deepcopy(held)
        profile.add("cache")
        certain = forward.length - (forward.num_states - 1)
        parts: list[tuple[Tensor, Tensor]] = []
        for tokens, begins in (
            (ids[:, :certain], start),
            (ids[:, certain:], start + certain),
        ):
            n = tokens.shape[1]
            if n:
                self.slots.use_one(row, begins, begins + n)
                # the states of the certain tokens but the last are not asked for
                asked = n if parts else 1
                parts.append(self.forward(tokens, asked, None))
                self._copies.keep(row, begins + n, copy.deepcopy(self._cache))
        profile.add(self.lm.role)
        logits, hidden = zip(*parts)
        return torch.cat(logits, 1), torch.cat(hidden, 1)


def _bytes_of(cache: PassCache) -> int:
    """Return the bytes of all tensors that a cache and its layers hold."""
    values = list(vars(cache).values())
    for layer in cache.layers:
        values += vars(layer).values()
    total = 0
    while values:
        value = values.pop()
        if isinstance(value, dict):
            values += value.values()
        elif isinstance(value, list | tuple):
            values += value
        elif isinstance(value, Tensor):
            total += value.nbytes
    return total
