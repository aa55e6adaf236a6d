"""Registry of the rules by name."""

from __future__ import annotations

from lenience.rules.base import Term
from lenience.rules.judge import Judge
from lenience.rules.lenient import (
    Fly,
    Fuzzy,
    GuardedKL,
    Lenience,
    Random,
    Rollback,
    TopK,
    Typical,
)
from lenience.rules.mixtures import Cascade, Diversed, Ensemble, Mentored
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
        Diversed,
        Cascade,
        Fly,
        Mentored,
        Random,
        Judge,
    )
}
"""Term class of each rule name. Specs, comparisons and the property tests cover every rule listed
here."""
