"""Training data of Judge Decoding (Bachmann 2025): answers with annotated errors."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lenience.core.errors import InputError
from lenience.core.files import read_lines
from lenience.core.progress import Progress, silent
from lenience.decoding.soundness import check_states
from lenience.heads.fitting import Examples
from lenience.heads.head import Inputs
from lenience.models.lm import LM
from lenience.models.pass_cache import States
from lenience.models.session import Session

ROW_KEYS = ("question", "correct", "wrong", "error")


@dataclass
class Annotated:
    """An annotated row. `error` [begin, end) are character offsets in `wrong`. Both answers
    directly continue the question's text."""

    question: Any
    correct: str
    wrong: str
    error: tuple[int, int]
    line: str
    """File and line number of the row."""


@dataclass
class MarkedAnswer:
    """Tokens of an answer, and which of them are erroneous."""

    ids: list[int]
    wrong: list[bool]


def read_annotated(path: Path) -> list[Annotated]:
    """Read a JSONL file whose rows have question (text or chat messages), correct, wrong and error.
    Raises InputError that names the line."""
    rows = []
    for number, text in read_lines(path, "annotated answers"):
        line = f"{path}, line {number}"
        try:
            row = json.loads(text)
            question, correct, wrong, (begin, end) = (row[key] for key in ROW_KEYS)
        except (ValueError, TypeError, KeyError) as error:
            expected = f"a row has {', '.join(ROW_KEYS)} [begin, end]"
            raise InputError(
                f"{line}: {type(error).__name__} {error}; {expected}"
            ) from None
        if not (
            isinstance(correct, str) and isinstance(wrong, str) and correct and wrong
        ):
            raise InputError(f"{line}: correct and wrong must be texts")
        if not (
            isinstance(begin, int)
            and isinstance(end, int)
            and 0 <= begin < end <= len(wrong)
        ):
            span = f"no span of the {len(wrong)} characters of wrong"
            raise InputError(f"{line}: error {[begin, end]} is {span}")
        rows.append(Annotated(question, correct, wrong, (begin, end), line))
    if not rows:
        raise InputError(f"{path}: has no rows")
    return rows


def marked_answers(lm: LM, row: Annotated) -> tuple[list[int], list[MarkedAnswer]]:
    """Return the prompt's tokens, and the correct and the wrong answer, cut after the error. Raises
    InputError if the tokenizer has no character offsets, a row is too long for the context, or the
    error covers no token."""
    if not lm.tokenizer.is_fast:
        raise InputError(
            f"target {lm.name!r}: its tokenizer does not map tokens to characters; use "
            "a fast tokenizer"
        )
    nothing = (len(row.correct), len(row.correct))
    try:
        prompt = lm.encode(row.question)
        answers = [_marked(lm, row.correct, nothing), _marked(lm, row.wrong, row.error)]
    except InputError as error:
        raise InputError(f"{row.line}: {error}") from None
    longest = len(prompt) + max(len(answer.ids) for answer in answers)
    if lm.context_length and longest > lm.context_length:
        room = f"{lm.name!r} has room for {lm.context_length}"
        raise InputError(f"{row.line}: has {longest} tokens, {room}")
    if not any(answers[1].wrong):
        fix = "holds no token; mark the wrong characters"
        raise InputError(f"{row.line}: the error {list(row.error)} {fix}")
    return prompt, answers


def _marked(lm: LM, text: str, error: tuple[int, int]) -> MarkedAnswer:
    """Return the tokens of an answer up to the end of its error."""
    begin, end = error
    tokens = lm.tokenize(text, add_special_tokens=False, return_offsets_mapping=True)
    answer = MarkedAnswer([], [])
    for token, (first, last) in zip(tokens["input_ids"], tokens["offset_mapping"]):
        if first < end:
            answer.ids.append(token)
            answer.wrong.append(last > begin)
    return answer


def annotated_states(
    lm: LM, rows: list[Annotated], inputs: Inputs
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield, for each row, the target's states [m, H] after each token of both answers, and which
    tokens are erroneous [m]."""
    for row in rows:
        prompt, answers = marked_answers(lm, row)
        session = Session(lm, states=States(inputs.layers))
        states = []
        wrong = list[bool]()
        for answer in answers:
            reading = session.read([prompt + answer.ids], len(answer.ids))
            states.append(reading.hidden[0].float().cpu())
            wrong += answer.wrong
        yield torch.cat(states), torch.tensor(wrong)


def annotated_examples(
    lm: LM, rows: list[Annotated], inputs: Inputs, progress: Progress = silent
) -> Examples:
    """Return the labelled states of all rows; each row counts as a sample."""
    states = list[Tensor]()
    wrong = list[Tensor]()
    samples = list[Tensor]()
    for number, (x, marked) in enumerate(annotated_states(lm, rows, inputs)):
        check_states(x, f"{lm.role} {lm.name!r}, row {number + 1}")
        states.append(x)
        wrong.append(marked)
        samples.append(torch.full((len(x),), number))
        progress("hidden states", number + 1, len(rows))
    harmless = ~torch.cat(wrong).numpy()
    return Examples(torch.cat(states).numpy(), harmless, torch.cat(samples).numpy())
