"""Planned trees: the dynamic program against all trees, and what it is planned by."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import torch
from conftest import prompt_lists, quick
from hypothesis import given
from hypothesis import strategies as st
from test_cli import documented

from lenience.cli import main
from lenience.core.errors import InputError
from lenience.core.types import Draws
from lenience.decoding.decoder import Decoder
from lenience.decoding.pair import Pair
from lenience.drafting.parsing import parse_drafter, parse_tree
from lenience.drafting.trees.planning import Acceptance, best_shape, load_acceptance
from lenience.drafting.trees.shapes import Shape
from lenience.mining.search import MineConfig, mine
from lenience.tasks import Sample, Task
from lenience.training.acceptance import DEPTH, RANKS, TreeSampling, measure_acceptance


@cache
def all_trees(nodes: int) -> list[tuple[int, ...]]:
    """All ordered trees of so many tokens after the prefix, by their children level by level."""
    found = [()]
    for i in range(
        nodes
    ):  # one's children are counted where it is there, the prefix first
        found = [
            (*counts, n)
            for counts in found
            if i <= sum(counts)
            for n in range(nodes - sum(counts) + 1)
        ]
    return [counts for counts in found if sum(counts) == nodes]


def worth(counts: tuple[int, ...], shares: list[list[float]]) -> float:
    """How many tokens a tree should keep, each token with the chance of its own path."""
    chances, depths = [1.0], [0]
    for at, n in enumerate(counts):
        for rank in range(n):
            deep = depths[at]
            known = deep < len(shares) and rank < len(shares[deep])
            chances.append(chances[at] * (shares[deep][rank] if known else 0.0))
            depths.append(deep + 1)
    return sum(chances[1:])


@given(
    nodes=st.integers(1, 8),
    shares=st.integers(1, 6).flatmap(
        lambda ranks: st.lists(
            st.lists(st.floats(0.01, 1.0), min_size=ranks, max_size=ranks).map(
                lambda row: [share / sum(row) for share in sorted(row, reverse=True)]
            ),
            min_size=1,
            max_size=4,
        )
    ),
)
def test_the_plan_is_the_best_of_all_trees(
    nodes: int, shares: list[list[float]]
) -> None:
    counts, kept = best_shape(shares, nodes)
    best = max(
        worth(tree, shares) for n in range(1, nodes + 1) for tree in all_trees(n)
    )
    assert kept == pytest.approx(best)
    assert worth(tuple(counts), shares) == pytest.approx(kept)
    assert sum(counts) <= nodes


def test_a_plan_of_eight_is_the_best_of_all_trees() -> None:
    shares = [[0.6, 0.2, 0.1], [0.5, 0.2, 0.1], [0.3, 0.3, 0.1], [0.9, 0.05, 0.01]]
    _, kept = best_shape(shares, 8)
    assert kept == pytest.approx(max(worth(tree, shares) for tree in all_trees(8)))


def test_shapes_are_read_level_by_level() -> None:
    shape = Shape((2, 1, 0, 2))
    assert shape.parents == [-1, -1, 0, 2, 2] and shape.size == 5
    assert str(shape) == "shape:2,1,0,2" and parse_tree(str(shape)) == shape
    for spec, match in {
        "shape:0": "lists the children",
        "shape:1,0,0,1": "lists the children|follow itself",
        "shape:1,0,1": "follow itself",
        "shape:-1": "must be 0 or more",
        "shape:2000": "at most 1024",
        "planned:0": "must be 1 or more",
        "planned:4,path=none.json": "there is no none.json",
    }.items():
        with pytest.raises(InputError, match=match):
            parse_tree(spec)


@quick(6)
@given(
    prompts=prompt_lists(3),
    spec=st.sampled_from(["shape:2,1,0,2", "shape:3,2,1,1,1,0,1"]),
)
def test_shapes_change_no_strict_answer(
    llama: Pair, prompts: list[list[int]], spec: str
) -> None:
    outs = llama.generate_batch(prompts, tree=spec, batch_size=2, max_new_tokens=24)
    alone = llama.generate_batch(prompts, rule="target", max_new_tokens=24)
    assert [out.tokens for out in outs] == [out.tokens for out in alone]
    # the same tree as a cartesian one
    one, other = (
        llama.generate(prompts[0], tree=tree, max_new_tokens=24)
        for tree in ("cartesian:3,2", "shape:3,2,2,2")
    )
    assert (one.drafted, one.target_passes) == (other.drafted, other.target_passes)


def test_acceptance_is_counted_by_rank_and_depth(llama: Pair, tmp_path: Path) -> None:
    prompts = [[i, 2 * i % 40 + 1] for i in range(1, 9)]
    found = measure_acceptance(llama, prompts, parse_drafter("model"))
    assert len(found.shares) <= DEPTH and all(len(row) == RANKS for row in found.shares)
    # by the book: after each token of the target's own answer, what rank it has for the draft
    said, places = [0] * RANKS, 0
    for prompt in prompts:
        out = llama.generate(prompt, rule="target")
        tokens = out.tokens
        # a place that has room for the target's own token alone has no tree
        ends = len(tokens) - (out.finish != "eos")
        # the places at which a window begins: the comb's path is that of the draft's first ranks
        at = 0
        while at < ends:
            text = prompt + tokens[:at]
            kept = 0
            for depth in range(DEPTH):
                logits = llama.draft.model(
                    torch.tensor([text + tokens[at : at + depth]])
                ).logits
                ranked = logits[0, -1].topk(RANKS).indices.tolist()
                if at + depth >= len(tokens):
                    break
                token = tokens[at + depth]
                if depth == 0:
                    places += 1
                    if token in ranked:
                        said[ranked.index(token)] += 1
                kept += token in ranked
                if token != ranked[0]:
                    break
            at += kept + 1
    assert places == found.places[0]
    assert [n / places for n in said] == pytest.approx(list(found.shares[0]), abs=0.02)
    found.save(tmp_path / "tree.json")
    assert load_acceptance(tmp_path / "tree.json") == found
    spec = f"planned:6,path={tmp_path / 'tree.json'}"
    tree = parse_tree(spec)
    assert isinstance(tree, Shape) and tree.size <= 6
    out = llama.generate([5, 6], tree=spec, max_new_tokens=24)
    assert out.tokens == llama.generate([5, 6], rule="target", max_new_tokens=24).tokens
    for none_of_its_own in ("ngram", "model|suffix"):
        with pytest.raises(InputError, match="proposes no trees"):
            measure_acceptance(llama, prompts, parse_drafter(none_of_its_own))
    with pytest.raises(InputError, match="has no ranks"):
        measure_acceptance(llama, prompts, parse_drafter("suffix"))
    (tmp_path / "tree.json").write_text(
        json.dumps({"drafter": "x", "shares": [[]], "places": []})
    )
    with pytest.raises(InputError, match="is broken"):
        parse_tree(spec)


def test_a_plan_depends_on_what_was_measured(tmp_path: Path) -> None:
    Acceptance("deep", ((0.9, 0.05),) * 8, (10,) * 8).save(tmp_path / "deep.json")
    Acceptance("broad", ((0.3, 0.3),) * 8, (10,) * 8).save(tmp_path / "broad.json")
    deep, broad = (
        parse_tree(f"planned:6,path={tmp_path}/{n}.json") for n in ("deep", "broad")
    )
    assert str(deep) == "shape:1,1,1,1,1,1"
    assert broad.children[0] == 2
    # what answers depend on is the shape, whatever the file says later
    decoder = Decoder.of(tree=f"planned:6,path={tmp_path}/deep.json")
    assert str(decoder.tree) == "shape:1,1,1,1,1,1"
    Acceptance("none", ((0.0, 0.0),), (10,)).save(tmp_path / "none.json")
    with pytest.raises(InputError, match="the target never chose a drafted token"):
        parse_tree(f"planned:6,path={tmp_path}/none.json")


class Counting(Task):
    name = "counting"

    def samples(self, split: str) -> Iterator[Sample]:
        for i in range(3):
            yield Sample(f"{i}", f"w{1 + i} w{5 + i}", "w1")

    def answer(self, text: str, sample: Sample | None = None) -> str | None:
        return text.split()[-1] if text.split() else None


def test_the_command_measures_a_run(
    llama: Pair,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = tmp_path / "run"
    mine(
        llama,
        Counting(),
        run,
        MineConfig(answers_only=True, limit=2, max_new_tokens=24),
    )
    # an export would take longer than all else here
    monkeypatch.setattr("lenience.models.compile.export_seconds", lambda _: 1e9)
    main(["fit", str(run), "--tree", "--json"])
    said = json.loads(capsys.readouterr().out)
    assert set(said) == documented(["fit", "--tree"])[0]
    assert (
        said["drafter"] == "model"
        and f"planned:16,path={run}/tree.json" in said["trees"]
    )
    kept = [*said["trees"].values()]
    assert kept == sorted(kept) and kept[0] >= 1
    main(["fit", str(run), "--tree", "--draw", "without-replacement", "--json"])
    drawn = [*json.loads(capsys.readouterr().out)["trees"]]
    assert drawn[0] == f"planned:4,path={run}/tree.json,draw=without-replacement"
    assert llama.generate(
        [5, 6], rule="speculative", tree=drawn[0], temperature=1.0
    ).tokens
    for flags, match in {
        ("--tree", "--heads", "2"): "--heads: is of a head, and --tree fits none",
        ("--with", "model"): "--with: needs --tree",
        ("--draw", "with-replacement"): "--draw: needs --tree",
        ("--tree", "--temperature", "1"): "--temperature: needs --draw",
        (
            "--tree",
            "--draw",
            "with-replacement",
            "--temperature",
            "0",
        ): "must be above 0",
        ("--drafter", "eagle", "--heads", "2"): "--heads: drafter eagle has no heads",
        ("--tree", "--with", "ngram"): "--with ngram: proposes no trees",
    }.items():
        with pytest.raises(SystemExit) as ended:
            main(["fit", str(run), *flags])
        assert ended.value.code == 2
        assert match in capsys.readouterr().err.replace("\n", " ")


@pytest.mark.parametrize("draw", ["with-replacement", "without-replacement"])
@torch.no_grad()
def test_acceptance_of_drawn_trees_is_counted(
    llama: Pair, draw: Draws, tmp_path: Path
) -> None:
    """The first of a place's drawn tokens is kept with the chance of one drawn token."""
    prompts = [[i, 2 * i % 40 + 1] for i in range(1, 13)]
    found = measure_acceptance(
        llama, prompts, parse_drafter("model"), TreeSampling(draw, 0.8)
    )
    comb = (RANKS, *[RANKS, *[0] * (RANKS - 1)] * (DEPTH - 2), RANKS)
    sampling = {"rule": "speculative", "temperature": 0.8, "seed": 0, "window": DEPTH}
    outs = llama.generate_batch(prompts, tree=Shape(comb, draw=draw), **sampling)
    chances = []
    for prompt, out in zip(prompts, outs):
        tokens, begins = out.tokens, [0]
        for i, entry in enumerate(out.trace):
            if not entry.origin.startswith("draft"):
                begins.append(i + 1)
        for at in begins:
            if at + 1 >= len(tokens) and (out.finish != "eos" or at == len(tokens)):
                continue
            ids = torch.tensor([prompt + tokens[:at]])
            p, q = (
                torch.softmax(lm.model(ids).logits[0, -1] / 0.8, -1)
                for lm in (llama.target, llama.draft)
            )
            chances.append(float(torch.minimum(p, q).sum()))
    assert found.places[0] == len(chances)
    expected, spread = sum(chances), sum(x * (1 - x) for x in chances) ** 0.5
    assert abs(found.shares[0][0] * len(chances) - expected) < 4 * spread
    # all of a place's together are kept more often
    assert sum(found.shares[0]) > found.shares[0][0]
    found.save(tmp_path / "tree.json")
    assert load_acceptance(tmp_path / "tree.json") == found


def test_a_tree_is_planned_for_the_window(tmp_path: Path) -> None:
    """Of as many levels as the window, and not cut off there: no token is lost."""
    shares = tuple((0.9, 0.05) for _ in range(12))
    Acceptance("model", shares, tuple([100] * 12)).save(tmp_path / "tree.json")
    spec = f"planned:10,path={tmp_path / 'tree.json'}"
    for window in (2, 4, 12):
        tree = parse_tree(Decoder.of(tree=spec, window=window).tree)
        counts, _ = best_shape(shares[:window], 10)
        while counts[-1] == 0:
            counts.pop()
        assert str(tree) == f"shape:{','.join(map(str, counts))}"
        depth = [0] * tree.size
        for i, parent in enumerate(tree.parents):
            depth[i] = 1 + (depth[parent] if parent >= 0 else 0)
        assert max(depth) <= window
