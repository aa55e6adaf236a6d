"""A test whose machine lacks something is skipped with the reason, and fails where nothing may be
skipped."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from capabilities import PROBES, REQUIRE_ALL, missing

TESTS = Path(__file__).parent
SANDBOXED = "test_what_a_program_writes_and_how_it_ends_is_told"


def run_without_bubblewrap(
    tmp_path: Path, **env: str
) -> subprocess.CompletedProcess[str]:
    """Run a test of each sandbox with a PATH on which there is no bwrap."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "no:cacheprovider",
        "-k",
        SANDBOXED,
    ]
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("PYTEST")
    }
    kept.pop(REQUIRE_ALL, None)
    return subprocess.run(
        [*command, str(TESTS / "test_sandbox.py")],
        env={**kept, "PATH": str(tmp_path), **env},
        cwd=TESTS.parent,
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_without_bubblewrap_its_cases_are_skipped_with_the_reason(
    tmp_path: Path,
) -> None:
    done = run_without_bubblewrap(tmp_path)
    assert done.returncode == 0, done.stdout
    reason = "needs bubblewrap (bwrap is not installed): apt-get install bubblewrap"
    assert reason in done.stdout.replace("\n", " ")
    assert "1 skipped" in done.stdout or "2 skipped" in done.stdout


@pytest.mark.slow
def test_where_nothing_may_be_skipped_the_same_fails(tmp_path: Path) -> None:
    done = run_without_bubblewrap(tmp_path, **{REQUIRE_ALL: "1"})
    assert done.returncode == 1, done.stdout
    assert "needs bubblewrap" in done.stdout and REQUIRE_ALL in done.stdout


def test_every_capability_that_is_missing_says_what_brings_it() -> None:
    for capability, (_, fix) in PROBES.items():
        reason = missing(capability)
        assert reason == "" or reason.endswith(fix)
