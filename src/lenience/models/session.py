"""Rows of tokens and their KV cache, extended by passes and rolled back."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain, repeat
from typing import cast
from weakref import finalize

import torch
from torch import Tensor

from lenience.core.errors import InputError, RunError, first_line
from lenience.core.profile import Profile
from lenience.core.transfer import to_device, to_host_async
from lenience.core.trees import Parents, followed, paths
from lenience.core.types import Reading
from lenience.models.copied_cache import CopiedCache
from lenience.models.kv_cache import LATER, Forward, PlainCache, RowCache
from lenience.models.lm import LM, check_finite
from lenience.models.pass_cache import LAST, States

LARGEST_MASK = 1 << 26
"""Maximum number of entries in the attention mask of batched rows."""
LARGEST_BEFORE_TREES = 1 << 22
"""Maximum number of mask entries of a row that ends with a tree. If the row needs more, the tokens
before the tree run separately; they count as part of the same pass, as the parts of a long prompt
do."""


@dataclass(frozen=True)
class _Pending:
    """Tokens of some rows that only the device has so far."""

    rows: list[list[int]]
    starts: list[int]
    """Position in each row at which the tokens begin."""
    fetch: Callable[[], list[list[int]]]
    """Function that returns the tokens, after waiting for the device."""


@dataclass(frozen=True)
class _RowTree:
    """The tree formed by the last tokens of a row."""

    start: int
    """Number of tokens before the tree."""
    parents: Parents


@dataclass(frozen=True)
class Batch:
    """Sequences [B] to be read into rows of a cache, with `num_states` states returned for each."""

    rows: Sequence[int]
    sequences: Sequence[list[int]]
    cached: Sequence[int]
    """Number of cached tokens of each sequence."""
    num_states: int
    lookahead: int
    device_tokens: Tensor | None
    parents: Sequence[Parents] | None

    def forward(self, group: list[int]) -> Forward:
        """Return one pass over the sequences in `group`. Sequences with fewer new tokens are padded
        in front, so that the last columns hold the requested states."""
        sequences = [self.sequences[b] for b in group]
        cached = [self.cached[b] for b in group]
        counts = [len(new) - n for n, new in zip(cached, sequences)]
        left_padding = [max(counts) - count for count in counts]
        on_device = self.device_tokens
        if on_device is not None and len(group) < len(self.sequences):
            on_device = on_device[to_device(group, on_device.device)]
        return Forward(
            rows=[self.rows[b] for b in group],
            input_ids=[
                [0] * pad + new[n:]
                for pad, new, n in zip(left_padding, sequences, cached)
            ],
            left_padding=left_padding,
            cached_lengths=cached,
            kv_length=max(map(len, sequences)) + self.lookahead,
            num_states=self.num_states,
            lookahead=self.lookahead,
            device_tokens=on_device,
            parents=self.parents and [self.parents[b] for b in group],
        )


class Session:
    """Sequences of tokens, each in a row of a preallocated KV cache addressed by position.

    A session takes whole sequences and finds out which tokens are new; rolling back shortens a row.
    If the last tokens were a tree, the path that the next sequence follows is kept. Rows of
    different lengths share a pass if the model's attention takes a mask (checked once, see
    `probe_masks`), and run one by one otherwise.
    """

    def __init__(
        self,
        lm: LM,
        rows: int = 1,
        capacity: int = 256,
        cache: RowCache | None = None,
        profile: Profile | None = None,
        states: States = LAST,
    ):
        self.lm = lm
        self.profile = profile or Profile()
        self.torch_threads: int | None = None
        """Number of PyTorch threads for work on the session's readings; None for PyTorch's
        default."""
        self._tokens: list[list[int]] = [[] for _ in range(rows)]
        self._pending: list[_Pending] = []
        self._trees: dict[int, _RowTree] = {}
        if cache is None and (backend := lm.backend_for(states)):
            cache = backend.cache(lm, rows, capacity)
        self.cache: RowCache = cache or own_cache(lm, rows, capacity, states)
        finalize(self, self.cache.on_session_closed).atexit = False

    def tokens(self) -> list[list[int]]:
        """Return the tokens of each row, after waiting for tokens that only the device has."""
        for pending in self._pending:
            for row, start, tokens in zip(
                pending.rows, pending.starts, pending.fetch()
            ):
                row[start : start + len(tokens)] = tokens
        self._pending = []
        return self._tokens

    def room(self, tokens: Sequence[int]) -> int:
        """Return the number of tokens that still fit into the model's context after `tokens`."""
        return (
            1 << 30
            if self.lm.context_length is None
            else self.lm.context_length - len(tokens)
        )

    def room_before_switch(self, tokens: Sequence[int]) -> int:
        """Return the number of tokens that one cycle may add: a window that ends at the model's
        `rope_switch`, and the correction or bonus."""
        switch = self.lm.rope_switch
        if switch is None or len(tokens) > switch:
            return 1 << 30
        return switch - len(tokens) + 1

    @torch.inference_mode()
    def move(self, source: int, to: int) -> None:
        """Move a row to another index; row `source` is empty afterwards."""
        self.copy(source, to)
        self.cut(source, 0)

    @torch.inference_mode()
    def copy(self, source: int, to: int) -> None:
        """Copy row `source` to row `to`."""
        tokens = self.tokens()
        tokens[to] = []  # a copy that fails leaves an empty row
        self._trees.pop(to, None)
        self.cache.copy(source, to, len(tokens[source]))
        tokens[to] = list(tokens[source])
        tree = self._trees.get(source)
        if tree:
            self._trees[to] = tree

    def cut(self, row: int, length: int) -> None:
        """Shorten a row to `length` tokens."""
        del self.tokens()[row][length:]
        self._trees.pop(row, None)

    @torch.inference_mode()
    def features(self, row: int, sequence: list[int], start: int) -> Tensor:
        """Return the features [n, F] of a sequence's tokens from `start` on, as far as the row
        holds the sequence."""
        return self.cache.features(row, start, self.held(row, sequence))

    @torch.inference_mode()
    def held(self, row: int, sequence: list[int]) -> int:
        """Return the number of a sequence's first tokens that the row holds. If the row ends with a
        tree, only the path that the sequence follows is kept."""
        self.tokens()
        self._keep_paths([row], [sequence], None)
        return common(self._tokens[row], sequence)

    @torch.inference_mode()
    def read(
        self,
        sequences: Sequence[list[int]],
        num_states: int = 1,
        device_tokens: Tensor | None = None,
        lookahead: int = 0,
        rows: Sequence[int] | None = None,
        parents: Sequence[Parents] | None = None,
    ) -> Reading:
        """Return logits [B, num_states, V] and hidden states [B, num_states, H] after each of the
        last `num_states` tokens of each sequence, which `device_tokens` [B, a] may extend. Sequence
        b belongs to row b, or to rows[b]. Tokens beyond the end of the model's context are not
        read, and their states are undefined.

        With one state, up to `lookahead` further tokens follow if the cache can loop, each the most
        probable after its predecessor. With `parents` [B][n] the last n tokens of each sequence are
        a tree, which must lie within the model's context but may exceed its remaining room.
        """
        self.profile.add("rest")
        rows = range(len(sequences)) if rows is None else rows
        cached = [self.tokens()[row] for row in rows]
        if device_tokens is not None:
            sequences, device_tokens = self._join(sequences, device_tokens)
        sequences, over = self._within_limits(sequences, num_states, parents)
        self._keep_paths(rows, sequences, parents)
        reused = self._reused(rows, cached, sequences, num_states)
        counts = [len(new) - n for n, new in zip(reused, sequences)]
        groups = self._groups(sequences, counts, num_states)
        # groups are read one after the other, and a loop runs on one batch
        if len(groups) > 1 or not self.cache.can_loop:
            lookahead = 0
        lookahead = max(0, min([lookahead, *map(self.room, sequences)]))
        batch = Batch(
            rows,
            sequences,
            reused,
            num_states,
            lookahead=lookahead,
            device_tokens=device_tokens,
            parents=parents if parents and parents[0] else None,
        )
        logits, hidden = self._read_in_groups(batch, groups)
        # after the pass: the tokens of a pass that fails do not count as cached
        for old, new in zip(cached, sequences):
            old += new[len(old) :]
        reading = Reading(_moved_up(logits, over), _moved_up(hidden, over), counts)
        self._fetch_later(cached, batch, reading)
        self.profile.add("cache")
        return reading

    def catch_up(self, prefixes: Sequence[list[int]], rows: Sequence[int]) -> list[int]:
        """Read long prefixes before their trees, and return the number of tokens read per prefix
        [B]. The pass over a tree has a mask over all its new tokens, so where this mask would be
        large all new tokens but the last are read here."""
        new = []
        for prefix, row in zip(prefixes, rows):
            new.append(len(prefix) - 1 - self.held(row, prefix))
        masks = [n * len(prefix) for n, prefix in zip(new, prefixes)]
        long = [b for b, mask in enumerate(masks) if mask > LARGEST_BEFORE_TREES]
        counts = [0] * len(prefixes)
        if long:
            reading = self.read(
                [prefixes[b][:-1] for b in long], rows=[rows[b] for b in long]
            )
            for b, n in zip(long, reading.tokens_read):
                counts[b] = n
        return counts

    def _read_in_groups(
        self, batch: Batch, groups: list[list[int]]
    ) -> tuple[Tensor, Tensor]:
        """Return logits and hidden states of a batch, read in one pass per group."""
        passes = [self._forward(batch, group) for group in groups]
        return _in_order(
            [self.cache.read(pass_, self.profile) for pass_ in passes], groups
        )

    def _forward(self, batch: Batch, group: list[int]) -> Forward:
        """Return one pass over some of a batch's sequences."""
        return batch.forward(group)

    def _keep_paths(
        self,
        rows: Sequence[int],
        sequences: Sequence[list[int]],
        parents: Sequence[Parents] | None,
    ) -> None:
        """Keep, of each row's tree, the path that the new sequence follows, moved to the front of
        the tree. If the new sequence ends with a tree at the same start, keep the common nodes in
        their columns."""
        for row, sequence, new in zip(rows, sequences, parents or repeat(None)):
            tree = self._trees.pop(row, None)
            if new is not None:
                self._trees[row] = _RowTree(len(sequence) - len(new), new)
            if tree is None:
                continue
            held = self._tokens[row]
            if new is not None and len(sequence) - len(new) == tree.start:
                del held[tree.start + common(tree.parents, new) :]
            else:
                self._keep_path(row, tree, sequence)

    def _keep_path(self, row: int, tree: _RowTree, sequence: list[int]) -> None:
        """Keep the path of a row's tree that a sequence follows."""
        held = self._tokens[row]
        drafted = held[tree.start :]
        del held[tree.start :]
        if sequence[: tree.start] != held:
            return
        path = followed(tree.parents[: len(drafted)], drafted, sequence[tree.start :])
        if path != [*range(len(path))]:
            self.cache.gather(row, tree.start, [tree.start + i for i in path])
        held += [drafted[i] for i in path]

    def _reused(
        self,
        rows: Sequence[int],
        cached: list[list[int]],
        sequences: Sequence[list[int]],
        num_states: int,
    ) -> list[int]:
        """Cut each row to the tokens that its new sequence reuses, and return their numbers.

        A row is emptied if its keys have other rotary factors than the new sequence needs: when the
        sequence shrinks below `rope_switch`, and when it grows beyond it in a model for which
        `transformers` recomputes the cache.
        """
        switch = self.lm.rope_switch
        if switch is not None:
            for old, new in zip(cached, sequences):
                grows = len(old) <= switch < len(new) and self.lm.restarts_at_switch
                shrinks = len(new) <= switch < len(old)
                if grows or shrinks:
                    del old[:]
        reused = []
        for row, old, new in zip(rows, cached, sequences):
            same = min(common(old, new), len(new) - num_states)
            # a pass that fails then leaves no wrong state
            del old[self.cache.resumable(row, same) :]
            reused.append(len(old))
        return reused

    def _within_limits(
        self,
        sequences: Sequence[list[int]],
        num_states: int,
        parents: Sequence[Parents] | None,
    ) -> tuple[Sequence[list[int]], list[int]]:
        """Return the sequences, cut at the end of the model's context, or at its `rope_switch` if
        the prefix ends before it, and the number of tokens cut from each. Trees are never cut."""
        over: list[int] = []
        if parents is not None:
            return sequences, [0] * len(sequences)
        for new in sequences:
            past = -self.room(new)
            switch = self.lm.rope_switch
            if switch is not None and len(new) - (num_states - 1) <= switch:
                past = max(past, len(new) - switch)
            over.append(max(0, past))
        return [new[: len(new) - past] for new, past in zip(sequences, over)], over

    def _fetch_later(
        self, cached: list[list[int]], batch: Batch, reading: Reading
    ) -> None:
        """Start to copy to the host the tokens that only the device has: those for which LATER
        stands at the rows' ends, and those found by the lookahead."""
        ends = list(map(len, cached))
        given = batch.device_tokens
        if given is not None:
            starts = [end - given.shape[1] for end in ends]
            self._pending.append(_Pending(cached, starts, to_host_async(given)))
        if batch.lookahead:
            found = reading.greedy_tokens[:, : batch.lookahead]
            self._pending.append(_Pending(cached, ends, to_host_async(found)))

    def _join(
        self, sequences: Sequence[list[int]], device_tokens: Tensor
    ) -> tuple[list[list[int]], Tensor | None]:
        """Return the sequences extended by the tokens [B, a]. If the tokens can stay on the device,
        LATER takes their positions and the tokens are returned too; otherwise None."""
        n = device_tokens.shape[1]
        room = all(self.room(sequence) >= n for sequence in sequences)
        if self.lm.rope_switch is not None:
            room = False  # some of the tokens may be beyond the switch
        if not room or self.cache.needs_host_tokens:
            tokens = device_tokens.tolist()
            return [sequence + more for sequence, more in zip(sequences, tokens)], None
        return [
            sequence + [LATER] * n for sequence in sequences
        ], device_tokens if n else None

    def _groups(
        self, sequences: Sequence[list[int]], counts: list[int], num_states: int
    ) -> list[list[int]]:
        """Return the groups of rows that share a pass. Rows with many new tokens, such as new
        prompts, run apart from the others, which would have to wait for them, and in groups that
        keep the mask small."""
        if len(sequences) > 1 and not self._reads_ragged():
            return [[b] for b in range(len(sequences))]
        short = [b for b, count in enumerate(counts) if count <= num_states + 1]
        groups: list[list[int]] = [short] if short else []
        long: list[int] = []
        for b, count in enumerate(counts):
            if count <= num_states + 1:
                continue
            group = [*long, b]
            longest_new = max(counts[g] for g in group)
            longest = max(len(sequences[g]) for g in group)
            if long and len(group) * longest_new * longest > LARGEST_MASK:
                groups.append(long)
                group = [b]
            long = group
        return [*groups, long] if long else groups

    def _reads_ragged(self) -> bool:
        known = self.cache.reads_ragged
        return probe_masks(self.lm) if known is None else known


def _in_order(
    parts: list[tuple[Tensor, Tensor]], groups: list[list[int]]
) -> tuple[Tensor, Tensor]:
    """Return logits and hidden states of rows that were read in groups, in the order of the
    rows."""
    if len(parts) == 1:
        return parts[0]
    order = to_device(list(chain.from_iterable(groups)), parts[0][0].device).argsort()
    logits, hidden = (torch.cat(states)[order] for states in zip(*parts))
    return logits, hidden


def _moved_up(states: Tensor, over: list[int]) -> Tensor:
    """Return states [B, n, …] of rows whose last `over` tokens were not read, each state moved to
    the index of its token. The last `over` states of a row are undefined."""
    if not any(over):
        return states
    return torch.stack([row.roll(-past, 0) for row, past in zip(states, over)])


def probe_masks(lm: LM) -> bool:
    """Return True if rows of different lengths can share a pass of the model's own forward;
    otherwise warn. The check runs once per model."""
    return lm.once("takes masks", lambda: _try_masks(lm))


def _try_masks(lm: LM) -> bool:
    """Try a pass over rows of different lengths, as models differ in how they take a mask."""
    attention = lm.model.config.get_text_config()._attn_implementation
    takes = attention in ("eager", "sdpa") and not lm.reads_rows_apart
    why = ""
    if takes:
        try:
            takes = reads_together_as_alone(
                lm, PlainCache(lm, 3, 256, reads_ragged=True)
            )
        except Exception as error:
            # whatever a model raises that takes its mask in another form
            takes = False
            why = f" ({type(error).__name__}: {first_line(error)})"
    if not takes:
        said = f"takes no mask from outside{why}; rows are read one by one"
        warnings.warn(f"{lm.role} {lm.name!r}: {said}", stacklevel=5)
    return takes


def reads_together_as_alone(lm: LM, cache: RowCache, states: States = LAST) -> bool:
    """Return True if rows of different lengths batched in `cache` (three rows) have the same states
    and features as each row read alone by the model's own pass. Tokens of the cache's lookahead are
    checked too."""
    rows = _random_tokens(lm, [min(n, lm.context_length or n) for n in (8, 40, 23)])
    together = Session(lm, 3, cache=cache)
    together.read([row[:-3] for row in rows])
    # a model that reads inputs needs a target's states, which its own cannot follow here
    for num_states, lookahead in ((2, 0), (1, 0 if lm.reads_inputs else 3)):
        last = torch.tensor([row[-1:] for row in rows], device=lm.device)
        prefixes = [row[:-1] for row in rows]
        reading = together.read(
            prefixes, num_states, device_tokens=last, lookahead=lookahead
        )
        n = reading.hidden.shape[1]
        found = reading.logits[:, : n - num_states].argmax(-1).tolist()
        rows = [row + more for row, more in zip(rows, found)]
        sessions = [Session(lm, cache=own_cache(lm, 1, 256, states)) for _ in rows]
        alone = [own.read([row], n) for own, row in zip(sessions, rows)]
        if not _are_alike(
            lm, reading.hidden, torch.cat([read.hidden for read in alone])
        ):
            return False
        if states.features and not _have_features_of(together, sessions, rows):
            return False
    return True


def _have_features_of(
    together: Session, sessions: Sequence[Session], rows: Sequence[list[int]]
) -> bool:
    """Return True if each row of a session has the same features as in a session that holds the row
    alone."""
    given = [together.features(b, row, 0) for b, row in enumerate(rows)]
    alone = []
    for own, row, ids in zip(sessions, rows, given):
        alone.append(own.features(0, row, 0)[: len(ids)])
    return _are_alike(together.lm, torch.cat(given), torch.cat(alone))


def check_windows(lm: LM) -> None:
    """Raise InputError if a pass over a window fails, or gives other states than token-by-token
    passes, as in encoders without a causal mask. Raises RunError if the states are NaN or infinite.
    The check runs once per model."""
    why = lm.once("reads windows", lambda: _why_no_windows(lm))
    if why is None:
        return
    kind = type(lm.model).__name__
    raise InputError(
        f"{lm.role} {lm.name!r}: {kind} {why}; name a decoder-only model that attends to earlier "
        "tokens alone"
    )


@torch.inference_mode()
def _why_no_windows(lm: LM) -> str | None:
    """Return the reason why a model cannot read three tokens in one pass; None if it can. Sets how
    the model's states are read: in pieces, one by one, or by copies of the whole cache."""
    ignores = _ignores_states(lm)
    why = None if ignores else _why_not_read_together(lm)
    follows = lm.has_states and not lm.copies_cache
    if follows and (ignores or why is not None):
        lm.reads_one_by_one = True
        why = _why_not_read_together(lm)
    if why is not None and not lm.only_attends and not lm.copies_cache:
        lm.copies_cache = True
        still = _why_not_read_together(lm)
        why = why if still else None
    if why is None and lm.copies_cache:
        kind = type(lm.model).__name__
        warnings.warn(
            f"{lm.role} {lm.name!r}: only transformers can continue the cache of {kind}; it is "
            "copied to be rolled back, and each cycle takes two calls of the model",
            stacklevel=4,
        )
    return why


def _ignores_states(lm: LM) -> bool:
    """Return True if a pass over several tokens begins with empty recurrent states, whatever was
    read before, as that of Mamba does in transformers."""
    if not lm.has_states or lm.copies_cache:
        return False
    (tokens,) = _random_tokens(lm, [3])
    after = []
    try:
        for factor in (1.0, 1e3):
            cache = PlainCache(lm, 1, 64)
            session = Session(lm, cache=cache)
            session.read([tokens[:1]])
            if not cache.scale_states(0, factor):
                return False
            # both tokens are certain, so that they are one piece
            after.append(session.read([tokens]).hidden)
    except Exception:  # the check of windows says what is wrong
        return False
    return torch.equal(*after)


def _why_not_read_together(lm: LM) -> str | None:
    (tokens,) = _random_tokens(lm, [3])
    try:
        together = Session(lm, cache=_cache_as_known(lm, 1, 64))
        read = together.read([tokens], len(tokens))
        # [3, H], [3, V]
        whole = read.hidden[0]
        logits = read.logits[0]
        apart = Session(lm, cache=_cache_as_known(lm, 1, 64))
        each = [apart.read([tokens[:n]]).hidden[0] for n in range(1, len(tokens) + 1)]
        apart.cut(0, 1)
        # [2, H], read together after the first token
        later = apart.read([tokens], 2).hidden[0]
        check_finite(lm, whole)
        counted = _logits_at_positions_from_0(lm, tokens)
    except (InputError, RunError):
        raise
    except Exception as error:  # whatever an unsuitable model raises
        return f"cannot be read token by token ({type(error).__name__}: {first_line(error)})"
    if not _are_alike(lm, whole, torch.cat(each)) or not _are_alike(
        lm, whole[1:], later
    ):
        return _otherwise(lm)
    if counted is not None and not _are_alike(lm, logits, counted):
        return "counts positions otherwise than transformers' generate does, from 0"
    return None


def _otherwise(lm: LM) -> str:
    """Return what is wrong with a model that reads a window otherwise than its tokens one by
    one."""
    what = "reads a window otherwise than its tokens one by one"
    if getattr(lm.model, "is_quantized", False):
        return f"{what}, as quantisation that rounds activations does"
    return what


def _logits_at_positions_from_0(lm: LM, tokens: list[int]) -> Tensor | None:
    """Return a model's logits [n, V] with positions counted from 0, as the `generate` of
    transformers passes them; None for a model that takes no positions."""
    if "position_ids" not in inspect.signature(lm.model.forward).parameters:
        return None
    ids = torch.tensor([tokens], device=lm.device)
    at = torch.arange(len(tokens), device=lm.device)[None]
    return cast(Tensor, lm.model(input_ids=ids, position_ids=at).logits[0])


def own_cache(lm: LM, rows: int, capacity: int, states: States = LAST) -> RowCache:
    """Return a cache that the model's own forward pass extends."""
    if not lm.only_attends:  # finds out how its cache is rolled back
        lm.once("reads windows", lambda: _why_no_windows(lm))
    return _cache_as_known(lm, rows, capacity, states)


def _cache_as_known(
    lm: LM, rows: int, capacity: int, states: States = LAST
) -> RowCache:
    """Return an `own_cache` by what is known of the model so far."""
    if lm.copies_cache:
        return CopiedCache(lm, rows, capacity, states)
    return PlainCache(lm, rows, capacity, states)


def tree_cache(lm: LM, rows: int, capacity: int, states: States = LAST) -> RowCache:
    """Return a cache that reads trees: the backend's if it has one, else a PlainCache."""
    backend = lm.backend_for(states, trees=True)
    return (
        backend.cache(lm, rows, capacity)
        if backend
        else own_cache(lm, rows, capacity, states)
    )


def check_trees(lm: LM, fix: str) -> None:
    """Raise InputError, which names the alternative `fix`, for a model whose own forward pass
    cannot read trees of tokens. The check runs once per model."""
    if lm.has_states or lm.copies_cache:
        raise InputError(
            f"{lm.role} {lm.name!r}: cannot read a tree of tokens, as it keeps a state, which "
            f"follows one path; take {fix}"
        )
    why = lm.once("reads trees", lambda: _why_no_trees(lm))
    if why is None:
        return
    attention = lm.model.config.get_text_config()._attn_implementation
    other = (
        "" if attention == "eager" else ", or load it with attn_implementation eager"
    )
    raise InputError(
        f"{lm.role} {lm.name!r}: cannot read a tree of tokens, as its attention ({attention}) "
        f"takes no mask or no positions from outside ({why}); take {fix}{other}"
    )


def _why_no_trees(lm: LM) -> str | None:
    """Return the reason why a model's own forward pass cannot read trees; None if it can."""
    if lm.rope_switch is not None:
        return f"its rotary factors change after {lm.rope_switch} tokens (longrope)"
    try:
        reads = reads_trees_as_paths(lm, PlainCache(lm, 2, 64, reads_ragged=False))
    except Exception as error:
        # whatever a model raises that takes its mask or positions in another form
        return f"{type(error).__name__}: {first_line(error)}"
    return None if reads else "a tree's states are not those of its paths"


def reads_trees_as_paths(lm: LM, cache: RowCache, given: States = LAST) -> bool:
    """Return True if the tokens of trees read in `cache` (two rows) have the same states as their
    paths read alone by the model's own pass, also after a path was kept."""
    parents = [-1, -1, 0, 1, 1, 4]
    room = (lm.context_length or 64) - 4
    *prefixes, tokens = _random_tokens(
        lm, [*(max(1, min(n, room)) for n in (9, 21)), len(parents)]
    )
    together = Session(lm, 2, cache=cache)
    whole = [prefix + tokens for prefix in prefixes]
    states = together.read(
        whole, len(tokens), parents=[parents, parents]
    ).hidden  # [2, n, H]
    branches = paths(parents)
    branches.append([*branches[-1], 0])  # and a token read after a path
    after = together.read(
        [prefix + [tokens[i] for i in branches[-1]] for prefix in prefixes]
    ).hidden
    own: list[Tensor] = []
    for prefix in prefixes:
        for path in branches:
            alone = Session(lm, cache=PlainCache(lm, 1, 64, given))
            own.append(alone.read([prefix + [tokens[i] for i in path]]).hidden[0, 0])
    leaves = [path[-1] for path in branches[:-1]]
    found = torch.cat([states[:, leaves], after], 1).flatten(0, 1)
    return _are_alike(lm, found, torch.stack(own))


def _random_tokens(lm: LM, lengths: Sequence[int]) -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    found = list[list[int]]()
    for n in lengths:
        found.append(torch.randint(lm.vocab_size, (n,), generator=generator).tolist())
    return found


def _are_alike(lm: LM, found: Tensor, wanted: Tensor) -> bool:
    """Return True if states or logits […, H] differ by no more than rounding. Entries that are -inf
    in both, outside a draft vocabulary, count as equal."""
    outside = (found == -torch.inf) & (wanted == -torch.inf)
    found = found.float().masked_fill(outside, 0.0)
    wanted = wanted.float().masked_fill(outside, 0.0)
    error = (found - wanted).norm(dim=-1) / wanted.norm(dim=-1)
    return bool(error.max() < (0.1 if lm.model.dtype.itemsize < 4 else 1e-3))


def common(a: Sequence[int], b: Sequence[int]) -> int:
    """Return the length of the longest common prefix of two sequences, found by bisection over
    slices."""
    low = 0
    high = min(len(a), len(b))
    if a[:high] == b[:high]:
        return high
    while high - low > 1:
        middle = (low + high) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle
    return low
