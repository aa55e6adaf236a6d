"""Equality of mathematical expressions, by math-verify in its own process.

Model-written expressions may keep sympy busy forever.
"""

from __future__ import annotations

import json
import selectors
import subprocess
import sys
import threading
from functools import cache
from importlib.util import find_spec

from lenience.core.errors import InputError

COMMAND = [sys.executable, "-m", "lenience.tasks.expressions"]
COMPARISON_SECONDS = 20.0
"""Time limit of a comparison, in seconds; math-verify usually gives up earlier."""


def same_expression(a: str, b: str) -> bool | None:
    """Return True if two expressions (LaTeX or plain) are equal; None if either cannot be parsed. A
    comparison that takes too long returns False. Raises InputError without math-verify."""
    if a.strip() == b.strip():
        return True
    return comparer().ask(a, b)


@cache
def comparer() -> _Comparer:
    """Return the shared process that compares expressions. Raises InputError without
    math-verify."""
    if find_spec("math_verify") is None:
        raise InputError(
            "comparing as math needs math-verify: pip install 'lenience[math]'"
        )
    return _Comparer()


class _Comparer:
    """A process that compares expressions, restarted if it hangs or dies."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        self._works = False
        """True if a process has answered before."""

    def ask(self, a: str, b: str) -> bool | None:
        with self._lock:
            process = self._process or self._start()
            assert process.stdin and process.stdout
            try:
                process.stdin.write(json.dumps([a, b]) + "\n")
                process.stdin.flush()
            except BrokenPipeError:
                return self._over(process, hangs=False)
            with selectors.DefaultSelector() as ready:
                ready.register(process.stdout, selectors.EVENT_READ)
                hangs = not ready.select(COMPARISON_SECONDS)
            line = "" if hangs else process.stdout.readline()
            if not line:
                return self._over(process, hangs)
            self._works = True
            same: bool | None = json.loads(line)
            return same

    def _start(self) -> subprocess.Popen[str]:
        self._process = subprocess.Popen(
            COMMAND,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        return self._process

    def _over(self, process: subprocess.Popen[str], hangs: bool) -> bool:
        """Abandon a process that hangs or has died; the pending comparison counts as different.
        Raises InputError if no comparison has ever worked."""
        process.kill()
        process.wait()
        self._process = None
        if not (hangs or self._works):
            _check()
        return False


def _check() -> None:
    """Raise InputError if a new process cannot compare a number with itself."""
    ended = subprocess.run(
        COMMAND,
        input='["1", "1.0"]',
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    if ended.stdout.strip() != "true":
        lines = ended.stderr.strip().splitlines() or [
            f"it ended with {ended.returncode}"
        ]
        raise InputError(
            f"math-verify does not work here ({lines[-1][:200]}); reinstall it"
        )


def _answer(a: str, b: str) -> bool | None:
    from math_verify import parse, verify

    first, second = (parse(text if "$" in text else f"${text}$") for text in (a, b))
    if not first or not second:
        return None
    return bool(verify(first, second))


if __name__ == "__main__":
    for asked in sys.stdin:
        print(json.dumps(_answer(*json.loads(asked))), flush=True)
