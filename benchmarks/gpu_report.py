"""Write the results of benchmarks/gpu.py into docs/performance.md.

    python benchmarks/gpu_report.py gpu

writes the last result of each measurement into benchmarks/results/gpu.json, and the tables between
the section's two marks.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

from gpu_bench import Result
from recording import write_results

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/performance.md"
KEPT = ROOT / "benchmarks/results/gpu.json"
BEGIN = "<!-- gpu: begin -->"
END = "<!-- gpu: end -->"
COUNTS = ("same", "near_ties", "different")
MEASURED = f"<!-- measured: {KEPT.name} -->"


def last_results(path: Path) -> list[Result]:
    """Return the last result of each key, without the lines that only say that one was begun."""
    last: dict[str, Result] = {}
    for line in path.read_text(encoding="utf-8").split("\n"):
        row: Result = json.loads(line) if line else {"begun": True}
        if not row.get("begun"):
            last[row["key"]] = row
    return list(last.values())


def section(kept: Result) -> str:
    """Return the section: what the machine was, and a table of each step that was measured."""
    rows = kept["results"]
    machine = next(row for row in rows if row["key"] == "machine")
    head = (
        f"<!-- not measured -->\n{machine['device']}, PyTorch {machine['torch']}, transformers "
        f"{machine['transformers']}, commit {machine['commit'][:7]}: `python benchmarks/gpu.py`."
    )
    parts = [head, *right_table(kept["answers"]), *windows_table(rows)]
    parts += [*fast_table(rows), *scale_parts(rows), *serving_table(rows)]
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


def answers_by_kind(rows: list[Result]) -> dict[str, Result]:
    """Return the counts of the step `right` by passes, variant and dtype, over all models."""
    sums: dict[str, Result] = {}
    for what, row in of_step(rows, "right"):
        *_, dtype, passes, variant = what.split(", ")
        counts = sums.setdefault(
            f"{passes}, {variant}, {dtype}", dict.fromkeys(COUNTS, 0)
        )
        for name in COUNTS:
            counts[name] += row[name]
    return sums


def right_table(answers: dict[str, Result]) -> list[str]:
    body = [
        [kind, *(str(counts[name]) for name in COUNTS)]
        for kind, counts in answers.items()
    ]
    head = [
        "answers against `transformers`' greedy",
        "same",
        "part at a near-tie",
        "different",
    ]
    return table(head, body)


def windows_table(rows: list[Result]) -> list[str]:
    body = []
    for what, row in of_step(rows, "windows"):
        times = {
            **row["milliseconds"],
            **{f"tree {n}": ms for n, ms in row["trees"].items()},
        }
        body.append(
            [what, *(f"{ms:.2f}" for ms in times.values()), f"{row['bound_ms']:.2f}"]
        )
        head = ["a pass, milliseconds", *map(str, times), "bound"]
    return table(head, body) if body else []


def fast_table(rows: list[Result]) -> list[str]:
    body = [
        [
            what,
            f"{row['tokens_per_second']:.0f}",
            _shown(row.get("tokens_per_pass"), 2),
            f"{100 * row['outside_the_models']:.0f} %"
            if "outside_the_models" in row
            else "",
            _shown(row.get("rule_ms"), 2),
        ]
        for what, row in of_step(rows, "fast")
    ]
    head = [
        "the built-in pair",
        "tokens/s",
        "tokens per pass",
        "outside the models",
        "rule, ms",
    ]
    return table(head, body)


def serving_table(rows: list[Result]) -> list[str]:
    body = [
        [
            what,
            f"{row['tokens_per_second']:.0f}",
            f"{row['same_as_plain']} of {row['problems']}"
            if "same_as_plain" in row
            else "",
        ]
        for what, row in of_step(rows, "serving")
    ]
    return table(["engine, rule, requests", "tokens/s", "answers as plain"], body)


def scale_parts(rows: list[Result]) -> Iterator[str]:
    """Say what was mined and certified, with a table of each comparison."""
    for what, row in of_step(rows, "scale"):
        told = row.get("told", {})
        name = what.rpartition(", ")[0] or "the trained target"
        if what.endswith("mine"):
            yield (
                f"{MEASURED}\nMined with {name}: {told['important']} of {told['mismatches']} "
                f"mismatches in {told['samples']} samples are important."
            )
        if what.endswith("compare"):
            head = [name, "n", "accuracy", "paired loss", "tokens per pass", "tokens/s"]
            yield from table(head, [compared(decoder) for decoder in told["rows"]])
        if what.endswith("certify"):
            yield certified(name, told)


def compared(row: Result) -> list[str]:
    return [
        f"`{row['rule']}`, window {row['window']}",
        str(row["n"]),
        f"{100 * row['accuracy']:.1f} %",
        f"{100 * row['paired_loss']:.1f} %",
        _shown(row["tokens_per_pass"], 2),
        _shown(row["tokens_per_second"], 0),
    ]


def _shown(value: float | None, decimals: int) -> str:
    """Return a number, or nothing where it was not measured."""
    return "" if value is None else f"{value:.{decimals}f}"


def certified(name: str, told: Result) -> str:
    found = told["certified"]
    if not found:
        return f"With {name} nothing was certified at the loss asked for."
    return (
        f"{MEASURED}\nCertified with {name}: `{found['rule']}` loses at most "
        f"{100 * found['upper_bound']:.2f} %, with a confidence of "
        f"{100 * told['confidence']:.0f} % and after {found['n']} prompts."
    )


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
    kept = {"results": rows, "answers": answers_by_kind(rows)}
    write_results(KEPT, kept)
    PAGE.write_text(
        fill(PAGE.read_text(encoding="utf-8"), section(kept)), encoding="utf-8"
    )


if __name__ == "__main__":
    main()
