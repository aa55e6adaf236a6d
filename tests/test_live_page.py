"""The live page of `lenience serve`, as a reader uses it: with a mouse, by keyboard and on a narrow
screen."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from capabilities import browser, needs
from test_serve import Served, rule, served

from lenience.decoding.decoder import Decoder
from lenience.decoding.pair import Pair
from lenience.serving.live_page import dial_steps, told_apart
from lenience.serving.service import RACERS
from lenience.tasks import WordMath, take

SAMPLE = str(take(WordMath(), "test", 1)[0].prompt)


@pytest.fixture(scope="module")
def server(built_in: Pair) -> Iterator[Served]:
    allow = rule("judge@0.993"), rule("judge@0.0988")
    strict = Decoder.parse("exact; drafter=medusa; window=4")
    with served(
        built_in, {"window": 8}, max_rows=2, context=300, allow=allow, strict=strict
    ) as found:
        yield found


@pytest.fixture(scope="module")
def page(server: Served) -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api")
    with playwright.sync_playwright() as running:
        chromium = running.chromium.launch(
            executable_path=browser(), args=["--no-sandbox"]
        )
        found = chromium.new_page()
        found.problems = []
        found.on("pageerror", lambda error: found.problems.append(str(error)))
        found.on("console", lambda line: found.problems.append(line.text))
        yield found
        chromium.close()


def race(server: Served, **body: Any) -> dict[str, list[dict[str, Any]]]:
    """The lines of each column."""
    answer = server.post("/live", **{"prompt": SAMPLE, "max_tokens": 60, **body})
    assert answer.status_code == 200, answer.text
    lines = [json.loads(line) for line in answer.text.splitlines()]
    found: dict[str, list[dict[str, Any]]] = {}
    for line in lines:
        found.setdefault(line["column"], []).append(line)
    return found


def test_the_columns_are_the_decoders_own_answers(
    server: Served, built_in: Pair
) -> None:
    found = race(server, lenience="judge@0.993")
    assert set(found) == set(RACERS)
    options: dict[str, dict[str, Any]] = {
        "target": {"rule": "target"},
        "strict": {"drafter": "medusa", "window": 4},
        "lenient": {"rule": "judge@0.993", "window": 8},
    }
    for name, lines in found.items():
        out = built_in.generate(SAMPLE, max_new_tokens=60, **options[name])
        tokens = [token for line in lines for token in line["tokens"]]
        assert "".join(token["text"] for token in tokens) == out.text, name
        assert lines[-1]["passes"] == out.target_passes
        assert [line["seconds"] for line in lines] == sorted(
            line["seconds"] for line in lines
        )
        origins = [entry.origin for entry in out.trace]
        assert [token["origin"] for token in tokens] == (
            ["bonus"] * len(tokens) if name == "target" else origins
        )
    # where a token is lenient, the target would have said another one
    lenient = [token for line in found["lenient"] for token in line["tokens"]]
    kept = [token for token in lenient if token["origin"] == "draft-lenient"]
    assert kept and all(token["target"] not in (None, token["text"]) for token in kept)
    assert all(0.993 <= token["score"] <= 1 for token in kept)
    agreed = [token for token in lenient if token["origin"] == "draft"]
    assert agreed and all(token["target"] is None for token in agreed)


def test_the_dial_goes_from_exact_to_what_is_allowed(server: Served) -> None:
    steps = dial_steps(server.service)
    assert steps[0].dial == "exact" and [step.starts for step in steps].count(True) == 1
    (start,) = (step for step in steps if step.starts)
    assert start.dial == "judge@0.993"
    thresholds = [float(step.dial.partition("@")[2]) for step in steps[1:]]
    assert thresholds == sorted(thresholds, reverse=True)
    passes = [
        race(server, columns=["lenient"], lenience=step.dial)["lenient"][-1]["passes"]
        for step in (steps[0], start, steps[-1])
    ]
    assert passes[0] > passes[1] >= passes[2]
    answer = server.post("/live", prompt=SAMPLE, lenience="topk:9")
    assert answer.status_code == 400


def test_thresholds_are_told_apart_and_from_one() -> None:
    assert told_apart([0.5, 0.25]) == ["0.5", "0.25"]
    assert told_apart([0.9999999, 0.9999998, 0.3]) == ["0.9999999", "0.9999998", "0.3"]
    assert told_apart([1.0, 0.99999]) == ["1", "0.99999"]


@needs("browser")
def test_a_reader_sees_the_race(server: Served, page: Any) -> None:
    page.set_viewport_size({"width": 1200, "height": 900})
    page.goto(server.url)
    page.select_option("#slow", "1")
    page.fill("#most", "50")
    page.click("#run")
    page.get_by_text("Lenient: ").wait_for()
    for name in RACERS:
        text = page.locator(f"#{name} .answer").inner_text()
        wanted = "".join(
            token["text"]
            for line in race(server, max_tokens=50, columns=[name])[name]
            for token in line["tokens"]
        )
        if name != "lenient":
            assert text.split() == wanted.split()
        assert int(page.locator(f"#{name} .rate").inner_text()) > 0
    mark = page.locator("#lenient .draft-lenient").first
    mark.hover()
    tip = page.locator("#tip")
    assert tip.is_visible()
    assert "judge's score" in tip.inner_text()
    assert "the target's own" in tip.inner_text()
    page.locator("h1").hover()
    assert not tip.is_visible()
    assert page.problems == []


@needs("browser")
def test_the_page_works_by_keyboard_on_a_narrow_screen(
    server: Served, page: Any
) -> None:
    page.set_viewport_size({"width": 400, "height": 900})
    page.emulate_media(reduced_motion="reduce")
    page.goto(server.url)
    page.focus("#prompt")
    page.keyboard.press("Control+Enter")
    page.get_by_text("Lenient: ").wait_for()
    before = int(page.locator("#lenient .passes").inner_text())
    assert page.locator("body").bounding_box()["width"] <= 400
    widest = max(
        box["x"] + box["width"]
        for box in (each.bounding_box() for each in page.locator("form *").all())
        if box
    )
    assert widest <= 400
    page.focus("#dial")
    page.keyboard.press("Home")
    assert page.locator("#dialtext").inner_text() == "exact"
    page.locator("#said").filter(has_not_text="decoding").wait_for()
    page.get_by_text("Lenient: ").wait_for()
    page.locator("#lenient .passes").filter(has_not_text="–").wait_for()
    assert int(page.locator("#lenient .passes").inner_text()) >= before
    page.keyboard.press("End")
    page.locator("#lenient .t[tabindex]").first.wait_for()
    page.locator("#lenient .t[tabindex]").first.focus()
    assert page.locator("#tip").is_visible()
    assert page.problems == []


@needs("browser")
def test_an_error_is_shown(server: Served, page: Any) -> None:
    page.goto(server.url)
    page.fill("#prompt", "zebra <script>alert(1)</script>")
    page.click("#run")
    page.locator("#said").filter(has_text="prompt:").wait_for()
    assert page.locator("#lenient .t").count() == 0
    page.problems.clear()  # the browser notes the status 400


def test_other_pages_cannot_run_or_frame_it(server: Served) -> None:
    answer = server.client.get("/")
    policy = answer.headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy and "frame-ancestors 'none'" in policy
    nonce = policy.partition("'nonce-")[2].partition("'")[0]
    assert answer.text.count("<script") == answer.text.count(f'nonce="{nonce}"') == 1
    assert "http://" not in answer.text and "https://" not in answer.text
