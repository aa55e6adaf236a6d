"""Choose which tests are slow, from the times of a run.

    pytest -n 2 -m "" --junitxml=times.xml
    python tools/slow_tests.py times.xml --seconds 2

writes tests/slow.txt: the cases that took longer, and those already named there that the run did
not include. `pytest` leaves them out by default; `make test-all` runs them.
"""

from __future__ import annotations

import argparse
import xml.etree.ElementTree as ElementTree
from pathlib import Path

KEPT = (
    "test_capabilities.py",
    "test_product.py::test_rows_among_others_as_alone_in",
    "test_live.py::test_a_race",
    "test_stops.py::test_a_gate_learns_from",
    "test_soundness.py::test_a_window_reaches",
    "test_decode.py::test_counts_end",
    "test_mining.py::test_features_equal_the_states_of_passes_from_scratch[models0",
    "test_certify.py::test_processes_that_watch_a_run",
)
"""Beginnings of cases that the default level runs whatever they take, for what they alone find."""
SLOW = Path(__file__).parents[1] / "tests" / "slow.txt"


def named(path: Path) -> set[str]:
    """Return the cases that a file names, one per line; lines that begin with # are comments."""
    lines = path.read_text(encoding="utf-8").split("\n") if path.exists() else []
    return {line for line in lines if line and not line.startswith("#")}


def seconds_of(report: Path) -> dict[str, float]:
    """Return the seconds of each case in a JUnit report."""
    found = {}
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        module = str(case.get("classname")).removeprefix("tests.")
        found[f"{module}.py::{case.get('name')}"] = float(str(case.get("time")))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("report", type=Path)
    parser.add_argument("--seconds", type=float, default=2.0)
    args = parser.parse_args()
    seconds = seconds_of(args.report)
    slow = {case for case, taken in seconds.items() if taken > args.seconds}
    slow = {case for case in slow if not case.startswith(KEPT)}
    slow |= named(SLOW) - set(seconds)
    lines = [
        "# Cases of the slow level; written by tools/slow_tests.py.",
        *sorted(slow),
    ]
    SLOW.write_text("\n".join(lines) + "\n", encoding="utf-8")
    left = sum(taken for case, taken in seconds.items() if case not in slow)
    print(f"{len(slow)} slow cases; the others took {left:.0f} s")


if __name__ == "__main__":
    main()
