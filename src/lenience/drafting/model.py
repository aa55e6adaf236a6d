"""Drafting of chains and trees with a model of the target's vocabulary."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from lenience.core.context import Context
from lenience.core.needs import Parts, Sources
from lenience.core.protocols import Drafter
from lenience.core.transfer import to_device
from lenience.core.types import Draft
from lenience.drafting.base import DrafterSetup, DrafterSpec
from lenience.drafting.stops import Fixed, Stop
from lenience.drafting.translated import TranslatedDrafter
from lenience.drafting.trees.growing import GrowingTree, PathEnds, TreeLevel, as_draft
from lenience.drafting.trees.shapes import Tree
from lenience.models.lm import LM
from lenience.models.session import Session, tree_cache
from lenience.models.translation import shares_vocabulary

CHUNK = 8
CHUNK_PER_TOKEN = 2
"""Numbers of tokens drafted between checks on the host: for EOS alone, and with a stop condition
that checks each token."""
_END = -1
"""Placeholder for a token at which a stop condition ends the window."""


@dataclass(frozen=True)
class DraftModel(DrafterSpec):
    """Draft with the pair's draft model (Leviathan 2023; Chen 2023). A draft of another tokenizer
    drafts through a `TranslatedDrafter`."""

    name = "model"
    needs = Sources.DRAFT_MODEL
    offers = (
        Parts.EARLY_ENDS
        | Parts.STATES
        | Parts.PROBS
        | Parts.CHANCES
        | Parts.TREES
        | Parts.OWN_TEMPERATURE
    )
    grid = ("model",)

    @property
    def proposes_as_draft(self) -> bool:
        return True

    def models(self, setup: DrafterSetup) -> list[LM]:
        return [setup.draft] if setup.draft else []

    def build(self, setup: DrafterSetup) -> Drafter:
        assert setup.draft is not None
        if shares_vocabulary(setup.target, setup.draft):
            return model_drafter(setup.draft, setup)
        return TranslatedDrafter(setup.draft, setup)


def model_drafter(lm: LM, setup: DrafterSetup) -> Drafter:
    """Return a drafter of chains or trees with a model of the target's vocabulary."""
    capacity = min(setup.capacity, lm.context_length or setup.capacity)
    cache = None if setup.tree.is_chain else tree_cache(lm, setup.rows, capacity)
    return drafter_on(Session(lm, setup.rows, capacity, cache, setup.profile), setup)


def drafter_on(session: Session, setup: DrafterSetup) -> Drafter:
    """Return a drafter of chains or trees on a session of its model."""
    if setup.tree.is_chain:
        return ModelDrafter(session, setup.target, setup.keep_states, setup.stop)
    return TreeDrafter(session, setup.target, setup.tree, setup.stop)


@dataclass
class _Windows:
    """The windows of B rows while they are drafted."""

    prefixes: list[list[int]]
    limits: list[int]
    """[B]: maximum number of tokens for each row."""
    tokens: Tensor
    """[B, n]: tokens drafted so far."""
    logits: list[Tensor] = field(default_factory=list)
    """Parts [B, m, V] of the logits in order, one per read."""
    hidden: list[Tensor] = field(default_factory=list)
    tokens_read: list[int] = field(default_factory=list)
    """[B]: number of tokens that the model has read for each row."""
    stop_mask: Tensor | None = None
    """[B, n] or [B, n - 1] bool: True where a stop condition ends drafting."""

    def add(
        self, logits: Tensor, hidden: Tensor, tokens: Tensor, tokens_read: Sequence[int]
    ) -> None:
        self.logits.append(logits)
        self.hidden.append(hidden)
        more = hidden.shape[1] - 1
        read_before = self.tokens_read or [0] * len(self.prefixes)
        self.tokens_read = [n + new + more for n, new in zip(read_before, tokens_read)]
        self.tokens = (
            torch.cat([self.tokens, tokens], 1) if self.tokens.shape[1] else tokens
        )


class ModelDrafter(Drafter):
    """A drafter of chains with a model of the target's vocabulary. A window has at most
    `ctx.window` tokens and ends at an EOS.

    Proposals have the target's width and device: two models may pad one vocabulary differently, and
    an id that only the draft has is never proposed. `keep_states` keeps the draft's hidden states
    for a rule that reads them.
    """

    def __init__(
        self,
        session: Session,
        target: LM,
        keep_states: bool = False,
        stop: Stop | None = None,
    ):
        self.session = session
        self.keep_states = keep_states
        self.stop = stop or Fixed()
        self.target = target
        self.device = target.device
        self.eos_ids = target.eos_ids
        self.eos = torch.tensor(sorted(self.eos_ids), device=self.device)

    def propose(self, ctx: Context, room: Sequence[int]) -> Draft:
        own = ctx.drafting()
        draft = self._propose(own, room)
        if own is ctx or draft.logits is None:
            return draft
        return replace(draft, probs=own.probs(draft.logits))

    def _propose(self, ctx: Context, room: Sequence[int]) -> Draft:
        windows = _Windows(
            prefixes=[row.prefix for row in ctx.rows],
            limits=self._limits(ctx, room),
            tokens=torch.empty(len(ctx.rows), 0, dtype=torch.long, device=self.device),
        )
        wanted = max(windows.limits)
        if not wanted:
            return self._nothing(windows)
        lengths = self._draft_greedily(windows, ctx) if self._unseen(ctx) else None
        if lengths is None:
            self._draft_looking(windows, ctx)
            lengths = to_device(windows.limits, self.device)
            wanted = max(windows.limits)
        draft = Draft(
            tokens=windows.tokens[:, :wanted],
            lengths=lengths,
            logits=_first_columns(windows.logits, wanted),
            passes=windows.tokens.shape[1],
            tokens_read=windows.tokens_read,
        )
        if self.keep_states:
            states = _first_columns(windows.hidden, wanted + 1).to(self.device)
            draft = replace(draft, hidden=states)
        if self.stop.skips_verification and windows.stop_mask is not None:
            doubted = (windows.stop_mask[:, :wanted] & draft.proposed).any(1)
            trusted = lengths - doubted.long()
            draft = replace(draft, trusted=trusted, bonus=self.stop.keeps_bonus)
        return draft

    def _nothing(self, windows: _Windows) -> Draft:
        lengths = to_device(windows.limits, self.device)
        trusted = torch.zeros_like(lengths) if self.stop.skips_verification else None
        return Draft(windows.tokens, lengths, trusted=trusted)

    def _reads_on(self, ctx: Context) -> bool:
        """Return True if each drafted token is the model's most probable token."""
        fits = self.session.lm.vocab_size <= self.target.vocab_size
        return ctx.greedy and not ctx.processes and fits

    def _unseen(self, ctx: Context) -> bool:
        """Return True if whole windows are drafted without checking tokens on the host."""
        looks = self.stop.per_token or self.session.cache.needs_host_tokens
        return self._reads_on(ctx) and not looks

    @property
    def _extra(self) -> bool:
        """Return True if the last drafted token is read too, for the state after it."""
        return self.keep_states or self.stop.needs_state_after

    def _draft_greedily(self, windows: _Windows, ctx: Context) -> Tensor | None:
        """Draft the whole window in one read. Return the lengths [B], found on the device; None if
        the model's context ended the window early. The number of tokens is rounded up, because each
        number is recorded as another CUDA graph."""
        left = max(windows.limits) + self._extra
        steps = min(-(-left // CHUNK) * CHUNK, ctx.window + self._extra)
        self._read(windows, windows.prefixes, steps, ctx)
        return self._to_eos(windows) if windows.tokens.shape[1] >= left else None

    def _draft_looking(self, windows: _Windows, ctx: Context) -> None:
        """Draft in chunks, and lower the limits of rows that an EOS or the stop condition ends."""
        chunk = 1
        if self._reads_on(ctx):
            chunk = CHUNK_PER_TOKEN if self.stop.per_token else CHUNK
        probs: list[Tensor] = []
        if windows.logits:
            self._shorten(windows, probs, ctx)
        while (wanted := max(windows.limits)) and (
            left := wanted + self._extra - windows.tokens.shape[1]
        ) > 0:
            sequences = windows.prefixes
            if windows.logits:
                drafted = windows.tokens.tolist()
                sequences = []
                for prefix, row in zip(windows.prefixes, drafted):
                    sequences.append(prefix + row)
            self._read(windows, sequences, min(left, chunk), ctx)
            self._shorten(windows, probs, ctx)

    def _read(
        self,
        windows: _Windows,
        sequences: Sequence[list[int]],
        steps: int,
        ctx: Context,
    ) -> None:
        """Read sequences and draft up to `steps` tokens after them."""
        reading = self.session.read(sequences, lookahead=steps - 1)
        logits = wide_as_target(reading.logits, self.target)
        logits = ctx.process(logits, windows.tokens)  # [B, n, V]
        if self._reads_on(ctx):
            tokens = reading.greedy_tokens
        else:
            tokens = ctx.draw(logits, windows.tokens.shape[1])
        windows.add(logits, reading.hidden, tokens.to(self.device), reading.tokens_read)

    def _shorten(self, windows: _Windows, probs: list[Tensor], ctx: Context) -> None:
        """Lower the limit of each row that has ended. `probs` collects the acceptance probabilities
        of the stop condition."""
        looked_at = windows.tokens
        if self.stop.per_token:
            self._ask(windows, probs, ctx)
        if windows.stop_mask is not None:
            later = windows.tokens.shape[1] - windows.stop_mask.shape[1]
            ends = torch.nn.functional.pad(windows.stop_mask, (0, later))
            looked_at = windows.tokens.where(~ends, _END)
        for b, row in enumerate(looked_at.tolist()):
            for i, token in enumerate(row[: windows.limits[b]], 1):
                if (
                    token == _END or token in self.eos_ids
                ):  # nothing after an EOS is ever kept
                    doubted = token == _END and not self.stop.proposes_doubted
                    windows.limits[b] = i - doubted
                    break

    def _ask(self, windows: _Windows, probs: list[Tensor], ctx: Context) -> None:
        """Query the stop condition about the last drafted tokens."""
        hidden = windows.hidden[-1]
        if self.stop.needs_state_after and len(windows.hidden) == 1:
            # the first state follows the token before the window
            hidden = hidden[:, 1:]
        if not hidden.shape[1]:
            return
        drafted = windows.tokens[:, -windows.hidden[-1].shape[1] :]
        probs.append(
            self.stop.acceptance_probs(windows.logits[-1], hidden, drafted, ctx)
        )
        windows.stop_mask = self.stop.stop_mask(torch.cat(probs, 1), ctx.rows).to(
            self.device
        )

    def _limits(self, ctx: Context, room: Sequence[int]) -> list[int]:
        """Return [B]: the maximum number of tokens to draft for each row."""
        # one token of the budget is the target's, in any case
        follows = not self.stop.skips_verification
        wanted = [self.stop.max_tokens(row, ctx.window) for row in ctx.rows]
        left = [n + 1 - follows for n in room]
        limits = most_drafted(self.session, self.target, ctx, left)
        return list(map(min, zip(wanted, limits)))

    def _to_eos(self, windows: _Windows) -> Tensor:
        """Return [B]: the number of tokens up to and including an EOS, within the limits. It is
        computed on the tokens' device."""
        n = windows.tokens.shape[1]
        places = torch.arange(1, n + 1, device=windows.tokens.device)
        last = places.where((windows.tokens[..., None] == self.eos).any(-1), n).amin(1)
        return last.minimum(to_device(windows.limits, windows.tokens.device))

    def move(self, source: int, to: int) -> None:
        self.session.move(source, to)

    def copy(self, source: int, to: int) -> None:
        self.session.copy(source, to)


class TreeDrafter(Drafter):
    """A drafter of trees with a model of the target's vocabulary, one pass per level. Tokens are
    chosen by probability, even if the target samples, unless the tree draws them. A stop condition
    that checks each token ends a path where it would end a chain."""

    def __init__(self, session: Session, target: LM, tree: Tree, stop: Stop):
        self.session = session
        self.target = target
        self.tree = tree
        self.stop = stop

    def propose(self, ctx: Context, room: Sequence[int]) -> Draft:
        wanted = [self.stop.max_tokens(row, ctx.window) for row in ctx.rows]
        most = most_drafted(self.session, self.target, ctx, room)
        limits = list(map(min, zip(wanted, most)))
        if not max(limits):
            return as_draft([GrowingTree() for _ in ctx.rows], self.target.device)
        # a row without drafted tokens may be longer than the draft's context
        prefixes = []
        for row, n in zip(ctx.rows, limits):
            prefixes.append(row.prefix if n else row.prefix[:1])
        reader = _LevelReader(self, ctx, prefixes)
        ends = PathEnds(limits, self.target.eos_ids, self.stop)
        grown = self.tree.grow(reader.read, ctx, ends)
        logits = torch.cat(reader.logits, 1)
        draws = self.tree.drawn(ctx)
        draft = as_draft(grown, self.target.device, logits, draws=draws)
        return replace(draft, passes=len(reader.logits), tokens_read=reader.tokens_read)

    def move(self, source: int, to: int) -> None:
        self.session.move(source, to)

    def copy(self, source: int, to: int) -> None:
        self.session.copy(source, to)


class _LevelReader:
    """A reader of a cycle's tokens, level by level."""

    def __init__(self, drafter: TreeDrafter, ctx: Context, prefixes: list[list[int]]):
        self.session = drafter.session
        self.target = drafter.target
        self.ctx = ctx
        self.prefixes = prefixes
        self.tokens = [list[int]() for _ in ctx.rows]
        self.parents = [list[int]() for _ in ctx.rows]
        self.logits: list[Tensor] = []
        """[B, F, V] for each level."""
        self.tokens_read = [0] * len(ctx.rows)

    def read(self, level: TreeLevel | None) -> Tensor:
        n = 1
        if level is not None:
            n = len(level.tokens[0])
            for b, (tokens, parents) in enumerate(zip(level.tokens, level.parents)):
                self.tokens[b] += tokens
                self.parents[b] += parents
        sequences = [prefix + more for prefix, more in zip(self.prefixes, self.tokens)]
        reading = self.session.read(sequences, n, parents=list(map(list, self.parents)))
        self.tokens_read = [
            a + b for a, b in zip(self.tokens_read, reading.tokens_read)
        ]
        logits = self._processed(wide_as_target(reading.logits, self.target), n)
        self.logits.append(logits)
        return logits

    def _processed(self, logits: Tensor, n: int) -> Tensor:
        """Return the logits after the model's logits processors, each applied to the token's own
        path."""
        if not self.ctx.processes:
            return logits
        ctx = replace(self.ctx, rows=[row for row in self.ctx.rows for _ in range(n)])
        ahead = []
        for tokens, parents in zip(self.tokens, self.parents):
            for node in range(len(tokens) - n, len(tokens)):
                path = list[int]()
                at = node
                while at >= 0:
                    path.insert(0, tokens[at])
                    at = parents[at]
                ahead.append(path)
        # paths of a level that is requested again are shorter; pad them
        deepest = max(map(len, ahead))
        ahead = [path[:1] * (deepest - len(path)) + path for path in ahead]
        flat = logits.reshape(-1, 1, logits.shape[-1])
        return ctx.process(flat, torch.tensor(ahead)).view(logits.shape)


def most_drafted(
    session: Session, target: LM, ctx: Context, room: Sequence[int]
) -> list[int]:
    """Return [B]: the maximum number of tokens that a draft may propose on a path. `room` is each
    row's token budget; its last token is the target's. A row with an id that only the target has
    gets 0."""
    limits = []
    for row, left in zip(ctx.rows, room):
        limit = max(0, min(ctx.window, left - 1, session.room(row.prefix) - 1))
        if (
            session.lm.vocab_size < target.vocab_size
        ):  # some ids belong to the target's vocabulary alone
            limit = 0 if max(row.prefix) >= session.lm.vocab_size else limit
        limits.append(limit)
    return limits


def wide_as_target(logits: Tensor, target: LM) -> Tensor:
    """Return the logits [B, n, V] of a draft with the target's vocabulary size, on the target's
    device."""
    missing = target.vocab_size - logits.shape[-1]
    if missing:
        logits = torch.nn.functional.pad(logits, (0, missing), value=float("-inf"))
    return logits.to(target.device)


def _first_columns(parts: list[Tensor], n: int) -> Tensor:
    """Return the first `n` columns of the concatenated parts."""
    return (torch.cat(parts, 1) if len(parts) > 1 else parts[0])[:, :n]
