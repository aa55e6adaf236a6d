"""Drafters that need no draft model: what they propose, and that it changes no strict answer."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import VOCABULARY, prompt_lists, quick
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from lenience.certification.certify import certify
from lenience.certification.question import CertifyConfig
from lenience.certification.tune import (
    GRID,
    TuneConfig,
    fitted_drafters,
    group_of,
    read_drafters,
)
from lenience.core.context import Context, Row
from lenience.core.errors import InputError
from lenience.core.noise import Noise
from lenience.core.profile import Profile
from lenience.decoding.decoder import Decoder
from lenience.decoding.loading import load_pair
from lenience.decoding.pair import Pair
from lenience.drafting.base import DrafterSetup
from lenience.drafting.heads import DraftHeads, load_heads
from lenience.drafting.parsing import parse_drafter, parse_tree
from lenience.drafting.stops import Fixed
from lenience.drafting.suffixes import END, Suffixes
from lenience.heads.head import Head, Inputs
from lenience.mining.search import MineConfig, mine
from lenience.tasks import Sample, Task
from lenience.training.fit_drafter import DrafterPlan, fit_drafter, fit_to_answers

SIZE = 32
"""The hidden size of the tests' models."""


def proposed(
    spec: str, pair: Pair, prefix: list[int], window: int, tree: str = "chain"
) -> list:
    """What a drafter proposes after a text: its tokens, and of a tree also their parents."""
    setup = DrafterSetup(
        pair.target,
        pair.draft,
        1,
        256,
        Fixed(),
        parse_tree(tree),
        keep_states=False,
        profile=Profile(),
    )
    ctx = Context([Row(Noise(0, b""), list(prefix))], window=window)
    draft = parse_drafter(spec).build(setup).propose(ctx, [1000])
    n = int(draft.lengths[0])
    tokens = draft.tokens[0, :n].tolist()
    return tokens if draft.parents is None else [tokens, list(draft.parents[0][:n])]


def by_lookup(text: list[int], most: int, window: int, oldest: bool) -> list[int]:
    """Prompt lookup in a few lines: the longest match, the most recent or the oldest."""
    for n in range(min(most, len(text)), 0, -1):
        ends = [e for e in range(n, len(text)) if text[e - n : e] == text[-n:]]
        if ends:
            found = text[ends[0 if oldest else -1] :][:window]
            return found[: found.index(0) + 1] if 0 in found else found
    return []


@given(
    st.lists(st.integers(0, 4), min_size=1, max_size=40),
    st.integers(1, 4),
    st.integers(1, 6),
    st.booleans(),
)
def test_ngrams_are_those_of_a_scan(
    llama: Pair, text: list[int], most: int, window: int, oldest: bool
) -> None:
    spec = f"ngram:max={most},oldest={str(oldest).lower()}"
    assert proposed(spec, llama, text, window) == by_lookup(text, most, window, oldest)


@given(st.lists(st.integers(1, 3), max_size=30))
def test_the_index_of_suffixes_counts_as_a_scan_does(text: list[int]) -> None:
    index = Suffixes()
    for token in text:
        index.add(token)
    ends = [text[-n:] for n in range(1, len(text) + 1)]
    lengths = {length: state for state, length in index.matches()}

    def followers(part: list[int]) -> Counter[int]:
        n = len(part)
        return Counter(
            text[i + n] for i in range(len(text) - n) if text[i : i + n] == part
        )

    before = [end for end in ends if followers(end)]
    assert max(lengths, default=0) == max(map(len, before), default=0)
    for length, state in lengths.items():
        part = text[-length:]
        counts = followers(part)
        shares = {token: share for token, share, _ in index.followers(state)}
        assert shares.keys() == counts.keys()
        # of what followed, weighed by how often that text stands there, the end's own included
        whole = {t: sum(text[i : i + length + 1] == [*part, t] for i in range(len(text)))
                 for t in counts}  # fmt: skip
        assert shares == pytest.approx(
            {t: n / sum(whole.values()) for t, n in whole.items()}
        )
    # every match that has other followers than a longer one is a state
    for end in before:
        longer = [n for n in lengths if n >= len(end)]
        assert longer and followers(text[-min(longer) :]) == followers(end)


@given(
    st.lists(
        st.lists(st.integers(1, 3), min_size=1, max_size=12), min_size=1, max_size=4
    ),
    st.lists(st.integers(1, 3), min_size=1, max_size=8),
)
def test_other_tokens_are_matched_as_a_scan_does(
    texts: list[list[int]], tail: list[int]
) -> None:
    index = Suffixes()
    for text in texts:
        for token in (*text, END):
            index.add(token)
    found = {length: state for state, length in index.matches_of(tail)}
    ends = [tail[-n:] for n in range(1, len(tail) + 1)]

    def stands(part: list[int]) -> list[int | None]:
        """What follows a part wherever it stands in a text."""
        n = len(part)
        return [
            text[i + n] if i + n < len(text) else None
            for text in texts
            for i in range(len(text) - n + 1)
            if text[i : i + n] == part
        ]

    assert max(found, default=0) == max(
        (len(end) for end in ends if stands(end)), default=0
    )
    for length, state in found.items():
        counts = Counter(token for token in stands(tail[-length:]) if token is not None)
        shares = {token: share for token, share, _ in index.followers(state)}
        assert shares == pytest.approx(
            {t: n / counts.total() for t, n in counts.items()}
        )


def test_finished_answers_are_proposed_again(checkpoints) -> None:
    pair = load_pair(checkpoints("llama")[0], dtype="float32", compile=False)
    prompts = [[3, 4, 5], [6, 7], [8, 9, 10], [11]]
    options = {"drafter": "suffix:finished=true", "window": 8, "max_new_tokens": 30}
    plain = [
        pair.generate(prompt, rule="target", max_new_tokens=30).tokens
        for prompt in prompts
    ]
    first = list(pair.generate_batch(prompts, batch_size=2, **options))
    again = list(pair.generate_batch(prompts, batch_size=3, **options))
    for outs in (first, again):
        assert [out.tokens for out in outs] == plain
    for before, after in zip(first, again):
        # what was answered is proposed, but for the first token, before which nothing is sure
        assert after.target_passes <= before.target_passes
        assert after.target_passes <= 2 + len(after.tokens) / 3
    drawn = {"temperature": 0.9, "seed": 3}
    one = pair.generate([3, 4, 5], rule="target", **drawn, max_new_tokens=30)
    assert pair.generate([3, 4, 5], **options, **drawn).tokens == one.tokens
    for wrong in ({"rule": "topk:2"}, {"rule": "speculative", **drawn}):
        with pytest.raises(InputError, match="proposes tokens from earlier answers"):
            pair.generate([3], **{**options, **wrong})
    with pytest.raises(InputError, match="proposes tokens from earlier answers"):
        pair.generate([3], rule="topk:2", drafter="ngram|suffix:finished=true")


def test_suffixes_propose_what_mostly_followed(llama: Pair) -> None:
    text = [1, 2, 3, 4, 9, 1, 2, 3, 4, 8, 1, 2, 3, 5, 7, 1, 2, 3]
    # after 1 2 3 stood 4 twice and 5 once; the match is of 3 tokens, so 3 are proposed at most
    assert proposed("suffix:least=0.0", llama, text, 8) == [4, 9, 1]
    assert proposed("suffix:least=0.5", llama, text, 8) == [4]
    assert proposed("suffix:least=0.0,factor=2.0", llama, text, 4) == [4, 9, 1, 2]
    assert proposed("suffix:least=0.0,depth=1", llama, text, 8) == [4]
    tokens, parents = proposed("suffix:least=0.3", llama, text, 8, tree="dynamic:4")
    # 4 (2/3); then 5 (1/3), 7 after it (1/3), and 9 or 8 after 4 (1/3 each)
    assert tokens[0] == 4 and parents[0] == -1
    before = [tokens[parent] if parent >= 0 else None for parent in parents]
    known = {(4, None), (5, None), (7, 5), (9, 4), (8, 4), (1, 9), (1, 7), (1, 8)}
    assert set(zip(tokens, before)) <= known
    assert len(tokens) == 4
    assert proposed("suffix", llama, [1, 2, 3], 8) == []


SPECS = (
    ("ngram", "chain"), ("ngram:max=1", "chain"), ("suffix", "chain"),
    ("suffix:least=0.0,factor=3.0", "dynamic:10"), ("suffix", "dynamic:4,depth=2"),
)  # fmt: skip


@pytest.mark.parametrize(("drafter", "tree"), SPECS)
@quick(6)
@given(prompts=prompt_lists(4), temperature=st.sampled_from([0.0, 0.7]))
def test_lookups_change_no_strict_answer(
    llama: Pair, drafter: str, tree: str, prompts: list[list[int]], temperature: float
) -> None:
    options = {"max_new_tokens": 40, "temperature": temperature, "seed": 2}
    alone = llama.generate_batch(prompts, rule="target", **options)
    outs = llama.generate_batch(
        prompts, drafter=drafter, tree=tree, batch_size=3, **options
    )
    assert [out.tokens for out in outs] == [out.tokens for out in alone]


@quick(8)
@given(prompts=prompt_lists(3), size=st.integers(1, 3))
def test_merged_drafters_propose_what_each_does_and_change_no_strict_answer(
    llama: Pair, prompts: list[list[int]], size: int
) -> None:
    options = {"max_new_tokens": 30, "batch_size": size}
    alone = llama.generate_batch(prompts, rule="target", **options)
    for drafter, tree in (("ngram|model", "chain"), ("suffix|model", "dynamic:8")):
        outs = llama.generate_batch(prompts, drafter=drafter, tree=tree, **options)
        assert [out.tokens for out in outs] == [out.tokens for out in alone]
    for text in prompts:
        for parts, tree in (
            (("ngram", "suffix"), "chain"),
            (("ngram", "model"), "chain"),
            (("suffix", "model"), "dynamic:6"),
        ):
            each = [paths_of(spec, llama, text * 2, tree) for spec in parts]
            joined = paths_of("|".join(parts), llama, text * 2, tree)
            assert len(set(joined)) == len(joined)
            assert set(joined) == {path for paths in each for path in paths}


def paths_of(
    spec: str, pair: Pair, text: list[int], tree: str
) -> list[tuple[int, ...]]:
    """Each proposed token with those before it on its path."""
    found = proposed(spec, pair, text, 5, tree)
    tokens, parents = (
        found if "|" in spec or tree != "chain" else (found, range(-1, len(found)))
    )
    paths = {-1: ()}
    for i, (token, parent) in enumerate(zip(tokens, parents)):
        paths[i] = (*paths[parent], token)
    del paths[-1]
    return [*paths.values()]


def test_what_cannot_be_joined_is_refused(llama: Pair) -> None:
    with pytest.raises(
        InputError, match=r"drafter 'ngram\|ngram': ngram is named twice"
    ):
        llama.generate("w1", drafter="ngram|ngram")
    with pytest.raises(InputError, match=r"there is no drafter 'x'"):
        llama.generate("w1", drafter="ngram|x")
    with pytest.raises(InputError, match=r"block: needs drawn tokens.*drafter alone"):
        llama.generate("w1", drafter="ngram|model", rule="block", temperature=0.5)


def test_a_target_alone_drafts_by_lookup(
    checkpoints: Callable[[str], tuple[str, str]],
) -> None:
    pair = load_pair(checkpoints("llama")[0], dtype="float32", compile=False)
    prompt = [5, 6, 7, 5, 6, 7, 5]
    out = pair.generate(prompt, drafter="ngram", max_new_tokens=30)
    assert out.tokens == pair.generate(prompt, rule="target", max_new_tokens=30).tokens
    assert out.drafted > 0 and out.draft_passes == 0


def random_heads(kind: str, n: int, own: bool = True) -> DraftHeads:
    generator = torch.Generator().manual_seed(n)

    def of(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * 0.3

    blocks = [
        [{"weight": of(SIZE, SIZE), "bias": of(SIZE)} for _ in range(2)]
        for _ in range(n)
    ]
    if kind == "blockwise":
        names = {
            "into": (16, SIZE),
            "into_bias": (16,),
            "out": (SIZE, 16),
            "out_bias": (SIZE,),
        }
        blocks = [
            [{name: of(*shape) for name, shape in names.items()}] for _ in range(n)
        ]
        own = False
    matrices = [of(VOCABULARY, SIZE) for _ in range(n)] if own else None
    return DraftHeads(kind, blocks, matrices, {}, {})


@pytest.mark.parametrize("tree", ["chain", "dynamic:7", "cartesian:2,2,1"])
@pytest.mark.parametrize("kind", ["medusa", "blockwise"])
def test_heads_change_no_strict_answer(
    kind: str, tree: str, llama: Pair, tmp_path: Path
) -> None:
    random_heads(kind, 3).save(tmp_path)
    prompts = [[5, 6, 7], list(range(1, 20)), [9], [4, 4]]
    for temperature in (0.0, 0.8):
        options = {"max_new_tokens": 30, "temperature": temperature, "seed": 1}
        alone = llama.generate_batch(prompts, rule="target", **options)
        options |= {"drafter": f"{kind}:{tmp_path}", "tree": tree}
        for size in (1, 3):
            outs = llama.generate_batch(
                prompts, batch_size=size, rule="exact", **options
            )
            assert [out.tokens for out in outs] == [out.tokens for out in alone]
            assert all(out.drafted for out in outs)


def published(folder: Path, heads: DraftHeads) -> None:
    """Medusa-1's own file and names; its configuration says another number of heads."""
    assert heads.matrices is not None
    saved = {}
    for i, (blocks, matrix) in enumerate(zip(heads.blocks, heads.matrices)):
        for j, block in enumerate(blocks):
            saved |= {
                f"{i}.{j}.linear.{name}": tensor for name, tensor in block.items()
            }
        saved[f"{i}.{len(blocks)}.weight"] = matrix
    folder.mkdir(exist_ok=True)
    torch.save(saved, folder / "medusa_lm_head.pt")
    (folder / "config.json").write_text(json.dumps({"medusa_num_heads": 2}))


def test_published_heads_predict_as_their_formula_says(
    llama: Pair, tmp_path: Path
) -> None:
    heads = random_heads("medusa", 5)
    published(tmp_path / "hub", heads)
    loaded = load_heads(tmp_path / "hub", "medusa")
    x = torch.randn(4, SIZE, generator=torch.Generator().manual_seed(3))
    found = loaded.logits(x, llama.target.output_matrix)
    assert heads.matrices is not None and found.shape == (4, 5, VOCABULARY)
    for i, (blocks, matrix) in enumerate(zip(heads.blocks, heads.matrices)):
        state = x
        for block in blocks:
            state = state + torch.nn.functional.silu(
                state @ block["weight"].T + block["bias"]
            )
        torch.testing.assert_close(found[:, i], state @ matrix.T)


def test_heads_are_asked_with_the_state_that_the_last_token_was_predicted_from(
    llama: Pair, tmp_path: Path
) -> None:
    """Heads that add nothing and have the target's matrix say again what it has just said, so each
    proposed token is the one before it."""
    blocks = [
        [{"weight": torch.zeros(SIZE, SIZE), "bias": torch.zeros(SIZE)}]
        for _ in range(2)
    ]
    matrix = llama.target.output_matrix.detach().clone()
    DraftHeads("medusa", blocks, [matrix, matrix], {}, {}).save(tmp_path)
    drafter = f"medusa:{tmp_path}"
    for rule in ("exact", "topk:48"):  # all that is drafted is kept by the second
        tokens = llama.generate(
            [5, 6, 7], rule=rule, drafter=drafter, max_new_tokens=30
        ).trace
        for entry, before in zip(tokens[1:], tokens):
            if entry.origin.startswith("draft"):
                assert entry.token == before.token
    assert any(entry.origin == "draft-lenient" for entry in tokens)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda heads: replace(heads, blocks=[[]], matrices=[torch.zeros(9, 8)]), "states of 8"),
        (lambda heads: replace(heads, matrices=[torch.zeros(99, SIZE)] * 3), "predicts 99 tokens"),
        (lambda heads: replace(heads, fingerprints={"target": "another"}), "another target"),
    ],
)  # fmt: skip
def test_heads_of_another_target_are_refused_by_name(
    change: Callable[[DraftHeads], DraftHeads], says: str, llama: Pair, tmp_path: Path
) -> None:
    change(random_heads("medusa", 3)).save(tmp_path)
    with pytest.raises(InputError, match=says):
        llama.generate("w1", drafter=f"medusa:{tmp_path}")


def test_missing_and_broken_files_are_told(llama: Pair, tmp_path: Path) -> None:
    with pytest.raises(
        InputError, match=r"no medusa.json in it and no medusa_lm_head.pt; .*fit"
    ):
        llama.generate("w1", drafter=f"medusa:{tmp_path}")
    with pytest.raises(InputError, match=r"blockwise needs path"):
        llama.generate("w1", drafter="blockwise")
    with pytest.raises(InputError, match=r"320 numbers, and the target's have 32"):
        llama.generate("w1", drafter="medusa")
    torch.save({"0.0.linear.weight": Path("/tmp")}, tmp_path / "medusa_lm_head.pt")
    with pytest.raises(InputError, match="holds more than tensors and is not loaded"):
        llama.generate("w1", drafter=f"medusa:{tmp_path}")
    random_heads("blockwise", 2).save(tmp_path)
    (tmp_path / "blockwise.safetensors").write_bytes(b"torn")
    with pytest.raises(InputError, match=r"blockwise .*is broken"):
        llama.generate("w1", drafter=f"blockwise:{tmp_path}")


class Counting(Task):
    """Prompts of a random model's words."""

    name = "counting"
    version = 1
    max_new_tokens = 40

    def samples(self, split: str):
        for i in range(40):
            yield Sample(f"{i}", f"w{1 + i} w{1 + (7 * i) % 40}", "w1")

    def answer(self, text: str, sample: Sample | None = None) -> str | None:
        return text.split()[-1] if text.split() else None


@pytest.mark.parametrize("kind", ["medusa", "blockwise", "eagle"])
def test_what_was_fitted_in_a_run_races_at_the_windows_that_it_can_fill(
    kind: str, llama: Pair, tmp_path: Path
) -> None:
    run, strict = tmp_path / "rate=3, a|b", Decoder.parse("exact")
    mine(llama, Counting(), run, MineConfig(limit=20, answers_only=True))
    fit_drafter(llama, run, DrafterPlan(kind, run / kind, heads=2, epochs=1))
    fitted, refused = fitted_drafters(llama, run, strict)
    assert len(fitted) == 1 and not refused
    config = TuneConfig(CertifyConfig(("topk",)), windows=(1, 3, 4, 8))
    raced = group_of(llama, config, strict, [*read_drafters(GRID), *fitted])
    windows = [1, 3] if kind != "eagle" else [1, 3, 4, 8]
    assert [one.window for one in raced if one.drafter == fitted[0]] == windows
    assert [one.window for one in raced if str(one.drafter) == "model"] == [1, 3, 4, 8]
    assert "medusa" not in {str(one.drafter) for one in raced}, (
        "those are the built-in target's"
    )
    assert fitted_drafters(llama, tmp_path, strict) == ([], [])
    built_in = load_pair(compile=False)
    fitted, (why,) = fitted_drafters(built_in, run, strict)
    assert not fitted and str(run / kind) in why
    assert "medusa" in {
        str(one.drafter)
        for one in group_of(built_in, config, strict, read_drafters(GRID))
    }


@pytest.mark.parametrize("kind", ["medusa", "blockwise"])
def test_heads_learn_from_a_run_go_on_after_a_stop_and_are_bound(
    kind: str, llama: Pair, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    mine(llama, Counting(), run, MineConfig(limit=30, answers_only=True))
    plan = DrafterPlan(kind, run / kind, heads=2, epochs=6)
    heads = fit_drafter(llama, run, plan)
    assert not (run / kind / "training.safetensors").exists()
    before = fit_drafter(llama, run, replace(plan, out=tmp_path / "none", epochs=0))
    assert heads.metrics["tokens_per_pass"] >= before.metrics["tokens_per_pass"]
    assert heads.fingerprints["target"] == llama.target.fingerprint
    # stopped after two epochs and started again
    again, seen = replace(plan, out=tmp_path / "again"), []

    def stopping(what: str, done: float, total: float) -> None:
        seen.append((what, done))
        if what.startswith("training") and done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fit_drafter(llama, run, again, stopping)
    seen.clear()
    resumed = fit_drafter(
        llama, run, again, lambda what, done, total: seen.append((what, done))
    )
    epochs = [done for what, done in seen if what.startswith("training")]
    assert epochs == [2, 3, 4, 5, 6]
    for name, tensor in resumed.tensors().items():
        torch.testing.assert_close(tensor, heads.tensors()[name])
    assert (
        load_file(run / kind / f"{kind}.safetensors").keys() == heads.tensors().keys()
    )
    spec = f"{kind}:{run / kind}"
    decoder = llama.decoder({"drafter": spec})
    assert llama.binding(decoder)["heads"] == [heads.fingerprint]
    assert llama.binding(decoder)["drafter"] == f"{kind}:{kind}"
    # a certificate with these heads is found and decoded with, from another folder too
    config = CertifyConfig(
        rules=("topk:1",),
        options={"drafter": spec, "window": 2},
        max_drop=0.9,
        confidence=0.5,
        split="test",
        loss="disagreement",
    )
    certificate = certify(llama, Counting(), run, config)
    assert certificate.certified
    moved = tmp_path / "moved"
    run.rename(moved)
    out = llama.generate("w1 w2", rule=f"certified:{moved}")
    assert (
        out.drafted and out.tokens == llama.generate("w1 w2", rule="target").tokens[:40]
    )
    random_heads(kind, 2).save(moved / kind)
    with pytest.raises(InputError, match="certified with heads"):
        llama.generate("w1 w2", rule=f"certified:{moved}")


def test_too_few_answers_are_refused(llama: Pair, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="3 answers are too few, 10"):
        fit_to_answers(llama, [([1], [2, 3])] * 3, DrafterPlan("medusa", tmp_path))


@pytest.mark.parametrize("bias", [-30.0, 30.0])
@pytest.mark.parametrize("tree", ["chain", "dynamic:7"])
@pytest.mark.parametrize("kind", ["medusa", "blockwise"])
def test_heads_draft_under_a_judge_of_another_layer(
    kind: str, tree: str, bias: float, llama: Pair, tmp_path: Path
) -> None:
    """One that accepts nothing or everything, whatever it reads, as one of the last states does."""
    random_heads(kind, 3).save(tmp_path)
    outs = {}
    prints = {name: llama.fingerprints[name] for name in ("target", "tokenizer")}
    for layer in (1, None):
        folder = tmp_path / str(layer)
        inputs = Inputs(("target",), ("draft",), (layer,))
        Head(torch.zeros(SIZE), bias, inputs, 0.5, prints).save(folder)
        options = {
            "rule": f"judge:{folder}@0.5",
            "drafter": f"{kind}:{tmp_path}",
            "tree": tree,
        }
        prompts = [[5, 6, 7], list(range(1, 20)), [9], [4, 4]]
        outs[layer] = llama.generate_batch(
            prompts, batch_size=2, max_new_tokens=30, **options
        )
    for one, other in zip(*outs.values()):
        assert one.drafted and (one.tokens, one.drafted) == (
            other.tokens,
            other.drafted,
        )
        assert (one.accepted_lenient > 0) == (bias > 0)
