"""A test whose machine lacks something is skipped with the reason, and fails where nothing may be
skipped."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from capabilities import ELSEWHERE, PROBES, REQUIRE_ALL, fail_if_skipped, missing

TESTS = Path(__file__).parent
SANDBOXED = "test_what_a_program_writes_and_how_it_ends_is_told"


def run_without_bubblewrap(
    tmp_path: Path, **env: str
) -> subprocess.CompletedProcess[str]:
    """Run a test of each sandbox with a PATH on which there is no bwrap."""
    chosen = ["-k", SANDBOXED, str(TESTS / "test_sandbox.py")]
    return run_pytest(*chosen, PATH=str(tmp_path), **env)


def run_pytest(*args: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run pytest in a process that knows nothing of this one's run."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("PYTEST")
        and name not in (REQUIRE_ALL, "LENIENCE_SGLANG")
    }
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *args],
        env={**kept, **env},
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


def collected(module: str) -> pytest.CollectReport:
    """Return what pytest reports of a module that skips itself, after our hook has seen it."""
    report = pytest.CollectReport(
        f"tests/{module}", "skipped", (module, 1, "Skipped: needs something"), []
    )
    fail_if_skipped(report)
    return report


def test_only_modules_that_run_elsewhere_may_skip_themselves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(REQUIRE_ALL, "1")
    monkeypatch.delenv("LENIENCE_SGLANG", raising=False)
    assert collected("test_sglang.py").outcome == "skipped"
    assert collected("test_gguf.py").outcome == "failed"
    monkeypatch.setenv("LENIENCE_SGLANG", "/packages")
    assert collected("test_sglang.py").outcome == "failed"


def test_where_nothing_may_be_skipped_modules_that_run_elsewhere_may() -> None:
    installed = find_spec("vllm") is not None
    modules = ["test_sglang.py"] if installed else sorted(ELSEWHERE)
    paths = [str(TESTS / name) for name in modules]
    done = run_pytest("--collect-only", *paths, **{REQUIRE_ALL: "1"})
    assert done.returncode == pytest.ExitCode.NO_TESTS_COLLECTED, done.stdout
