"""What a machine may lack, and how a test that needs it is skipped.

A test says `@needs("bubblewrap")`, or `pytest.param(…, marks=needs("bubblewrap"))`. On a machine
without it the test is skipped, with the reason and the command that installs it. With
LENIENCE_TESTS_REQUIRE_ALL=1, as in CI, such a skip, like any other, is a failure.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from pathlib import PurePosixPath

import pytest

REQUIRE_ALL = "LENIENCE_TESTS_REQUIRE_ALL"
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
ELSEWHERE = {
    "test_vllm.py": lambda: find_spec("vllm") is not None,
    "test_vllm_v2.py": lambda: find_spec("vllm") is not None,
    "test_sglang.py": lambda: "LENIENCE_SGLANG" in os.environ,
}
"""Modules that `make test-vllm` and `make test-sglang` run, and what tells whether this is such a
run. Elsewhere they may be skipped."""


def browser() -> str | None:
    """Return the path of a Chromium, or None."""
    return next((found for found in map(shutil.which, BROWSERS) if found), None)


def _lacks_sandbox(kind: str) -> str:
    from lenience.core.errors import InputError
    from lenience.tasks.sandbox import probe

    try:
        return probe(kind)  # type: ignore[arg-type]
    except InputError as error:
        return str(error)


def _lacks_any_sandbox() -> str:
    reasons = [f"{kind}: {_lacks_sandbox(kind)}" for kind in ("bubblewrap", "landlock")]
    return (
        "" if any(reason.endswith(": ") for reason in reasons) else "; ".join(reasons)
    )


PROBES: dict[str, tuple[Callable[[], str], str]] = {
    "bubblewrap": (lambda: _lacks_sandbox("bubblewrap"), "apt-get install bubblewrap"),
    "landlock": (
        lambda: _lacks_sandbox("landlock"),
        "run on Linux 5.13 or newer with Landlock",
    ),
    "sandbox": (_lacks_any_sandbox, "apt-get install bubblewrap"),
    "browser": (
        lambda: "" if browser() else "no Chromium found",
        "apt-get install chromium",
    ),
    "ray": (
        lambda: "" if find_spec("ray") else "no ray found",
        "pip install 'lenience[ray]'",
    ),
    "mapie": (
        lambda: "" if find_spec("mapie") else "no mapie found",
        "pip install mapie",
    ),
}
"""For each capability, what says why it is missing ("" if it is there), and what brings it."""


@cache
def missing(capability: str) -> str:
    """Return why a capability is missing and what brings it; "" if it is there."""
    lacks, fix = PROBES[capability]
    reason = lacks()
    return f"needs {capability} ({reason}): {fix}" if reason else ""


def needs(capability: str) -> pytest.MarkDecorator:
    """Return the mark of a test that needs a capability."""
    assert capability in PROBES
    return pytest.mark.needs(capability)


def skip_unless_capable(item: pytest.Item) -> None:
    """Skip a test whose machine lacks what it needs."""
    for mark in item.iter_markers("needs"):
        if reason := missing(mark.args[0]):
            pytest.skip(reason)


def fail_if_skipped(report: pytest.TestReport | pytest.CollectReport) -> None:
    """Turn a skip into a failure where nothing may be skipped."""
    if (
        not os.environ.get(REQUIRE_ALL)
        or not report.skipped
        or hasattr(report, "wasxfail")
    ):
        return
    module = PurePosixPath(report.nodeid.split("::")[0]).name
    if module in ELSEWHERE and not ELSEWHERE[module]():
        return
    assert isinstance(report.longrepr, tuple)
    report.outcome = "failed"
    report.longrepr = (
        f"{report.longrepr[2]}\n{REQUIRE_ALL} is set, so nothing may be skipped"
    )
