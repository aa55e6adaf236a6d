"""The page on which a person marks errors, and the file that it saves."""

from __future__ import annotations

import html
import json
import re
import subprocess
from pathlib import Path

import pytest
from capabilities import browser, needs
from test_mining import ParityTask

from lenience import InputError
from lenience.decoding.pair import Pair
from lenience.evaluation.annotating import write_annotation_page
from lenience.evaluation.compare import CompareConfig, compare
from lenience.training.annotated import marked_answers, read_annotated

READER = """
<pre id="told"></pre>
<script>
const frame = document.querySelector("iframe");
frame.addEventListener("load", () => {
  const page = frame.contentDocument, inside = frame.contentWindow, saved = [];
  const words = () => [...page.querySelectorAll("#wrong button")];
  const pressed = () => words().map(word => word.getAttribute("aria-pressed") === "true");
  const press = key =>
    page.dispatchEvent(new inside.KeyboardEvent("keydown", {key, bubbles: true}));
  const told = {words: words().map(word => word.textContent)};
  words()[1].click();
  told.one = pressed();
  words()[3].click();
  told.span = pressed();
  words()[0].click();
  told.anew = pressed();
  press("Escape");
  told.cleared = pressed();
  words()[1].click();
  words()[2].click();
  press("ArrowRight");
  told.place = page.getElementById("place").textContent;
  words()[0].click();
  inside.URL.createObjectURL = blob => { saved.push(blob); return "#"; };
  page.getElementById("save").click();
  saved[0].text().then(text => {
    told.saved = text;
    document.getElementById("told").textContent = JSON.stringify(told);
  });
});
</script>
"""


@pytest.fixture
def compared(llama: Pair, tmp_path: Path) -> Path:
    config = CompareConfig(
        rules=("exact",), windows=(4,), limit=20, tuning=2, timed=1, repeats=1
    )
    compare(llama, ParityTask(), config, tmp_path / "compared")
    return tmp_path / "compared"


def shown(page: Path) -> list[dict]:
    text = page.read_text()
    found: list[dict] = json.loads(text.split('id="data">')[1].split("</script>")[0])
    return found


def test_the_page_holds_wrong_answers_where_the_target_is_right(compared: Path) -> None:
    page = write_annotation_page(compared)
    answers: dict[str, dict[str, dict]] = {}
    for line in (compared / "compare.jsonl").read_text().splitlines():
        answer = json.loads(line)
        answers.setdefault(answer["id"], {})[answer["rule"]] = answer
    prompts = json.loads((compared / "prompts.json").read_text())
    wanted = [
        (prompts[id], " " + by["target"]["text"], " " + by["draft"]["text"])
        for id, by in answers.items()
        if by["target"]["correct"]
        and not by["draft"]["correct"]
        and by["draft"]["text"]
    ]
    rows = [(row["question"], row["correct"], row["wrong"]) for row in shown(page.path)]
    assert sorted(rows) == sorted(wanted) and page.answers == len(wanted) > 2
    assert len(shown(write_annotation_page(compared, limit=2).path)) == 2
    with pytest.raises(InputError, match="--rule topk:2: is missing"):
        write_annotation_page(compared, "topk:2")
    with pytest.raises(InputError, match="nothing to mark"):
        write_annotation_page(compared, "exact")
    with pytest.raises(InputError, match="holds no comparison"):
        write_annotation_page(compared / "none")


@needs("browser")
def test_marked_words_are_what_a_judge_learns_from(
    compared: Path, llama: Pair, tmp_path: Path
) -> None:
    page = write_annotation_page(compared).path
    rows = shown(page)
    # characters that are two for JavaScript and one in the file
    rows[0]["wrong"] = " \U0001f600 w3 w4 w5 w6"
    text = page.read_text()
    begin = text.index('id="data">') + len('id="data">')
    data = json.dumps(rows)
    page.write_text(text[:begin] + data + text[text.index("</script>", begin) :])
    frame = f'<iframe srcdoc="{html.escape(page.read_text())}">'
    around = tmp_path / "around.html"
    around.write_text(f'<!doctype html><meta charset="utf-8">{frame}</iframe>{READER}')
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-web-security"]
    flags += ["--allow-file-access-from-files", "--virtual-time-budget=10000"]
    command = [str(browser()), *flags, "--dump-dom", around.as_uri()]
    dom = subprocess.run(command, capture_output=True, text=True, timeout=120).stdout
    told = json.loads(
        html.unescape(re.findall(r'<pre id="told">(.*?)</pre>', dom, re.S)[0])
    )
    assert told["words"] == ["\U0001f600", "w3", "w4", "w5", "w6"]
    assert told["one"] == [False, True, False, False, False]
    assert told["span"] == [False, True, True, True, False]
    assert told["anew"] == [True, False, False, False, False]
    assert not any(told["cleared"])
    assert told["place"] == f"answer 2 of {len(rows)}, 1 marked"
    filled = tmp_path / "annotated.jsonl"
    filled.write_text(told["saved"], encoding="utf-8")
    first, second = read_annotated(filled)
    assert first.wrong[slice(*first.error)] == "w3 w4"
    assert second.wrong[slice(*second.error)] == second.wrong.split()[0]
    assert (second.question, second.correct) == (
        rows[1]["question"],
        rows[1]["correct"],
    )
    _, (right, wrong) = marked_answers(llama.target, second)
    assert not any(right.wrong) and wrong.wrong == [True]
