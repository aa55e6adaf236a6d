"""The report in a browser, as a reader without a mouse and with a narrow screen uses it."""

from __future__ import annotations

import csv
import html
import io
import json
import re
import subprocess
from pathlib import Path

import pytest
from capabilities import browser, needs
from test_compare import RULES, compare
from test_mining import ParityTask

from lenience.decoding.pair import Pair
from lenience.evaluation.names import named
from lenience.evaluation.pages import write_report
from lenience.evaluation.table import Frontier

WIDTH = 400
READER = """
<pre id="told"></pre>
<script>
const frame = document.querySelector("iframe");
frame.addEventListener("load", () => {
  const page = frame.contentDocument, inside = frame.contentWindow, saved = [], told = {};
  const shown = node => node.getBoundingClientRect().width > 0;
  const press = (node, key) => {
    node.focus();
    if (page.activeElement !== node) return "takes no focus";
    node.dispatchEvent(new inside.KeyboardEvent("keydown", {key, bubbles: true, cancelable: true}));
    return page.querySelector("#picked h2").textContent;
  };
  told.wide = page.documentElement.scrollWidth;
  told.figures = [".wide svg", ".narrow svg"].map(name => shown(page.querySelector(name)));
  told.rows = [...page.querySelectorAll("tr[data-row]")].map(row => press(row, "Enter"));
  told.marks = [...page.querySelectorAll('.narrow [id^="mark-"]')]
    .map(mark => [Number(mark.id.split("-")[1]), press(mark, " ")]);
  const cost = page.getElementById("cost");
  told.speeds = [0, 0.25].map(value => {
    cost.value = value;
    cost.dispatchEvent(new inside.Event("input"));
    return [...page.querySelectorAll("#speeds tr")].map(row => Number(row.cells[1].textContent));
  });
  inside.URL.createObjectURL = blob => { saved.push(blob); return "#"; };
  for (const name of ["csv", "json"]) page.getElementById(name).click();
  Promise.all(saved.map(blob => blob.text())).then(texts => {
    told.saved = texts;
    document.getElementById("told").textContent = JSON.stringify(told);
  });
});
</script>
"""


def read_in_a_browser(page: Path) -> dict:
    """What a reader sees of a page on a screen of WIDTH pixels."""
    frame = f'<iframe width="{WIDTH}" height="800" srcdoc="{html.escape(page.read_text())}">'
    around = page.with_name("around.html")
    around.write_text(f'<!doctype html><meta charset="utf-8">{frame}</iframe>{READER}')
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-web-security"]
    flags += ["--allow-file-access-from-files", "--virtual-time-budget=10000"]
    command = [str(browser()), *flags, "--dump-dom", around.as_uri()]
    dom = subprocess.run(command, capture_output=True, text=True, timeout=120).stdout
    (told,) = re.findall(r'<pre id="told">(.*?)</pre>', dom, re.S)
    return json.loads(html.unescape(told))


@needs("browser")
def test_the_report_is_read_on_a_narrow_screen_by_keyboard(
    llama: Pair, tmp_path: Path
) -> None:
    _, made = compare(llama, ParityTask(), RULES, windows=(4,), limit=5, tuning=2)
    frontier = Frontier(**made)
    write_report(tmp_path / "report.html", frontier)
    told = read_in_a_browser(tmp_path / "report.html")
    assert told["wide"] <= WIDTH, "the page does not scroll sideways"
    assert told["figures"] == [False, True], "the figure is the one for narrow screens"
    rows = named(frontier.rows)
    titles = [
        row.name + (f", window {row.window}" if row.window else "") for row in rows
    ]
    assert told["rows"] == titles
    assert told["marks"] and all(title == titles[i] for i, title in told["marks"])
    drafting = [
        row for row in rows if row.tokens_per_pass is not None and row.rule != "target"
    ]
    for share, speeds in zip((0, 0.25), told["speeds"]):
        by_hand = [row.tokens_per_pass / (1 + share * row.window) for row in drafting]
        assert speeds == pytest.approx(sorted(by_hand, reverse=True), abs=0.006)
    table = list(csv.DictReader(io.StringIO(told["saved"][0])))
    assert [row["rule"] for row in table] == [row.rule for row in rows]
    as_json = json.loads(told["saved"][1])
    assert [row["tokens_per_second"] for row in as_json] == [
        row.tokens_per_second for row in rows
    ]
