"""Combinations of drafters: one verifies another's proposals, or continues from them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Self

import torch
from torch import Tensor

from lenience.core.context import Context, Row
from lenience.core.errors import InputError
from lenience.core.needs import Parts, Sources
from lenience.core.protocols import Drafter, TrainedPart
from lenience.core.types import Draft, Reading, Verdict
from lenience.drafting.base import DrafterSetup, DrafterSpec
from lenience.drafting.model import most_drafted, wide_as_target
from lenience.drafting.stops import Fixed
from lenience.drafting.trees.growing import GrowingTree, as_draft
from lenience.drafting.trees.shapes import Chain
from lenience.models.lm import LM
from lenience.models.session import Session


@dataclass(frozen=True)
class Vertical(DrafterSpec):
    """Draft with b, for which a drafts in turn, so that b needs fewer passes: `a>b` (cascade
    speculative drafting, Chen 2023, section 3.1)."""

    first: DrafterSpec
    then: DrafterSpec
    name = "vertical"
    offers = Parts.PROBS

    @property
    def proposes_as_draft(self) -> bool:
        return self.then.proposes_as_draft

    def __post_init__(self) -> None:
        if Parts.OWN_TEMPERATURE not in self.then.offers:
            raise InputError(
                f"{self}: {self.then} runs no model, so there are no passes to save; "
                "combine other drafters"
            )
        reads_model = self.first.needs & (Sources.DRAFT_MODEL | Sources.STATES)
        if self.first.branches or reads_model:
            raise InputError(
                f"{self}: {self.first} cannot draft for another drafter; use ngram, "
                "suffix, datastore, exit or skip"
            )

    @cached_property
    def needs(self) -> Sources:
        return self.first.needs | self.then.needs

    @property
    def fitted(self) -> tuple[TrainedPart, ...]:
        return self.first.fitted

    def relocated(self, path: Callable[[str], str]) -> Self:
        return replace(self, first=self.first.relocated(path))

    def check(self, target: LM, fingerprints: Callable[[], Mapping[str, str]]) -> None:
        self.then.check(target, fingerprints)
        if Parts.OWN_TEMPERATURE not in self.first.offers:
            self.first.check(target, fingerprints)

    def models(self, setup: DrafterSetup) -> list[LM]:
        setup = replace(setup, alone=False)
        (lm,) = self.then.models(setup)
        return [lm, *self.first.models(replace(setup, target=lm))]

    def build(self, setup: DrafterSetup) -> Drafter:
        setup = replace(setup, alone=False)
        (lm,) = self.then.models(setup)
        if Parts.OWN_TEMPERATURE in self.first.offers:  # on some of that model's layers
            self.first.check(lm, dict)
        capacity = min(setup.capacity, lm.context_length or setup.capacity)
        session = Session(lm, setup.rows, capacity, profile=setup.profile)
        inner = replace(
            setup, target=lm, draft=None, stop=Fixed(), tree=Chain(), session=session
        )
        return _VerticalDrafter(self.first.build(inner), session, setup)

    def __str__(self) -> str:
        return f"{self.first}>{self.then}"


class _VerticalDrafter(Drafter):
    def __init__(self, drafter: Drafter, session: Session, setup: DrafterSetup):
        self.drafter = drafter
        self.session = session
        self.target = setup.target

    def propose(self, ctx: Context, room: Sequence[int]) -> Draft:
        limits = most_drafted(self.session, self.target, ctx, room)
        windows = [_Growing(row, limit) for row, limit in zip(ctx.rows, limits)]
        inner = replace(ctx, rows=[window.row for window in windows])
        passes = 0
        read = [0] * len(windows)
        while any(left := [window.limit - len(window.tokens) for window in windows]):
            # one token of each budget is the verifying model's own
            draft = self.drafter.propose(inner, left)
            prefixes = [window.row.prefix for window in windows]
            reading = self.session.read(
                prefixes, draft.width + 1, device_tokens=draft.tokens
            )
            passes += 1 + draft.passes
            read = [a + b for a, b in zip(read, reading.tokens_read)]
            logits = inner.process(
                wide_as_target(reading.logits, self.target), draft.tokens
            )
            own = inner.draw(logits).tolist()  # [B, W + 1]
            proposed = []
            for row, n in zip(draft.tokens.tolist(), draft.lengths.tolist()):
                proposed.append(row[:n])
            for window, tokens, said, given in zip(windows, proposed, own, logits):
                window.keep(tokens, said, given, self.target.eos_ids)
        tokens = [window.tokens for window in windows]
        given = [window.logits for window in windows]
        return replace(
            _chains(tokens, given, self.target), passes=passes, tokens_read=read
        )

    def move(self, source: int, to: int) -> None:
        self.session.move(source, to)
        self.drafter.move(source, to)


class _Growing:
    """A row's window while it is drafted and verified."""

    def __init__(self, row: Row, limit: int):
        self.row = Row(row.noise, list(row.prefix), row.position, sampling=row.sampling)
        self.limit = limit
        """Maximum number of tokens."""
        self.tokens = list[int]()
        self.logits = list[Tensor]()
        """Logits [V] that each of `tokens` was picked from."""

    def keep(
        self, proposed: list[int], said: list[int], logits: Tensor, eos: frozenset[int]
    ) -> None:
        """Keep the proposed tokens that the model predicts too, and the model's next token. `said`
        are the model's tokens and `logits` [W + 1, V] its logits."""
        n = next(
            (i for i, token in enumerate(proposed) if token != said[i]), len(proposed)
        )
        kept = said[: min(n + 1, self.limit - len(self.tokens))]
        ends = (i for i, token in enumerate(kept, 1) if token in eos)
        end = next(ends, None)
        if end is not None:
            kept = kept[:end]
            self.limit = len(self.tokens) + end
        self.tokens += kept
        self.logits += logits[: len(kept)]
        self.row.prefix += kept
        self.row.position += len(kept)
        self.row.ahead += len(kept)


@dataclass(frozen=True)
class Horizontal(DrafterSpec):
    """Draft the first tokens of a window with a and later ones, which are accepted less often, with
    b, which may be cheaper: `a:4+b` (cascade speculative drafting, Chen 2023, section 3.2)."""

    first: DrafterSpec
    count: int
    then: DrafterSpec
    name = "horizontal"

    def __post_init__(self) -> None:
        if self.count < 1:
            raise InputError(
                f"{self}: the first drafter gives {self.count} tokens; name 1 or more"
            )
        for part in (self.first, self.then):
            if part.branches:
                raise InputError(
                    f"{self}: {part} proposes trees; combine drafters of chains"
                )
        if self.then.needs & Sources.STATES:
            raise InputError(
                f"{self}: {self.then} drafts from the target's own states only; name "
                "it first"
            )

    @cached_property
    def needs(self) -> Sources:
        return self.first.needs | self.then.needs

    @cached_property
    def offers(self) -> Parts:
        return (self.first.offers | self.then.offers) & Parts.PROBS

    @property
    def fitted(self) -> tuple[TrainedPart, ...]:
        return self.first.fitted + self.then.fitted

    def relocated(self, path: Callable[[str], str]) -> Self:
        return replace(
            self, first=self.first.relocated(path), then=self.then.relocated(path)
        )

    def check(self, target: LM, fingerprints: Callable[[], Mapping[str, str]]) -> None:
        self.first.check(target, fingerprints)
        self.then.check(target, fingerprints)

    def features(self, target: LM) -> tuple[int | None, ...]:
        return self.first.features(target)

    def models(self, setup: DrafterSetup) -> list[LM]:
        setup = replace(setup, alone=False)
        return self.first.models(setup) + self.then.models(setup)

    def build(self, setup: DrafterSetup) -> Drafter:
        setup = replace(setup, alone=False)
        parts = self.first.build(setup), self.then.build(setup)
        return _HorizontalDrafter(*parts, self, setup.target)

    def __str__(self) -> str:
        return f"{self.first}:{self.count}+{self.then}"


class _HorizontalDrafter(Drafter):
    def __init__(self, first: Drafter, then: Drafter, spec: Horizontal, target: LM):
        self.first = first
        self.then = then
        self.spec = spec
        self.target = target

    def propose(self, ctx: Context, room: Sequence[int]) -> Draft:
        narrow = replace(ctx, window=min(ctx.window, self.spec.count))
        begun = self.first.propose(narrow, room)
        tokens = [
            row[:n] for row, n in zip(begun.tokens.tolist(), begun.lengths.tolist())
        ]
        rows = []
        left = []
        for row, drafted, most in zip(ctx.rows, tokens, room):
            n = len(drafted)
            ended = bool(drafted) and drafted[-1] in self.target.eos_ids
            begun_row = Row(row.noise, row.prefix + drafted, row.position + n, ahead=n)
            begun_row.sampling = row.sampling
            rows.append(begun_row)
            left.append(1 if ended else min(most, ctx.window + 1) - n)
        rest = self.then.propose(replace(ctx, rows=rows), left)
        return self._joined(begun, rest, tokens)

    def _joined(self, begun: Draft, rest: Draft, first: list[list[int]]) -> Draft:
        """Return the windows that start with the `first` tokens, proposed in `begun`, and end with
        those of `rest`."""
        later = [row[:n] for row, n in zip(rest.tokens.tolist(), rest.lengths.tolist())]
        logits = None
        if Parts.PROBS in self.spec.offers:
            logits = []
            for b, (tokens, more) in enumerate(zip(first, later)):
                logits.append(
                    self._picked_from(begun, b, tokens)
                    + self._picked_from(rest, b, more)
                )
        read = [draft.tokens_read or [0] * len(first) for draft in (begun, rest)]
        return replace(
            _chains([a + b for a, b in zip(first, later)], logits, self.target),
            passes=begun.passes + rest.passes,
            tokens_read=[a + b for a, b in zip(*read)],
        )

    def _picked_from(self, draft: Draft, row: int, tokens: list[int]) -> list[Tensor]:
        """Return the logits [V] that each of a row's tokens was picked from. The logits of a token
        proposed with probability 1 are 0 for the token and −inf elsewhere."""
        if draft.logits is not None:
            return list(draft.logits[row, : len(tokens)])
        size = self.target.vocab_size
        blank = torch.full((len(tokens), size), -torch.inf, device=self.target.device)
        return list(blank.scatter(1, draft.tokens[row, : len(tokens), None], 0.0))

    def move(self, source: int, to: int) -> None:
        self.first.move(source, to)
        self.then.move(source, to)

    def observe(
        self, ctx: Context, reading: Reading, verdicts: Sequence[Verdict]
    ) -> None:
        self.first.observe(ctx, reading, verdicts)
        self.then.observe(ctx, reading, verdicts)


def _chains(
    tokens: Sequence[list[int]], logits: Sequence[list[Tensor]] | None, target: LM
) -> Draft:
    """Return chains of these tokens, with the logits [V] that each token was picked from."""
    grown = [GrowingTree.chain(row) for row in tokens]
    width = max(map(len, tokens), default=0)
    given = None
    if logits is not None and width:
        blank = torch.zeros(target.vocab_size, device=target.device)
        padded = [[*row, *[blank] * (width - len(row))] for row in logits]
        given = torch.stack(list(map(torch.stack, padded)))
    return as_draft(grown, target.device, given, trees=False)
