"""A page on which a person marks errors in wrong answers, for Judge Decoding (Bachmann 2025)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lenience.core.errors import InputError
from lenience.core.files import digest, read_json, write_text
from lenience.evaluation.human import answers_in, prompts_file, rule_of
from lenience.evaluation.pages import as_text, template

PAGE = "annotate.html"


@dataclass(frozen=True)
class AnnotationPage:
    """A written page, and its number of answers."""

    path: Path
    answers: int


def write_annotation_page(
    folder: Path, rule: str = "draft", limit: int = 50
) -> AnnotationPage:
    """Write a page of a rule's wrong answers into a comparison's folder.

    The page holds up to `limit` answers to problems that the target answers correctly. It saves
    annotated.jsonl, which `lenience fit --from annotated` reads. Raises InputError for a folder
    without a finished comparison, for an unknown rule, and if there is no wrong answer."""
    by_rule = {rule_of(given): given for given in answers_in(folder).values()}
    for needed in ("target", rule):
        if needed not in by_rule:
            there = ", ".join(by_rule)
            raise InputError(
                f"--rule {needed}: is missing in {folder}, which compares {there}"
            )
    prompts = read_json(prompts_file(folder))
    own = by_rule["target"]
    rows = [
        _row(prompts[id], own[id].text, wrong.text)
        for id, wrong in by_rule[rule].items()
        if id in own and own[id].correct and not wrong.correct and wrong.text.strip()
    ][:limit]
    if not rows:
        raise InputError(
            f"{folder}: rule {rule} has no wrong answer where the target is right; nothing to mark"
        )
    page = template(PAGE).render(page=digest(rows), rows=rows)
    write_text(folder / PAGE, page)
    return AnnotationPage(folder / PAGE, len(rows))


def _row(question: Any, correct: str, wrong: str) -> dict[str, Any]:
    """Return a row of the page. Answers to a text follow it directly, so they begin with a
    space."""
    space = ""
    if isinstance(question, str) and not question[-1:].isspace():
        space = " "
    correct, wrong = (
        text if text[:1].isspace() else space + text for text in (correct, wrong)
    )
    return {
        "question": question,
        "shown": as_text(question),
        "correct": correct,
        "wrong": wrong,
    }
