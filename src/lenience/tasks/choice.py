"""Questions with choices, answered by the letter: MMLU, ARC and CommonsenseQA."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from lenience.core.errors import InputError
from lenience.tasks.base import Sample
from lenience.tasks.finding import choice
from lenience.tasks.published import Published, stratified
from lenience.tasks.rows import Row

LETTERS = "ABCDEFGHIJ"
QUESTION = (
    "Answer the following multiple choice question. Think step by step, and end your response "
    "with a line of the form 'Answer: LETTER', where LETTER is one of {letters}.\n\n{question}"
)


@dataclass(frozen=True)
class Question:
    """A question with its choices. `answer` is the index of the right choice; None if it is not
    published."""

    text: str
    choices: tuple[str, ...]
    answer: int | None
    subject: str = ""

    def shown(self) -> str:
        lines = [f"{letter}. {text}" for letter, text in zip(LETTERS, self.choices)]
        return "\n".join([self.text.strip(), *lines])

    @property
    def letter(self) -> str | None:
        return None if self.answer is None else LETTERS[self.answer]


@dataclass(kw_only=True)
class ChoiceTask(Published):
    """Multiple-choice questions, answered by generating a letter.

    Without shots the prompt asks for step-by-step reasoning that ends with "Answer: LETTER";
    `lenience.tasks.finding.choice` finds the letter, which must be one of the question's. With
    `shots` the prompt has the published form, solved questions and then "Answer:", and the response
    must begin with the letter. `subset` selects that many test questions, drawn by `seed` and
    stratified by subject (or else by right letter). Accuracy is the share of right letters, as in
    every published scorer; the parser is tested on 100 answers of odd shapes.
    """

    version = 1
    max_new_tokens = 512
    head: ClassVar[str] = (
        "The following are multiple choice questions (with answers){about}.\n\n"
    )
    shots: int = 0
    subset: int = 0
    seed: int = 0
    shot_roles: ClassVar[tuple[str, ...]] = ("dev", "train", "validation")

    def __post_init__(self) -> None:
        super().__post_init__()
        self._shown: dict[str, list[Question]] = {}
        if not 0 <= self.shots <= 64:
            raise InputError(
                f"{self.title}'s shots must be from 0 to 64, not {self.shots}"
            )
        if self.subset < 0:
            raise InputError(f"{self.title}'s subset must be 0, which is all, or more")

    def _prepare(self, files: dict[str, list[Path]]) -> None:
        if not self.shots:
            return
        role = next((name for name in self.shot_roles if name in files), None)
        if role is None:
            raise InputError(
                f"task {self.title}: shots come from dev, train or validation files, and there "
                "are none"
            )
        for path in files[role]:
            for where, row in self._rows(path):
                question = self._question(row, where)
                shown = self._shown.setdefault(question.subject, [])
                if len(shown) < self.shots:
                    shown.append(question)

    def read(self, row: Row, where: str, role: str) -> Sample | None:
        question = self._question(row, where)
        shown = self._shown.get(question.subject, [])
        if question in shown:
            return None
        letters = LETTERS[: len(question.choices)]
        prompt = QUESTION.format(letters=letters, question=question.shown())
        if self.shots:
            about = f" about {question.subject}" if question.subject else ""
            solved = [f"{shot.shown()}\nAnswer: {shot.letter}\n\n" for shot in shown]
            asked = f"{question.shown()}\nAnswer:"
            prompt = self.head.format(about=about) + "".join(solved) + asked
        stratum = {
            "choices": len(letters),
            "stratum": question.subject or question.letter,
        }
        return Sample(str(row.get("id", "")), prompt, question.letter, stratum)

    def _question(self, row: Row, where: str) -> Question:
        whose = _origin(row)
        if whose and whose != self.title:
            raise InputError(f"is a row of {whose}; write --task {whose}")
        return question_of(row, where)

    def _chosen(self, samples: list[Sample], split: str) -> list[Sample]:
        if split != "test" or not self.subset:
            return samples
        return stratified(samples, self.subset, self.seed, "stratum")

    def answer(self, text: str, sample: Sample | None = None) -> str | None:
        if self.shots:
            letter = text.strip()[:1].upper()
            alone = letter if not text.strip()[1:2].isalnum() else ""
        else:
            alone = choice(text) or ""
        possible = LETTERS[: sample.metadata["choices"]] if sample else LETTERS
        return alone if alone and alone in possible else None


@dataclass(kw_only=True)
class Mmlu(ChoiceTask):
    """MMLU, multiple choice (Hendrycks 2021): CSV folders, or the Hub's rows {question, choices,
    answer, subject}. Shots are of the question's subject, from dev."""

    title: ClassVar[str] = "mmlu"
    train_roles: ClassVar[tuple[str, ...]] = ("validation", "train")


@dataclass(kw_only=True)
class Arc(ChoiceTask):
    """ARC, Easy or Challenge (Clark 2018): the published JSON lines, or the Hub's rows. Numbered
    labels become letters."""

    title: ClassVar[str] = "arc"


@dataclass(kw_only=True)
class CommonsenseQa(ChoiceTask):
    """CommonsenseQA (Talmor 2019), five choices: the published JSON lines, or the Hub's rows. Its
    test set has no answers, so its dev set is the split "test"."""

    title: ClassVar[str] = "csqa"
    train_roles: ClassVar[tuple[str, ...]] = ("train",)
    shot_roles: ClassVar[tuple[str, ...]] = ("train",)


def _origin(row: Row) -> str | None:
    """Return the name of the benchmark that a row belongs to, by its fields; None if unknown."""
    asked = row.get("question")
    if "question_concept" in row or (
        isinstance(asked, Mapping) and "question_concept" in asked
    ):
        return "csqa"
    if isinstance(asked, Mapping) or isinstance(row.get("choices"), Mapping):
        return "arc"
    return "mmlu" if {"choices", "answer"} <= row.keys() else None


def question_of(row: Row, where: str = "") -> Question:
    """Return the question in a row of any published layout. Raises InputError or KeyError for
    another layout."""
    asked = row["question"]
    if isinstance(asked, Mapping):  # the original files of ARC and CommonsenseQA
        listed = asked["choices"]
        return _labelled(str(asked["stem"]), listed, row.get("answerKey"))
    choices = row["choices"]
    if isinstance(choices, Mapping):  # the Hub's rows of the same
        listed = []
        for label, text in zip(choices["label"], choices["text"], strict=True):
            listed.append({"label": label, "text": text})
        return _labelled(str(asked), listed, row.get("answerKey"))
    texts = tuple(map(str, choices))
    answer = row["answer"]
    by_letter = str(answer) in tuple(LETTERS)
    place = LETTERS.index(str(answer)) if by_letter else int(answer)
    if not 0 <= place < len(texts) <= len(LETTERS):
        raise InputError(f"its answer {answer!r} is none of its {len(texts)} choices")
    subject = str(row.get("subject", "")).replace("_", " ")
    return Question(str(asked), texts, place, subject)


def _labelled(text: str, listed: list[dict[str, Any]], key: str | None) -> Question:
    labels = [str(entry["label"]) for entry in listed]
    if key and key not in labels:
        raise InputError(
            f"its answer {key!r} is none of its choices, {', '.join(labels)}"
        )
    if len(labels) > len(LETTERS):
        raise InputError(f"has {len(labels)} choices, more than {len(LETTERS)}")
    place = labels.index(key) if key else None
    return Question(text, tuple(str(entry["text"]) for entry in listed), place)
