"""How terms join into a rule, and the verdicts that a rule comes to."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from lenience.core.context import Context
from lenience.core.errors import InputError
from lenience.core.types import Draft, Reading, Verdict
from lenience.rules.base import Lenient, Term, at, of
from lenience.rules.strict import Exact, Speculative


@dataclass(frozen=True)
class AllOf:
    """Accept what all of the lenient terms accept: `judge:…&topk:4`."""

    terms: tuple[Term, ...]

    def __post_init__(self) -> None:
        for term in self.terms:
            if not isinstance(term, Lenient):
                raise InputError(f"{term} is a strict rule, which is joined by |, not by &")

    def __str__(self) -> str:
        return "&".join(str(term) for term in self.terms)


@dataclass(frozen=True)
class AnyOf:
    """Accept what any of the parts accepts: `exact|judge:…`. Raises InputError where parts cannot be joined."""

    parts: tuple[Term | AllOf, ...]

    def __post_init__(self) -> None:
        if sum(term.strict for term in self.terms) > 1:
            raise InputError(f"{self}: joins two strict rules, and only one can say what follows a rejection")
        for term in self.terms:
            if term.alone and len(self.terms) > 1:
                raise InputError(f"{self}: {term.name} decides by itself and cannot be joined with another rule")

    @cached_property
    def terms(self) -> tuple[Term, ...]:
        return tuple(term for part in self.parts for term in (part.terms if isinstance(part, AllOf) else (part,)))

    def check(self, fingerprints: Callable[[], dict[str, str]], sizes: dict[str, int]) -> None:
        for term in self.terms:
            term.check(fingerprints, sizes)
        if len(self._layers) > 1:
            raise InputError(f"{self}: its judges read states of different layers; fit them to the same one")

    @property
    def reads_draft(self) -> bool:
        return any(term.reads_draft for term in self.terms)

    @property
    def layer(self) -> int | None:
        return next(iter(self._layers), None)

    @property
    def _layers(self) -> set[int | None]:
        return {term.layer for term in self.terms if term.reads_target}

    @property
    def samples(self) -> bool:
        return any(term.samples for term in self.terms)

    @property
    def looks_ahead(self) -> bool:
        return any(term.looks_ahead for term in self.terms)

    def __call__(self, draft: Draft, reading: Reading, ctx: Context) -> list[Verdict]:
        named = next((term for term in self.terms if term.strict), None)
        strict = named or (Exact() if ctx.greedy else Speculative())
        exact = strict.accepts(draft, reading, ctx)  # [B, W]
        lenient = [term for term in self.terms if isinstance(term, Lenient)]
        if not lenient or not draft.width:
            accepted = exact if draft.kept_unasked is None else exact | draft.kept_unasked
            return _verdicts(draft, exact, accepted, None, self._follow(strict, accepted, draft, reading, ctx))
        asked = {term: self._ask(term, draft, reading, ctx, exact) for term in lenient}
        joined = bool(named) or any(term.joins for term in lenient)
        least = exact if joined else torch.zeros_like(exact)
        if draft.kept_unasked is not None:
            least = least | draft.kept_unasked
        accepted, used = self._spend({term: mask for term, (mask, _, _) in asked.items()}, exact, least, ctx)
        logits = next((logits for _, logits, _ in asked.values() if logits is not None), None)
        if joined:
            return _verdicts(draft, exact, accepted, logits, self._follow(strict, accepted, draft, reading, ctx))
        own = lenient[0] if len(lenient) == 1 else Term()
        follow = self._follow(own, accepted, draft, reading, ctx)
        off = [mask for term, (_, _, defers) in asked.items() if (mask := _deferred(term, defers, used)) is not None]
        if off:
            deferred = torch.stack(off).any(0)
            deferred = torch.cat([deferred, deferred[:, -1:]], 1)  # the bonus is the same either way
            if not ctx.greedy:
                kept = _kept(accepted, draft)
                deferred = at(deferred, kept)[:, None]
            follow = torch.where(deferred, self._follow(strict, accepted, draft, reading, ctx), follow)
        return _verdicts(draft, exact, accepted, logits, follow)

    def _ask(
        self, term: Lenient, draft: Draft, reading: Reading, ctx: Context, exact: Tensor
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """[B, W]: what a term accepts within its floor and its span, a judge's logits, and where it defers."""
        mask, logits = term.ask(draft, reading, ctx, exact)
        before = reading.logits[:, :-1]
        mask = mask & ctx.allows(before, draft.tokens)
        if term.floor:
            mask = mask & (of(ctx.logs(before), draft.tokens) >= math.log(term.floor))
        defers = term.defers(draft, reading, ctx)
        return (mask if defers is None else torch.where(defers, exact, mask)), logits, defers

    def _spend(self, masks: dict[Lenient, Tensor], exact: Tensor, least: Tensor, ctx: Context) -> tuple[Tensor, Tensor | None]:
        """[B, W]: what is accepted where the terms accept `masks` and their budgets last, `least` in any case; and how many
        lenient acceptances each row's request has before each position, None without a budget."""

        def combine(spent: int) -> Tensor:
            """What is accepted where budgets up to `spent` are used up."""
            accepted = least
            for part in self.parts:
                if isinstance(part, Lenient):
                    part = AllOf((part,))
                if isinstance(part, AllOf):
                    given = [term for term in part.terms if isinstance(term, Lenient)]
                    left = [exact if t.budget is not None and t.budget <= spent else masks[t] for t in given]
                    accepted = accepted | (left[0] if len(left) == 1 else torch.stack(left).all(0))
            return accepted

        accepted, used = combine(-1), None
        for budget in sorted({term.budget for term in masks if term.budget is not None}):
            used = ctx.used(exact.device)[:, None] + _before(accepted & ~exact)
            accepted = torch.where(used < budget, accepted, combine(budget))
        return accepted, None if used is None else ctx.used(exact.device)[:, None] + _before(accepted & ~exact)

    def _follow(self, term: Term, accepted: Tensor, draft: Draft, reading: Reading, ctx: Context) -> Tensor:
        """[B, W + 1]: what follows after 0 … W kept tokens; when sampling, of which only the one after those that are kept is
        right."""
        if ctx.greedy:
            return term.best(draft, reading, ctx)
        return term.follow(_kept(accepted, draft), draft, reading, ctx)[:, None].expand(-1, draft.width + 1)

    def __str__(self) -> str:
        return "|".join(str(part) for part in self.parts)


def _deferred(term: Lenient, defers: Tensor | None, used: Tensor | None) -> Tensor | None:
    """[B, W] bool: where the strict rule decides in a term's place, by its span and its budget; None for nowhere."""
    if term.budget is None or used is None:
        return defers
    spent = used >= term.budget
    return spent if defers is None else spent | defers


def _before(mask: Tensor) -> Tensor:
    """[B, W] bool → how many are true before each place."""
    return mask.cumsum(1) - mask.long()


def _kept(accepted: Tensor, draft: Draft) -> Tensor:
    """[B]: how many tokens are accepted before the first that is not."""
    return (accepted & draft.proposed).cumprod(1).sum(1)


def _verdicts(draft: Draft, exact: Tensor, accepted: Tensor, logits: Tensor | None, follow: Tensor) -> list[Verdict]:
    columns = [draft.lengths[:, None], follow, draft.tokens, exact, accepted, *([] if logits is None else [logits])]
    table = torch.cat(columns, 1)  # of float32, where there are a judge's logits: it holds ids below 2²⁴
    return [_verdict(row, draft.width) for row in table.tolist()]  # the rule's one synchronisation


def _verdict(row: Sequence[float], width: int) -> Verdict:
    """From a row's length, what follows after 0 … W kept tokens, the tokens, which of them the strict rule and this one
    accept, and perhaps the logits of a judge's scores."""
    n = int(row[0])
    drafted, exact, accepted, logits = (row[begin : begin + n] for begin in (2 + i * width for i in range(1, 5)))
    kept = next((i for i, ok in enumerate(accepted) if not ok), n)
    asked: list[float | None] = [None] * n if not logits else [None if ok else _score(x) for ok, x in zip(exact, logits)]
    return Verdict([int(token) for token in drafted], kept, int(row[1 + kept]), [bool(ok) for ok in exact], asked)


def _score(logit: float) -> float:
    return 1 / (1 + math.exp(-logit)) if logit > -700 else 0.0
