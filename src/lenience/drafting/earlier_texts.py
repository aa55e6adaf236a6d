"""Drafting from earlier texts of the same search, corrected by the draft model if there is one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lenience.core.context import Context, Row
from lenience.core.needs import Parts
from lenience.core.protocols import Drafter
from lenience.core.recall import MATCHES, Place, Recall, Recollection
from lenience.core.types import Draft
from lenience.drafting.base import DrafterSetup, DrafterSpec
from lenience.drafting.model import most_drafted, wide_as_target
from lenience.drafting.trees.growing import GrowingTree, as_draft
from lenience.models.lm import LM
from lenience.models.session import Session, common
from lenience.models.translation import shares_vocabulary

ROUNDS = 4
"""Maximum number of draft passes per window."""
READ_AT_ONCE = 16
"""Maximum number of recalled tokens that the draft reads in one pass."""
ALONE = 8
"""Maximum number of drafted tokens if nothing is recalled."""
LEAST_MATCH = 3
MATCH_AGAIN = 4
"""Minimum length of a match: at first, and after a token that differs from the recalled one."""
SURE = 0.9
UNSURE = 0.5
"""Limits of the probability of the draft's most probable token: sure from the first on, unsure
below the second."""
LEAST_SHARE = 0.5
"""Probability of accepting the whole window, below which the window ends."""
AGREED = 0.999
AGREED_UNSURELY = 0.975
AS_BEFORE = 0.98
DRAFTED_SURELY = 0.965
RECALLED = 0.6
"""Acceptance rates measured on the built-in pair, in this order. A token on which the recalled text
and the draft agree, with the draft sure, or not sure. A recalled token where the draft predicts the
same token as in the earlier text. A token of which the draft is sure. A recalled token where the
draft is unsure. Other values affect speed only."""
DRAFTED = 0.7
"""Acceptance rate of a token that the draft is not sure of, as a factor of its probability."""


@dataclass(frozen=True)
class Recalled(DrafterSpec):
    """Propose the continuation of the same tokens in a search's earlier texts. The draft model
    corrects it where the draft now predicts another token than in the earlier text. The rows'
    memory of `Recall` holds the texts. Used when the target continues one sample many times."""

    name = "recalled"
    offers = Parts.NOTHING

    def models(self, setup: DrafterSetup) -> list[LM]:
        return [setup.draft] if _corrects(setup) and setup.draft else []

    def build(self, setup: DrafterSetup) -> Drafter:
        if setup.draft is None or not _corrects(setup):
            return _RecallOnly(setup.target)
        capacity = min(setup.capacity, setup.draft.context_length or setup.capacity)
        return _RecalledDrafter(
            Session(setup.draft, setup.rows, capacity, profile=setup.profile),
            setup.target,
        )


def _corrects(setup: DrafterSetup) -> bool:
    """Return True if the draft model, if there is one, reads the target's tokens."""
    draft = setup.draft
    return draft is not None and shares_vocabulary(setup.target, draft)


class _RecallOnly(Drafter):
    """A drafter that proposes continuations of earlier texts uncorrected, for a target without a
    draft model."""

    def __init__(self, target: LM):
        self.target = target

    def propose(self, ctx: Context, room: Sequence[int]) -> Draft:
        grown = []
        for b, (row, left) in enumerate(zip(ctx.rows, room)):
            window = _RowWindow(b, row, max(0, min(ctx.window, left - 1)))
            if window.left:
                window.recollect(self.target.vocab_size)
                window.take_recalled(self.target.eos_ids)
            grown.append(window.as_chain())
            window.recall.ahead = []
        return as_draft(grown, self.target.device, trees=False)


class _RecalledDrafter(Drafter):
    def __init__(self, session: Session, target: LM):
        self.session = session
        self.target = target

    def propose(self, ctx: Context, room: Sequence[int]) -> Draft:
        limits = most_drafted(self.session, self.target, ctx, room)
        windows = []
        for b, bounds in enumerate(zip(ctx.rows, limits)):
            windows.append(_RowWindow(b, *bounds))
        passes = 0
        while passes < ROUNDS and (
            unfinished := [window for window in windows if window.left]
        ):
            passes += 1
            self._extend(unfinished, ctx)
        for window in windows:
            window.recall.ahead = window.guesses
        grown = [window.as_chain() for window in windows]
        draft = as_draft(grown, self.target.device, trees=False)
        return replace(
            draft, passes=passes, tokens_read=[window.tokens_read for window in windows]
        )

    def _extend(self, windows: Sequence[_RowWindow], ctx: Context) -> None:
        """Run the draft over the recalled tokens of each window, and keep those that it agrees
        with."""
        for window in windows:
            window.recollect(self.session.lm.vocab_size)
        states = 1 + max(len(window.recalled) for window in windows)
        together = [window for window in windows if len(window.sequence) >= states]
        # these texts are shorter than the number of states
        apart = [window for window in windows if len(window.sequence) < states]
        for some in ([together] if together else []) + [[window] for window in apart]:
            self._read(some, ctx)

    def _read(self, windows: Sequence[_RowWindow], ctx: Context) -> None:
        states = 1 + max(len(window.recalled) for window in windows)
        sequences = [window.sequence for window in windows]
        rows = [window.row for window in windows]
        reading = self.session.read(sequences, states, rows=rows)
        logits = wide_as_target(reading.logits, self.target)[
            ..., : self.target.vocab_size
        ]
        tokens, probs = _said(logits, windows, ctx)
        for window, said, sure in zip(windows, tokens.tolist(), probs.tolist()):
            n = len(window.recalled) + 1
            window.take(said[-n:], sure[-n:], self.target.eos_ids)

    def move(self, source: int, to: int) -> None:
        self.session.move(source, to)

    def copy(self, source: int, to: int) -> None:
        self.session.copy(source, to)


class _RowWindow:
    """A row's window while it is drafted."""

    def __init__(self, row: int, of: Row, limit: int):
        self.row = row
        self.limit = limit
        self.recall = of.memory.get(Recall) or Recall(Recollection(), 0, [])
        self.recall.go_on(of.prefix)
        self.tokens = list[int]()
        self.guesses = list[int | None]()
        """Draft's tokens at the positions of `tokens`, the proposed ones."""
        self.recalled = list[int]()
        self.wanted = list[int | None]()
        """Draft's tokens in the earlier text, at the positions of `recalled`."""
        self.sequence = list[int]()
        """Text that the draft reads next."""
        self.tokens_read = 0
        self._place: Place | None = None
        self._share = 1.0
        self._alone = 0
        self._over = not limit

    @property
    def left(self) -> int:
        """Return the number of tokens that may still be proposed."""
        return 0 if self._over else self.limit - len(self.tokens)

    def as_chain(self) -> GrowingTree:
        """Return the window's tokens as a chain."""
        count = len(self.tokens)
        return GrowingTree(self.tokens, [*range(-1, count - 1)], [0] * count)

    def take_recalled(self, eos: frozenset[int]) -> None:
        """Propose the recalled tokens unchanged."""
        for token in self.recalled:
            if not self._propose(token, token, AS_BEFORE, eos):
                return

    def recollect(self, known_ids: int) -> None:
        """Look up the continuation that the draft will read, up to the first id that the draft
        lacks."""
        if self._place is None:
            self._place = self._found(LEAST_MATCH)
        self.recalled = []
        self.wanted = []
        if self._place is not None:
            most = min(self.left, READ_AT_ONCE)
            self.recalled, self.wanted = self.recall.of.following(self._place, most)
            of_target = (
                i for i, token in enumerate(self.recalled) if token >= known_ids
            )
            self.recalled = self.recalled[: next(of_target, None)]
        self.sequence = [*self.recall.text, *self.tokens, *self.recalled]
        known = common(self.recall.last_read, self.sequence)
        self.tokens_read += max(len(self.recalled) + 1, len(self.sequence) - known)
        self.recall.last_read = self.sequence

    def take(
        self, said: Sequence[int], probs: Sequence[float], eos: frozenset[int]
    ) -> None:
        """Append the recalled tokens that the draft agrees with, and one token of the draft."""
        for i, (token, wanted) in enumerate(zip(self.recalled, self.wanted)):
            now = said[i]
            sure = probs[i]
            if now == token:
                chance = AGREED if sure >= SURE else AGREED_UNSURELY
            elif now == wanted:
                chance = AS_BEFORE
            elif sure < UNSURE:
                chance = RECALLED
            else:
                self._propose(now, now, _chance(sure), eos)
                self._go_on_after(i + 1)
                return
            if not self._propose(token, now, chance, eos):
                return
        if len(self.recalled) == READ_AT_ONCE:  # the text may continue
            self._go_on_after(READ_AT_ONCE)
            return
        if self._place is None:
            self._alone += 1
            self._over |= self._alone >= ALONE
        self._place = None
        if len(self.tokens) < self.limit:
            self._propose(said[-1], said[-1], _chance(probs[-1]), eos)

    def _go_on_after(self, n: int) -> None:
        """Continue recalling after n of the recalled tokens: at a new match of the text's end if
        there is one, else in the same earlier text."""
        assert self._place is not None
        again = self._found(MATCH_AGAIN)
        self._place = again or Place(self._place.text, self._place.at + n)

    def _found(self, least: int) -> Place | None:
        longest = MATCHES[0]
        end = [*self.recall.text[-longest:], *self.tokens][-longest:]
        return self.recall.of.find(end, least)

    def _propose(
        self, token: int, guess: int, chance: float, eos: frozenset[int]
    ) -> bool:
        """Add a token with its acceptance probability. Return True if the window continues."""
        self._share *= chance
        if self.tokens and self._share < LEAST_SHARE:
            self._over = True
            self.guesses.append(guess)
            return False
        self.tokens.append(token)
        self.guesses.append(guess)
        self._over |= token in eos or self._share < LEAST_SHARE
        return not self._over


def _said(
    logits: Tensor, windows: Sequence[_RowWindow], ctx: Context
) -> tuple[Tensor, Tensor]:
    """Return the draft's tokens [m, n] for logits [m, n, V], greedy or drawn with the rows' keys,
    and their probabilities [m, n]."""
    if ctx.greedy:
        best, tokens = logits.float().max(-1)
        return tokens, (best - logits.float().logsumexp(-1)).exp()
    n = logits.shape[1]
    drawn = []
    for window, of_row in zip(windows, logits):
        read = len(window.tokens) + len(window.recalled) + 1 - n
        row = replace(ctx, rows=[ctx.rows[window.row]])
        drawn.append(row.draw(of_row[None], ahead=read))
    tokens = torch.cat(drawn)
    return tokens, ctx.probs(logits).gather(-1, tokens[..., None])[..., 0]


def _chance(sure: float) -> float:
    """Return the acceptance rate of a token that the draft predicts with probability `sure`."""
    return DRAFTED_SURELY if sure >= SURE else DRAFTED * sure
