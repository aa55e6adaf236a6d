r"""Input files of `benchmarks/real.py`: Spec-Bench's questions in two sets, and annotated answers.

    python benchmarks/real_inputs.py questions --data DATA --work WORK
    python benchmarks/real_inputs.py annotated --data DATA --work WORK

`questions` writes WORK/questions/test.jsonl, a seeded choice of Spec-Bench with the same number of
questions of each category, and WORK/questions/train.jsonl for drafters: the other questions,
problems of GSM8K's training set and functions of HumanEval.

`annotated` writes WORK/annotated.jsonl for `lenience fit --from annotated`: right solutions, each
beside a copy in which one number is wrong, one that the question does not state in digits. Their
authors are the program that wrote the solutions of the target's training data, the target itself
(its right answers in WORK/answers), and people (GSM8K's training set).
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

TESTED = 8
"""Number of test questions of each category of Spec-Bench."""
PROBLEMS = 240
"""Number of GSM8K problems among the training questions."""
FUNCTIONS = 100
"""Number of HumanEval functions among the training questions."""
ROWS_OF_AN_AUTHOR = 150
NUMBER = re.compile(r"\d+(?:\.\d+)?")
CALCULATION = re.compile(r"<<.*?>>")
"""GSM8K's annotation of a calculation inside a solution."""


def rows_of(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a JSONL file, which may be compressed."""
    opened = gzip.open if path.suffix == ".gz" else open
    with opened(path, "rt", encoding="utf-8") as file:
        return [json.loads(line) for line in file if line.strip()]


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(row) + "\n" for row in rows]
    path.write_text("".join(lines), encoding="utf-8")


def test_questions(questions: list[dict[str, Any]], each: int) -> list[dict[str, Any]]:
    """Return a seeded choice of questions, `each` of each category."""
    by_category: dict[str, list[dict[str, Any]]] = {}
    for question in questions:
        by_category.setdefault(question["category"], []).append(question)
    rng = random.Random(0)
    return [row for some in by_category.values() for row in rng.sample(some, each)]


def write_questions(data: Path, work: Path) -> None:
    """Write the test questions, and the training questions of drafters."""
    questions = rows_of(data / "spec_bench/question.jsonl")
    test = test_questions(questions, TESTED)
    tested = {question["question_id"] for question in test}
    prompts = [
        question["turns"][0]
        for question in questions
        if question["question_id"] not in tested
    ]
    rng = random.Random(1)
    problems = [row["question"] for row in rows_of(data / "gsm8k/train.jsonl")]
    functions = [
        f"Complete this function:\n\n{row['prompt']}"
        for row in rows_of(data / "humaneval/HumanEval.jsonl.gz")
    ]
    prompts += rng.sample(problems, PROBLEMS)
    prompts += rng.sample(functions, FUNCTIONS)
    rng.shuffle(prompts)
    train = [
        {"question_id": f"train-{number}", "category": "train", "turns": [prompt]}
        for number, prompt in enumerate(prompts)
    ]
    write_rows(work / "questions/train.jsonl", train)
    write_rows(work / "questions/test.jsonl", test)


def by_program(work: Path) -> Iterator[tuple[str, str]]:
    """Yield questions and solutions of the target's training data."""
    for row in rows_of(work / "train.jsonl"):
        yield row["question"], row["solution"]


def by_target(work: Path) -> Iterator[tuple[str, str]]:
    """Yield questions and the target's own right answers, without their special tokens."""
    tokenizer: Any = AutoTokenizer.from_pretrained(work / "target")
    problems = rows_of(work / "train.jsonl")  # ids count lines from 1
    for row in rows_of(work / "answers/journal.jsonl"):
        answers = row["answers"]
        if answers["reference"] is None or answers["target"] != answers["reference"]:
            continue
        number = int(row["id"].rpartition("-")[2]) - 1
        text = tokenizer.decode(row["response_ids"], skip_special_tokens=True)
        yield problems[number]["question"], text


def by_people(data: Path) -> Iterator[tuple[str, str]]:
    """Yield questions and solutions of GSM8K."""
    for row in rows_of(data / "gsm8k/train.jsonl"):
        solution, _, answer = row["answer"].partition("\n#### ")
        text = CALCULATION.sub("", solution).replace("\n", " ")
        yield row["question"], f"{text} The answer is {answer}."


def slipped(
    question: str, solution: str, rng: random.Random
) -> tuple[str, tuple[int, int]] | None:
    """Return the solution with one number wrong, and the place [begin, end) of the wrong digit. The
    number is one that the question does not state in digits; None if there is none."""
    given = set(NUMBER.findall(question))
    found = [n for n in NUMBER.finditer(solution) if n.group() not in given]
    if not found:
        return None
    number = rng.choice(found)
    digits = number.group()
    at = rng.choice([i for i, digit in enumerate(digits) if digit != "."])
    # the first digit of a longer number stays above zero
    lowest = 1 if at == 0 and len(digits) > 1 else 0
    others = [str(n) for n in range(lowest, 10) if str(n) != digits[at]]
    begin = number.start() + at
    wrong = solution[:begin] + rng.choice(others) + solution[begin + 1 :]
    return wrong, (begin, begin + 1)


def write_annotated(data: Path, work: Path) -> None:
    """Write annotated answers: the same number of each author."""
    rows: list[dict[str, Any]] = []
    authors = {
        "program": by_program(work),
        "target": by_target(work),
        "people": by_people(data),
    }
    for author, solutions in authors.items():
        rng = random.Random(author)
        taken = 0
        for question, solution in solutions:
            made = slipped(question, solution, rng)
            if made is None or taken == ROWS_OF_AN_AUTHOR:
                continue
            taken += 1
            wrong, error = made
            asked = [{"role": "user", "content": question}]
            rows.append(
                {
                    "question": asked,
                    "correct": solution,
                    "wrong": wrong,
                    "error": error,
                    "author": author,
                }
            )
    write_rows(work / "annotated.jsonl", rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("made", choices=("questions", "annotated"))
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True)
    args = parser.parse_args()
    make = write_questions if args.made == "questions" else write_annotated
    make(args.data, args.work)


if __name__ == "__main__":
    main()
