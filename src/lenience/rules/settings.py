"""Settings of a rule: the grid for comparisons, and the ladder for certification."""

from __future__ import annotations

from collections.abc import Sequence

from lenience.core import spec
from lenience.core.errors import InputError
from lenience.rules.base import Term
from lenience.rules.baselines import is_baseline
from lenience.rules.combine import AnyOf
from lenience.rules.parsing import parse_spec
from lenience.rules.registry import RULES

JUDGED = (0.5, 0.8, 0.9, 0.98, 0.995, 0.998)
"""Recalls at whose thresholds a comparison with "all" tries a judge."""


def grid() -> tuple[str, ...]:
    """Return the settings of every rule, for which the rule "all" stands."""
    return tuple(setting for term in RULES.values() for setting in term.grid)


def expand(rules: Sequence[str], temperature: float) -> list[str]:
    """Return the rules to compare. If "all" is among them, it is replaced by the grid, and each
    judge without a threshold by several thresholds. When greedy, the grid leaves out rules that
    equal `exact` or have no greedy form."""
    if "all" not in rules:
        return list(rules)
    expanded: list[str] = []
    for rule in rules:
        if rule == "all":
            expanded += [
                setting for setting in grid() if _applies(setting, temperature)
            ]
        elif is_baseline(rule):
            expanded.append(rule)
        else:
            expanded += _at_recalls(rule)
    return expanded


def _applies(setting: str, temperature: float) -> bool:
    terms = parse_spec(setting).terms
    return temperature > 0 or not any(
        term.exact_when_greedy or term.needs.sampling for term in terms
    )


def _at_recalls(rule: str) -> list[str]:
    """Return a judge without a threshold at the thresholds for the recalls in JUDGED; any other
    rule unchanged."""
    terms = parse_spec(rule).terms
    if len(terms) > 1 or not terms[0].open_threshold:
        return [rule]
    (judge,) = terms
    rows = []
    for head in judge.heads:
        for row in head.head.metrics.get("thresholds", []):
            rows.append(row)
    listed = {row["recall"]: row["threshold"] for row in rows}
    chosen = [listed[recall] for recall in JUDGED if recall in listed]
    return [str(judge.with_thresholds([threshold])[0]) for threshold in chosen] or [
        rule
    ]


def ladder(rule: str, thresholds: Sequence[float] = ()) -> list[AnyOf]:
    """Return a rule's settings from strict to lenient.

    With `thresholds` these are the settings, strictest first. Otherwise a judge without a threshold
    has the thresholds listed when it was trained, a rule's bare name such as topk or fuzzy:js has
    its grid, and any other rule is its only setting. Raises InputError for thresholds of a rule
    that has none, and for several open thresholds.
    """
    named = spec.named_settings(rule, grid())
    if named:
        if not thresholds:
            return list(map(parse_spec, named))
        rule = named[0]
    whole = parse_spec(rule)
    choices = [term for term in whole.terms if term.has_threshold]
    if not thresholds:
        choices = [term for term in choices if term.open_threshold]
    if not choices:
        if thresholds:
            raise InputError(f"rule {rule}: has no threshold; leave the thresholds out")
        return [whole]
    if len(choices) > 1:
        raise InputError(
            f"rule {rule}: has several thresholds to choose; give all but one"
        )
    chosen = choices[0]

    def at(setting: Term) -> AnyOf:
        return whole.with_terms(lambda term: setting if term is chosen else term)

    return list(map(at, chosen.with_thresholds(thresholds or chosen.thresholds())))
