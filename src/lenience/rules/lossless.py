"""Lossless rules, and a guard for machines on which lossy decoding is forbidden."""

from __future__ import annotations

import os

from lenience.core.errors import InputError
from lenience.core.protocols import Rule
from lenience.rules.baselines import Baseline
from lenience.rules.combine import AnyOf

FORBID = "LENIENCE_FORBID"


def is_lossless(rule: Rule) -> bool:
    """Return True if a rule keeps the target's own output, or its distribution."""
    if isinstance(rule, Baseline):
        return rule.role == "target"
    return isinstance(rule, AnyOf) and all(term.is_strict for term in rule.terms)


def refuse_forbidden(rule: Rule) -> None:
    """Raise InputError for a lossy rule, or a baseline other than the target, if lossy decoding is
    forbidden, see `refuse_lossy`."""
    if not is_lossless(rule):
        refuse_lossy(f"rule {rule}")


def refuse_lossy(what: str) -> None:
    """Raise InputError if LENIENCE_FORBID=1 forbids lossy decoding. The variable guards machines
    whose output becomes training data."""
    if os.environ.get(FORBID, "0") not in ("", "0"):
        raise InputError(
            f"{what}: is not lossless, and {FORBID}=1 forbids that here; decode by exact or "
            "unset it"
        )
