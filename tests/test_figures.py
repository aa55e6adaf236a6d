"""Figures that documents quote stand in the results files that they name.

A comment `<!-- measured: NAME.json … -->` before a paragraph or a table names files of
benchmarks/results, each perhaps with the key under which to look, as in `sprinter.json#baselines`;
`<!-- not measured -->` says that what follows quotes nothing. A row of a table is looked for in the
record that its first cell names, where there is one.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
from recording import BEFORE, FIELDS, recorded

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks/results"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
MARK = re.compile(r"<!-- (?:measured: (?P<files>[^>]+?)|not measured) -->")
FIGURE = re.compile(
    r"(?<![\w@:/=#.,-])(\d+(?:,\d{3})*(?:\.\d+)?)(?![\w])(?: (%|points|times|M|s|ms)(?!\w))?"
)
SEPARATORS = (", ", " / ", " and ", "–", "; ")
SCALES = {"%": (100,), "points": (100,), "M": (1, 1e-6), "ms": (1, 1e3)}
"""What a figure with a unit may be of a number in a file."""
MANY = 3
"""A paragraph with so many figures that have a unit or decimals quotes something."""


def blocks(text: str) -> Iterator[tuple[int, str, list[str]]]:
    """The line, the mark and the lines of each paragraph or table outside of code; a mark holds for
    the block after it."""
    lines, mark, fenced = list[str](), "", False
    for number, line in enumerate([*text.splitlines(), ""], 1):
        fenced ^= line.startswith("```")
        if found := MARK.fullmatch(line.strip()):
            mark = found[0]
        elif line.strip() and not fenced and not line.startswith("```"):
            lines.append(line)
        elif lines:
            yield number - len(lines), mark, lines
            lines, mark = [], ""


def figures(text: str) -> Iterator[tuple[str, str]]:
    """The numbers of a text outside of code, and their units."""
    plain = re.sub(
        r"`[^`]*`|\]\([^)]*\)|<[^>]+>|95 % (?=interval|confidence)", " ", text
    )
    found = [*FIGURE.finditer(plain)]
    units = [one[2] or "" for one in found]
    for i in reversed(range(len(found) - 1)):  # 2.8, 3.4 and 2.6 %; 4–5 %
        between = plain[found[i].end() : found[i + 1].start()]
        units[i] = units[i] or (units[i + 1] if between in SEPARATORS else "")
    for i in range(1, len(found)):  # 4.5 % (2.8–8.1)
        between = plain[found[i - 1].end() : found[i].start()]
        units[i] = units[i] or (units[i - 1] if between in (" (", "–") else "")
    for one, unit in zip(found, units):
        yield one[1].replace(",", ""), unit


def leaves(value: Any) -> Iterator[float]:
    if isinstance(value, dict | list):
        for part in value.values() if isinstance(value, dict) else value:
            yield from leaves(part)
        if isinstance(value, dict):  # some figures are keys
            yield from (
                float(key) for key in value if re.fullmatch(r"\d+(\.\d+)?", key)
            )
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield float(value)


def records(value: Any, name: str) -> Iterator[Any]:
    """What stands under a name, or says that it has it."""
    if isinstance(value, list):
        for part in value:
            yield from records(part, name)
    if isinstance(value, dict):
        if name in value.values():
            yield value
        for key, part in value.items():
            if key == name:
                yield part
            else:
                yield from records(part, name)


def found_in(figure: str, unit: str, known: list[float]) -> float | None:
    """The known number that a figure quotes in its unit, as rounded."""
    decimals = len(figure.partition(".")[2])
    if len(figure) > 3 and figure.endswith("000"):
        decimals = -3
    scales: dict[str, tuple[float, ...]] = {
        "%": (100,),
        "points": (100,),
        "M": (1, 1e-6),
        "ms": (1, 1e3),
    }
    for scale in scales.get(unit, (1,)):
        for number in known:
            if abs(abs(number) * scale - float(figure)) <= 0.5 * 10**-decimals * (
                1 + 1e-6
            ):
                return number
    return None


def without_bounds(text: str, known: list[float]) -> str:
    """The text without bounds of p-values, as in "p < 0.001", below which a known number is."""

    def kept(bound: re.Match[str]) -> str:
        below = any(0 < number < float(bound[1]) for number in known)
        return "" if below else bound[0]

    return re.sub(r"p < (0\.\d+)", kept, text)


def missing(text: str, known: list[float]) -> list[str]:
    """The figures of a text that are not known; so many times something is a ratio of two others of
    the text."""
    quoted = list(figures(without_bounds(text, known)))
    found = {one: found_in(*one, known) for one in quoted}
    values = [value for value in found.values() if value]
    ratios = [a / b for a in values for b in values]
    return [
        f"{figure} {unit}"
        for figure, unit in quoted
        if found[figure, unit] is None
        and not (
            unit == "times" and found_in(figure, "", [r for r in ratios if r < 1000])
        )
    ]


def named(mark: str) -> list[Any]:
    found = MARK.fullmatch(mark)
    assert found
    values = []
    for name in (found["files"] or "").split():
        file, _, key = name.partition("#")
        value = json.loads((RESULTS / file).read_text())
        for part in filter(None, key.split(".")):
            value = value[int(part)] if isinstance(value, list) else value[part]
        values.append(value)
    return values


def told_of(page: Path) -> Iterator[str]:
    """What a page quotes that stands nowhere."""
    for line, mark, lines in blocks(page.read_text()):
        is_table = lines[0].startswith("|")
        whole = ("\n" if is_table else " ").join(map(str.strip, lines))
        if not mark:
            sure = [
                one
                for one in figures(whole)
                if one[1] in ("%", "times") or "." in one[0]
            ]
            if len(sure) >= MANY:
                yield f"{page.name}:{line}: quotes figures and names no results file"
            continue
        values = named(mark)
        known = [leaf for value in values for leaf in leaves(value)]
        for row in lines[2:] if is_table else [whole if values else ""]:
            label, _, cells = (
                row.strip("|").partition("|") if is_table else ("", "", row)
            )
            of_row = [r for v in values for r in records(v, label.strip().strip("`"))]
            here = [leaf for record in of_row for leaf in leaves(record)] or known
            for figure in missing(cells, here) if values else []:
                yield f"{page.name}:{line}: {figure} of {label.strip() or whole[:40]!r}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_quoted_figures_stand_in_results_files(page: Path) -> None:
    assert list(told_of(page)) == []


@pytest.mark.parametrize(
    "path", sorted(RESULTS.glob("*.json")), ids=lambda path: path.name
)
def test_a_results_file_says_what_measured_it(path: Path) -> None:
    """Its commit, date, command, machine and versions; an old one that it is older than that."""
    record = json.loads(path.read_text())["record"]
    if record == {"commit": BEFORE}:
        return
    assert set(record) == set(FIELDS) and all(record.values())
    assert re.fullmatch(r"[0-9a-f]{12}\+?", record["commit"])
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", record["date"])
    assert {"lenience", "python", "torch"} <= record["versions"].keys()


def test_a_record_names_this_process() -> None:
    told = recorded({"rows": [1]})
    assert set(told) == {"record", "rows"} and set(told["record"]) == set(FIELDS)
    assert re.fullmatch(r"[0-9a-f]{12}\+?|unknown\+?", told["record"]["commit"])
    assert "cores" in told["record"]["machine"] or "NVIDIA" in told["record"]["machine"]
    assert {"lenience", "python", "torch"} <= told["record"]["versions"].keys()


def test_a_figure_is_told_from_another() -> None:
    known = [0.0283, 12_345_678.0, 3.14159, 1919.0]
    for figure, unit in (
        ("2.8", "%"),
        ("12.3", "M"),
        ("3.14", ""),
        ("1919", "s"),
        ("3.1", ""),
    ):
        assert found_in(figure, unit, known)
    for figure, unit in (
        ("2.9", "%"),
        ("3.15", ""),
        ("1918", ""),
        ("3.14", "%"),
        ("12.3", ""),
    ):
        assert found_in(figure, unit, known) is None
    assert missing("970 against 815 is 1.19 times, not 1.25 times", [970.4, 814.9]) == [
        "1.25 times"
    ]
    assert list(records({"rows": [{"rule": "a", "x": 1}, {"rule": "b"}]}, "a")) == [
        {"rule": "a", "x": 1}
    ]
    text = (
        "<!-- measured: a.json -->\nIt is 3.1 (2.0–4.5 %), `x@0.7` 1,919.\n\nNext 5 %."
    )
    (_, mark, lines), (_, none, _) = blocks(text)
    assert mark == "<!-- measured: a.json -->" and none == ""
    wanted = [("3.1", ""), ("2.0", "%"), ("4.5", "%"), ("1919", "")]
    assert list(figures(lines[0])) == wanted


def test_a_bound_of_a_p_value_needs_a_smaller_number() -> None:
    assert missing("25 against 1 (p < 0.001)", [25, 1, 8e-7]) == []
    assert missing("25 against 1 (p < 0.001)", [25, 1, 0.0, 0.02]) == ["0.001 "]
