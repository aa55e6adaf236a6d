"""Acceptance rates of a drafter's tokens by depth and rank, measured on a run's prompts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from lenience.core.context import Context
from lenience.core.errors import InputError
from lenience.core.needs import Parts, Sources
from lenience.core.progress import Progress, silent
from lenience.core.protocols import Drafter
from lenience.core.types import Draft, Draws, Reading, Verdict
from lenience.decoding.decoder import Decoder
from lenience.decoding.pair import Pair
from lenience.drafting.base import DrafterSetup, DrafterSpec
from lenience.drafting.trees.planning import Acceptance
from lenience.drafting.trees.shapes import Shape, Tree
from lenience.models.lm import LM
from lenience.models.prompts import Prompt
from lenience.rules.combine import as_rule
from lenience.rules.strict import Exact, Speculative
from lenience.training.features import check_models, mined_samples

DEPTH = 12
RANKS = 5
"""Largest depth and largest rank to measure."""
PROMPTS = 200
TOGETHER = 8
"""Maximum number of prompts, and number of prompts per batch."""


@dataclass(frozen=True)
class TreeSampling:
    """Settings for trees whose tokens are drawn instead of the most probable: how they are drawn,
    and the temperature of the answers."""

    draw: Draws
    temperature: float = 1.0


def fit_tree(
    pair: Pair,
    run: Path,
    drafter: DrafterSpec,
    drawn: TreeSampling | None = None,
    progress: Progress = silent,
) -> Acceptance:
    """Measure the acceptance rates from which trees are planned, on a run's prompts, and save them
    in RUN/tree.json. Raises InputError if the run has other models, or if the drafter proposes no
    trees."""
    check_models(pair, run)
    prompts = [sample.prompt_ids for sample in mined_samples(run)]
    found = measure_acceptance(pair, prompts[:PROMPTS], drafter, drawn, progress)
    found.save(run / "tree.json")
    return found


def measure_acceptance(
    pair: Pair,
    prompts: Sequence[Prompt],
    drafter: DrafterSpec,
    drawn: TreeSampling | None = None,
    progress: Progress = silent,
) -> Acceptance:
    """Answer prompts with a strict rule and trees that have several siblings at each depth, all
    below the first sibling, and count which siblings the target keeps. The siblings are the most
    probable tokens when greedy, and drawn with `drawn`. Raises InputError if the drafter proposes
    no trees or the target keeps none of its tokens."""
    counts = _Counts()
    if Parts.TREES not in drafter.offers or drafter.branches:
        raise InputError(f"--with {drafter}: proposes no trees; name another drafter")
    after_first = [RANKS, *[0] * (RANKS - 1)]
    comb = (RANKS, *after_first * (DEPTH - 2), RANKS)
    decoder = Decoder(
        rule=as_rule(Speculative() if drawn else Exact()),
        temperature=drawn.temperature if drawn else 0.0,
        drafter=_CountedDrafter(drafter, counts),
        tree=Shape(comb, draw=drawn.draw if drawn else None),
        window=DEPTH,
    )
    answers = pair.as_completed(prompts, decoder, batch_size=TOGETHER)
    for n, _ in enumerate(answers, 1):
        progress("decoding", n, len(prompts))
    shares, places = counts.shares()
    if not any(chain.from_iterable(shares)):
        raise InputError(
            f"--with {drafter}: the target chose none of its tokens on {len(prompts)} "
            "prompts; measure on more prompts, or name another drafter"
        )
    return Acceptance(str(drafter), shares, places, drawn.draw if drawn else None)


@dataclass
class _Counts:
    """Counts of the tokens that the target kept in trees, by depth and rank."""

    said: NDArray[np.int64] = field(
        default_factory=lambda: np.zeros((DEPTH, RANKS), np.int64)
    )
    places: NDArray[np.int64] = field(default_factory=lambda: np.zeros(DEPTH, np.int64))

    def add(self, verdict: Verdict) -> None:
        node = -1
        for depth in range(DEPTH):
            siblings = []
            for i, parent in enumerate(verdict.parents or ()):
                if parent == node:
                    siblings.append(i)
            if not siblings:
                return
            self.places[depth] += 1
            kept = next((i for i in siblings if i in verdict.path), None)
            if kept is not None:
                self.said[depth, siblings.index(kept)] += 1
            if kept != siblings[0]:
                return
            node = kept

    def shares(self) -> tuple[tuple[tuple[float, ...], ...], tuple[int, ...]]:
        seen = self.places > 0
        table = self.said[seen] / self.places[seen, None]
        return tuple(map(tuple, table.tolist())), tuple(self.places[seen].tolist())


@dataclass(frozen=True)
class _CountedDrafter(DrafterSpec):
    """A drafter whose trees are counted."""

    inner: DrafterSpec
    counts: _Counts = field(compare=False)
    name = "counted"
    offers = Parts.EARLY_ENDS | Parts.TREES

    @property
    def needs(self) -> Sources:
        return self.inner.needs

    def check_tree(self, tree: Tree) -> None:
        self.inner.check_tree(tree)

    def check(self, target: LM, fingerprints: object) -> None:
        self.inner.check(target, fingerprints)  # type: ignore[arg-type]

    def features(self, target: LM) -> tuple[int | None, ...]:
        return self.inner.features(target)

    def models(self, setup: DrafterSetup) -> list[LM]:
        return self.inner.models(setup)

    def build(self, setup: DrafterSetup) -> Drafter:
        return _CountingDrafter(self.inner.build(setup), self.counts)

    def __str__(self) -> str:
        return str(self.inner)


class _CountingDrafter(Drafter):
    def __init__(self, drafter: Drafter, counts: _Counts):
        self.drafter = drafter
        self.counts = counts

    def propose(self, ctx: Context, room: Sequence[int]) -> Draft:
        return self.drafter.propose(ctx, room)

    def move(self, source: int, to: int) -> None:
        self.drafter.move(source, to)

    def observe(
        self, ctx: Context, reading: Reading, verdicts: Sequence[Verdict]
    ) -> None:
        self.drafter.observe(ctx, reading, verdicts)
        for verdict in verdicts:
            self.counts.add(verdict)
