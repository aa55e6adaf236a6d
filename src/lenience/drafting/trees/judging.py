"""Acceptance rules on trees of drafted tokens.

For the rule, each path from the prefix to a leaf is a window; the deepest accepted path is kept. A
tree's tokens count as chosen, not drawn. Drawing the target's token, and following it if it is in
the tree, keeps the target's distribution (SpecInfer, Miao 2023, section 4.3, for drafts of
probability 1). For drawn tokens see `lenience.drafting.trees.drawn`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lenience.core.context import Context
from lenience.core.protocols import Rule
from lenience.core.transfer import to_device
from lenience.core.trees import paths
from lenience.core.types import Draft, Reading, Verdict
from lenience.drafting.trees.drawn import verify_drawn


def judge_trees(
    rule: Rule, draft: Draft, reading: Reading, ctx: Context
) -> list[Verdict]:
    """Return the verdicts on the trees of all rows. The rule decides on each token after the
    token's path, so floors, budgets and spans hold along each path. Among the deepest accepted
    paths, the one with the most tokens that the strict rule accepts is kept, then the first."""
    assert draft.parents is not None
    lengths = draft.lengths.tolist()
    flat = []
    for b, (parents, n) in enumerate(zip(draft.parents, lengths)):
        for nodes in paths(parents[:n]):
            flat.append(_Path(b, nodes))
    on_rows = ctx
    # the rule sees each path as a row with a chain
    ctx = replace(ctx, rows=[ctx.rows[path.row] for path in flat], on_trees=True)
    windows = _windows(draft, flat)
    readings = _readings(reading, flat)
    # paths may share a node but not its processed logits, which depend on the path's tokens
    if ctx.processes:
        readings = replace(
            readings, logits=ctx.process(readings.logits, windows.tokens)
        )
    if draft.draws and rule.verifies and not ctx.greedy:
        reading = _of_nodes(reading, readings, flat)
        return verify_drawn(draft, reading, on_rows, upwards=rule.verifies == "up")
    verdicts = rule(windows, readings, ctx)
    trees = [_TreeVerdict.of(row[:n]) for row, n in zip(draft.tokens.tolist(), lengths)]
    for path, verdict in zip(flat, verdicts):
        trees[path.row].add(path.nodes, verdict)
    found = list[Verdict]()
    for tree, parents, n in zip(trees, draft.parents, lengths):
        found.append(tree.verdict(list(parents[:n])))
    return found


@dataclass(frozen=True)
class _Path:
    row: int
    nodes: list[int]


@dataclass
class _TreeVerdict:
    """A verdict on a row's tree, built path by path."""

    tokens: list[int]
    exact: list[bool]
    scores: list[float | None]
    best: tuple[int, int] = (-1, 0)
    """Number of accepted tokens on the best path, and how many of them the strict rule accepts."""
    path: Sequence[int] = ()
    next_token: int | None = None

    @classmethod
    def of(cls, tokens: list[int]) -> _TreeVerdict:
        return cls(tokens, [False] * len(tokens), [None] * len(tokens))

    def add(self, nodes: list[int], verdict: Verdict) -> None:
        for node, exact, score in zip(nodes, verdict.exact, verdict.scores):
            self.exact[node] = exact
            self.scores[node] = score
        kept = verdict.num_accepted
        worth = kept, sum(verdict.exact[:kept])
        if worth > self.best:
            self.best = worth
            self.path = nodes[:kept]
            self.next_token = verdict.next_token

    def verdict(self, parents: list[int]) -> Verdict:
        path = list(self.path)
        return Verdict(
            self.tokens, path, self.next_token, self.exact, self.scores, parents=parents
        )


def _windows(draft: Draft, flat: list[_Path]) -> Draft:
    """Return the paths as a batch of windows, without hidden states of the draft."""
    at, rows = _places(flat, draft.tokens.device)
    return Draft(
        tokens=draft.tokens[rows, at],
        lengths=to_device([len(path.nodes) for path in flat], draft.tokens.device),
        logits=None if draft.logits is None else draft.logits[rows, at],
    )


def _readings(reading: Reading, flat: list[_Path]) -> Reading:
    at, rows = _places(flat, reading.logits.device)
    return Reading(
        _with_first(reading.logits, rows, at), _with_first(reading.hidden, rows, at)
    )


def _of_nodes(reading: Reading, of_paths: Reading, flat: list[_Path]) -> Reading:
    """Return the reading with the logits that were processed for the paths, by node."""
    logits = of_paths.logits.new_empty(reading.logits.shape)
    for path, processed in zip(flat, of_paths.logits):
        places = [0, *(node + 1 for node in path.nodes)]
        logits[path.row, places] = processed[: len(places)]
    return replace(reading, logits=logits)


def _places(flat: list[_Path], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return [P, D], the token indices of each path, with the last one repeated; and [P, 1], the
    row of each path."""
    longest = max(len(path.nodes) for path in flat)
    at = [path.nodes + path.nodes[-1:] * (longest - len(path.nodes)) for path in flat]
    at = [places or [0] * longest for places in at]
    rows = to_device([[path.row] for path in flat], device)
    return to_device(at, device).long().view(len(flat), longest), rows.long()


def _with_first(states: Tensor, rows: Tensor, at: Tensor) -> Tensor:
    """Return [P, D + 1, …]: the states after the prefix and after each token of a path, from states
    [B, W + 1, …]."""
    return states[rows, torch.nn.functional.pad(at + 1, (1, 0))]
