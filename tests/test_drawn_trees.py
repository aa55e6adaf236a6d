"""Trees whose tokens are drawn: strict rules keep the target's distribution on them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import permutations, product

import numpy as np
import pytest
import torch
from conftest import CONFIGS, spread
from scipy.stats import chisquare

from lenience.core.context import Context, Row
from lenience.core.errors import InputError
from lenience.core.noise import Noise, without_replacement
from lenience.core.types import Draft, Reading, Verdict
from lenience.decoding.pair import Pair
from lenience.drafting.parsing import parse_tree
from lenience.drafting.trees.growing import PathEnds, TreeLevel, as_draft
from lenience.drafting.trees.judging import judge_trees
from lenience.drafting.trees.shapes import Ranked
from lenience.rules.parsing import parse_rule

THAT_TAKE_TREES = [name for name in CONFIGS if name != "gpt_neo"]
DRAWS = ("with-replacement", "without-replacement")
SHAPES = ("cartesian:2,2", "cartesian:3,1,1", "shape:2,0,2,1", "cartesian:1,1,1")
TARGET = np.array([[0.5, 0.2, 0.2, 0.1], [0.1, 0.6, 0.0, 0.3], [0.25, 0.25, 0.25, 0.25],
                   [0.05, 0.05, 0.1, 0.8]])  # fmt: skip
DRAFT = np.array([[0.2, 0.4, 0.3, 0.1], [0.4, 0.3, 0.3, 0.0], [0.7, 0.1, 0.1, 0.1],
                  [0.3, 0.3, 0.2, 0.2]])  # fmt: skip
"""What follows each token; some tokens never do."""
BEGIN = 2


def logits_of(table: np.ndarray, tokens: torch.Tensor) -> torch.Tensor:
    return torch.tensor(np.log(np.maximum(table, 0) + 1e-300)).clamp(min=-600)[tokens]


def cycle(tree: Ranked, rule: str, rows: list[Row]) -> tuple[Draft, list[Verdict]]:
    """Draw trees for rows of Markov chains, and verify them."""
    ctx = Context(rows, 1.0, fresh_noise_per_window=True)
    logits = []

    def expand(level: TreeLevel | None) -> torch.Tensor:
        tokens = [[row.prefix[-1]] for row in rows] if level is None else level.tokens
        logits.append(logits_of(DRAFT, torch.tensor(tokens)))
        return logits[-1]

    grown = tree.grow(expand, ctx, PathEnds([9] * len(rows), frozenset()))
    draft = as_draft(grown, torch.device("cpu"), torch.cat(logits, 1), draws=tree.draws)
    read = torch.cat(
        [torch.tensor([[row.prefix[-1]] for row in rows]), draft.tokens], 1
    )
    reading = Reading(logits_of(TARGET, read), torch.zeros(*read.shape, 1))
    return draft, judge_trees(parse_rule(rule), draft, reading, ctx)


def tree_of(shape: str, draw: str) -> Ranked:
    tree = parse_tree(f"{shape},draw={draw}")
    assert isinstance(tree, Ranked)
    return tree


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("draw", DRAWS)
@pytest.mark.parametrize("rule", ["speculative", "block"])
def test_strict_rules_keep_the_targets_distribution_over_several_windows(
    rule: str, draw: str, shape: str
) -> None:
    """The joint distribution of the first four tokens."""
    tree = tree_of(shape, draw)
    rows = [Row(Noise(3, i.to_bytes(4, "little")), [BEGIN]) for i in range(3000)]
    while waiting := [row for row in rows if row.position < 4]:
        _, verdicts = cycle(tree, rule, waiting)
        for row, verdict in zip(waiting, verdicts):
            assert verdict.next_token is not None
            tokens = [*(verdict.drafted[i] for i in verdict.path), verdict.next_token]
            row.prefix, row.position = row.prefix + tokens, row.position + len(tokens)
    seen = np.zeros((4,) * 4)
    for row in rows:
        seen[tuple(row.prefix[1:5])] += 1
    wanted = np.array([
        np.prod([TARGET[a, b] for a, b in zip((BEGIN, *path), path)])
        for path in product(range(4), repeat=4)
    ]).reshape(seen.shape)  # fmt: skip
    assert seen[wanted == 0].sum() == 0
    expected = wanted[wanted > 0] * len(rows)
    assert chisquare(seen[wanted > 0], expected).pvalue > 1e-3


@pytest.mark.parametrize("rule", ["speculative", "block"])
def test_a_drawn_chain_is_verified_as_any_chain(rule: str) -> None:
    rows = [Row(Noise(8, i.to_bytes(4, "little")), [BEGIN]) for i in range(500)]
    draft, verdicts = cycle(
        tree_of("cartesian:1,1,1", "without-replacement"), rule, rows
    )
    chain = replace(draft, parents=None, draws=None)
    read = torch.cat([torch.full((500, 1), BEGIN), draft.tokens], 1)
    reading = Reading(logits_of(TARGET, read), torch.zeros(500, 4, 1))
    ctx = Context(rows, 1.0, fresh_noise_per_window=True)
    paths = [verdict.path for verdict in parse_rule(rule)(chain, reading, ctx)]
    assert paths == [verdict.path for verdict in verdicts]
    assert {len(path) for path in paths} == {0, 1, 2, 3}


def test_more_draws_keep_more_and_most_where_none_comes_twice() -> None:
    """A child's chance to be kept, against numpy's of SpecInfer's and Sequoia's algorithms."""
    rows = [Row(Noise(1, i.to_bytes(4, "little")), [BEGIN]) for i in range(6000)]
    target, drafted, kept = TARGET[BEGIN], DRAFT[BEGIN], dict[str, float]()
    for draw in DRAWS:
        _, verdicts = cycle(tree_of("cartesian:2", draw), "speculative", rows)
        kept[draw] = np.mean([verdict.num_accepted for verdict in verdicts])
        chance = 0.0
        for a, b in product(range(4), repeat=2):
            second = drafted.copy()
            if draw == "without-replacement":
                second[a] = 0
                second /= second.sum()
            left = (
                np.maximum(target - drafted, 0) / np.maximum(target - drafted, 0).sum()
            )
            first = min(1, target[a] / drafted[a])
            later = min(1, left[b] / second[b]) if second[b] else 0
            chance += drafted[a] * second[b] * (first + (1 - first) * later)
        assert abs(kept[draw] - chance) < 4 * (chance * (1 - chance) / len(rows)) ** 0.5
    single = np.minimum(target, drafted).sum()
    assert single < kept["with-replacement"] < kept["without-replacement"]


def test_draws_without_replacement_are_those_of_an_urn() -> None:
    probs = np.array([0.5, 0.3, 0.0, 0.2])
    keys = torch.arange(20_000) * 7919
    drawn = without_replacement(torch.tensor(probs).expand(len(keys), 4), keys, 4)
    assert (drawn[:, 3] == -1).all()
    orders = list(permutations([0, 1, 3]))
    wanted = [probs[a] * probs[b] / (1 - probs[a]) for a, b, _ in orders]
    seen = [int((drawn[:, :3] == torch.tensor(order)).all(1).sum()) for order in orders]
    assert chisquare(seen, np.array(wanted) * len(keys)).pvalue > 1e-3


@pytest.mark.parametrize(
    ("draw", "name"),
    [(draw, name) for name, draw in spread(THAT_TAKE_TREES, DRAWS, times=1)],
)
def test_drawn_trees_are_decoded_with(
    name: str, draw: str, pairs: Callable[[str], Pair]
) -> None:
    """Greedily as the target alone, by `exact` as plain sampling with the same seed, and by the
    others alike alone and among others."""
    pair, tree = pairs(name), f"cartesian:3,2,draw={draw}"
    prompts, options = [[5, 6, 7, 8], [9, 3], [11]], {"max_new_tokens": 20, "window": 2}
    plain = [
        pair.generate(prompt, rule="target", **options).tokens for prompt in prompts
    ]
    outs = pair.generate_batch(prompts, tree=tree, batch_size=2, **options)
    assert [out.tokens for out in outs] == plain
    options |= {"temperature": 0.9, "seed": 4}
    plain = [
        pair.generate(prompt, rule="target", **options).tokens for prompt in prompts
    ]
    outs = pair.generate_batch(
        prompts, rule="exact", tree=tree, batch_size=3, **options
    )
    assert [out.tokens for out in outs] == plain
    for rule in ("speculative", "block", "speculative|topk:2"):
        alone = [
            pair.generate(prompt, rule=rule, tree=tree, **options) for prompt in prompts
        ]
        outs = pair.generate_batch(
            prompts, rule=rule, tree=tree, batch_size=3, **options
        )
        assert [out.tokens for out in outs] == [one.tokens for one in alone]
        assert any(out.accepted_exact for out in outs)


@pytest.mark.parametrize("rule", ["speculative", "block"])
def test_a_whole_decode_on_drawn_trees_follows_the_targets_distribution(
    rule: str, llama: Pair
) -> None:
    """The second token's marginal, through the engine, with the request's truncation."""
    with torch.inference_mode():

        def next_probs(*prefix: int) -> np.ndarray:
            logits = (
                llama.target.model(torch.tensor([[7, *prefix]])).logits[0, -1].double()
            )
            top = logits.topk(3)
            kept = torch.full_like(logits, float("-inf")).scatter(
                0, top.indices, top.values
            )
            return torch.softmax(kept, -1).numpy()

        wanted = sum(
            next_probs()[a] * next_probs(a) for a in np.flatnonzero(next_probs()) if a
        )
    seen = np.zeros(48)
    options = {"temperature": 1.0, "top_k": 3, "max_new_tokens": 2, "window": 2}
    tree = "cartesian:2,1,draw=without-replacement"
    for seed in range(800):
        tokens = llama.generate([7], rule=rule, tree=tree, seed=seed, **options).tokens
        if len(tokens) == 2:
            seen[tokens[1]] += 1
    assert seen[wanted == 0].sum() == 0
    expected = wanted[wanted > 0] / wanted.sum() * seen.sum()
    assert chisquare(seen[wanted > 0], expected).pvalue > 1e-4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"tree": "cartesian:2,draw=some"},
            "draw some: must be one of with-replacement",
        ),
        ({"tree": "dynamic:4,draw=with-replacement"}, "no argument 'draw'"),
        (
            {"tree": "cartesian:2,draw=with-replacement", "drafter": "model|exit:1"},
            "combines several",
        ),
        (
            {"tree": "cartesian:2,draw=with-replacement", "rule": "lenient:0.5"},
            "needs drawn tokens",
        ),
    ],
)
def test_what_cannot_be_drawn_is_refused_by_name(
    options: dict[str, str], message: str, llama: Pair
) -> None:
    with pytest.raises(InputError, match=message):
        llama.generate([1, 2, 3], temperature=0.7, **options)
