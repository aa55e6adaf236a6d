"""Open questions in two turns: MT-Bench, and Spec-Bench, which has the same format."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from lenience.core.errors import InputError
from lenience.tasks.base import Messages, Sample
from lenience.tasks.published import Published, chat
from lenience.tasks.rows import Row

OwnAnswers = Callable[[Sequence[Messages]], list[str]]


@dataclass(kw_only=True)
class MtBench(Published):
    """MT-Bench (Zheng 2023) and Spec-Bench: question.jsonl with rows {question_id, category,
    turns}.

    Each turn is a sample. The prompt of the second turn contains the target's answer to the first,
    so that all decoders get the same prompt. There is no right answer: a grader (--grader) compares
    answers with the target's own, as in MT-Bench's pairwise mode. Without a grader, answers agree
    if their texts are equal. `category` selects one category, such as math.
    """

    title: ClassVar[str] = "mtbench"
    version = 1
    max_new_tokens = 512
    measure = "agreement"
    beside_target = True
    scores_by_reference = False
    disagreement_is = (
        "the share of prompts on which this decoder's text is not the target's"
    )
    turns: Literal["both", "first"] = "both"
    category: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._own_answers: OwnAnswers | None = None
        self._categories = set[str]()

    @property
    def choices(self) -> str:
        there = ", ".join(sorted(self._categories))
        return f"category={self.category} is none of {there}" if self.category else ""

    def attach(self, own_answers: OwnAnswers) -> None:
        self._own_answers = own_answers

    def read(self, row: Row, where: str, role: str) -> Sample | None:
        turns = list(row["turns"])
        category = str(row.get("category", ""))
        if not turns or not all(isinstance(turn, str) for turn in turns):
            raise InputError('its "turns" is no list of texts')
        self._categories.add(category)
        if self.category and category != self.category:
            return None
        references = row.get("reference") or row.get("reference_answer") or []
        known = {"category": category, "turns": turns, "references": references}
        id = str(row["question_id"])
        return Sample(id, chat(("user", turns[0])), None, known, group=id)

    def samples(self, split: str) -> Iterator[Sample]:
        questions = list(super().samples(split))
        several = []
        for question in questions:
            if len(question.metadata["turns"]) > 1:
                several.append(question)
        answers = dict[str, str]()
        if several and self.turns == "both":
            if self._own_answers is None:
                raise InputError(
                    "task mtbench: its second turns hold the target's own answers to the first; "
                    "mine, compare and certify see to that, else write mtbench:turns=first"
                )
            first = list[Messages]()
            for question in several:
                first.append(chat(("user", question.metadata["turns"][0])))
            answers = dict(
                zip((question.id for question in several), self._own_answers(first))
            )
        for question in questions:
            yield self._turn(question, 1, question.prompt)
            if question.id in answers:
                first_turn, second_turn = question.metadata["turns"][:2]
                said = chat(
                    ("user", first_turn),
                    ("assistant", answers[question.id]),
                    ("user", second_turn),
                )
                yield self._turn(question, 2, said)

    def answer(self, text: str, sample: Sample | None = None) -> str | None:
        return text.strip() or None

    def _turn(self, question: Sample, number: int, prompt: str | Messages) -> Sample:
        references = question.metadata["references"]
        metadata = {"category": question.metadata["category"], "turn": number}
        if len(references) >= number:
            metadata["reference"] = references[number - 1]
        return replace(
            question, id=f"{question.id}-{number}", prompt=prompt, metadata=metadata
        )
