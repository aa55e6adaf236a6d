"""Which rules are lossless, and a guard for machines where others are forbidden."""

from __future__ import annotations

import os

from lenience.core.errors import InputError
from lenience.core.protocols import Rule
from lenience.rules.combine import AnyOf

FORBID = "LENIENCE_FORBID"


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
