"""Trees of drafted tokens: they are read, decided and kept as their paths would be alone."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import (
    COMMON,
    CONFIGS,
    VOCABULARY,
    prompt_lists,
    quick,
    save_model,
    spread,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import BloomConfig, FalconConfig, MptConfig

from lenience.core.context import Context, Row
from lenience.core.errors import InputError
from lenience.core.needs import Parts
from lenience.core.noise import Noise
from lenience.core.trees import depths, followed, lineage, paths
from lenience.core.types import Draft, Reading
from lenience.decoding.auto_window import Chooser
from lenience.decoding.loading import load_pair
from lenience.decoding.pair import Pair
from lenience.drafting.parsing import parse_tree
from lenience.drafting.trees.growing import GrowingTree, PathEnds, TreeLevel
from lenience.drafting.trees.judging import judge_trees
from lenience.drafting.trees.planning import BUILT_IN_TREE
from lenience.drafting.trees.shapes import Dynamic
from lenience.heads.head import Head, Inputs
from lenience.models import onnx_graph
from lenience.models.cuda_graphs import CudaGraphs
from lenience.models.kv_cache import Forward, TreeVisibility
from lenience.models.pass_cache import LAST
from lenience.models.session import Session
from lenience.rules.parsing import parse_rule

TREES = (
    "dynamic:6",
    "dynamic:16",
    "dynamic:8,temperature=1.5",
    "dynamic:9,depth=3,top=2",
    "dynamic:9,least=0.3",
    "cartesian:3,2,1",
    "cartesian:2",
)


@st.composite
def some_parents(draw: st.DrawFn, most: int = 12) -> list[int]:
    return [draw(st.integers(-1, i - 1)) for i in range(draw(st.integers(0, most)))]


@given(some_parents(), st.lists(st.integers(0, 2), max_size=6), st.data())
def test_paths_depths_and_lineages_are_those_of_walking_up(
    parents: list[int], sequence: list[int], data: st.DataObject
) -> None:
    def up(node: int) -> list[int]:
        return [*up(parents[node]), node] if node >= 0 else []

    leaves = [i for i in range(len(parents)) if i not in parents]
    assert paths(parents) == ([up(leaf) for leaf in leaves] or [[]])
    assert depths(parents) == [len(up(i)) - 1 for i in range(len(parents))]
    assert lineage(parents).tolist() == [
        [j in up(i) for j in range(len(parents))] for i in range(len(parents))
    ]
    # siblings of one token are never proposed
    tokens = [data.draw(st.integers(0, 2)) for _ in parents]
    twice = [(p, t) for p, t in zip(parents, tokens)]
    if len(set(twice)) < len(twice):
        return
    path = followed(parents, tokens, sequence)
    said = [tokens[i] for i in path]
    assert said == sequence[: len(said)] and (not path or up(path[-1]) == path)
    ends = [[tokens[i] for i in up(leaf)] for leaf in range(len(parents))]
    assert len(said) == max(
        n for n in range(len(sequence) + 1) if sequence[:n] in [[], *ends]
    )


@pytest.mark.parametrize(
    ("name", "tree"), spread([name for name in CONFIGS if name != "gpt_neo"], TREES)
)
def test_strict_answers_are_the_targets_own_alone_and_in_batches(
    name: str, tree: str, pairs: Callable[[str], Pair]
) -> None:
    """Sliding windows are shorter than what is decoded, and rows of different lengths share
    passes."""
    pair = pairs(name)
    prompts = [[5, 6, 7], list(range(1, 20)), [9], [3, 3, 3, 3, 8, 8]]
    options = {"max_new_tokens": 28, "window": 5}
    alone = pair.generate_batch(prompts, rule="target", **options)
    for batch_size in (1, 3):
        outs = pair.generate_batch(prompts, tree=tree, batch_size=batch_size, **options)
        assert [out.tokens for out in outs] == [out.tokens for out in alone]
    assert sum(out.target_passes for out in outs) < sum(len(out.tokens) for out in outs)
    sampled = pair.generate_batch(
        prompts, rule="target", temperature=0.9, seed=4, **options
    )
    for rule in ("exact", "speculative"):
        outs = pair.generate_batch(
            prompts,
            rule=rule,
            tree=tree,
            temperature=0.9,
            seed=4,
            batch_size=3,
            **options,
        )
        assert [out.tokens for out in outs] == [out.tokens for out in sampled]


@quick(10)
@given(prompts=prompt_lists(4), tree=st.sampled_from(TREES), size=st.integers(1, 4))
def test_any_prompts_are_answered_through_any_tree_as_by_the_target(
    llama: Pair, prompts: list[list[int]], tree: str, size: int
) -> None:
    options = {"max_new_tokens": 24}
    outs = llama.generate_batch(prompts, tree=tree, batch_size=size, **options)
    assert [out.tokens for out in outs] == [
        llama.generate(prompt, rule="target", **options).tokens for prompt in prompts
    ]


@pytest.mark.usefixtures("graphs")
@pytest.mark.parametrize("recorded", [False, True], ids=["exported", "recorded"])
def test_trees_through_exported_and_recorded_passes(
    recorded: bool, checkpoints: Callable[[str], tuple[str, str]]
) -> None:
    pair = load_pair(*checkpoints("mistral"), dtype="float32", compile=False)
    if recorded:
        for lm in pair.models.values():
            lm.use(CudaGraphs())
    else:
        assert pair.compile()
        assert all(lm.backend_for(LAST, trees=True) for lm in pair.models.values())
    prompts = [[5, 6, 7], list(range(1, 20)), [9]]
    alone = pair.generate_batch(prompts, rule="target", max_new_tokens=40)
    for size in (1, 2):
        for tree in ("dynamic:9", "cartesian:3,2,1"):
            outs = pair.generate_batch(
                prompts, tree=tree, batch_size=size, max_new_tokens=40
            )
            assert [out.tokens for out in outs] == [out.tokens for out in alone]


def test_the_end_of_a_context_cuts_a_tree(
    checkpoints: Callable[[str], tuple[str, str]],
) -> None:
    pair = load_pair(*checkpoints("gpt2"), dtype="float32", compile=False)
    prompt = [1 + i % 40 for i in range(240)]
    out = pair.generate(prompt, tree="dynamic:12", max_new_tokens=100)
    alone = pair.generate(prompt, rule="target", max_new_tokens=100)
    assert out.tokens == alone.tokens
    assert out.finish == alone.finish


def trees_of(seed: int, rows: int, n: int) -> tuple[Draft, Reading, Context]:
    """Random trees of at most n tokens with what both models say, few tokens being likely."""
    rng = np.random.default_rng(seed)
    parents = [[int(rng.integers(-1, i)) for i in range(n)] for _ in range(rows)]
    tokens = torch.zeros(rows, n, dtype=torch.long)
    for b in range(rows):
        for i in range(n):
            taken = {
                int(tokens[b, j]) for j in range(i) if parents[b][j] == parents[b][i]
            }
            tokens[b, i] = int(rng.choice([t for t in range(n + 2) if t not in taken]))
    generator = torch.Generator().manual_seed(seed)
    shape = (rows, n + 1, VOCABULARY)
    logits = torch.randn(shape, generator=generator)
    logits[..., : n + 2] += 4
    drafted = torch.randn(rows, n, VOCABULARY, generator=generator)
    hidden = torch.randn(rows, n + 1, 8, generator=generator)
    lengths = torch.tensor([int(rng.integers(0, n + 1)) for _ in range(rows)])
    draft = Draft(tokens, lengths, drafted, parents=parents)
    ctx = Context(
        [Row(Noise(seed, bytes([b])), [1, 2], position=b) for b in range(rows)]
    )
    return draft, Reading(logits, hidden), ctx


LENIENT = ("topk:2", "topk:3", "typical:0.3,0.55", "fuzzy:js@0.4", "random:0.5", "topk:3,budget=1",
           "exact", "exact|fuzzy:tv@0.6,floor=0.05", "ensemble:0.4",
           "cascade:token3@0.5", "fly:0.1,1")  # fmt: skip


@pytest.fixture(scope="module")
def judges(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Judges of random weights on the target's states, so that each node's own state decides."""
    folder = tmp_path_factory.mktemp("judges")
    for token in ("draft", "previous"):
        inputs = Inputs(("target",), (token,))
        weight = torch.randn(8, generator=torch.Generator().manual_seed(1))
        Head(weight, 0.3, inputs, 0.5, {}).save(folder / token)
    return folder


@pytest.mark.parametrize(
    "rule", (*LENIENT, "judge:{judges}/draft", "judge:{judges}/previous")
)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@settings(max_examples=25)
@given(seed=st.integers(0, 10_000))
def test_the_deepest_path_that_the_rule_accepts_is_kept(
    rule: str, temperature: float, seed: int, judges: Path
) -> None:
    """Against each path's own chain, asked alone."""
    parsed = parse_rule(rule.format(judges=judges))
    if temperature and Parts.DRAWS in parsed.needs.window:
        return
    draft, reading, ctx = trees_of(seed, 2, 7)
    ctx.temperature = temperature
    verdicts = judge_trees(parsed, draft, reading, ctx)
    for b, verdict in enumerate(verdicts):
        assert draft.parents is not None
        parents = draft.parents[b][: int(draft.lengths[b])]
        found = []
        for path in paths(parents):
            places = torch.tensor([0, *(i + 1 for i in path)])
            chain = Draft(
                draft.tokens[b : b + 1, path],
                torch.tensor([len(path)]),
                draft.logits[b : b + 1, path] if draft.logits is not None else None,
            )
            own = Reading(
                reading.logits[b : b + 1, places], reading.hidden[b : b + 1, places]
            )
            alone = Context([ctx.rows[b]], temperature, on_trees=True)
            (said,) = parsed(chain, own, alone)
            assert [verdict.exact[i] for i in path] == said.exact
            found.append(
                (said.num_accepted, sum(said.exact[: said.num_accepted]), path, said)
            )
        deepest = max(kept for kept, *_ in found)
        assert verdict.num_accepted == deepest
        best = next(one for one in found if one[:2] == max(one[:2] for one in found))
        assert verdict.path == best[2][:deepest]
        assert verdict.next_token == best[3].next_token
        strictly = max(
            next((n for n, i in enumerate(path) if not verdict.exact[i]), len(path))
            for *_, path, _ in found
        )
        assert verdict.kept_exactly(7) == strictly


def test_a_lenient_tree_counts_what_the_strict_rule_would_keep(llama: Pair) -> None:
    out = llama.generate([5, 6, 7], rule="topk:3", tree="dynamic:12", max_new_tokens=60)
    origins = [entry.origin for entry in out.trace]
    assert "draft-lenient" in origins
    kept = sum(origin.startswith("draft") for origin in origins)
    assert out.accepted_exact + out.accepted_lenient == kept
    assert out.tokens_per_pass == len(out.tokens) / out.target_passes


def likeliest(
    log_probs: Callable[[tuple[int, ...]], torch.Tensor], nodes: int, depth: int
) -> set:
    """Of all paths up to a depth those of the highest probability, by trying all."""
    return {path for _, path in best_paths(log_probs, nodes, depth)}


def best_paths(
    log_probs: Callable[[tuple[int, ...]], torch.Tensor], nodes: int, depth: int
) -> list[tuple[float, tuple[int, ...]]]:
    """The same with their log-probabilities."""
    scored = []
    for n in range(1, depth + 1):
        for path in product(range(4), repeat=n):
            score = sum(float(log_probs(path[:i])[path[i]]) for i in range(n))
            scored.append((score, path))
    return sorted(scored, reverse=True)[:nodes]


@settings(max_examples=60)
@given(
    st.integers(0, 10_000), st.integers(1, 12), st.integers(1, 4),
    st.sampled_from([0.0, 0.1, 0.3, 0.6]),
)  # fmt: skip
def test_a_dynamic_tree_has_the_likeliest_paths(
    seed: int, nodes: int, depth: int, least: float
) -> None:
    """With as wide levels as there are tokens nothing is left out; with `least` (OPT-Tree) down to
    the first level by which the sum of their probabilities grows by less."""
    generator = torch.Generator().manual_seed(seed)
    known: dict[tuple[int, ...], torch.Tensor] = {}

    def log_probs(path: tuple[int, ...]) -> torch.Tensor:
        if path not in known:
            known[path] = torch.log_softmax(2 * torch.randn(4, generator=generator), 0)
        return known[path]

    asked: list[tuple[int, ...]] = [()]

    def expand(level: TreeLevel | None) -> torch.Tensor:
        if level is None:
            return log_probs(())[None, None]
        before = [asked[parent + 1] for parent in level.parents[0]]
        more = [(*path, token) for path, token in zip(before, level.tokens[0])]
        asked.extend(more)
        assert all(len(path) == level.depth + 1 for path in more)
        return torch.stack([log_probs(path) for path in more])[None]

    wide = Dynamic(nodes, top=256, least=least)
    ctx = Context([Row(Noise(0, b""))])
    (grown,) = wide.grow(_padded(expand), ctx, PathEnds([depth], frozenset()))
    found = {
        tuple(grown.tokens[i] for i in path[: n + 1])
        for path in paths(grown.parents)
        for n in range(len(path))
    }
    worth = [
        sum(math.exp(score) for score, _ in best_paths(log_probs, nodes, n))
        for n in range(depth + 1)
    ]
    small = (n for n in range(1, depth + 1) if worth[n] - worth[n - 1] < least)
    assert found == likeliest(log_probs, nodes, next(small, depth))


def _padded(
    expand: Callable[[TreeLevel | None], torch.Tensor],
) -> Callable[..., torch.Tensor]:
    """As wide as a vocabulary of 256, of which four tokens are possible."""
    return lambda level: torch.nn.functional.pad(
        expand(level), (0, 252), value=-torch.inf
    )


def test_a_tree_can_rank_paths_at_a_temperature() -> None:
    """Two sure tokens against one that is less sure: 0.9 · 0.9 > 0.1, and at a temperature of 8 the
    other way round, 0.568² < 0.432."""
    logits = torch.log(torch.tensor([0.9, 0.1]))
    ctx = Context([Row(Noise(0, b""))])
    for temperature, other in ((1.0, False), (8.0, True)):
        tree = Dynamic(2, top=2, temperature=temperature)

        def expand(level: TreeLevel | None) -> torch.Tensor:
            width = 1 if level is None else len(level.tokens[0])
            return logits.expand(1, width, 2)

        (grown,) = tree.grow(expand, ctx, PathEnds([2], frozenset()))
        ((path, *more),) = [paths(grown.parents)]
        assert (len(more) == 1) == other, (
            "a second branch, or a second token on the first"
        )
        assert grown.tokens == ([0, 1] if other else [0, 0]) and len(path) == (
            1 if other else 2
        )


def test_a_tree_is_cut_at_a_depth() -> None:
    grown = GrowingTree([1, 2, 3, 4, 5], [-1, 0, 1, 0, -1], [0, 1, 2, 1, 0])
    cut = grown.cut(2, frozenset())
    assert (cut.tokens, cut.parents) == ([1, 2, 4, 5], [-1, 0, 0, -1])
    assert cut.picked_from == [0, 1, 1, 0]
    assert grown.cut(0, frozenset()).tokens == []
    assert grown.cut(9, frozenset({2})).tokens == [1, 2, 4, 5], "nothing follows an EOS"


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"tree": "bush"}, "no tree 'bush'"),
        ({"tree": "dynamic"}, "dynamic needs nodes"),
        ({"tree": "dynamic:0"}, "nodes 0: must be 1"),
        ({"tree": "dynamic:4,temperature=0"}, "temperature 0.0: must be above 0"),
        ({"tree": "dynamic:4,least=-1"}, "least -1.0: must be 0 or more"),
        ({"tree": "dynamic:5000"}, "at most 1024"),
        ({"tree": "cartesian:64,64"}, "at most 1024"),
        ({"tree": "cartesian"}, "cartesian needs widths"),
        ({"tree": "cartesian:2,x"}, "whole number"),
        (
            {"tree": "dynamic:8", "drafter": "ngram"},
            "needs trees, and drafter ngram has none; take another drafter or --tree chain",
        ),
        ({"tree": "cartesian:2,2", "drafter": "suffix"}, "dynamic:NODES"),
        (
            {"tree": "dynamic:8", "rule": "block", "temperature": 0.5},
            "block: needs drawn tokens",
        ),
        (
            {"tree": "dynamic:8", "rule": "lenient:0.5", "temperature": 0.5},
            "lenient:0.5: needs",
        ),
    ],
)
def test_what_trees_cannot_do_is_refused_by_name(
    options: dict[str, object], says: str, llama: Pair
) -> None:
    with pytest.raises(InputError, match=says):
        llama.generate("w1 w2", **options)


def test_a_spec_of_several_numbers_is_read_and_shown() -> None:
    assert str(parse_tree("cartesian:4,3,2")) == "cartesian:4,3,2"
    assert parse_tree("cartesian:4,3,2").size == 4 + 12 + 24
    assert str(parse_tree("dynamic:16,top=4")) == "dynamic:16,top=4"
    assert str(parse_tree("chain")) == "chain"


def test_a_model_that_cannot_read_trees_is_refused_by_name(
    pairs: Callable[[str], Pair],
) -> None:
    """GPT-Neo's local layers place their window by the cache's length."""
    with pytest.raises(InputError, match=r"target .*cannot read a tree of tokens"):
        pairs("gpt_neo").generate([1, 2, 3], tree="dynamic:8")


def test_a_long_prompt_before_a_tree_is_read_without_a_mask_over_all_of_it(
    llama: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, real = [], TreeVisibility.of

    def spy(forward: Forward, longest: int | None) -> TreeVisibility:
        read.append(forward.length)
        return real(forward, longest)

    monkeypatch.setattr(TreeVisibility, "of", spy)
    monkeypatch.setattr("lenience.models.session.LARGEST_BEFORE_TREES", 100 * 100)
    prompts = [[1 + (7 * i) % 40 for i in range(150)], [5, 6, 7], list(range(1, 30))]
    for size in (1, 3):
        outs = llama.generate_batch(
            prompts, tree="dynamic:8", batch_size=size, max_new_tokens=20
        )
        for prompt, out in zip(prompts, outs):
            alone = llama.generate(prompt, rule="target", max_new_tokens=20)
            assert out.tokens == alone.tokens
            # each token of the prompt is read once; together rows are read as wide as the widest
            if size == 1:
                assert (
                    out.target_tokens <= len(prompt) + out.drafted + out.target_passes
                )
    assert read and max(read) <= 1 + 29 + 8


def test_trees_too_large_for_memory_are_refused(
    llama: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(
        InputError, match="a tree of up to 1200 tokens, and at most 1024"
    ):
        llama.generate([1, 2, 3], drafter="suffix|model", tree="dynamic:600")
    monkeypatch.setattr("lenience.models.memory.free_bytes", lambda device: 1 << 20)
    assert llama.generate([1, 2, 3], tree="dynamic:8", max_new_tokens=8).tokens
    with pytest.raises(
        InputError,
        match=r"of KV cache and masks of trees .*, the tree.s size or the window",
    ):
        llama.generate([1, 2, 3], tree="dynamic:1000", max_new_tokens=200)


ALIBI = {
    "bloom": BloomConfig(**COMMON, hidden_size=32, n_layer=2, n_head=4),
    "falcon": FalconConfig(
        **COMMON, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, alibi=True
    ),
    "mpt": MptConfig(**COMMON, d_model=32, n_layers=2, n_heads=4, max_seq_len=256),
}


@pytest.mark.parametrize("name", ALIBI)
def test_positions_from_the_cache_are_refused_by_name(
    name: str, tmp_path: Path
) -> None:
    """ALiBi's are counted along the cache, so that a tree's tokens would stand too far behind."""
    models = [
        str(save_model(tmp_path / role, ALIBI[name], 1)) for role in ("target", "draft")
    ]
    pair = load_pair(*models, dtype="float32", compile=False)
    with pytest.raises(InputError, match=r"target .*cannot read a tree") as told:
        pair.generate([1, 2, 3], tree="dynamic:8")
    eager = pair.target.model.config._attn_implementation == "eager"
    assert ("attn_implementation eager" in str(told.value)) is not eager, (
        "that is no fix then"
    )


def test_attentions_without_masks_are_refused_by_name(
    checkpoints: Callable[[str], tuple[str, str]],
) -> None:
    pair = load_pair(*checkpoints("llama"), dtype="float32", compile=False)
    pair.target.model.config._attn_implementation_internal = "flash_attention_2"
    with pytest.raises(InputError, match=r"its attention \(flash_attention_2\)"):
        pair.generate([1, 2, 3], tree="dynamic:8")


def test_a_tree_of_the_same_tokens_and_other_parents_is_read_anew(llama: Pair) -> None:
    prefix, tokens = [5, 6, 7], [1, 2, 3, 4]
    session = Session(llama.target)
    session.read([prefix + tokens], 5, parents=[[-1, 0, 1, 2]])
    again = session.read([prefix + tokens], 2, parents=[[-1, -1, 1, 2]]).hidden
    fresh = (
        Session(llama.target)
        .read([prefix + tokens], 2, parents=[[-1, -1, 1, 2]])
        .hidden
    )
    torch.testing.assert_close(again, fresh)


@pytest.mark.usefixtures("graphs")
def test_a_tree_that_is_read_in_parts_is_read_rightly(
    checkpoints: Callable[[str], tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where attention scores would take too much memory at once."""
    # the graphs of test_trees_through_exported_and_recorded_passes
    pair = load_pair(*checkpoints("mistral"), dtype="float32", compile=False)
    assert pair.compile()
    prompts = [[5, 6, 7], list(range(1, 20))]
    alone = pair.generate_batch(prompts, rule="target", max_new_tokens=40)
    monkeypatch.setattr(onnx_graph, "LARGEST_SCORES", 4 * 2 * 5 * 160)
    outs = pair.generate_batch(
        prompts, tree="dynamic:16", batch_size=2, max_new_tokens=40
    )
    assert [out.tokens for out in outs] == [out.tokens for out in alone]


@pytest.mark.usefixtures("graphs")
@pytest.mark.parametrize("drafter", ["model", "suffix|model"])
def test_rows_at_the_end_of_a_context_and_others_share_trees(
    drafter: str, checkpoints: Callable[[str], tuple[str, str]]
) -> None:
    pair = load_pair(*checkpoints("gpt2"), dtype="float32", compile=False)
    prompts = [
        [1 + i % 40 for i in range(240)],
        [5, 6, 7],
        [1 + i % 7 for i in range(250)],
    ]
    options = {"max_new_tokens": 60, "batch_size": 3}
    alone = pair.generate_batch(prompts, rule="target", **options)
    for compiled in (False, True):
        if compiled:
            assert pair.compile()
        outs = pair.generate_batch(
            prompts, drafter=drafter, tree="dynamic:12", **options
        )
        assert [out.tokens for out in outs] == [out.tokens for out in alone]
    pair.generate(
        prompts[2], drafter=drafter, tree="dynamic:12", window="auto", max_new_tokens=4
    )


def test_trees_of_a_model_with_processors(
    checkpoints: Callable[[str], tuple[str, str]],
) -> None:
    """A repetition penalty sees each token's own path; an EOS ends some rows' trees before
    others."""
    pair = load_pair(*checkpoints("llama"), dtype="float32", compile=False)
    for lm in pair.models.values():
        lm.model.generation_config.repetition_penalty = 1.3
    prompts = [[5, 6, 7], [9, 1], [3, 3, 3, 3, 8, 8], [11]]
    alone = pair.generate_batch(prompts, rule="target", max_new_tokens=40)
    for tree in ("dynamic:8,top=1", "dynamic:9", "cartesian:2,2,2"):
        outs = pair.generate_batch(prompts, tree=tree, batch_size=4, max_new_tokens=40)
        assert [out.tokens for out in outs] == [out.tokens for out in alone]


def test_the_fastest_shape_is_picked_and_answers_stay_the_targets(llama: Pair) -> None:
    prompt, options = [5, 6, 7, 8], {"max_new_tokens": 40}
    plain = llama.generate(prompt, rule="target", **options)
    out = llama.generate(prompt, tree="auto", window="auto", **options)
    assert out.tokens == plain.tokens
    choices = [str(tree) for tree in parse_tree("auto").choices()]
    assert choices == ["chain", *(f"dynamic:{n}" for n in (4, 8, 16, 32, 64))]
    assert out.tree in choices
    settled = llama.settle([prompt], tree="auto", window="auto")
    assert (str(settled.tree), settled.window) == (out.tree, out.window)
    planned = parse_tree(f"auto:path={BUILT_IN_TREE}").choices()
    assert [tree.size for tree in planned[1:]] == [4, 8, 16, 32, 64]
    with pytest.raises(InputError, match="window auto"):
        llama.generate(prompt, tree="auto", window=8)
    with pytest.raises(
        InputError,
        match="needs trees, and drafter ngram has none; take another drafter or",
    ):
        llama.generate(prompt, tree="auto", window="auto", drafter="ngram")


def test_what_is_picked_is_what_is_estimated_to_be_fastest(
    llama: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With cycles whose times are said, and what is kept by counting."""
    monkeypatch.setattr(llama, "_picked", {})
    seconds = {"chain": 1.0, "dynamic:4": 1.1, "dynamic:8": 0.1}
    monkeypatch.setattr(
        Chooser,
        "_cycle_seconds",
        lambda self, ids, size, setup: {8: seconds.get(str(setup.tree), 2.0)},
    )
    assert llama.settle(
        [[3, 4, 5]], tree="auto", window="auto", seed=9
    ).tree == parse_tree("dynamic:8")
