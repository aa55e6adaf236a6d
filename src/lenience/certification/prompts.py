"""The prompts of a question, recorded as used before their first use."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING

from lenience.certification.question import CertifyConfig
from lenience.core.errors import InputError
from lenience.runs.ledger import Ledger
from lenience.runs.uses import Draw, aligned
from lenience.tasks import Sample, Task, ungradable

if TYPE_CHECKING:
    from lenience.decoding.pair import Pair
    from lenience.models.lm import LM

TUNING = 8
"""Number of prompts on which an automatic window is chosen."""


class Prompts:
    """The rows of a question in order of use, each recorded as used before its first use."""

    def __init__(self, ledger: Ledger, lm: LM, task: Task, draw: Draw):
        self.ledger = ledger
        self.lm = lm
        self.task = task
        self.draw = draw
        self._noted = 0
        self._drawn = ledger.drawn(lm, task, draw)

    @property
    def rows(self) -> list[Sample]:
        """Return the rows; some may still be replaced, if another question uses them first."""
        return self._drawn.rows

    @classmethod
    def of(
        cls,
        pair: Pair,
        config: CertifyConfig,
        task: Task,
        ledger: Ledger,
        *,
        key: str,
        use: str,
    ) -> Prompts:
        """Draw the prompts of a question. They are none of the training prompts of the question's
        heads or of the draft."""
        settings = list(chain.from_iterable(config.chains()))
        heads = {head.path: head for setting in settings for head in setting.heads}
        draw = Draw(
            key,
            config.num_prompts(),
            use,
            split=config.split,
            ids=config.ids,
            heads=(*heads.values(), *aligned(pair.draft)),
        )
        return cls(ledger, pair.target, task, draw)

    def first(self, n: int) -> list[Sample]:
        """Return the first n rows, or all if there are fewer, and record them as used."""
        if self._noted < min(n, len(self.rows)):
            with self.ledger.held():
                self._drawn = self.ledger.drawn(
                    self.lm, self.task, self.draw, self._drawn
                )
                fresh = self.rows[self._noted : n]
                use = self.draw.use
                self.ledger.note(
                    self.lm, fresh, use=use, key=self.draw.key, task=self.task
                )
            self._noted = min(n, len(self.rows))
        return self.rows[:n]

    def for_window(self) -> list[Sample]:
        """Return separate prompts for picking an automatic window. Raises InputError if too few are
        left."""
        draw = replace(self.draw, n=TUNING, use="window")
        own = Prompts(self.ledger, self.lm, self.task, draw).first(TUNING)
        try:
            self.first(1)
        except InputError:
            few = f"needs {TUNING} fresh prompts, and there are {len(own)}"
            raise InputError(f"window auto: {few}; give a number") from None
        return own


def check_references(
    task: Task, config: CertifyConfig, samples: Sequence[Sample]
) -> None:
    """Raise InputError if references are needed and missing, or equal no possible answer, so that
    nothing could be lost."""
    if not config.needs_references:
        return
    if any(sample.reference is None for sample in samples) and not config.labels:
        raise InputError(
            f"task {task.name!r}: has prompts without a reference; collect them with "
            "--ask-labels, or bound --loss disagreement, which needs none"
        )
    wrong = ungradable(task, samples)
    if wrong:
        first = wrong[0]
        raise InputError(
            f"task {task.name!r}: {len(wrong)} of {len(samples)} prompts have "
            f"references that equal no possible answer, such as {first.reference!r} of "
            f"{first.id}; leave them out (--ids), or check --answer and --same"
        )
