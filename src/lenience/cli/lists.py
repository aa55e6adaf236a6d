"""The commands that list rules, drafters and tasks."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from lenience.cli.console import print_json
from lenience.cli.options import Json
from lenience.core.spec import template

NARROWEST = 80
"""Minimum width of a list, in columns."""
SPEC_WIDTH = 28
"""Number of columns after which the options of a spec go to the next line."""
COMBINATIONS = {
    "A|B": "Draft with both drafters, as one tree (SpecInfer, Miao 2023).",
    "A>B": "Draft B's window with A's help, so that B runs fewer passes (Chen 2023).",
    "A:N+B": "Draft the first N tokens with A and the later ones with B (Chen 2023).",
}
"""Drafters made of two others."""


def rules(*, json: Json = False) -> None:
    """List the acceptance rules."""
    from lenience.rules.registry import RULES

    _print("Acceptance rules", _rows({"--rule": RULES}), "docs/rules.md", json)


def drafters(*, json: Json = False) -> None:
    """List the drafters, tree shapes and stop conditions."""
    from lenience.drafting.registry import DRAFTERS, STOPS, TREES

    kinds: dict[str, Mapping[str, type]] = {
        "--drafter": DRAFTERS,
        "--tree": TREES,
        "--stop": STOPS,
    }
    rows = _rows(kinds)
    single = sum(flag == "--drafter" for flag, _, _ in rows)
    rows[single:single] = [
        ("--drafter", spec, text) for spec, text in COMBINATIONS.items()
    ]
    _print("Drafters, trees and stop conditions", rows, "docs/drafters.md", json)


def tasks(*, json: Json = False) -> None:
    """List the built-in tasks and benchmarks."""
    from lenience.tasks import BENCHMARKS, WordMath

    kinds: dict[str, type] = {WordMath.name: WordMath, **BENCHMARKS}
    rows = [("--task", name, summary(kind)) for name, kind in kinds.items()]
    rows.append(("--task", "ROWS.jsonl", "Your own JSON rows (docs/your-own-task.md)."))
    rows.append(("--task", "FILE.py:NAME", "A Task class or object in a Python file."))
    _print("Tasks", rows, "docs/tasks.md", json)


def _rows(kinds: Mapping[str, Mapping[str, type]]) -> list[tuple[str, str, str]]:
    """Return the flag, the spec and the summary of each class."""
    found = list[tuple[str, str, str]]()
    for flag, registry in kinds.items():
        for name, kind in registry.items():
            found.append((flag, template(name, kind), summary(kind)))
    return found


def summary(kind: type) -> str:
    """Return the first sentence of a class's docstring."""
    first = " ".join((inspect.getdoc(kind) or "").split("\n\n")[0].split())
    return re.split(r"(?<=\.)\s(?=[A-Z0-9`])", first)[0]


def _folded(spec: str) -> str:
    """Return a spec on lines of at most SPEC_WIDTH columns, broken after commas and brackets."""
    lines = [""]
    for part in re.split(r"(?<=,)|(?=\[)", spec):
        if lines[-1].strip() and len(lines[-1]) + len(part) > SPEC_WIDTH:
            lines.append("  ")
        lines[-1] += part
    return "\n".join(lines)


def _print(title: str, rows: list[tuple[str, str, str]], docs: str, json: bool) -> None:
    if json:
        found = list[dict[str, Any]]()
        for flag, spec, text in rows:
            found.append({"flag": flag, "spec": spec, "summary": text})
        print_json({"docs": docs, "entries": found})
        return
    out = Console()
    out.width = max(out.width, NARROWEST)
    out.print(f"{title}; {docs} has the details", highlight=False, markup=False)
    for flag in dict.fromkeys(flag for flag, _, _ in rows):
        table = Table(box=SIMPLE_HEAD, title_justify="left", expand=True)
        table.add_column(flag, overflow="fold", min_width=SPEC_WIDTH)
        table.add_column("what it does", ratio=1)
        for of, spec, text in rows:
            if of == flag:
                table.add_row(Text(_folded(spec)), Text(text))
        out.print(table)
