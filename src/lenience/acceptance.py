"""What an acceptance rule is: terms that accept drafted tokens, the strict ones among them, and how terms join.

`a|b` accepts what either accepts, `a&b` what both accept. The correction is the strict term's; where there is none it is
drawn from the target's own distribution.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from lenience.core import spec
from lenience.core.context import Context
from lenience.core.errors import InputError
from lenience.core.noise import race, uniform
from lenience.core.types import Draft, Reading, Verdict


@dataclass(frozen=True)
class Term:
    """One named rule: which drafted tokens it accepts, and what follows them."""

    name: ClassVar[str]
    strict: ClassVar[bool] = False
    alone: ClassVar[bool] = False
    """Whether it cannot be joined with others, as it looks ahead or decides by a distribution of its own."""
    samples: ClassVar[bool] = False
    """Whether it has no meaning for greedy decoding."""
    looks_ahead: ClassVar[bool] = False
    """Whether each window needs draws of its own, see `Context.anew`."""

    def accepts(self, draft: Draft, reading: Reading, ctx: Context) -> Tensor:
        """[B, W] bool: for each drafted position, whether its token is accepted there."""
        raise NotImplementedError

    def best(self, draft: Draft, reading: Reading, ctx: Context) -> Tensor:
        """[B, W + 1]: when greedy, the token that follows after 0 … W accepted ones. Here: the target's most probable."""
        return reading.best

    def follow(self, kept: Tensor, draft: Draft, reading: Reading, ctx: Context) -> Tensor:
        """[B]: when sampling, the token after `kept` [B] accepted ones: a correction, or the bonus where all are kept. Here:
        from the target's own distribution, by a draw that is independent of the one that picked the rejected token."""
        return race(ctx.probs(at(reading.logits, kept)), follow_keys(kept, draft, ctx))

    def check(self, fingerprints: Callable[[], dict[str, str]], sizes: dict[str, int]) -> None:
        """Raise InputError where a head of this rule cannot run on models of these fingerprints and hidden sizes."""

    @property
    def reads_draft(self) -> bool:
        """Whether the draft's hidden states are needed."""
        return False

    @property
    def reads_target(self) -> bool:
        """Whether the target's hidden states are needed."""
        return False

    @property
    def layer(self) -> int | None:
        """After which of the target's layers the states are that it reads; None after the final norm."""
        return None

    def __call__(self, draft: Draft, reading: Reading, ctx: Context) -> list[Verdict]:
        return AnyOf((self,))(draft, reading, ctx)

    def __str__(self) -> str:
        return spec.show(self.name, self)


@dataclass(frozen=True)
class Exact(Term):
    """Keep a drafted token where the target picks the same (Stern 2018; Xia 2023). When sampling, the target's token is
    drawn and compared, so that the output is plain sampling's with the same seed, whatever was drafted."""

    name = "exact"
    strict = True

    def accepts(self, draft: Draft, reading: Reading, ctx: Context) -> Tensor:
        drawn = reading.best[:, :-1] if ctx.greedy else ctx.draw(reading.logits[:, :-1])
        return drawn == draft.tokens

    def follow(self, kept: Tensor, draft: Draft, reading: Reading, ctx: Context) -> Tensor:
        keys = ctx.keys(draft.width + 1, "token", device=kept.device)
        return race(ctx.probs(at(reading.logits, kept)), at(keys, kept))


@dataclass(frozen=True)
class Speculative(Term):
    """Speculative sampling (Leviathan 2023, algorithm 1; Chen 2023): accept with probability min(1, target/draft), and
    correct from the normalised positive part of target − draft. Lossless; the same as `exact` when greedy."""

    name = "speculative"
    strict = True

    def accepts(self, draft: Draft, reading: Reading, ctx: Context) -> Tensor:
        if ctx.greedy:
            return reading.best[:, :-1] == draft.tokens
        return accept_ratio(ctx.probs(reading.logits[:, :-1]), draft, ctx)

    def follow(self, kept: Tensor, draft: Draft, reading: Reading, ctx: Context) -> Tensor:
        return correct(ctx.probs(at(reading.logits, kept)), 1.0, kept, draft, ctx)


def accept_ratio(aim: Tensor, draft: Draft, ctx: Context, factor: float = 1.0) -> Tensor:
    """[B, W] bool: accept each drafted token with probability min(1, aim / (factor · draft)), of the distribution `aim`
    [B, W, V]."""
    if draft.logits is None:
        return torch.zeros_like(draft.proposed)
    chance = uniform(ctx.keys(draft.width, "accept", device=aim.device))  # [B, W]
    drafted = of(ctx.probs(draft.logits), draft.tokens).double() * factor
    # chance < aim / drafted, without the division: a token that the target forbids is never accepted
    return chance * drafted < of(aim, draft.tokens).double()


def correct(aim: Tensor, share: float | Tensor, kept: Tensor, draft: Draft, ctx: Context) -> Tensor:
    """[B]: the token after `kept` [B] ones, drawn from the normalised positive part of share · aim − draft, where `aim` [B, V]
    is the distribution there; from `aim` itself where the window was kept whole."""
    if draft.logits is None:
        return race(aim, follow_keys(kept, draft, ctx))
    drafted = ctx.probs(at(draft.logits, kept.clamp(max=draft.width - 1)))
    rest = (share * aim - drafted).clamp(min=0)
    # a window kept whole has a bonus from the target itself; so have equal distributions, rejected by rounding alone
    whole = (kept == draft.lengths) | ~rest.any(-1)
    return race(torch.where(whole[:, None], aim.to(rest.dtype), rest), follow_keys(kept, draft, ctx))


def follow_keys(kept: Tensor, draft: Draft, ctx: Context) -> Tensor:
    """[B]: what the token after the kept ones is drawn with; a bonus is drawn as plain decoding draws."""
    n, device = draft.width + 1, kept.device
    correction, token = (ctx.keys(n, purpose, device=device) for purpose in ("correction", "token"))
    return torch.where(kept == draft.lengths, at(token, kept), at(correction, kept))


@dataclass(frozen=True)
class Lenient(Term):
    """A term that accepts more than a strict one would. What it accepts may be limited; where a limit leaves the decision to
    the strict rule, that is the strict term of the whole rule or, where it names none, `exact` when greedy and
    `speculative` when sampling."""

    floor: float = field(default=0.0, kw_only=True)
    """Never accept a token to which the target gives a lower probability."""
    budget: int | None = field(default=None, kw_only=True)
    """After so many lenient acceptances in a request the strict rule decides."""
    begin: str = field(default="", kw_only=True)
    end: str = field(default="", kw_only=True)
    """Only between these two texts, such as <think> and </think>; outside the strict rule decides."""
    joins: ClassVar[bool] = False
    """Whether alone it means the strict rule or this one."""
    bounds: ClassVar[Mapping[str, tuple[float, float]]] = {}
    """The least and the largest value of its fields; one that is None has none."""

    def __post_init__(self) -> None:
        for what, (least, most) in {**self.bounds, "floor": (0, 1), "budget": (0, math.inf)}.items():
            value = getattr(self, what)
            if isinstance(value, int) and abs(value) >= 2**31:
                raise InputError(f"{self.name}'s {what} {value}: must fit into 32 bits")
            if value is not None and not least <= value <= most:
                limits = f"at least {least:g}" + (f" and at most {most:g}" if most < math.inf else "")
                raise InputError(f"{self.name}'s {what} {value:g}: must be {limits}")
        if bool(self.begin) != bool(self.end) or (self.begin and self.begin == self.end):
            raise InputError(f"{self.name}: begin and end mark a span together; give both, and not the same text")

    def ask(self, draft: Draft, reading: Reading, ctx: Context, exact: Tensor) -> tuple[Tensor, Tensor | None]:
        """[B, W]: what is accepted, where the strict rule accepts `exact`; and the logits of a judge's scores."""
        return self.accepts(draft, reading, ctx), None

    def defers(self, draft: Draft, reading: Reading, ctx: Context) -> Tensor | None:
        """[B, W] bool: where the strict rule decides; None for nowhere."""
        return ~ctx.inside(self.begin, self.end, draft.tokens) if self.begin else None


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


def at(values: Tensor, i: Tensor) -> Tensor:
    """[B, m, …] and an index [B] → [B, …]."""
    return values[torch.arange(len(i), device=i.device), i]


def of(values: Tensor, tokens: Tensor) -> Tensor:
    """[B, W, V] and tokens [B, W] → the tokens' values [B, W]."""
    return values.gather(2, tokens[..., None])[..., 0]
