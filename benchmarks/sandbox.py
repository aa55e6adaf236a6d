"""How many programs a second the sandbox runs on this machine. Prints one JSON object.

    python benchmarks/sandbox.py --out benchmarks/results/sandbox.json

`checks` run a function and, in a sandbox of their own, its tests, as HumanEval's do; `runs` one
script, as a test of LiveCodeBench does. With `--humaneval HumanEval.jsonl.gz` its 164 canonical
solutions and two mutants of each are run too: all of the first must pass, and none of the others.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from recording import recorded

from lenience.core.errors import InputError
from lenience.decoding.machine import processor
from lenience.tasks import Sample
from lenience.tasks.code import HumanEval
from lenience.tasks.sandbox import Sandbox, SandboxKind, workers

FUNCTION = "def add(a, b):\n    return a + b\n"
TESTS = "def check(candidate):\n    assert candidate(1, 2) == 3\n"
OFF_BY_ONE = """

_inner = {name}


def {name}(*args):
    value = _inner(*args)
    if isinstance(value, bool):
        return not value
    if isinstance(value, (int, float)):
        return value + 1
    if isinstance(value, str):
        return value + "x"
    if isinstance(value, (list, tuple)):
        return value + type(value)([0])
    return value or 0
"""


def checks(box: Sandbox) -> bool:
    return box.check(FUNCTION, "add", TESTS).passed


def runs(box: Sandbox) -> bool:
    return box.run("print(1)").out == "1\n"


def rate(function: Callable[[], bool], n: int) -> float:
    """Return calls per second with `workers` in parallel; all must give the right result."""
    began = time.perf_counter()
    with ThreadPoolExecutor(workers()) as pool:
        if not all(pool.map(lambda _: function(), range(n))):
            raise RuntimeError("a program did not come out right")
    return round(n / (time.perf_counter() - began), 1)


def humaneval(data: Path) -> dict[str, int | float]:
    task = HumanEval(sets="whole").open(str(data))
    samples = list(task.samples("test"))

    def passed(program: Callable[[Sample], str]) -> int:
        return sum(
            verdict.correct
            for verdict in task.score([(program(s), s) for s in samples])
        )

    def mutant(sample: Sample) -> str:
        name = sample.metadata["entry_point"]
        whole = f"{sample.metadata['prompt']}{sample.reference}{OFF_BY_ONE.format(name=name)}"
        return f"```python\n{whole}\n```"

    began = time.perf_counter()
    found = {
        "problems": len(samples),
        "canonical_passed": passed(lambda sample: str(sample.reference)),
        "return_none_passed": passed(lambda sample: "    return None\n"),
        "off_by_one_passed": passed(mutant),
    }
    return {
        **found,
        "checks_per_second": round(3 * len(samples) / (time.perf_counter() - began), 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--n", type=int, default=200)
    parser.add_argument("--humaneval", type=Path)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    figures: dict[str, object] = {
        "machine": processor(),
        "workers": workers(),
        "n": given.n,
    }
    kinds: tuple[SandboxKind, ...] = ("bubblewrap", "landlock")
    for kind in kinds:
        box = Sandbox(kind)
        try:
            figures[kind] = {
                "checks_per_second": rate(partial(checks, box), given.n),
                "runs_per_second": rate(partial(runs, box), given.n),
            }
        except (InputError, RuntimeError) as error:
            figures[kind] = str(error)
    if given.humaneval:
        figures["humaneval"] = humaneval(given.humaneval)
    figures = recorded(figures)
    print(json.dumps(figures))
    if given.out:
        given.out.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
