"""The rules by name, and a rule from its spec."""

from __future__ import annotations

import os

from lenience.core import spec
from lenience.core.errors import InputError
from lenience.core.protocols import Rule
from lenience.rules.base import Term
from lenience.rules.combine import AllOf, AnyOf, as_rule
from lenience.rules.judge import Judge
from lenience.rules.lenient import (
    Ensemble,
    Fly,
    Fuzzy,
    GuardedKL,
    Lenience,
    Mentored,
    Random,
    Rollback,
    TopK,
    Typical,
)
from lenience.rules.strict import Block, Exact, Speculative

RULES: dict[str, type[Term]] = {
    term.name: term
    for term in (
        Exact,
        Speculative,
        Block,
        Lenience,
        TopK,
        Typical,
        Rollback,
        Fuzzy,
        GuardedKL,
        Ensemble,
        Fly,
        Mentored,
        Random,
        Judge,
    )
}
"""A rule is added here, and is then known to specs, comparisons and the property tests."""
FORBID = "LENIENCE_FORBID"
BASELINES = ("target", "draft")
"""Stand in place of a rule for decoding with that model alone."""
ELSEWHERE = {
    "all": "stands for every rule in a comparison alone; name one",
    "certified": "write certified:RUN, with a run folder that has a certificate",
}
"""What people write for a rule that is none."""


def parse_rule(rule: str | Term | Rule) -> Rule:
    """A rule from its spec, such as "topk:3" or "judge:runs/gsm8k/judge@0.9", or from a single
    term; a Rule is returned as it is. Raises InputError that names what is wrong with the spec."""
    if isinstance(rule, str):
        return parse_spec(rule)
    if isinstance(rule, Term):
        return as_rule(rule)
    if not isinstance(rule, Rule):
        raise InputError(
            f"rule {rule!r}: is neither a spec nor a rule; derive its class from "
            "lenience.core.protocols.Rule"
        )
    return rule


def parse_spec(text: str) -> AnyOf:
    """A rule from its spec. Raises InputError that names what is wrong with it."""
    if text in ELSEWHERE:
        raise InputError(f"rule {text!r}: {ELSEWHERE[text]}")
    try:
        return AnyOf(tuple(_part(part) for part in spec.split(text, "|")))
    except InputError as error:
        raise InputError(f"rule {text!r}: {error}") from None


def _part(text: str) -> AllOf:
    terms = [spec.parse_term(term, "rule", RULES) for term in spec.split(text, "&")]
    return AllOf(tuple(terms))


def is_lossless(rule: Rule) -> bool:
    """Whether a rule keeps the target's own output, or its distribution."""
    return isinstance(rule, AnyOf) and all(term.is_strict for term in rule.terms)


def refuse_forbidden(rule: Rule | str) -> None:
    """Raise InputError for a rule that is not lossless, or the draft alone, where the environment's
    LENIENCE_FORBID=1 forbids it: a guard for machines whose text becomes training data."""
    forbids = os.environ.get(FORBID, "0") not in ("", "0")
    lossless = rule == "target" if isinstance(rule, str) else is_lossless(rule)
    if forbids and not lossless:
        raise InputError(
            f"rule {rule}: is not lossless, and {FORBID}=1 forbids that here; decode by exact or "
            "unset it"
        )


def terms(rule: str) -> tuple[Term, ...]:
    """The terms of a rule's spec, none for a model alone. Raises InputError as `parse_spec`
    does."""
    return () if rule in BASELINES else parse_spec(rule).terms
