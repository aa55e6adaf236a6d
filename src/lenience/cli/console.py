"""Messages and progress bars on standard error."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from rich.console import Console

if TYPE_CHECKING:
    from lenience.core.progress import Progress

screen = Console(stderr=True)
T = TypeVar("T")


def say(text: str) -> None:
    """Print text without markup or added line breaks, so that commands in it can be copied."""
    screen.print(text, highlight=False, markup=False, soft_wrap=True)


def counted(number: int, noun: str, plural: str = "") -> str:
    """Return a number with its noun, such as "1 prompt" or "1,200 prompts"."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def print_json(value: dict[str, Any]) -> None:
    """Print an object as a line of standard output."""
    print(json.dumps(value), flush=True)


def wide(width: int) -> Console:
    """Return a console for tables that is at least `width` columns wide."""
    return Console(stderr=True, width=max(screen.width, width))


@contextmanager
def loading() -> Iterator[None]:
    """Show that models are loading, and silence log lines of their libraries that are not
    errors."""
    with screen.status("loading the models"):
        from huggingface_hub.utils import logging as hub_logging
        from transformers.utils import logging

        hub_logging.set_verbosity_error()
        logging.set_verbosity_error()
        yield


@contextmanager
def progress_bars() -> Iterator[Progress]:
    """Provide a progress callback that draws a bar for each phase."""
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TaskID,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn("{task.description:18}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=screen) as bars:
        by_phase: dict[str, TaskID] = {}

        def show_progress(phase: str, done: int, total: int) -> None:
            if phase not in by_phase:
                by_phase[phase] = bars.add_task(phase, total=total)
            bars.update(by_phase[phase], completed=done, total=total)

        yield show_progress
        for task in bars.tasks:  # phases that ended early are done too
            bars.update(task.id, total=task.completed)


def with_bars(step: Callable[..., T], *args: Any, **named: Any) -> T:
    """Run a step that takes a `progress` callback, with a bar for each of its phases."""
    with progress_bars() as show:
        return step(*args, progress=show, **named)


def duration(seconds: float) -> str:
    """Return a time in words: seconds, minutes or hours."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return (
        f"{seconds / 60:.0f} minutes"
        if seconds < 5400
        else f"{seconds / 3600:.1f} hours"
    )
