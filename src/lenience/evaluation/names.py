"""Names of the rows of a comparison, for tables and figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from lenience.certification.certificate import TriedSetting
from lenience.core.files import built_in
from lenience.decoding.decoder import relocated_options
from lenience.evaluation.table import FrontierRow
from lenience.rules.names import family, short_name
from lenience.rules.parsing import terms


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
        relocated_options(row.options, note)
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
    options = relocated_options(row.options, lambda path: labels[str(Path(path))])
    parts = [f"{name}={value}" for name, value in options.items()]
    return ", ".join([short_name(row.rule, labels), *parts])


def _shortest_end(path: Path, paths: set[Path]) -> str:
    """Return the shortest end of a path that no other path shares."""
    for n in range(1, len(path.parts) + 1):
        end = path.parts[-n:]
        if sum(other.parts[-n:] == end for other in paths) == 1:
            break
    return str(Path(*end))


def alike(row: FrontierRow, tried: TriedSetting) -> bool:
    """Return True if a compared and a certified setting have the same rule, window, stop condition
    and drafter."""
    same = (row.rule, row.window) == (tried.rule, tried.window)
    return same and all(
        row.options.get(name) == tried.options.get(name) for name in ("stop", "drafter")
    )


def why(row: FrontierRow) -> str:
    """Return the reason why a row has its window; "" if the window is given or the fastest."""
    if row.why.startswith("window of"):
        return "judge's window"
    return "widest window" if row.why == "widest" else ""
