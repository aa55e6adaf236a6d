"""Rules parsed from their specs."""

from __future__ import annotations

from lenience.core import spec
from lenience.core.errors import InputError
from lenience.core.protocols import Rule
from lenience.rules.base import Term
from lenience.rules.baselines import is_baseline
from lenience.rules.combine import AllOf, AnyOf, as_rule
from lenience.rules.registry import RULES

ELSEWHERE = {
    "all": "stands for every rule in a comparison alone; name one",
    "certified": "write certified:RUN, with a run folder that has a certificate",
}
"""Hints for names that are valid elsewhere but are no rules."""


def parse_rule(rule: str | Term | Rule) -> Rule:
    """Return the rule for a spec, such as "topk:3" or "judge:runs/gsm8k/judge@0.9", or for a single
    term. A Rule is returned unchanged. Raises InputError for a wrong spec."""
    if isinstance(rule, str):
        return parse_spec(rule)
    if isinstance(rule, Term):
        return as_rule(rule)
    if not isinstance(rule, Rule):
        raise InputError(
            f"rule {rule!r}: is neither a spec nor a rule; subclass "
            "lenience.core.protocols.Rule"
        )
    return rule


def parse_spec(text: str) -> AnyOf:
    """Return the rule for a spec. Raises InputError for a wrong spec."""
    if text in ELSEWHERE:
        raise InputError(f"rule {text!r}: {ELSEWHERE[text]}")
    try:
        return AnyOf(tuple(map(_part, spec.split(text, "|"))))
    except InputError as error:
        raise InputError(f"rule {text!r}: {error}") from None


def _part(text: str) -> AllOf:
    terms = [spec.parse_term(term, "rule", RULES) for term in spec.split(text, "&")]
    return AllOf(tuple(terms))


def parts(rule: str) -> tuple[AllOf, ...]:
    """Return the alternatives of a rule's spec; none for a baseline. Raises InputError as
    `parse_spec` does."""
    return () if is_baseline(rule) else parse_spec(rule).parts


def terms(rule: str) -> tuple[Term, ...]:
    """Return the terms of a rule's spec; none for a baseline. Raises InputError as `parse_spec`
    does."""
    return () if is_baseline(rule) else parse_spec(rule).terms
