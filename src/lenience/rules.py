"""Acceptance rules. A rule is data: a frozen dataclass whose fields are its spec, see lenience.spec.

`a|b` accepts what either accepts; the correction is the strict member's, and is drawn from the target's own distribution
where there is none.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from lenience import spec
from lenience.core import Context, Draft, Reading, Rule, Verdict, race, uniform
from lenience.errors import InputError
from lenience.heads import Head, load_head


@dataclass(frozen=True)
class Term:
    """One named rule. Subclasses say which drafted tokens they accept; strict ones also what follows a rejection."""

    name: ClassVar[str]
    strict: ClassVar[bool] = False

    def accepts(self, draft: Draft, reading: Reading, ctx: Context) -> Tensor:
        """[B, W] bool: for each drafted position, whether its token is accepted there."""
        raise NotImplementedError

    def follow(self, kept: Tensor, draft: Draft, reading: Reading, ctx: Context) -> Tensor:
        """[B]: the token after `kept` [B] accepted ones: a correction, or the bonus where all are kept. Here: from the target's
        own distribution, by a draw that is independent of the one that picked the rejected token. When greedy it is the
        target's most probable one, and this is not asked."""
        return race(ctx.probs(_at(reading.logits, kept)), self.keys(kept, draft, ctx))

    def keys(self, kept: Tensor, draft: Draft, ctx: Context) -> Tensor:
        """[B]: what the token after the kept ones is drawn with; a bonus is drawn as plain decoding draws."""
        n, device = draft.width + 1, kept.device
        correction, token = (ctx.keys(n, purpose, device=device) for purpose in ("correction", "token"))
        return torch.where(kept == draft.lengths, _at(token, kept), _at(correction, kept))

    def check(self, fingerprints: Callable[[], dict[str, str]], sizes: dict[str, int]) -> None:
        """Raise InputError where a head of this rule cannot run on models of these fingerprints and hidden sizes."""

    @property
    def reads_draft(self) -> bool:
        """Whether the draft's hidden states are needed."""
        return False

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

    def keys(self, kept: Tensor, draft: Draft, ctx: Context) -> Tensor:
        return _at(ctx.keys(draft.width + 1, "token", device=kept.device), kept)


@dataclass(frozen=True)
class Speculative(Term):
    """Speculative sampling (Leviathan 2023, algorithm 1; Chen 2023): accept with probability min(1, target/draft), and
    correct from the normalised positive part of target − draft. Lossless; the same as `exact` when greedy."""

    name = "speculative"
    strict = True

    def accepts(self, draft: Draft, reading: Reading, ctx: Context) -> Tensor:
        if draft.logits is None:
            return torch.zeros_like(draft.proposed)
        target = _of(ctx.probs(reading.logits[:, :-1]), draft.tokens)
        drafted = _of(ctx.probs(draft.logits), draft.tokens)
        chance = uniform(ctx.keys(draft.width, "accept", device=target.device))  # [B, W]
        # chance < target / drafted, without the division: a token that the target forbids is never accepted
        return chance * drafted.double() < target.double()

    def follow(self, kept: Tensor, draft: Draft, reading: Reading, ctx: Context) -> Tensor:
        if draft.logits is None:
            return super().follow(kept, draft, reading, ctx)
        target = ctx.probs(_at(reading.logits, kept))  # [B, V]
        drafted = ctx.probs(_at(draft.logits, kept.clamp(max=draft.width - 1)))
        rest = (target - drafted).clamp(min=0)
        # a window kept whole has a bonus from the target itself; so have equal distributions, rejected by rounding alone
        whole = (kept == draft.lengths) | ~rest.any(-1)
        return race(torch.where(whole[:, None], target, rest), self.keys(kept, draft, ctx))


@dataclass(frozen=True)
class TopK(Term):
    """Accept a drafted token that is among the target's k most probable ones at its own position (Bachmann 2025)."""

    k: int
    name = "topk"

    def __post_init__(self) -> None:
        if self.k < 1:
            raise InputError(f"rule topk:{self.k}: k must be at least 1")

    def accepts(self, draft: Draft, reading: Reading, ctx: Context) -> Tensor:
        logits = reading.logits[:, :-1]
        best = logits.topk(min(self.k, logits.shape[-1])).indices  # [B, W, k]; of equal logits it names as many as fit
        return (best == draft.tokens[..., None]).any(-1) & ctx.allows(logits, draft.tokens)


@dataclass(frozen=True)
class Judge(Term):
    """Accept a mismatch that a fitted head scores at least `threshold` (AutoJudge, Garipov 2025; Judge Decoding, Bachmann
    2025). Alone it means `exact|judge:…` when greedy and `speculative|judge:…` when sampling."""

    path: str
    threshold: float | None = None
    """None: the one that the head was saved with."""
    unchecked: bool = False
    """Run the head on models other than those it was fitted to."""
    name = "judge"

    @cached_property
    def head(self) -> Head:
        return load_head(self.path)

    def __post_init__(self) -> None:
        if self.threshold is not None and not 0 <= self.threshold <= 2:
            raise InputError(f"judge's threshold {self.threshold}: a score is a probability, above 1 nothing is accepted")

    def check(self, fingerprints: Callable[[], dict[str, str]], sizes: dict[str, int]) -> None:
        self.head.check({} if self.unchecked else fingerprints(), sizes)

    @property
    def reads_draft(self) -> bool:
        return "draft" in self.head.inputs.models

    def accepts(self, draft: Draft, reading: Reading, ctx: Context) -> Tensor:
        return self.judge(draft, reading, ctx)[0]

    def judge(self, draft: Draft, reading: Reading, ctx: Context) -> tuple[Tensor, Tensor]:
        """[B, W]: what is accepted, and the scores' logits."""
        logits = self.head.window_logits(draft, reading)
        threshold = self.head.threshold if self.threshold is None else self.threshold
        return (logits >= _logit(threshold)) & ctx.allows(reading.logits[:, :-1], draft.tokens), logits


@dataclass(frozen=True)
class AnyOf:
    """Accept what any of the terms accepts: `exact|judge:…`."""

    terms: tuple[Term, ...]

    def __post_init__(self) -> None:
        if sum(term.strict for term in self.terms) > 1:
            raise InputError(f"{self}: joins two strict rules, and only one can say what follows a rejection")

    def check(self, fingerprints: Callable[[], dict[str, str]], sizes: dict[str, int]) -> None:
        for term in self.terms:
            term.check(fingerprints, sizes)

    @property
    def reads_draft(self) -> bool:
        return any(term.reads_draft for term in self.terms)

    def __call__(self, draft: Draft, reading: Reading, ctx: Context) -> list[Verdict]:
        strict = next((term for term in self.terms if term.strict), None)
        terms = self.terms
        if strict is None and any(isinstance(term, Judge) for term in terms):
            strict = Exact() if ctx.greedy else Speculative()
            terms = (strict, *terms)
        exact = (strict or Exact()).accepts(draft, reading, ctx)
        accepted, logits = exact if strict else torch.zeros_like(exact), None
        for term in terms if draft.width else ():
            if isinstance(term, Judge):
                accepts, judged = term.judge(draft, reading, ctx)
                accepted, logits = accepted | accepts, judged if logits is None else logits
            elif term is not strict:
                accepted = accepted | term.accepts(draft, reading, ctx)
        if ctx.greedy:
            follow = reading.best
        else:
            kept = (accepted & draft.proposed).cumprod(1).sum(1)  # [B]
            last = (strict or terms[0]).follow(kept, draft, reading, ctx)
            follow = last[:, None].expand(-1, draft.width + 1)
        columns = [draft.lengths[:, None], follow, draft.tokens, exact, accepted, *([] if logits is None else [logits])]
        table = torch.cat(columns, 1)  # of float32, where there are a judge's logits: it holds ids below 2²⁴
        return [_verdict(row, draft.width) for row in table.tolist()]  # the rule's one synchronisation

    def __str__(self) -> str:
        return "|".join(str(term) for term in self.terms)


def _verdict(row: list[float], width: int) -> Verdict:
    """From a row's length, what follows after 0 … W kept tokens, the tokens, which of them the strict rule and this one
    accept, and perhaps the logits of a judge's scores."""
    n = int(row[0])
    drafted, exact, accepted, logits = (row[begin : begin + n] for begin in (2 + i * width for i in range(1, 5)))
    kept = accepted.index(0) if 0 in accepted else n
    asked: list[float | None] = [None] * n if not logits else [None if ok else _score(x) for ok, x in zip(exact, logits)]
    return Verdict([int(token) for token in drafted], kept, int(row[1 + kept]), [bool(ok) for ok in exact], asked)


def _logit(threshold: float) -> float:
    return math.copysign(math.inf, threshold - 0.5) if not 0 < threshold < 1 else math.log(threshold / (1 - threshold))


def _score(logit: float) -> float:
    return 1 / (1 + math.exp(-logit)) if logit > -700 else 0.0


def _at(values: Tensor, i: Tensor) -> Tensor:
    """[B, m, …] and an index [B] → [B, …]."""
    return values[torch.arange(len(i), device=i.device), i]


def _of(values: Tensor, tokens: Tensor) -> Tensor:
    """[B, W, V] and tokens [B, W] → the tokens' values [B, W]."""
    return values.gather(2, tokens[..., None])[..., 0]


RULES: dict[str, type[Term]] = {term.name: term for term in (Exact, Speculative, TopK, Judge)}


def parse_rule(rule: str | Rule) -> Rule:
    """A rule from its spec, such as "topk:3" or "judge:runs/gsm8k/judge@0.9"; a Rule is returned as it is.

    Raises InputError that names what is wrong with the spec.
    """
    if not isinstance(rule, str):
        return rule
    try:
        terms = [spec.parse_term(part, "rule", RULES) for part in spec.split(rule, "|")]
        return terms[0] if len(terms) == 1 else AnyOf(tuple(terms))
    except InputError as error:
        raise InputError(f"rule {rule!r}: {error}") from None


ALONE = ("target", "draft")
"""Stand in place of a rule for decoding with that model alone."""


def terms(text: str) -> tuple[Term, ...]:
    """The terms of a rule's spec, none for a model alone. Raises InputError as `parse_rule` does."""
    rule = None if text in ALONE else parse_rule(text)
    return rule.terms if isinstance(rule, AnyOf) else (rule,) if isinstance(rule, Term) else ()
