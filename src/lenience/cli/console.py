"""The screen: progress with the time left, on standard error."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console

screen = Console(stderr=True)


@contextmanager
def loading() -> Iterator[None]:
    """While models load: says so, and keeps transformers from drawing bars of its own."""
    with screen.status("loading the models"):
        from transformers.utils import logging

        logging.disable_progress_bar()
        logging.set_verbosity_error()
        yield


@contextmanager
def progress() -> Iterator[Callable[[str, int, int], None]]:
    """A function (what, done, total) that draws a bar with the time left on standard error."""
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (TextColumn("{task.description:18}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
               TextColumn("left"), TimeRemainingColumn())  # fmt: skip
    with Progress(*columns, console=screen) as bars:
        made: dict[str, Any] = {}

        def show(what: str, done: int, total: int) -> None:
            if what not in made:
                made[what] = bars.add_task(what, total=total)
            bars.update(made[what], completed=done, total=total)

        yield show


def follow(items: Iterable[Any]) -> dict[str, Any]:
    """Draw the progress of a comparison; returns its frontier."""
    from lenience.evaluation.compare import Estimate

    with progress() as show:
        frontier: dict[str, Any] = {}
        for item in items:
            if isinstance(item, dict):
                frontier = item
            elif isinstance(item, Estimate):
                screen.print(f"{item.answers} answers to decode, about {_duration(item.seconds)}", highlight=False)
            else:
                show(item.phase, item.done, item.total)
    return frontier


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} minutes" if seconds < 5400 else f"{seconds / 3600:.1f} hours"
