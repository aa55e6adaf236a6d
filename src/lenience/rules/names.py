"""Short names of rules and thresholds, for tables and figures."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from lenience.core import spec
from lenience.core.files import built_in
from lenience.rules.base import Term
from lenience.rules.parsing import parts, terms

NO_LABELS: Mapping[str, str] = MappingProxyType({})
SATURATED = 1e-4
"""Distance from 0 or 1 below which a threshold is shown as a logit."""


def family(rule: str, labels: Mapping[str, str] = NO_LABELS) -> str:
    """Return the group that a rule is drawn with: the name of its last term with the names of the
    given arguments, or for a judge its label or the folder of its head."""
    found = terms(rule)
    if not found:
        return rule
    last = found[-1]
    if last.heads:
        return _label(last, labels)
    return " ".join([last.name, *spec.named_arguments(last)])


def short_name(rule: str, labels: Mapping[str, str] = NO_LABELS) -> str:
    """Return a rule's spec with its judge's path shortened to the label or the folder's name."""
    found = parts(rule)
    if not found:
        return rule
    return "|".join(
        "&".join(_short_term(term, labels) for term in part.terms) for part in found
    )


def _short_term(term: Term, labels: Mapping[str, str]) -> str:
    if not term.heads:
        return str(term)
    at = spec.shown_bound(term, probability)
    return ",".join([_label(term, labels), *spec.further_arguments(term)]) + at


def _label(term: Term, labels: Mapping[str, str]) -> str:
    path = Path(term.heads[0].path)
    if built_in(path):
        return f"built-in {path.name}"
    return labels.get(str(path), path.name)


def bound_text(threshold: float) -> str:
    """Return a threshold as it is written after `@`: 0.93, or logit=11.4 if the probability is
    close to 0 or 1."""
    if threshold in (0.0, 1.0) or SATURATED <= threshold <= 1 - SATURATED:
        return probability(threshold)
    return f"logit={math.log(threshold / (1 - threshold)):.3g}"


def probability(p: float) -> str:
    """Return a probability in the fewest digits that distinguish it from 0 and 1: 0.9 and
    0.99996."""
    for digits in range(2, 17):
        text = f"{p:.{digits}g}"
        if abs(float(text) - p) <= 0.05 * min(abs(p), abs(1 - p)):
            return text
    return repr(p)
