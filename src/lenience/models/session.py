"""Session: rows of tokens and their KV cache, read and rolled back."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from weakref import finalize

import torch
from torch import Tensor

from lenience.core.errors import first_line
from lenience.core.profile import Profile
from lenience.core.transfer import coming, sent
from lenience.core.types import Reading
from lenience.models.kv_cache import LATER, Pass, PlainCache, RowCache
from lenience.models.lm import LM

LARGEST_MASK = 1 << 26
"""How many entries the attention mask of rows that are read together may have."""


class Session:
    """Sequences of tokens, each in a row of a preallocated KV cache that is addressed by position. A session is handed the
    whole sequences each time and works out what is new; rolling back is forgetting that a row was longer.

    Rows of different lengths share a pass where the model's attention takes a mask from outside (checked once, see
    `takes_masks`), and are read one by one where it does not.
    """

    def __init__(
        self,
        lm: LM,
        rows: int = 1,
        capacity: int = 256,
        cache: RowCache | None = None,
        profile: Profile | None = None,
        layer: int | None = None,
    ):
        self.lm, self.profile = lm, profile or Profile()
        self._tokens: list[list[int]] = [[] for _ in range(rows)]
        self._coming: list[tuple[list[list[int]], list[int], Callable[[], list[list[int]]]]] = []
        """Rows, from where on they have tokens of the device, and what gives these."""
        if cache is None and layer is not None:
            cache = PlainCache(lm, rows, capacity, layer)  # exported passes give the last states alone
        self.cache: RowCache = cache or (lm.graph.cache if lm.graph else PlainCache)(lm, rows, capacity)
        finalize(self, self.cache.release).atexit = False

    @property
    def tokens(self) -> list[list[int]]:
        """What is in each row."""
        for rows, starts, found in self._coming:
            for row, start, tokens in zip(rows, starts, found()):
                row[start : start + len(tokens)] = tokens
        self._coming = []
        return self._tokens

    def room(self, tokens: Sequence[int]) -> int:
        """How many more tokens the model's context can hold after these."""
        return 1 << 30 if self.lm.context is None else self.lm.context - len(tokens)

    @torch.inference_mode()
    def move(self, source: int, to: int) -> None:
        """The row at `source` becomes the row at `to`."""
        tokens = self.tokens
        moved, tokens[to], tokens[source] = tokens[source], [], []
        self.cache.move(source, to)
        tokens[to] = moved

    @torch.inference_mode()
    def read(
        self,
        sequences: Sequence[list[int]],
        states: int = 1,
        ahead: Tensor | None = None,
        on: int = 0,
        rows: Sequence[int] | None = None,
    ) -> Reading:
        """Logits [B, states, V] and hidden states [B, states, H] after each of the last `states` tokens of each sequence,
        which may be followed by tokens `ahead` [B, a]; sequence b is row b's, or rows[b]'s. What is past the end of the
        model's context is not read; its states are anything.

        Of a single state, up to `on` more may follow, each after the most probable token of the one before, where the cache
        reads on by itself.
        """
        self.profile.lap("rest")
        held = self.tokens
        assert len(sequences) <= len(held)
        held = held[: len(sequences)] if rows is None else [held[row] for row in rows]
        if ahead is not None:
            sequences, ahead = self._join(sequences, ahead)
        over = [max(0, -self.room(new)) for new in sequences]
        sequences = [new[: len(new) - past] for new, past in zip(sequences, over)]
        keep = [min(common(old, new), len(new) - states) for old, new in zip(held, sequences)]
        counts = [len(new) - kept for kept, new in zip(keep, sequences)]
        groups = self._groups(sequences, counts, states)
        if len(groups) > 1 or not self.cache.loops:
            on = 0
        on = max(0, min([on, *map(self.room, sequences)]))
        for old, kept in zip(held, keep):
            del old[kept:]  # a pass that fails leaves nothing that is believed
        done = [
            self._pass(
                group if rows is None else [rows[b] for b in group],
                [sequences[b] for b in group],
                [keep[b] for b in group],
                states,
                on,
                ahead if ahead is None or len(groups) == 1 else ahead[sent(group, ahead.device)],
            )
            for group in groups
        ]
        for old, new in zip(held, sequences):
            old += new[len(old) :]
        if ahead is not None:
            self._coming.append((held, [len(new) - ahead.shape[1] for new in sequences], coming(ahead)))
        logits, hidden = done[0]
        if len(done) > 1:
            order = sent([b for group in groups for b in group], logits.device).argsort()
            logits, hidden = (torch.cat(parts)[order] for parts in zip(*done))
        if any(over):  # the states of what was read belong further in front
            logits, hidden = (torch.stack([row.roll(-past, 0) for row, past in zip(rows, over)]) for rows in (logits, hidden))
        reading = Reading(logits, hidden, counts)
        if on:
            self._coming.append((held, [len(new) for new in sequences], coming(reading.best[:, :on])))
        self.profile.lap("cache")
        return reading

    def _join(self, sequences: Sequence[list[int]], ahead: Tensor) -> tuple[list[list[int]], Tensor | None]:
        """The sequences with the tokens `ahead` [B, a]; where these are left on the device, LATER stands for them and they are
        given back."""
        n = ahead.shape[1]
        late = not self.cache.waits and all(self.room(sequence) >= n for sequence in sequences)
        tokens = [[LATER] * n] * len(sequences) if late else ahead.tolist()
        return [sequence + more for sequence, more in zip(sequences, tokens)], ahead if late and n else None

    def _groups(self, sequences: Sequence[list[int]], counts: list[int], states: int) -> list[list[int]]:
        """Which rows are read in one pass. Rows with much to read, such as new prompts, would make the others wait if they
        were read with them, and too many of them together would need a large mask."""
        if len(sequences) > 1 and not self._reads_ragged():
            return [[b] for b in range(len(sequences))]
        groups: list[list[int]] = []
        for b in (b for b, count in enumerate(counts) if count > states + 1):
            group = [*groups[-1], b] if groups else [b]
            mask = len(group) * max(counts[g] for g in group) * max(len(sequences[g]) for g in group)
            if groups and mask <= LARGEST_MASK:
                groups[-1] = group
            else:
                groups.append([b])
        short = [b for b, count in enumerate(counts) if count <= states + 1]
        return [short, *groups] if short else groups

    def _reads_ragged(self) -> bool:
        known = self.cache.together
        return takes_masks(self.lm) if known is None else known

    def _pass(
        self, which: list[int], sequences: list[list[int]], keep: list[int], states: int, on: int, ahead: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """One forward pass of the rows `which`, of whose sequences `keep` tokens are in the cache; gives logits and hidden
        states. Rows with fewer new tokens than others are padded in front, so that the last states are those asked for."""
        most = max(len(new) - kept for new, kept in zip(sequences, keep))  # T
        pads = [most - len(new) + kept for new, kept in zip(sequences, keep)]
        ids = [[0] * pad + new[kept:] for pad, new, kept in zip(pads, sequences, keep)]
        return self.cache.read(Pass(which, ids, pads, keep, max(map(len, sequences)) + on, states, on, ahead), self.profile)


def takes_masks(lm: LM) -> bool:
    """Whether rows of different lengths can share a pass of a model's own forward; where they cannot, a warning says so.
    Found out once for a model."""
    with lm.lock:
        if lm.takes_masks is None:
            _try_masks(lm)
    return bool(lm.takes_masks)


def _try_masks(lm: LM) -> None:
    attention = lm.model.config.get_text_config()._attn_implementation
    lm.takes_masks = attention in ("eager", "sdpa") and not lm.reads_rows_apart
    why = "takes no mask from outside"
    if lm.takes_masks:  # models differ in how they place a mask, so it is tried; the session that tries it believes that it can
        try:
            lm.takes_masks = reads_together_as_alone(lm, PlainCache(lm, 3, 256))
        except Exception as error:  # whatever a model raises that wants its mask otherwise
            lm.takes_masks, why = False, f"{why} ({type(error).__name__}: {first_line(error)})"
    if not lm.takes_masks:
        warnings.warn(f"{lm.role} {lm.name!r}: {why}; rows are read one by one", stacklevel=4)


def reads_together_as_alone(lm: LM, cache: RowCache) -> bool:
    """Whether rows of different lengths that are read together in `cache`, of three rows, have the states that they have when
    each is read alone by the model's own pass; so have those that the cache goes on to by itself."""
    generator = torch.Generator().manual_seed(0)
    lengths = [min(n, lm.context or n) for n in (8, 40, 23)]
    rows = [torch.randint(lm.width, (n,), generator=generator).tolist() for n in lengths]
    together = Session(lm, 3, cache=cache)
    together.read([row[:-3] for row in rows])
    for states, on in ((2, 0), (1, 3)):
        last = torch.tensor([row[-1:] for row in rows], device=lm.device)
        got = together.read([row[:-1] for row in rows], states, ahead=last, on=on)
        n = got.hidden.shape[1]
        rows = [row + more for row, more in zip(rows, got.logits[:, : n - states].argmax(-1).tolist())]
        alone = [Session(lm, cache=PlainCache(lm, 1, 256)).read([row], n).hidden for row in rows]
        wanted = torch.cat(alone).float()
        error = (got.hidden.float() - wanted).norm(dim=-1) / wanted.norm(dim=-1)
        if not error.max() < (0.1 if lm.model.dtype.itemsize < 4 else 1e-3):
            return False
    return True


def common(a: Sequence[int], b: Sequence[int]) -> int:
    """The length of the common beginning of two sequences, by bisection over comparisons of slices."""
    low, high = 0, min(len(a), len(b))
    if a[:high] == b[:high]:
        return high
    while high - low > 1:
        middle = (low + high) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle
    return low
