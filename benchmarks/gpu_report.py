"""Write the results of benchmarks/gpu.py into docs/performance.md.

    python benchmarks/gpu_report.py gpu

copies the last result of each measurement to benchmarks/results/gpu.json, and writes the tables
between the section's two marks.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

from gpu_bench import Result

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/performance.md"
KEPT = ROOT / "benchmarks/results/gpu.json"
BEGIN, END = "<!-- gpu: begin -->", "<!-- gpu: end -->"
MEASURED = f"<!-- measured: {KEPT.name} -->"


def last_results(path: Path) -> list[Result]:
    """Return the last result of each key, without the lines that only say that one was begun."""
    last: dict[str, Result] = {}
    for line in path.read_text(encoding="utf-8").split("\n"):
        row: Result = json.loads(line) if line else {"begun": True}
        if not row.get("begun"):
            last[row["key"]] = row
    return list(last.values())


def section(rows: list[Result]) -> str:
    """Return the section: what the machine was, and a table of each step that was measured."""
    machine = next(row for row in rows if row["key"] == "machine")
    head = (
        f"<!-- not measured -->\n{machine['device']}, PyTorch {machine['torch']}, transformers "
        f"{machine['transformers']}, commit {machine['commit'][:7]}: `python benchmarks/gpu.py`."
    )
    parts = [head, *right_table(rows), *windows_table(rows), *fast_table(rows), *scale_lines(rows)]
    failed = [f"- `{row['key']}`: {row['failed']}" for row in rows if "failed" in row]
    if failed:
        parts += ["What failed:\n\n<!-- not measured -->\n" + "\n".join(failed)]
    return "\n\n".join(parts)


def of_step(rows: list[Result], step: str) -> Iterator[tuple[str, Result]]:
    for row in rows:
        name, _, what = row["key"].partition("/")
        if name == step and not {"failed", "skipped"} & row.keys():
            yield what, row


def table(head: list[str], body: list[list[str]]) -> list[str]:
    """Return a Markdown table with its mark; nothing if it has no rows."""
    lines = [head, ["---"] * len(head), *body]
    text = "\n".join("| " + " | ".join(cells) + " |" for cells in lines)
    return [f"{MEASURED}\n{text}"] if body else []


def right_table(rows: list[Result]) -> list[str]:
    """Answers by how they were decoded, of all models together."""
    sums: dict[tuple[str, str], list[int]] = {}
    for what, row in of_step(rows, "right"):
        *_, dtype, passes, variant = what.split(", ")
        counts = sums.setdefault((f"{passes}, {variant}", dtype), [0, 0, 0])
        for i, name in enumerate(("same", "near_ties", "different")):
            counts[i] += row[name]
    body = [[f"{how}, {dtype}", *map(str, counts)] for (how, dtype), counts in sums.items()]
    head = ["answers against `transformers`' greedy", "same", "part at a near-tie", "different"]
    return table(head, body)


def windows_table(rows: list[Result]) -> list[str]:
    body = []
    for what, row in of_step(rows, "windows"):
        times = {**row["milliseconds"], **{f"tree {n}": ms for n, ms in row["trees"].items()}}
        body.append([what, *(f"{ms:.2f}" for ms in times.values()), f"{row['bound_ms']:.2f}"])
        head = ["a pass, milliseconds", *map(str, times), "bound"]
    return table(head, body) if body else []


def fast_table(rows: list[Result]) -> list[str]:
    body = [
        [
            what,
            f"{row['tokens_per_second']:.0f}",
            f"{row['tokens_per_pass']:.2f}" if "tokens_per_pass" in row else "",
            f"{100 * row['outside_the_models']:.0f} %" if "outside_the_models" in row else "",
            f"{row['rule_ms']:.2f}" if "rule_ms" in row else "",
        ]
        for what, row in of_step(rows, "fast")
    ]
    head = ["the built-in pair", "tokens/s", "tokens per pass", "outside the models", "rule, ms"]
    return table(head, body)


def scale_lines(rows: list[Result]) -> list[str]:
    said = [(what, row["said"]) for what, row in of_step(rows, "scale") if "said" in row]
    return [f"`{what}`:\n\n```\n" + "\n".join(lines) + "\n```" for what, lines in said]


def fill(page: str, text: str) -> str:
    """Return a page with its section replaced."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{text}\n{END}{after}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path, help="folder of the results")
    rows = last_results(parser.parse_args().out / "results.jsonl")
    KEPT.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    PAGE.write_text(fill(PAGE.read_text(encoding="utf-8"), section(rows)), encoding="utf-8")


if __name__ == "__main__":
    main()
