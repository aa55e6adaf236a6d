"""What studies of judges and gates start from: a mined run of any pair and task, by default the one
that comes with the built-in pair."""

from __future__ import annotations

import argparse
import json
import random
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lenience import load_pair
from lenience.cli.choices import TaskChoice, choice_of, mined_with
from lenience.core.files import EMBEDDED
from lenience.decoding.pair import Pair
from lenience.tasks import Task, wordmath_problems


@dataclass(frozen=True)
class Mined:
    """A run, its pair's names and its task."""

    run: Path
    task: Task
    target: str | None
    draft: str | None

    def pair(self, **options: Any) -> Pair:
        return load_pair(self.target, self.draft, **options)

    def first(self, folder: Path, samples: int) -> list[dict[str, Any]]:
        """Make a run folder of the first samples; their records."""
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copy(self.run / "run.json", folder)
        lines = (
            (self.run / "journal.jsonl").read_text().splitlines(keepends=True)[:samples]
        )
        (folder / "journal.jsonl").write_text("".join(lines))
        return [json.loads(line) for line in lines]


def add_run(parser: argparse.ArgumentParser) -> None:
    run_help = "a mined run, whose pair and task are taken; by default the shipped one"
    parser.add_argument("--run", type=Path, default=EMBEDDED / "run", help=run_help)


def mined(run: Path) -> Mined:
    models = mined_with(run)
    return Mined(run, choice_of(run, TaskChoice()).load(), models.target, models.draft)


def family(sample: str) -> str:
    """Return the kind of problem that a sample is, as wordmath.problem draws it."""
    split, number = sample.split("-")
    return (
        random.Random(f"wordmath/{split}/{number}")
        .choice(wordmath_problems.FAMILIES)
        .__name__.strip("_")
    )
