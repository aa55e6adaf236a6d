"""People as graders: a page of blinded pairs of answers from a comparison, and their grades."""

from __future__ import annotations

import json
import math
import random
import secrets
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from lenience.core.errors import InputError, reason
from lenience.core.files import digest, read_json, write_json, write_text
from lenience.core.records import Record
from lenience.decoding.decoder import Decoder
from lenience.evaluation.pages import as_text, template, write_report
from lenience.evaluation.table import Frontier, HumanGrades
from lenience.rules.baselines import BASELINES
from lenience.runs.answers import Answer
from lenience.runs.journal import Journal

PAGE = "grade.html"
KEY = "grade-key.json"
GRADED = "graded.json"
GRADING_FILES = (PAGE, KEY, GRADED)
GRADES = {"left": 1.0, "tie": 0.5, "right": 0.0}
"""Points of the left answer for each grade."""


class AnswerPair(Record):
    """Two answers to a prompt, as recorded in the key."""

    id: str
    settings: list[str]
    """Settings whose answer is shown next to the target's."""
    target_left: bool


class Key(Record):
    """The assignment of answers to sides, which the page does not reveal."""

    page: str
    pairs: list[AnswerPair]


@dataclass(frozen=True)
class Page:
    """A written page, with its counts."""

    path: Path
    pairs: int
    alike: int
    """Number of answers left out because they equal the target's."""


def write_page(folder: Path, rules: Sequence[str] = (), limit: int = 50) -> Page:
    """Write a page of blinded pairs of answers into a comparison's folder. Each of `rules`, by
    default all that may differ from the target, contributes up to `limit` prompts. A pair shows the
    target's and the rule's answer in random order. Raises InputError for a folder without a
    finished comparison, for an unknown rule, and if a page exists or nothing differs."""
    answers = answers_in(folder)
    prompts = _prompts(folder)
    own = next(
        (given for given in answers.values() if rule_of(given) == "target"), None
    )
    if own is None:
        raise InputError(
            f"{folder}: its comparison is not finished; run it again first"
        )
    pairs, alike = _pairs(prompts, own, answers, _chosen(folder, answers, rules), limit)
    if not pairs:
        raise InputError(
            f"{folder}: no answer differs from the target's own; nothing to grade"
        )
    if (folder / KEY).exists():
        raise InputError(
            f"{folder / PAGE}: exists, and a new page would lose its grades; delete "
            f"{folder / KEY} to start over"
        )
    name = digest([pair.to_json() for pair in pairs])
    write_json(folder / KEY, Key(page=name, pairs=pairs).to_json())
    shown = []
    for pair in pairs:
        shown.append(_blinded(pair, prompts[pair.id], own, answers[pair.settings[0]]))
    page = template(PAGE).render(page=name, pairs=shown, title=str(folder))
    write_text(folder / PAGE, page)
    return Page(folder / PAGE, len(pairs), alike)


def _pairs(
    prompts: Iterable[str],
    own: dict[str, Answer],
    answers: dict[str, dict[str, Answer]],
    settings: Sequence[str],
    limit: int,
) -> tuple[list[AnswerPair], int]:
    """Return the pairs to show, in random order, and the number of answers that equal the target's.
    Each setting's answers to at most `limit` prompts are paired with the target's `own`; equal
    answers of two settings are shown once."""
    drawn = random.Random(secrets.token_hex(16))
    by_content = dict[tuple[str, str], AnswerPair]()
    alike = 0
    for setting in settings:
        same, differing = _compared(prompts, own, answers[setting])
        alike += len(same)
        for id in differing[:limit]:
            new = AnswerPair(id=id, settings=[], target_left=drawn.random() < 0.5)
            text = answers[setting][id].text.strip()
            by_content.setdefault((id, text), new).settings.append(setting)
    pairs = list(by_content.values())
    drawn.shuffle(pairs)
    return pairs, alike


def _compared(
    ids: Iterable[str], own: dict[str, Answer], others: dict[str, Answer]
) -> tuple[list[str], list[str]]:
    """Return the ids of prompts with two equal answers, and of prompts whose answers differ."""
    both = [id for id in ids if id in own and id in others]
    same = [id for id in both if own[id].text.strip() == others[id].text.strip()]
    return same, [id for id in both if id not in set(same)]


def _blinded(
    pair: AnswerPair, prompt: str, own: dict[str, Answer], others: dict[str, Answer]
) -> dict[str, str]:
    """Return a pair as the page shows it."""
    left = own[pair.id].text
    right = others[pair.id].text
    if not pair.target_left:
        left, right = right, left
    return {"prompt": prompt, "left": left, "right": right}


def take_grades(folder: Path, filled: Path) -> dict[str, HumanGrades]:
    """Read the file that the page saved, and return the grades of each setting. They are added to
    the comparison's frontier.json and report.html. Raises InputError for the file of another
    page."""
    if not (folder / KEY).exists():
        raise InputError(
            f"{folder}: has no page of pairs; lenience grade {folder} writes one"
        )
    key = Key.read(read_json(folder / KEY), str(folder / KEY))
    points: dict[str, list[float]] = {}
    for number, said in _said(folder, key, filled).items():
        pair = key.pairs[number]
        left = GRADES[said]
        for setting in pair.settings:
            points.setdefault(setting, []).append(
                1 - left if pair.target_left else left
            )
    found = {setting: _grades(given) for setting, given in points.items()}
    write_json(
        folder / GRADED,
        {setting: grades.to_json() for setting, grades in found.items()},
    )
    frontier = Frontier.read(
        read_json(folder / "frontier.json"), str(folder / "frontier.json")
    )
    frontier = with_grades(folder, frontier)
    write_json(folder / "frontier.json", frontier.to_json())
    write_report(folder / "report.html", frontier)
    return found


def _said(folder: Path, key: Key, filled: Path) -> dict[int, str]:
    """Return the grades in a saved file, by the pair's index. Raises InputError for another
    file."""
    try:
        text = filled.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{filled}: cannot be read ({reason(error)})") from None
    try:
        content = json.loads(text)
        grades = {int(number): str(said) for number, said in content["grades"].items()}
        page = content["page"]
    except (ValueError, LookupError, TypeError, AttributeError):
        fix = f"open {folder / PAGE} and save the grades there"
        raise InputError(f"{filled}: is not what the page saves; {fix}") from None
    if page != key.page:
        raise InputError(f"{filled}: belongs to another page than {folder / PAGE}")
    wrong = [said for number, said in grades.items() if said not in GRADES]
    if wrong or not all(0 <= number < len(key.pairs) for number in grades):
        raise InputError(
            f"{filled}: a grade must be left, tie or right, of a pair on the page"
        )
    if not grades:
        raise InputError(f"{filled}: no pair is graded yet")
    return grades


def with_grades(folder: Path, frontier: Frontier) -> Frontier:
    """Return a comparison's figures with people's grades, if there are any."""
    if not (folder / GRADED).exists():
        return frontier
    known = read_json(folder / GRADED)
    settings = []
    for record in read_json(folder / "windows.json")["settings"]:
        settings.append(record["decoding"])
    rows = [
        row.model_copy(
            update={"human": HumanGrades.read(known[name], str(folder / GRADED))}
        )
        if (name := str(Decoder.of(setting))) in known
        else row
        for setting, row in zip(settings, frontier.rows, strict=True)
    ]
    return frontier.model_copy(update={"rows": rows})


def _grades(points: list[float]) -> HumanGrades:
    counted = Counter(points)
    n = len(points)
    share = sum(points) / n
    return HumanGrades(
        n=n,
        wins=counted[1.0],
        ties=counted[0.5],
        losses=counted[0.0],
        win_rate=share,
        win_rate_interval=_wilson(share, n),
    )


def _wilson(share: float, n: int) -> tuple[float, float]:
    """Return the 95 % interval of a share (Wilson 1927), which has a width even if all agree."""
    z = 1.96
    middle = (share + z * z / (2 * n)) / (1 + z * z / n)
    half = (
        z / (1 + z * z / n) * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    )
    return max(0.0, middle - half), min(1.0, middle + half)


def answers_in(folder: Path) -> dict[str, dict[str, Answer]]:
    """Return the answers of each setting, by sample id. Raises InputError for a folder without a
    comparison."""
    path = folder / "compare.jsonl"
    if not path.exists() or not (folder / "frontier.json").exists():
        raise InputError(
            f"{folder}: holds no comparison; lenience compare --out {folder} makes one"
        )
    answers: dict[str, dict[str, Answer]] = {}
    for line, record in Journal(path).numbered():
        answer = Answer.read(record, f"{path}, line {line}")
        answers.setdefault(answer.setting, {})[answer.id] = answer
    return answers


def _prompts(folder: Path) -> dict[str, str]:
    prompts = read_json(prompts_file(folder))
    return {id: as_text(prompt) for id, prompt in prompts.items()}


def prompts_file(folder: Path) -> Path:
    """Return the file of a comparison's prompts by sample id. Raises InputError if it is
    missing."""
    path = folder / "prompts.json"
    if not path.exists():
        raise InputError(
            f"{folder}: an older comparison, which kept no prompts; make it again"
        )
    return path


def rule_of(answers: dict[str, Answer]) -> str:
    """Return the rule of a setting's answers."""
    return next(iter(answers.values())).rule


def _chosen(
    folder: Path, answers: dict[str, dict[str, Answer]], rules: Sequence[str]
) -> list[str]:
    """Return the settings whose answers are graded. Raises InputError for an unknown rule."""
    by_rule = {setting: rule_of(given) for setting, given in answers.items()}
    unknown = [rule for rule in rules if rule not in by_rule.values()]
    if unknown:
        there = ", ".join(dict.fromkeys(by_rule.values()))
        raise InputError(
            f"--rule {unknown[0]}: is missing in {folder}, which compares {there}"
        )
    if rules:
        return [setting for setting, rule in by_rule.items() if rule in rules]
    found = list[str]()
    for setting, rule in by_rule.items():
        if rule not in (*BASELINES, "exact"):
            found.append(setting)
    return found
