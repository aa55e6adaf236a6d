"""What rows are called where there is little room."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from lenience.core import spec
from lenience.decoding.certified import TriedSetting, drafter_without_paths, stop_without_paths
from lenience.evaluation.table import FrontierRow
from lenience.rules.base import Term
from lenience.rules.registry import BASELINES, parse_spec, terms

NO_LABELS: Mapping[str, str] = MappingProxyType({})


class NamedRow(FrontierRow):
    """A row with what it is called."""

    name: str
    family: str
    """The group that it is drawn with."""


def named(rows: Sequence[FrontierRow]) -> list[NamedRow]:
    """Name rows; a judge is called by as much of its path as tells it from the others."""
    heads = [head for row in rows for term in terms(row.rule) for head in term.heads]
    paths = {Path(head.path) for head in heads}
    labels = {str(path): _shortest_end(path, paths) for path in paths}
    return [
        NamedRow(
            **row.model_dump(),
            name=", ".join([short(row.rule, labels), *_options(row)]),
            family=family(row.rule, labels),
        )
        for row in rows
    ]


def _options(row: FrontierRow) -> list[str]:
    return [f"{name}={value}" for name, value in _without_paths(row.options).items()]


def _without_paths(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options with a stop condition and a drafter that name no more than their heads' folders."""
    shown = {**options}
    for name, short_one in (("stop", stop_without_paths), ("drafter", drafter_without_paths)):
        if name in shown:
            shown[name] = short_one(shown[name])
    return shown


def _shortest_end(path: Path, paths: set[Path]) -> str:
    """As much of a path's end as tells it from the others."""
    for n in range(1, len(path.parts) + 1):
        end = path.parts[-n:]
        if sum(other.parts[-n:] == end for other in paths) == 1:
            break
    return str(Path(*end))


def family(rule: str, labels: Mapping[str, str] = NO_LABELS) -> str:
    """The group that a rule is drawn with: the name of its last term and which of its settings are
    given, for a judge what `labels` calls it, or the folder of its head."""
    found = terms(rule)
    if not found:
        return rule
    last = found[-1]
    if last.heads:
        return _label(last, labels)
    return " ".join([last.name, *spec.named_arguments(last)])


def short(rule: str, labels: Mapping[str, str] = NO_LABELS) -> str:
    """A rule with no more of its judge's path than what `labels` calls it, or its folder."""
    if rule in BASELINES:
        return rule
    parts = parse_spec(rule).parts
    return "|".join("&".join(_short_term(term, labels) for term in part.terms) for part in parts)


def _short_term(term: Term, labels: Mapping[str, str]) -> str:
    if not term.heads:
        return str(term)
    threshold = term.heads[0].threshold
    at = "" if threshold is None else f"@{probability(threshold)}"
    return ",".join([_label(term, labels), *spec.further_arguments(term)]) + at


def _label(term: Term, labels: Mapping[str, str]) -> str:
    path = Path(term.heads[0].path)
    return labels.get(str(path), path.name)


def setting_name(row: TriedSetting) -> str:
    """A setting that was certified or tried, without its window."""
    options = _without_paths(row.options).items()
    return ", ".join([short(row.rule), *(f"{name} {value}" for name, value in options)])


def why(row: FrontierRow) -> str:
    """Why a row's window is in the table, where it is not the rule's fastest."""
    if row.why.startswith("window of"):
        return "judge's"
    return "widest" if row.why == "widest" else ""


def probability(p: float) -> str:
    """A probability in as few digits as tell it from 0 and 1: 0.9 and 0.99996."""
    for digits in range(2, 17):
        text = f"{p:.{digits}g}"
        if abs(float(text) - p) <= 0.05 * min(abs(p), abs(1 - p)):
            return text
    return repr(p)
