"""Inputs of rules: the draft's distribution, and parameters of requests."""

from __future__ import annotations

from typing import Any

from lenience.core.errors import InputError
from lenience.core.needs import Parts
from lenience.core.protocols import Rule
from lenience.rules.combine import AnyOf
from lenience.rules.lossless import is_lossless
from lenience.rules.mixtures import Ensemble


def compares_distributions(rule: Rule) -> bool:
    """Return True if a rule depends on the draft's distribution. This includes ensemble, which
    without it would take the drafted tokens as certain."""
    terms = rule.terms if isinstance(rule, AnyOf) else ()
    return Parts.PROBS in rule.needs.window or any(
        isinstance(term, Ensemble) for term in terms
    )


def check_request(rule: AnyOf, params: Any) -> None:
    """Raise InputError if a rule cannot decide with a request's sampling parameters."""
    if is_lossless(rule) or not hasattr(params, "temperature"):
        return
    for head in rule.heads:
        head.check_temperature(params.temperature)
    if params.min_p:
        raise InputError(
            f"min_p {params.min_p}: cannot go with rule {rule}; leave it out"
        )
    greedy = params.temperature == 0
    if greedy and rule.needs.sampling:
        raise InputError(f"rule {rule}: has no greedy form; give a temperature above 0")
    if greedy and compares_distributions(rule):
        raise InputError(
            f"rule {rule}: compares the draft's distribution, which the engine keeps for "
            'sampled requests alone; give a temperature above 0, or the dial "exact"'
        )
