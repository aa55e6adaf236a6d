"""What decoding may be told, and whether it can be done."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, TypedDict

from lenience.core.errors import InputError
from lenience.core.profile import Profile
from lenience.core.protocols import Rule
from lenience.drafting.stops import Stop, parse_stop
from lenience.heads.head import Learned
from lenience.rules.registry import terms


def learned(rule: str | Rule, stop: str | Stop = "fixed") -> list[Learned]:
    """The parts of a rule and of a stop condition that ask a fitted head. Raises InputError for a wrong spec."""
    return [one for one in (*terms(rule), parse_stop(stop)) if isinstance(one, Learned)]


class Options(TypedDict, total=False):
    """What `Pair.generate` takes besides the prompt; `Pair.stream` says what each means and its default."""

    rule: str | Rule
    window: int | Literal["auto"]
    stop: str | Stop
    max_new_tokens: int
    temperature: float
    top_k: int | None
    top_p: float | None
    seed: int
    stop_strings: str | Sequence[str]
    profile: Profile | None


def check_options(
    window: int | Literal["auto"] = 8,
    max_new_tokens: int = 256,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
    stop_strings: Sequence[str] = (),
) -> None:
    """Raise InputError for a value that no decoding can use."""
    if "" in stop_strings:
        raise InputError("stop_strings: an empty one would stop at once; leave it out")
    if not -(2**63) <= seed < 2**63:
        raise InputError(f"seed {seed}: must fit into 64 bits")
    if window != "auto" and (not isinstance(window, int) or window < 0):
        raise InputError(f'window {window}: must be 0 (no drafting) or more, or "auto"')
    if max_new_tokens < 1:
        raise InputError(f"max_new_tokens {max_new_tokens}: must be 1 or more")
    if temperature < 0 or not math.isfinite(temperature):
        raise InputError(f"temperature {temperature}: must be 0 (greedy) or more")
    if top_k is not None and top_k < 0:
        raise InputError(f"top_k {top_k}: must be 0 (off) or more")
    if top_p is not None and not 0 < top_p <= 1:
        raise InputError(f"top_p {top_p}: must be in (0, 1]")
