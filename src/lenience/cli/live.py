"""The live race: one problem decoded in three columns, then several at full speed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rich.columns import Columns
from rich.console import Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from lenience.cli.console import say, screen
from lenience.cli.tables import MARKS, STYLES
from lenience.decoding.response import TextStream
from lenience.models.compile import NEEDS_ONNX, refuses
from lenience.tasks import take

if TYPE_CHECKING:
    from lenience.core.types import Step
    from lenience.decoding.pair import Pair
    from lenience.tasks import Sample, Task

SHOWN_SECONDS = 6.0
"""Seconds that the slowest column takes on the screen; all columns are slowed by the same
factor."""
NARROWEST_COLUMN = 28
"""Minimum width of a column, in characters; in a narrower terminal the columns are stacked."""
SCORED = 12
"""Number of problems decoded at full speed after the one that is shown."""


@dataclass(frozen=True)
class LiveSetting:
    """A decoder of the race: its title and its options of decoding."""

    title: str
    options: dict[str, Any]


SETTINGS = (
    LiveSetting("target alone", {"rule": "exact", "window": 0}),
    LiveSetting("strict", {"rule": "exact", "drafter": "medusa", "window": 4}),
    LiveSetting("judge", {"rule": "judge@0.993", "window": 16}),
)
"""The fastest strict setting and the judge of the published results on the built-in pair."""


@dataclass
class LiveColumn:
    """A column of the race: one decoder's text so far, and its decoding time."""

    setting: LiveSetting
    steps: Iterator[Step]
    stream: TextStream
    seconds: float = 0.0
    passes: int = 0
    tokens: int = 0
    pieces: list[tuple[str, str]] = field(default_factory=list)
    """Text and origin of each token."""
    done: bool = False
    right: bool | None = None

    @property
    def text(self) -> str:
        return "".join(piece for piece, _ in self.pieces)

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0

    def advance(self) -> None:
        """Decode one cycle, and add its time."""
        began = time.perf_counter()
        step = next(self.steps, None)
        self.seconds += time.perf_counter() - began
        if step is None:
            self.done = True
            return
        self.passes += step.target_passes
        self.tokens += len(step.trace)
        self.pieces += [
            (self.stream.push(entry.token), entry.origin) for entry in step.trace
        ]
        self.done = step.finish is not None
        if self.done:
            self.pieces.append(
                (self.stream.flush(), step.trace[-1].origin if step.trace else "")
            )


def race(
    pair: Pair,
    task: Task,
    settings: Sequence[LiveSetting] = SETTINGS,
    scored: int | None = None,
) -> list[dict[str, Any]]:
    """Decode one problem in columns, then `scored` more at full speed, by default SCORED. Return a
    record for each setting: tokens per second, tokens per pass, and the number of right answers.

    Every cycle is decoded at the moment it appears. The columns share one slow-motion factor, so
    their order is that of the real race.
    """
    samples = take(task, "test", (SCORED if scored is None else scored) + 1)
    shown = samples[0]
    say(f"\n{shown.prompt}\n")
    for setting in settings:  # loads heads and graphs, and makes the caches
        _finish(_lane(pair, task, shown, setting))
    slowest = _lane(pair, task, shown, settings[0])
    _finish(slowest)
    lanes = [_lane(pair, task, shown, setting) for setting in settings]
    _show(lanes, task, shown, slowest.seconds)
    results = _at_full_speed(pair, task, samples[1:], settings)
    screen.print(_summary(results, len(samples) - 1))
    if refuses(pair.target) == NEEDS_ONNX:
        say(f"These passes run in PyTorch and are several times slower: {NEEDS_ONNX}")
    return results


def _lane(pair: Pair, task: Task, sample: Sample, setting: LiveSetting) -> LiveColumn:
    options = {"max_new_tokens": task.max_new_tokens, **setting.options}
    return LiveColumn(
        setting, pair.stream(sample.prompt, **options), TextStream(pair.target)
    )


def _finish(lane: LiveColumn) -> None:
    while not lane.done:
        lane.advance()


def _show(lanes: list[LiveColumn], task: Task, sample: Sample, slowest: float) -> None:
    """Decode in columns; without a terminal the finished columns are printed once."""
    check = _checker(task, sample)
    plain = screen.no_color or not screen.is_terminal
    screen.print(_legend(plain))
    if not screen.is_terminal:
        for lane in lanes:
            _finish(lane)
            lane.right = check(lane)
            screen.print(_column(lane, plain))
        return
    slowed = max(1.0, SHOWN_SECONDS / slowest)
    say(f"decoded live, slowed down {slowed:.0f} times")
    began = time.perf_counter()
    with Live(_columns(lanes, plain), console=screen, refresh_per_second=20) as live:
        while waiting := [lane for lane in lanes if not lane.done]:
            lane = min(waiting, key=lambda each: each.seconds)
            time.sleep(max(0.0, began + lane.seconds * slowed - time.perf_counter()))
            lane.advance()
            if lane.done:
                lane.right = check(lane)
            live.update(_columns(lanes, plain))


def _checker(task: Task, sample: Sample) -> Callable[[LiveColumn], bool | None]:
    def check(lane: LiveColumn) -> bool | None:
        (score,) = task.score([(lane.text, sample)])
        return score.correct

    return check


def _columns(lanes: Sequence[LiveColumn], plain: bool) -> RenderableType:
    """Draw the columns side by side, or stacked if the terminal is narrow."""
    panels = [_column(lane, plain) for lane in lanes]
    if screen.width < NARROWEST_COLUMN * len(lanes):
        return Group(*panels)
    return Columns(panels, width=screen.width // len(lanes) - 1, padding=0)


def _column(lane: LiveColumn, plain: bool) -> Panel:
    text = Text()
    for piece, origin in lane.pieces:
        before, after = (
            MARKS.get(origin, ("", "")) if plain and piece.strip() else ("", "")
        )
        text.append(f"{before}{piece}{after}", "" if plain else STYLES.get(origin, ""))
    speed = f"{lane.tokens_per_second:,.0f} tokens/s, {lane.passes} passes"
    verdict = {True: ", right", False: ", wrong", None: ""}[lane.right]
    return Panel(
        text, title=lane.setting.title, subtitle=speed + verdict, title_align="left"
    )


def _legend(plain: bool) -> Text:
    """Name the colour of each origin, or its mark if there are no colours."""
    legend = Text()
    for origin in ("draft", "draft-lenient", "correction", "bonus"):
        before, after = MARKS[origin] if plain else (" ", " ")
        legend.append(f"{before}{origin}{after}", "" if plain else STYLES[origin])
        legend.append("  ")
    return legend


def _at_full_speed(
    pair: Pair, task: Task, samples: Sequence[Sample], settings: Sequence[LiveSetting]
) -> list[dict[str, Any]]:
    """Decode problems one by one, the settings taking turns on each."""
    lanes: dict[str, list[LiveColumn]] = {setting.title: [] for setting in settings}
    with screen.status(f"{len(samples)} more problems at full speed"):
        for sample in samples:
            for setting in settings:
                lane = _lane(pair, task, sample, setting)
                _finish(lane)
                lane.right = _checker(task, sample)(lane)
                lanes[setting.title].append(lane)
    return [_record(setting, lanes[setting.title]) for setting in settings]


def _record(setting: LiveSetting, lanes: Sequence[LiveColumn]) -> dict[str, Any]:
    tokens = sum(lane.tokens for lane in lanes)
    return {
        "setting": setting.title,
        **setting.options,
        "problems": len(lanes),
        "right": sum(lane.right is True for lane in lanes),
        "tokens_per_second": tokens / sum(lane.seconds for lane in lanes),
        "tokens_per_pass": tokens / sum(lane.passes for lane in lanes),
    }


def _summary(results: Sequence[dict[str, Any]], problems: int) -> Table:
    table = Table(
        "decoder", title=f"{problems} more problems at full speed, one by one"
    )
    for column in ("tokens/s", "speed-up", "tokens/pass", "right"):
        table.add_column(column, justify="right")
    alone = results[0]["tokens_per_second"]
    for result in results:
        table.add_row(
            result["setting"],
            f"{result['tokens_per_second']:,.0f}",
            f"{result['tokens_per_second'] / alone:.2f} ×",
            f"{result['tokens_per_pass']:.2f}",
            f"{result['right']} of {result['problems']}",
        )
    return table
