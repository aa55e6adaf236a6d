"""The rules by name, and a rule from its spec."""

from __future__ import annotations

from lenience.core import spec
from lenience.core.errors import InputError
from lenience.core.protocols import Rule
from lenience.rules.base import Term
from lenience.rules.combine import AllOf, AnyOf
from lenience.rules.judge import Judge
from lenience.rules.lenient import Ensemble, Fly, Fuzzy, GuardedKL, Lenience, Mentored, Random, TopK, Typical
from lenience.rules.strict import Block, Exact, Speculative

RULES: dict[str, type[Term]] = {
    term.name: term
    for term in (
        Exact, Speculative, Block, Lenience, TopK, Typical, Fuzzy, GuardedKL, Ensemble, Fly, Mentored, Random, Judge
    )
}  # fmt: skip


def parse_rule(rule: str | Rule) -> Rule:
    """A rule from its spec, such as "topk:3" or "judge:runs/gsm8k/judge@0.9"; a Rule is returned as it is.

    Raises InputError that names what is wrong with the spec.
    """
    if not isinstance(rule, str):
        return rule
    try:
        parts = [_part(part) for part in spec.split(rule, "|")]
        return parts[0] if len(parts) == 1 and isinstance(parts[0], Term) else AnyOf(tuple(parts))
    except InputError as error:
        raise InputError(f"rule {rule!r}: {error}") from None


def _part(text: str) -> Term | AllOf:
    terms = tuple(spec.parse_term(term, "rule", RULES) for term in spec.split(text, "&"))
    return terms[0] if len(terms) == 1 else AllOf(terms)


ALONE = ("target", "draft")
"""Stand in place of a rule for decoding with that model alone."""


def terms(rule: str | Rule) -> tuple[Term, ...]:
    """The terms of a rule or of its spec, none for a model alone. Raises InputError as `parse_rule` does."""
    parsed = None if rule in ALONE else parse_rule(rule)
    return parsed.terms if isinstance(parsed, AnyOf) else (parsed,) if isinstance(parsed, Term) else ()
