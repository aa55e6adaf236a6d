"""Choice of the fastest window, stop condition and tree shape for given prompts."""

from __future__ import annotations

import statistics
import time
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

import numpy as np

from lenience.core.context import Context, Row
from lenience.core.errors import InputError
from lenience.core.needs import Parts
from lenience.core.noise import Noise
from lenience.core.protocols import Drafter, Rule
from lenience.core.types import Step
from lenience.decoding.decoder import Decoder, Ends
from lenience.decoding.loop import cycle
from lenience.drafting.stops import Fixed, Likely, Stop
from lenience.drafting.trees.shapes import Chain, Tree
from lenience.heads.head import load_head
from lenience.models.session import Session

STOP_THRESHOLDS = (0.3, 0.5, 0.7)
"""Thresholds tried for a stop head."""
CANDIDATES = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
"""Windows to choose from."""
PILOT_PROMPTS = 8
PILOT_TOKENS = 64
"""Number of prompts, and of new tokens per prompt, on which accepted tokens are counted."""
MOST_SECONDS = 1.0
LEAST_ROUNDS = 2
MOST_ROUNDS = 21
"""Limits of timing cycles: seconds, and rounds over all windows. The first round is a warm-up."""


Cycle = tuple[int, int]
"""Numbers of drafted and accepted tokens of a cycle."""


@dataclass(frozen=True)
class Drafting:
    """A window, a stop condition and a tree, with their estimated speed."""

    window: int
    stop: Stop
    tokens_per_second: float = 0.0
    """Estimated speed in tokens per second."""
    tree: Tree = field(default_factory=Chain)


def fastest_window(
    cycles: Sequence[Cycle], seconds: Mapping[int, float], stop: Stop
) -> Drafting:
    """Return the window with the most tokens per second. `cycles` were run with a wide window;
    `seconds` is the time of a cycle at each window.

    The tokens of a wide cycle are cut into consecutive narrow windows. The start of each wide cycle
    alone would mislead: a window within a long run of accepted tokens is accepted more often.
    """
    tokens = sum(
        kept + (stop.keeps_bonus or kept < drafted) for drafted, kept in cycles
    )

    def narrow(drafted: int, kept: int, window: int) -> int:
        """Return the number of narrow cycles that decode the tokens of a wide cycle."""
        if stop.keeps_bonus or not window:
            return -(-(kept + 1) // (window + 1))
        if kept < drafted:
            return kept // window + 1
        return max(1, -(-kept // window))

    def tokens_per_second(window: int) -> float:
        count = sum(narrow(drafted, kept, window) for drafted, kept in cycles)
        return tokens / count / seconds[window]

    return max(
        (Drafting(window, stop, tokens_per_second(window)) for window in seconds),
        key=lambda measured: measured.tokens_per_second,
    )


def stopped(
    cycles: Sequence[Cycle], seconds: Mapping[int, float], stop: Stop
) -> Drafting:
    """Return the widest window with a stop condition, and their estimated speed. The stop condition
    ended these `cycles`; `seconds` are times of cycles in which it was queried but ended
    nothing."""
    windows = sorted(seconds)
    took = np.interp(
        [drafted for drafted, _ in cycles], windows, [seconds[w] for w in windows]
    )
    tokens = sum(1 + kept for _, kept in cycles)
    return Drafting(max(windows), stop, tokens / float(took.sum()))


def learned_stops(rule: Rule) -> list[Likely]:
    """Return the stop head stored next to the rule's judge, once per threshold to try. Only a stop
    head that learned this judge's rejections counts."""
    for judge in rule.heads:
        folder = Path(judge.path).parent / "stop"
        if (folder / "stop.json").is_file():
            learned_of = load_head(folder, "stop").metrics.get("of_heads", ())
            if judge.head.fingerprint in learned_of:
                return [Likely(str(folder), threshold) for threshold in STOP_THRESHOLDS]
    return []


def cycle_seconds(
    session: Session, drafter: Drafter, rule: Rule, ctx: Context, rows: list[Row]
) -> dict[int, float]:
    """Return the median seconds of a cycle at each of CANDIDATES, for windows after the rows'
    prefixes. The first round is not counted."""
    seconds: dict[int, list[float]] = {window: [] for window in CANDIDATES}
    end = time.perf_counter() + MOST_SECONDS
    rounds = 0
    while rounds < LEAST_ROUNDS or (time.perf_counter() < end and rounds < MOST_ROUNDS):
        for window in CANDIDATES:
            began = time.perf_counter()
            # without a last step, so that an adaptive stop condition does not adapt
            fresh = [replace(row, last=None) for row in rows]
            at_window = replace(ctx, rows=fresh, window=window)
            room = [min(window + 1, session.room(row.prefix)) for row in rows]
            cycle(session, drafter, rule, at_window, room)
            seconds[window].append(time.perf_counter() - began)
        rounds += 1
    return {window: statistics.median(taken[1:]) for window, taken in seconds.items()}


class MeasuredPair(Protocol):
    """The pair whose cycles are counted and timed."""

    @property
    def compiled(self) -> bool: ...

    def check(self, decoder: Decoder) -> None: ...

    def context(self, decoder: Decoder) -> Context: ...

    def engine(
        self, decoder: Decoder, rows: int, capacity: int
    ) -> tuple[Session, Drafter]: ...

    def steps(
        self, prompts: Sequence[list[int]], decoder: Decoder, batch_size: int
    ) -> Iterator[Step]: ...


@dataclass
class Chooser:
    """Choose the window, the stop condition and the tree of a pair's decoders.

    A pilot on a few prompts counts the tokens that the rule accepts. A cycle is timed at each
    window of CANDIDATES and for each tree. If no stop condition is given, a stop head next to the
    judge that learned the judge's rejections is tried too, at the widest window.
    """

    pair: MeasuredPair
    picked: dict[Hashable, Drafting]
    """Earlier choices by decoder, batch size and whether the pair is compiled."""

    def settled(self, ids: list[list[int]], size: int, decoder: Decoder) -> Decoder:
        """Return the decoder with a number as its window, for prompts `ids` in batches of `size`.
        For "auto", the window, the stop condition and the tree are the fastest."""
        if decoder.proposer is None or not ids:
            return replace(decoder, window=0)
        if decoder.window != "auto":
            return decoder
        free = replace(
            decoder,
            seed=0,
            seeds_by_prompt=False,
            stop_strings=(),
            ends=Ends(),
            max_new_tokens=PILOT_TOKENS,
        )
        key = free, size, self.pair.compiled
        if key not in self.picked:
            self.picked[key] = self._pick(ids, size, decoder)
        picked = self.picked[key]
        return replace(
            decoder, window=picked.window, stop=picked.stop, tree=picked.tree
        )

    def _pick(self, ids: list[list[int]], size: int, decoder: Decoder) -> Drafting:
        trees = decoder.tree.choices() or [decoder.tree]
        picked = []
        for tree in trees:
            picked.append(
                replace(
                    self._pick_ending(ids, size, replace(decoder, tree=tree)), tree=tree
                )
            )
        return max(picked, key=lambda drafting: drafting.tokens_per_second)

    def _pick_ending(
        self, ids: list[list[int]], size: int, decoder: Decoder
    ) -> Drafting:
        seconds = self._cycle_seconds(ids, size, decoder)
        tried = [fastest_window(self._pilot(ids, size, decoder), seconds, decoder.stop)]
        has_states = Parts.STATES in decoder.drafter.offers and not decoder.branches
        stops = (
            learned_stops(decoder.rule)
            if has_states and isinstance(decoder.stop, Fixed)
            else []
        )
        if stops and self._can_ask(stops[0], decoder):
            # time cycles in which the stop condition is queried but ends no window
            asked = replace(decoder, stop=replace(stops[0], threshold=1.0))
            seconds = self._cycle_seconds(ids, size, asked)
            for stop in stops:
                cycles = self._pilot(ids, size, replace(decoder, stop=stop))
                tried.append(stopped(cycles, seconds, stop))
        return max(tried, key=lambda drafting: drafting.tokens_per_second)

    def _can_ask(self, stop: Stop, decoder: Decoder) -> bool:
        """Return True if a stop condition works with the pair: its head may be for another draft
        than the rule's judge."""
        try:
            self.pair.check(replace(decoder, stop=stop))
        except InputError:
            return False
        return True

    def _pilot(self, ids: list[list[int]], size: int, decoder: Decoder) -> list[Cycle]:
        """Return the numbers of drafted and accepted tokens of cycles with the widest window, on a
        few prompts."""
        widest = replace(
            decoder,
            window=max(CANDIDATES),
            max_new_tokens=PILOT_TOKENS,
            stop_strings=(),
            ends=Ends(),
        )
        steps = self.pair.steps(ids[:PILOT_PROMPTS], widest, size)
        return [(step.drafted, step.kept) for step in steps]

    def _cycle_seconds(
        self, ids: list[list[int]], size: int, decoder: Decoder
    ) -> dict[int, float]:
        """Return the median seconds of a cycle at each window."""
        widest = replace(decoder, window=max(CANDIDATES))
        if not decoder.stop.per_token:
            # a schedule that adapts to accepted tokens would narrow the windows to be timed
            widest = replace(widest, stop=Fixed())
        prompts = [ids[i % len(ids)] for i in range(size)]
        capacity = max(map(len, prompts)) + max(CANDIDATES)
        session, drafter = self.pair.engine(widest, size, capacity)
        # position 1, because some drafters propose nothing in an answer's first cycle
        rows = []
        for prompt in prompts:
            rows.append(
                Row(Noise.for_prompt(decoder.seed, prompt), list(prompt), position=1)
            )
        ctx = self.pair.context(widest)
        return cycle_seconds(session, drafter, decoder.rule, ctx, rows)
