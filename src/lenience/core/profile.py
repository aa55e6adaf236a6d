"""Where the time of decoding goes."""

from __future__ import annotations

import time
from collections.abc import Callable


class Profile:
    """Wall-clock time per component of decoding. `seconds` has the draft's passes (or drafting, if
    a window takes no pass), the target's passes, the rule, the caches (comparing rows and writing
    their states) and the rest; `cycles` counts cycles. One profile may serve several calls. On a
    GPU it synchronises after each component, which slows decoding."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(("draft", "target", "rule", "cache", "rest"), 0.0)
        self.cycles = 0
        self.wait: Callable[[], None] | None = None
        """Waits for the device."""
        self._last = time.perf_counter()

    def wait_by(self, wait: Callable[[], None] | None) -> None:
        """Wait for the device, from now on, at the end of each component."""
        self.wait = wait

    def count_cycle(self) -> None:
        self.cycles += 1

    def start(self) -> None:
        """Start the clock; the time before belongs to no component."""
        self._last = time.perf_counter()

    def add(self, part: str) -> None:
        """Add the time since the last call to a component."""
        if self.wait:
            self.wait()
        now = time.perf_counter()
        self.seconds[part] += now - self._last
        self._last = now
