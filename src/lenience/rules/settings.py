"""Which settings stand for a rule that is only named: a grid to compare, a ladder from strict to lenient to certify."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from lenience.core.errors import InputError
from lenience.rules.judge import Judge
from lenience.rules.registry import ALONE, parse_rule, terms

GRID = (
    "exact", "speculative", "block",
    "lenient:0.5", "lenient:0.2", "lenient:0.05",
    "topk:2", "topk:3", "topk:4", "topk:4,margin=0.1", "topk:4,margin=0.3", "topk:4,margin=0.6",
    "topk:10,ratio=0.5", "topk:10,ratio=0.3", "topk:10,ratio=0.1",
    "typical:0.3,0.55", "typical:0.09,0.3", "typical:0.01,0.1",
    "fuzzy:js@0.05", "fuzzy:js@0.1", "fuzzy:js@0.2", "fuzzy:js@0.3",
    "fuzzy:kl@0.1", "fuzzy:kl@0.4", "fuzzy:kl@1.0", "fuzzy:tv@0.1", "fuzzy:tv@0.25", "fuzzy:tv@0.45",
    "kl:0.1", "kl:0.4", "kl:1.0",
    "ensemble:0.8", "ensemble:0.6", "ensemble:0.5", "ensemble:0.4",
    "fly:0.3,6", "fly:0.3,3", "fly:0.1,3",
    "mentored:0.05", "mentored:0.2", "mentored:0.5",
    "random:0.05", "random:0.15", "random:0.4",
)  # fmt: skip
"""What the rule "all" stands for; when greedy, without what is the same as `exact` then or has no greedy form."""
JUDGED = (0.5, 0.8, 0.9, 0.98, 0.995, 0.998)
"""The recalls at whose thresholds "all" tries a judge."""


def expand(rules: Sequence[str], temperature: float) -> list[str]:
    """The rules with "all" in its place: GRID, and each judge without a threshold at several."""
    if "all" not in rules:
        return list(rules)
    same = ("speculative", "block") if temperature == 0 else ()
    grid = [rule for rule in GRID if rule not in same and (temperature > 0 or not terms(rule)[0].samples)]
    found: list[str] = []
    for rule in rules:
        judge = None if rule in ("all", *ALONE) else parse_rule(rule)
        if rule == "all":
            found += grid
        elif isinstance(judge, Judge) and judge.threshold is None:
            listed = {row["recall"]: row["threshold"] for row in judge.head.metrics.get("thresholds", [])}
            found += [str(replace(judge, threshold=listed[recall])) for recall in JUDGED if recall in listed] or [rule]
        else:
            found.append(rule)
    return found


def ladder(rule: str, thresholds: Sequence[float] = ()) -> list[str]:
    """A rule's settings from strict to lenient: of a judge without a threshold, those it was fitted with; of a rule's name,
    such as topk or fuzzy:js, those of GRID; with `thresholds`, those, the strictest first; else the rule as it is."""
    if named := [spec for spec in GRID if re.match(re.escape(rule) + "[:@=]", spec)]:
        settings = [spec for spec in named if "," not in spec[len(rule) :]] or named
        if not thresholds:
            return settings
        rule = settings[0]
    rule = str(parse_rule(rule))  # as its terms print themselves
    open_: list[Any] = [term for term in terms(rule) if hasattr(term, "threshold")]
    open_ = [term for term in open_ if thresholds or term.threshold is None]
    if not open_:
        if thresholds:
            raise InputError(f"rule {rule}: has no threshold; leave the thresholds out")
        return [rule]
    if len(open_) > 1:
        raise InputError(f"rule {rule}: has several thresholds to choose; give all but one")
    term = open_[0]
    thresholds = sorted(set(thresholds), reverse=isinstance(term, Judge))
    if not thresholds:
        listed = term.head.metrics.get("thresholds", []) if isinstance(term, Judge) else []
        thresholds = list(dict.fromkeys(sorted((row["threshold"] for row in listed), reverse=True)))
        thresholds = [threshold for threshold in thresholds if threshold <= 1] or [term.head.threshold]
    return [rule.replace(str(term), str(replace(term, threshold=threshold))) for threshold in thresholds]
