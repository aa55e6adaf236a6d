"""Judge Decoding's data (Bachmann 2025): answers in which a person, or a program, marked the error."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from lenience.core.errors import InputError
from lenience.heads.head import Inputs
from lenience.models.lm import LM
from lenience.models.session import Session

if TYPE_CHECKING:
    from numpy.typing import NDArray

KEYS = ("question", "correct", "wrong", "error")


@dataclass
class Annotated:
    """One row: `error` [begin, end) counts the characters of `wrong`; answers are as they follow the question's text."""

    question: Any
    correct: str
    wrong: str
    error: tuple[int, int]
    place: str
    """The file and the line that it stands on."""


def read_annotated(path: Path) -> list[Annotated]:
    """The rows of a JSONL file, each with question (text or chat messages), correct, wrong and error. Raises InputError that
    names the line."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: cannot be read ({error}); name a JSONL file of annotated answers") from None
    rows = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        place = f"{path}, line {number}"
        try:
            row = json.loads(line)
            question, correct, wrong, (begin, end) = (row[key] for key in KEYS)
        except (ValueError, TypeError, KeyError) as error:
            raise InputError(f"{place}: {type(error).__name__} {error}; a row has {', '.join(KEYS)} [begin, end]") from None
        if not (isinstance(correct, str) and isinstance(wrong, str) and correct and wrong):
            raise InputError(f"{place}: correct and wrong must be texts")
        if not (isinstance(begin, int) and isinstance(end, int) and 0 <= begin < end <= len(wrong)):
            raise InputError(f"{place}: error {[begin, end]} is no span of the {len(wrong)} characters of wrong")
        rows.append(Annotated(question, correct, wrong, (begin, end), place))
    if not rows:
        raise InputError(f"{path}: has no rows")
    return rows


def tokens_of(lm: LM, row: Annotated) -> tuple[list[int], list[tuple[list[int], list[bool]]]]:
    """The prompt's tokens, and for the correct and the wrong answer its tokens and which of them are erroneous; what follows
    the error is left out."""
    if not lm.tokenizer.is_fast:
        raise InputError(f"target {lm.name!r}: its tokenizer cannot tell which characters a token stands for; take a fast one")
    answers = []
    try:
        prompt = lm.encode(row.question)
        made = [lm.tokenize(text, add_special_tokens=False, return_offsets_mapping=True) for text in (row.correct, row.wrong)]
    except InputError as error:
        raise InputError(f"{row.place}: {error}") from None
    for one, (begin, end) in zip(made, ((len(row.correct), len(row.correct)), row.error)):
        found = [(token, last > begin) for token, (first, last) in zip(one["input_ids"], one["offset_mapping"]) if first < end]
        answers.append(([token for token, _ in found], [wrong for _, wrong in found]))
    longest = len(prompt) + max(len(ids) for ids, _ in answers)
    if lm.context and longest > lm.context:
        raise InputError(f"{row.place}: has {longest} tokens, {lm.name!r} has room for {lm.context}")
    if not any(answers[1][1]):
        raise InputError(f"{row.place}: the error {list(row.error)} holds no token; mark what is wrong")
    return prompt, answers


def states(lm: LM, rows: list[Annotated], inputs: Inputs) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
    """For each row its number, the target's states [m, H] after each token of its answers, and which are erroneous [m]."""
    for number, row in enumerate(rows):
        prompt, answers = tokens_of(lm, row)
        x, wrong = [], []
        session = Session(lm, layer=inputs.layer)
        for ids, marked in answers:
            x.append(session.read([prompt + ids], len(ids)).hidden[0].float().cpu())
            wrong += marked
        yield number, torch.cat(x), torch.tensor(wrong)


def collect(found: list[tuple[int, torch.Tensor, torch.Tensor]]) -> tuple[NDArray, NDArray, NDArray]:
    """x [m, H], erroneous [m] bool and row [m] of all rows."""
    rows = torch.cat([torch.full((len(x),), number) for number, x, _ in found])
    return torch.cat([x for _, x, _ in found]).numpy(), torch.cat([y for _, _, y in found]).numpy(), rows.numpy()
