"""Wall-clock time per component of decoding."""

from __future__ import annotations

import time
from collections.abc import Callable


class Profile:
    """Wall-clock time per component of decoding, in `seconds`, and the number of `cycles`.

    The components are `draft` (passes of the draft model, or drafting without a pass), `target`
    (its passes), `rule`, `cache` and `rest`. `cache` is the time to compare rows and write their
    states. One profile may serve several calls. On a GPU it synchronises after each component,
    which slows decoding.
    """

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(("draft", "target", "rule", "cache", "rest"), 0.0)
        self.cycles = 0
        self.wait: Callable[[], None] | None = None
        """Function that waits for the device; None if there is nothing to wait for."""
        self._last = time.perf_counter()

    def wait_by(self, wait: Callable[[], None] | None) -> None:
        """Call `wait` at the end of each component from now on, to synchronise the device."""
        self.wait = wait

    def count_cycle(self) -> None:
        self.cycles += 1

    def start(self) -> None:
        """Start the clock. Earlier time belongs to no component."""
        self._last = time.perf_counter()

    def add(self, part: str) -> None:
        """Add the time since the last call to the component `part`."""
        if self.wait:
            self.wait()
        now = time.perf_counter()
        self.seconds[part] += now - self._last
        self._last = now
