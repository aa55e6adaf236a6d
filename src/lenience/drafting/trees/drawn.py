"""Lossless verification of trees whose tokens were drawn from the draft's distributions.

The children of a token are verified in the order in which they were drawn. Let p be the target's
distribution, q the one that a child x was drawn from, and P the share of p to keep. The child is
accepted with probability min(1, P · p(x) / q(x)). After a rejection, the next children are verified
against the positive part of P · p − q, normalised. If no token is drawn twice, q loses x.

Going down, P is 1: an accepted child decides on its branch (SpecInfer, Miao 2023, algorithm 2;
Sequoia, Chen 2024, algorithm 2). Going up, a whole path is accepted by the share of its last token,
and a token's share grows with each rejected branch (traversal verification, Weng 2025). On a chain,
going up is block verification.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lenience.core.context import Context
from lenience.core.noise import gumbel_argmax, uniform
from lenience.core.transfer import to_device
from lenience.core.trees import Parents
from lenience.core.types import Draft, Reading, Verdict
from lenience.rules.base import select_position


def verify_drawn(
    draft: Draft, reading: Reading, ctx: Context, *, upwards: bool
) -> list[Verdict]:
    """Return the verdicts on trees that were drawn from `draft.logits`, by the distributions that
    sampling uses. Accepted tokens count as accepted by the strict rule."""
    assert draft.parents is not None and draft.logits is not None
    lengths = draft.lengths.tolist()
    trees = [list(parents[:n]) for parents, n in zip(draft.parents, lengths)]
    shares = _Shares(draft, ctx.probs(reading.logits).double(), ctx, upwards)
    for depth in _by_depth(trees):
        for siblings in depth:
            shares.ask(siblings)
    chance = shares.of_prefix_and_tokens[:, 1:]
    device = chance.device
    kept = uniform(ctx.noise_keys(draft.width, "accept", device=device)) < chance
    walk = _upwards if upwards else _downwards
    walked = [walk(tree, row) for tree, row in zip(trees, kept.tolist())]
    tokens = _next_tokens(shares.rest, trees, walked, ctx)
    found = list[Verdict]()
    for drafted, tree, path, token in zip(
        draft.tokens.tolist(), trees, walked, tokens.tolist()
    ):
        found.append(_verdict(drafted[: len(tree)], tree, path, token))
    return found


def _next_tokens(
    rest: Tensor,
    trees: Sequence[Parents],
    walked: Sequence[Sequence[int]],
    ctx: Context,
) -> Tensor:
    """Return [B]: the tokens after the accepted paths, drawn from the remaining distributions
    `rest` [B, W + 1, V]. A bonus token is drawn as in plain decoding."""
    last = [path[-1] if path else -1 for path in walked]
    bonus = to_device([at not in tree for at, tree in zip(last, trees)], rest.device)
    place = to_device([*map(len, walked)], rest.device).long()
    plain = select_position(
        ctx.noise_keys(rest.shape[1], "token", device=rest.device), place
    )
    own = select_position(
        ctx.noise_keys(rest.shape[1], "correction", device=rest.device), place
    )
    left = select_position(rest, to_device(last, rest.device).long() + 1)
    return gumbel_argmax(left, torch.where(bonus, plain, own))


def _verdict(
    drafted: list[int], tree: list[int], path: list[int], token: int
) -> Verdict:
    exact = [False] * len(tree)
    for node in path:
        exact[node] = True
    return Verdict(drafted, path, token, exact, [None] * len(tree), parents=tree)


def _by_depth(trees: Sequence[Parents]) -> list[list[list[tuple[int, int, int]]]]:
    """Group the tokens, as (row, parent, token), by depth and then by rank among siblings. The
    tokens of a group can be verified at once, after the groups before it."""
    levels: list[list[list[tuple[int, int, int]]]] = []
    for row, parents in enumerate(trees):
        depth = {-1: 0}
        seen = dict[int, int]()
        for node, parent in enumerate(parents):
            at = depth[parent]
            rank = seen.get(parent, 0)
            depth[node] = at + 1
            seen[parent] = rank + 1
            while len(levels) <= at:
                levels.append([])
            while len(levels[at]) <= rank:
                levels[at].append([])
            levels[at][rank].append((row, parent, node))
    return levels


class _Shares:
    """The remaining target distributions, and the shares of them to keep, while children are
    verified."""

    def __init__(self, draft: Draft, target: Tensor, ctx: Context, upwards: bool):
        assert draft.logits is not None
        self.draft = draft
        self.upwards = upwards
        self.rest = target
        """[B, W + 1, V]: remaining distribution after the prefix and after each token, given the
        children rejected so far."""
        self.drafted = ctx.probs(draft.logits).double()
        """[B, W, V]: distribution that each token was drawn from, before siblings are removed."""
        self.of_prefix_and_tokens = torch.ones_like(target[..., 0])
        """[B, W + 1]: probability with which the prefix and each token are accepted once
        verified."""
        self._left: dict[tuple[int, int], Tensor] = {}

    def ask(self, siblings: Sequence[tuple[int, int, int]]) -> None:
        """Verify a group of tokens with different parents, given as (row, parent, token)."""
        device = self.rest.device
        row, parent, node = to_device(list(zip(*siblings)), device).long()
        tokens = self.draft.tokens[row, node]
        # [M, V]
        target = self.rest[row, parent + 1]
        drafted = self._unused(siblings, row, node)
        share = self.of_prefix_and_tokens[row, parent + 1] if self.upwards else 1.0
        aim = target * share[:, None] if isinstance(share, Tensor) else target
        own = (values.gather(1, tokens[:, None])[:, 0] for values in (aim, drafted))
        self.of_prefix_and_tokens[row, node + 1] = torch.div(*own).clamp(max=1)
        left = (aim - drafted).clamp(min=0)
        mass = left.sum(-1)
        # equal distributions leave nothing; then only rounding can have rejected a token
        self.rest[row, parent + 1] = torch.where(
            mass[:, None] > 0, left / mass[:, None], target
        )
        if isinstance(share, Tensor):
            of_all = mass + 1 - share
            self.of_prefix_and_tokens[row, parent + 1] = torch.where(
                of_all > 0, mass / of_all, 1.0
            )
        self._use(siblings, drafted, tokens)

    def _unused(
        self, siblings: Sequence[tuple[int, int, int]], row: Tensor, node: Tensor
    ) -> Tensor:
        """Return [M, V]: the distributions that the tokens were drawn from, without siblings that
        cannot be drawn again."""
        known = [self._left.get(sibling[:2]) for sibling in siblings]
        own = self.drafted[row, node]
        return torch.stack(
            [mine if left is None else left for left, mine in zip(known, own)]
        )

    def _use(
        self, siblings: Sequence[tuple[int, int, int]], drafted: Tensor, tokens: Tensor
    ) -> None:
        if self.draft.draws != "without-replacement":
            return
        left = drafted.scatter(1, tokens[:, None], 0.0)
        left = left / left.sum(-1, keepdim=True)
        for (row, parent, _), rest in zip(siblings, left):
            self._left[row, parent] = rest


def _downwards(tree: Parents, kept: Sequence[bool]) -> list[int]:
    """Return the path that follows the first accepted child of each token."""
    path = list[int]()
    at = -1
    for node, parent in enumerate(tree):
        if parent == at and kept[node]:
            path.append(node)
            at = node
    return path


def _upwards(tree: Parents, kept: Sequence[bool]) -> list[int]:
    """Return the path to the first accepted token in the order that visits descendants first."""
    children: dict[int, list[int]] = {}
    for node, parent in enumerate(tree):
        children.setdefault(parent, []).append(node)

    def first(node: int, path: list[int]) -> list[int] | None:
        for child in children.get(node, ()):
            found = first(child, [*path, child])
            if found is not None:
                return found
        return path if node < 0 or kept[node] else None

    return first(-1, []) or []
