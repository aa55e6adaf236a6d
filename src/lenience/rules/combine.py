"""Rules made of terms, and their verdicts.

`a|b` accepts a token that either accepts, `a&b` a token that both accept. The correction is the
strict term's; without a strict term it is drawn from the target's own distribution.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, reduce
from operator import or_
from typing import Literal

import torch
from torch import Tensor

from lenience.core.context import Context
from lenience.core.errors import InputError
from lenience.core.needs import Needs, Parts
from lenience.core.types import Draft, Reading, Verdict
from lenience.heads.head import HeadReference
from lenience.rules.base import (
    Lenient,
    Term,
    gather_tokens,
    lacks_distribution,
    select_position,
)
from lenience.rules.strict import Exact, Speculative, accept_ratio


@dataclass(frozen=True)
class AllOf:
    """A conjunction of terms, which accepts the tokens that all terms accept: `judge:…&topk:4`. A
    single term stands for itself."""

    terms: tuple[Term, ...]

    def __post_init__(self) -> None:
        for term in self.terms:
            if term.is_strict and len(self.terms) > 1:
                raise InputError(
                    f"{term} is a strict rule, which combines by |, not by &"
                )

    @cached_property
    def lenient(self) -> list[Lenient]:
        return [term for term in self.terms if isinstance(term, Lenient)]

    def __str__(self) -> str:
        return "&".join(map(str, self.terms))


@dataclass(frozen=True)
class _Opinion:
    """Decisions of a lenient term on the windows."""

    accepted: Tensor
    """[B, W] bool: accepted tokens, within the term's floor and span."""
    logits: Tensor | None
    """[B, W]: logits of a judge's scores, if any."""
    defers: Tensor | None
    """[B, W] bool: True where the strict rule decides instead; None for nowhere."""


@dataclass(frozen=True)
class AnyOf:
    """A disjunction of parts, which accepts the tokens that any part accepts: `exact|judge:…`.
    Every rule parsed from a spec is an AnyOf; `str` returns its spec. Raises InputError for parts
    that cannot be combined."""

    parts: tuple[AllOf, ...]

    def __post_init__(self) -> None:
        if sum(term.is_strict for term in self.terms) > 1:
            raise InputError(
                f"{self}: combines two strict rules, and only one can give the token "
                "after a rejection"
            )
        for term in self.terms:
            if not term.composable and len(self.terms) > 1:
                raise InputError(
                    f"{self}: {term.name} decides alone and cannot be combined with "
                    "another rule"
                )

    @cached_property
    def terms(self) -> tuple[Term, ...]:
        return tuple(term for part in self.parts for term in part.terms)

    def with_terms(self, change: Callable[[Term], Term]) -> AnyOf:
        """Return the rule with each of its terms replaced by `change(term)`."""
        return AnyOf(
            tuple(AllOf(tuple(map(change, part.terms))) for part in self.parts)
        )

    def check(
        self, fingerprints: Callable[[], Mapping[str, str]], sizes: Mapping[str, int]
    ) -> None:
        for term in self.terms:
            term.check(fingerprints, sizes)
        try:
            _ = self.needs
        except InputError as error:
            raise InputError(f"{self}: {error}") from None

    @property
    def heads(self) -> tuple[HeadReference, ...]:
        """Return the trained heads that the rule uses."""
        return tuple(head for term in self.terms for head in term.heads)

    @cached_property
    def needs(self) -> Needs:
        """Return the inputs that the rule's terms require. Raises InputError, see `Needs`."""
        needs = reduce(or_, (term.needs for term in self.terms))
        if any(term.overshoot < math.inf for term in self._lenient):
            needs |= Needs(Parts.PROBS | Parts.DRAWS)
        return needs

    @property
    def verifies(self) -> Literal["down", "up"] | None:
        return self.terms[0].verifies if len(self.terms) == 1 else None

    @property
    def goes_on_as_target(self) -> bool:
        return all(term.goes_on_as_target for term in self.terms)

    @cached_property
    def _named_strict(self) -> Term | None:
        return next((term for term in self.terms if term.is_strict), None)

    def _strict(self, ctx: Context) -> Term:
        """Return the strict term, named or implied. On trees of chosen tokens `exact` replaces
        `speculative`, so that the target's own draw decides between siblings."""
        strict = self._named_strict or (Exact() if ctx.greedy else Speculative())
        return Exact() if ctx.on_trees and isinstance(strict, Speculative) else strict

    @cached_property
    def _lenient(self) -> list[Lenient]:
        return [term for part in self.parts for term in part.lenient]

    def __call__(self, draft: Draft, reading: Reading, ctx: Context) -> list[Verdict]:
        assert draft.parents is None, (
            "a rule reads chains; judge_trees hands it a tree's paths"
        )
        strict = self._strict(ctx)
        exact = strict.accepts(draft, reading, ctx)  # [B, W]
        if not self._lenient or not draft.width:
            accepted = (
                exact if draft.kept_unasked is None else exact | draft.kept_unasked
            )
            after = _next_tokens(strict, accepted, draft, reading, ctx)
            return _verdicts(draft, exact, accepted, after, None)
        opinions = {}
        for term in self._lenient:
            opinions[term] = self._opinion(term, draft, reading, ctx, exact)
        joined = bool(self._named_strict) or any(
            term.implies_strict for term in self._lenient
        )
        least = exact if joined else torch.zeros_like(exact)
        if draft.kept_unasked is not None:
            least = least | draft.kept_unasked
        accepted, used = self._within_budgets(opinions, exact, least, ctx)
        deferred = None if joined else _deferred(opinions, used)
        own = self._lenient[0] if len(self._lenient) == 1 else Term()
        decides = strict if joined else own
        after = _next_tokens(decides, accepted, draft, reading, ctx)
        if deferred is not None:
            deferred = _at_next_token(deferred, accepted, draft, ctx)
            strict_after = _next_tokens(strict, accepted, draft, reading, ctx)
            after = torch.where(deferred, strict_after, after)
        scores = next(
            (
                opinion.logits
                for opinion in opinions.values()
                if opinion.logits is not None
            ),
            None,
        )
        return _verdicts(draft, exact, accepted, after, scores)

    @staticmethod
    def _opinion(
        term: Lenient, draft: Draft, reading: Reading, ctx: Context, exact: Tensor
    ) -> _Opinion:
        """Query one term, given the tokens `exact` that the strict rule accepts."""
        accepted, logits = term.ask(draft, reading, ctx, exact)
        before = reading.logits[:, :-1]
        accepted = accepted & ctx.allowed(before, draft.tokens)
        if term.floor:
            log_probs = gather_tokens(ctx.log_probs(before), draft.tokens)
            accepted = accepted & (log_probs >= math.log(term.floor))
        if term.overshoot < math.inf:
            accepted = accepted & _within_overshoot(term, draft, before, ctx)
        defers = term.defers(draft, reading, ctx)
        if defers is not None:
            accepted = torch.where(defers, exact, accepted)
        return _Opinion(accepted, logits, defers)

    def _within_budgets(
        self,
        opinions: Mapping[Lenient, _Opinion],
        exact: Tensor,
        least: Tensor,
        ctx: Context,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the accepted tokens [B, W] bool while the terms' budgets last; tokens in `least`
        are accepted in any case. Return also the number of the request's lenient acceptances before
        each position [B, W]; None without a budget."""
        accepted = self._combined(opinions, exact, least, spent=-1)
        budgets = sorted({term.budget for term in opinions if term.budget is not None})
        if not budgets:
            return accepted, None
        before = ctx.lenient_used(exact.device)[:, None]
        for budget in budgets:
            used = before + _count_before(accepted & ~exact)
            over = self._combined(opinions, exact, least, spent=budget)
            accepted = torch.where(used < budget, accepted, over)
        return accepted, before + _count_before(accepted & ~exact)

    def _combined(
        self,
        opinions: Mapping[Lenient, _Opinion],
        exact: Tensor,
        least: Tensor,
        spent: int,
    ) -> Tensor:
        """Return the accepted tokens [B, W] bool if budgets of up to `spent` are used up."""
        accepted = least
        for part in self.parts:
            masks = []
            for term in part.lenient:
                masks.append(
                    exact
                    if term.budget is not None and term.budget <= spent
                    else opinions[term].accepted
                )
            if len(masks) == 1:
                accepted = accepted | masks[0]
            elif masks:
                accepted = accepted | torch.stack(masks).all(0)
        return accepted

    def __str__(self) -> str:
        return "|".join(map(str, self.parts))


def _within_overshoot(
    term: Lenient, draft: Draft, before: Tensor, ctx: Context
) -> Tensor:
    """Return [B, W] bool: the tokens within a term's `overshoot`, from the target's logits `before`
    [B, W, V]. When sampling, the draw is that of `accept_ratio`, so that a rule which accepts in
    proportion to the target accepts no less often."""
    if draft.logits is None:
        raise lacks_distribution(term)
    if not ctx.greedy:
        return accept_ratio(ctx.probs(before), draft, ctx, 1 / term.overshoot)
    target = gather_tokens(ctx.log_probs(before), draft.tokens)
    drafted = gather_tokens(ctx.log_probs(draft.logits), draft.tokens)
    return drafted <= target + math.log(term.overshoot)


def as_rule(term: Term) -> AnyOf:
    """Return a single term as a rule."""
    return AnyOf((AllOf((term,)),))


def _next_tokens(
    term: Term, accepted: Tensor, draft: Draft, reading: Reading, ctx: Context
) -> Tensor:
    """Return [B, W + 1]: the token after 0 … W accepted tokens. When sampling, only the token after
    the actual number of accepted tokens is valid."""
    if ctx.greedy:
        return term.greedy_next_tokens(draft, reading, ctx)
    token = term.next_token(_num_kept(accepted, draft), draft, reading, ctx)
    return token[:, None].expand(-1, draft.width + 1)


def _deferred(
    opinions: Mapping[Lenient, _Opinion], used: Tensor | None
) -> Tensor | None:
    """Return [B, W] bool: True where the strict rule decides because a term defers or its budget is
    used up; None if it decides nowhere."""
    masks = []
    for term, opinion in opinions.items():
        if opinion.defers is not None:
            masks.append(opinion.defers)
        if term.budget is not None and used is not None:
            masks.append(used >= term.budget)
    return torch.stack(masks).any(0) if masks else None


def _at_next_token(
    mask: Tensor, accepted: Tensor, draft: Draft, ctx: Context
) -> Tensor:
    """Return the mask [B, W] at the next token: [B, W + 1] when greedy, [B, 1] when sampling. The
    bonus takes the mask's last column, since both rules give the same bonus."""
    mask = torch.cat([mask, mask[:, -1:]], 1)
    if ctx.greedy:
        return mask
    return select_position(mask, _num_kept(accepted, draft))[:, None]


def _count_before(mask: Tensor) -> Tensor:
    """Return [B, W]: the number of True entries of a mask [B, W] before each position."""
    return mask.cumsum(1) - mask.long()


def _num_kept(accepted: Tensor, draft: Draft) -> Tensor:
    """Return [B]: the number of tokens accepted before the first rejection."""
    return (accepted & draft.proposed).cumprod(1).sum(1)


def _verdicts(
    draft: Draft, exact: Tensor, accepted: Tensor, after: Tensor, scores: Tensor | None
) -> list[Verdict]:
    """Return the verdicts on chains. `exact`, `accepted` and, with a judge, the logits of its
    `scores` are [B, W]. `after` [B, W + 1] is the token after 0 … W accepted tokens."""
    # one synchronisation with the device for all decisions of the rule
    rows = _pack(draft, exact, accepted, after, scores).tolist()
    return [_unpack(row, draft.width) for row in rows]


# A packed row, for a window of width W; positions beyond the draft's length are padding:
#
#     0      | 1 … W + 1      | W columns | W columns | W columns | W columns
#     length | next tokens    | drafted   | exact     | accepted  | logits of the judge's scores
#            | after 0 … W    | tokens    | 0 or 1    | 0 or 1    | (absent without a judge)
#
# With logits the row is float32, which holds token ids below 2²⁴ exactly.


def _pack(
    draft: Draft, exact: Tensor, accepted: Tensor, after: Tensor, scores: Tensor | None
) -> Tensor:
    """Return [B, 2 + 4 W], or [B, 2 + 5 W] with a judge's logits, laid out as above."""
    columns = [draft.lengths[:, None], after, draft.tokens, exact, accepted]
    if scores is not None:
        columns.append(scores)
    return torch.cat(columns, 1)


def _unpack(row: Sequence[float], width: int) -> Verdict:
    """Return the verdict of a packed row."""
    length = int(row[0])
    next_tokens = row[1 : width + 2]
    blocks = row[width + 2 :]
    drafted = blocks[:length]
    exact = blocks[width : width + length]
    accepted = blocks[2 * width : 2 * width + length]
    logits = blocks[3 * width : 3 * width + length]
    kept = next(
        (i for i, is_accepted in enumerate(accepted) if not is_accepted), length
    )
    scores: list[float | None] = [None] * length
    for i, logit in enumerate(logits):
        # a match has no score: whether a judge was queried there depends on later tokens
        scores[i] = None if exact[i] else _score(logit)
    return Verdict(
        drafted=list(map(int, drafted)),
        path=list(range(kept)),
        next_token=int(next_tokens[kept]),
        exact=list(map(bool, exact)),
        scores=scores,
    )


def _score(logit: float) -> float:
    return 1 / (1 + math.exp(-logit)) if logit > -700 else 0.0
