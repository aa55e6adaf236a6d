"""The live race: what it decodes, and how it looks on different terminals."""

from __future__ import annotations

import io
import re

import pytest
from rich.console import Console

from lenience.cli import live
from lenience.decoding.loading import load_pair
from lenience.decoding.pair import Pair
from lenience.tasks import WordMath, take

ESCAPE = "\x1b["
COLOURED = re.compile(r"\x1b\[[0-9;]*(4[0-9]|10[0-9])m")


@pytest.fixture(scope="module")
def pair() -> Pair:
    return load_pair()


def race(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, **console: object
) -> tuple[str, list[dict]]:
    """Run a race of one further problem. Returns what was printed, and the records."""
    out = io.StringIO()
    options = {"width": 120, "color_system": "standard", **console}
    screen = Console(file=out, **options)  # type: ignore[arg-type]
    monkeypatch.setattr(live, "screen", screen)
    monkeypatch.setattr("lenience.cli.console.screen", screen)
    monkeypatch.setattr(live, "SHOWN_SECONDS", 0.2)
    results = live.race(pair, WordMath(), scored=1)
    return out.getvalue(), results


def test_a_race_decodes_as_generate_does_and_counts_it(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    printed, results = race(pair, monkeypatch, force_terminal=False)
    assert "lenience[onnx]" not in printed
    second = take(WordMath(), "test", 2)[1]
    for setting, result in zip(live.SETTINGS, results, strict=True):
        out = pair.generate(second.prompt, max_new_tokens=320, **setting.options)
        (score,) = WordMath().score([(out.text, second)])
        assert result["right"] == int(bool(score.correct))
        assert result["tokens_per_pass"] == pytest.approx(out.tokens_per_pass)
    assert results[0]["tokens_per_pass"] == 1 < results[1]["tokens_per_pass"]


def test_without_a_terminal_the_finished_columns_are_printed_once(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "refuses", lambda lm: live.NEEDS_ONNX)
    printed, _ = race(pair, monkeypatch, force_terminal=False, color_system=None)
    assert "pip install 'lenience[onnx]'" in printed
    assert ESCAPE not in printed
    for setting in live.SETTINGS:
        assert printed.count(f"─ {setting.title} ─") == 1
    assert "«" in printed and "tokens/s" in printed and "right" in printed


def test_a_terminal_shows_colours_and_no_marks(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    printed, _ = race(pair, monkeypatch, force_terminal=True)
    assert COLOURED.search(printed) and "«" not in printed
    assert "slowed down" in printed and "draft-lenient" in printed


def test_without_colours_marks_take_their_place(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    printed, _ = race(pair, monkeypatch, force_terminal=True, no_color=True)
    assert not COLOURED.search(printed) and "«draft-lenient»" in printed


@pytest.mark.parametrize(("width", "rows"), [(120, 1), (60, 3)])
def test_columns_stand_side_by_side_where_there_is_room(
    pair: Pair, width: int, rows: int
) -> None:
    (sample,) = take(WordMath(), "test", 1)
    lanes = [live._lane(pair, WordMath(), sample, setting) for setting in live.SETTINGS]
    for lane in lanes:
        live._finish(lane)
    out = io.StringIO()
    screen = Console(file=out, width=width)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(live, "screen", screen)
        screen.print(live._columns(lanes, plain=True))
    lines = out.getvalue().rstrip("\n").split("\n")
    assert max(map(len, lines)) <= width
    assert sum("╭─" in line for line in lines) == rows
    words = re.findall(r"[a-z]{3,}", lanes[0].text)
    assert len(words) > 5
    if rows == 3:  # each word stands there whole but for line breaks and marks
        shown = re.sub(r"[^a-z]", "", out.getvalue())
        assert all(word in shown for word in words)
