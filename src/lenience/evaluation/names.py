"""What rows are called where there is little room."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from lenience.rules.judge import Judge
from lenience.rules.registry import ALONE, parse_rule, terms


def named(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows with a `name` and a `family`, in which a judge is called by as much of its path as tells it from the others."""
    paths = {Path(term.path) for row in rows for term in terms(row["rule"]) if isinstance(term, Judge)}
    labels = {}
    for path in paths:
        ends = (Path(*path.parts[-n:]) for n in range(1, len(path.parts) + 1))
        labels[str(path)] = str(
            next(end for end in ends if sum(other.parts[-len(end.parts) :] == end.parts for other in paths) == 1)
        )
    return [{**row, "name": short(row, labels), "family": family(row["rule"], labels)} for row in rows]


def family(rule: str, labels: Mapping[str, str] = MappingProxyType({})) -> str:
    """The group that a rule is drawn with: the name of its last term and which of its settings are given, for a judge what
    `labels` calls it, or the folder of its head."""
    found = terms(rule)
    if not found:
        return rule
    last = found[-1]
    if isinstance(last, Judge):
        return labels.get(str(Path(last.path)), Path(last.path).name)
    keys = re.findall(r"[,:]([a-z]+)(?==|[,@]|$)", str(last))  # top, margin, … and a divergence
    return " ".join([last.name, *keys])


def short(row: dict[str, Any], labels: Mapping[str, str] = MappingProxyType({})) -> str:
    """A row's rule with no more of its judge's path than what `labels` calls it, or its folder."""
    if "name" in row:
        return str(row["name"])
    told = str(parse_rule(row["rule"])) if row["rule"] not in ALONE else row["rule"]  # as its terms print themselves
    for term in terms(told):
        if isinstance(term, Judge):
            limits = str(replace(term, path="x", threshold=None)).removeprefix("judge:x")
            at = "" if term.threshold is None else f"@{probability(term.threshold)}"
            label = labels.get(str(Path(term.path)), Path(term.path).name)
            told = told.replace(str(term), label + limits + at)
    return told


def why(row: dict[str, Any]) -> str:
    """Why a row's window is in the table, where it is not the rule's fastest."""
    if row["why"].startswith("window of"):
        return "judge's"
    return "widest" if row["why"] == "widest" else ""


def probability(p: float) -> str:
    """A probability in as few digits as tell it from 0 and 1: 0.9 and 0.99996."""
    for digits in range(2, 17):
        text = f"{p:.{digits}g}"
        if abs(float(text) - p) <= 0.05 * min(abs(p), abs(1 - p)):
            return text
    return repr(p)
