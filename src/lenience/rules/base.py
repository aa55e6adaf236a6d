"""What an acceptance rule is: terms that accept drafted tokens, the strict ones among them, and how terms join.

`a|b` accepts what either accepts, `a&b` what both accept. The correction is the strict term's; where there is none it is
drawn from the target's own distribution.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from lenience.core import spec
from lenience.core.context import Context
from lenience.core.errors import InputError
from lenience.core.noise import race
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
        from lenience.rules.combine import AnyOf

        return AnyOf((self,))(draft, reading, ctx)

    def __str__(self) -> str:
        return spec.show(self.name, self)


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


def at(values: Tensor, i: Tensor) -> Tensor:
    """[B, m, …] and an index [B] → [B, …]."""
    return values[torch.arange(len(i), device=i.device), i]


def of(values: Tensor, tokens: Tensor) -> Tensor:
    """[B, W, V] and tokens [B, W] → the tokens' values [B, W]."""
    return values.gather(2, tokens[..., None])[..., 0]
