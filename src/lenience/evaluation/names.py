"""Short names of rules and settings, for tables and figures."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from lenience.core import spec
from lenience.core.files import built_in
from lenience.decoding.decoder import Decoder
from lenience.evaluation.table import FrontierRow
from lenience.rules.base import Term
from lenience.rules.combine import AnyOf
from lenience.rules.parsing import terms
from lenience.runs.certificate import TriedSetting

NO_LABELS: Mapping[str, str] = MappingProxyType({})


class NamedRow(FrontierRow):
    """A row with its displayed name."""

    name: str
    family: str
    """Group of rows that share a colour and a line."""


def named(rows: Sequence[FrontierRow]) -> list[NamedRow]:
    """Name rows. Judges, stop conditions and drafters are shown with the part of their paths that
    distinguishes them."""
    heads = [head for row in rows for term in terms(row.rule) for head in term.heads]
    paths = {Path(head.path) for head in heads if not built_in(head.path)}

    def note(path: str) -> str:
        paths.add(Path(path))
        return path

    for row in rows:
        _options(row.options, note)
    labels = {str(path): _shortest_end(path, paths) for path in paths}
    found = list[NamedRow]()
    for row in rows:
        found.append(
            NamedRow(
                **row.model_dump(),
                name=_name(row, labels),
                family=family(row.rule, labels),
            )
        )
    return found


def _name(row: FrontierRow, labels: Mapping[str, str]) -> str:
    options = _options(row.options, lambda path: labels[str(Path(path))])
    parts = [f"{name}={value}" for name, value in options.items()]
    return ", ".join([short(row.rule, labels), *parts])


def _options(options: Mapping[str, Any], path: Callable[[str], str]) -> dict[str, Any]:
    """Return options with the heads of the stop condition and the drafter at other paths."""
    named = {name: options[name] for name in ("stop", "drafter") if name in options}
    relocated = Decoder.of({"rule": "exact", **named}).relocated(path).to_json()
    return {**options, **{name: relocated[name] for name in named}}


def _shortest_end(path: Path, paths: set[Path]) -> str:
    """Return the shortest end of a path that no other path shares."""
    for n in range(1, len(path.parts) + 1):
        end = path.parts[-n:]
        if sum(other.parts[-n:] == end for other in paths) == 1:
            break
    return str(Path(*end))


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


def short(rule: str, labels: Mapping[str, str] = NO_LABELS) -> str:
    """Return a rule's spec with its judge's path shortened to the label or the folder's name."""
    read = Decoder.of(rule=rule).rule
    parts = read.parts if isinstance(read, AnyOf) else ()
    if not parts:
        return rule
    return "|".join(
        "&".join(_short_term(term, labels) for term in part.terms) for part in parts
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


def alike(row: FrontierRow, tried: TriedSetting) -> bool:
    """Return True if a compared and a certified setting have the same rule, window, stop condition
    and drafter."""
    same = (row.rule, row.window) == (tried.rule, tried.window)
    return same and all(
        row.options.get(name) == tried.options.get(name) for name in ("stop", "drafter")
    )


def setting_name(row: TriedSetting) -> str:
    """Return the name of a certified or tested setting, without its window."""
    options = _options(row.options, lambda path: Path(path).name).items()
    return ", ".join([short(row.rule), *(f"{name} {value}" for name, value in options)])


def why(row: FrontierRow) -> str:
    """Return the reason why a row has its window; "" if the window is given or the fastest."""
    if row.why.startswith("window of"):
        return "judge's window"
    return "widest window" if row.why == "widest" else ""


SATURATED = 1e-4
"""Distance from 0 or 1 below which a threshold is shown as a logit."""


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
