"""Stop conditions on drafters other than the draft model, and on trees, against their definition in
numpy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from time import perf_counter

import numpy as np
import pytest
import torch
from conftest import prompt_lists, quick
from hypothesis import given
from test_drafters import random_heads
from test_eagle import write
from test_stops import softmax

from lenience import InputError
from lenience.core.context import Context, Row
from lenience.core.noise import Noise
from lenience.core.profile import Profile
from lenience.core.protocols import Drafter
from lenience.core.types import Draft, Reading, Verdict
from lenience.decoding.loop import Request, decode
from lenience.decoding.pair import Pair
from lenience.decoding.response import Response
from lenience.heads.head import Head, Inputs

WINDOW = 6
LEAST = {"confidence": 0.3, "fallback": 0.3, "entropy": 0.45}


@pytest.fixture(scope="module")
def drafters(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Drafters that tell what their tokens are picked from, by name."""
    folder = tmp_path_factory.mktemp("drafters")
    for kind in ("medusa", "blockwise"):
        random_heads(kind, 4).save(folder / kind)
    write(folder / "eagle", 3)
    paths = {
        kind: f"{kind}:{folder / kind}" for kind in ("medusa", "blockwise", "eagle")
    }
    return {"model": "model", "exit": "exit:1", "skip": "skip:1", **paths}


@pytest.fixture(scope="module")
def stop_folder(tmp_path_factory: pytest.TempPathFactory, llama: Pair) -> Path:
    folder = tmp_path_factory.mktemp("stop")
    weight, inputs = (
        torch.ones(llama.draft.hidden_size),
        Inputs(("draft",), ("previous",)),
    )
    Head(weight, 1.0, inputs, 0.5, llama.fingerprints, role="stop").save(folder)
    return folder


class Recorded(Drafter):
    """A drafter that remembers what it proposed, and how much room there was."""

    def __init__(self, drafter: Drafter):
        self.drafter, self.seen = drafter, list[tuple[Draft, int]]()

    def propose(self, ctx: Context, room: Sequence[int]) -> Draft:
        self.seen.append((self.drafter.propose(ctx, room), room[0]))
        return self.seen[-1][0]

    def move(self, source: int, to: int) -> None:
        self.drafter.move(source, to)

    def observe(
        self, ctx: Context, reading: Reading, verdicts: Sequence[Verdict]
    ) -> None:
        self.drafter.observe(ctx, reading, verdicts)


def chances(kind: str, logits: np.ndarray, token: int) -> float:
    """What a stop condition asks of a token that was picked from logits [V], when greedy."""
    p = softmax(logits.astype(np.float64))
    if kind == "entropy":
        return float(1 - np.sqrt(0.2 * -sum(x * np.log(x) for x in p if x > 0)))
    return float(p.max() if kind == "fallback" else p[token])


@pytest.mark.parametrize("kind", LEAST)
@pytest.mark.parametrize("name", ["exit", "skip", "eagle", "medusa", "blockwise"])
def test_a_chain_ends_where_it_should(
    name: str, kind: str, drafters: dict[str, str], llama: Pair
) -> None:
    least, prompt = LEAST[kind], [5, 6, 7, 9]
    options = {
        "drafter": drafters[name],
        "stop": f"{kind}:{least}",
        "max_new_tokens": 40,
    }
    setup = llama.decoder({**options, "window": WINDOW, "rule": "exact"})
    session, inner = llama.engine(setup, 1, 128)
    drafter = Recorded(inner)
    request = Request(
        Row(Noise(0, b""), list(prompt)), Response(llama.target, 40, len(prompt), ())
    )
    waiting, tokens = [request], []
    ctx = llama.context(setup)
    for _, step in decode(
        session, drafter, setup.rule, ctx, lambda _: waiting.pop() if waiting else None
    ):
        tokens += step.tokens
    assert tokens == llama.generate(prompt, rule="target", max_new_tokens=40).tokens
    ended = 0
    for draft, room in drafter.seen[1:]:
        most = min(4 if name in ("medusa", "blockwise") else WINDOW, room - 1)
        n = int(draft.lengths[0])
        assert draft.logits is not None or not n
        drafted = draft.tokens[0, :n].tolist()
        asked = [
            chances(kind, draft.logits[0, i].numpy(), x) for i, x in enumerate(drafted)
        ]
        if kind == "fallback":  # the doubted one is not proposed
            assert all(chance >= least for chance in asked)
            ended += n < most
        else:
            assert all(chance >= least for chance in asked[:-1])
            # it ends there, or is full, or ends the answer
            assert n == most or asked[-1] < least or drafted[-1] == 0
            ended += n < most
    assert ended


Tokens = tuple[int, ...]


def proposed(
    pair: Pair, prompts: list[list[int]], room: list[int], window: int, **options: str
) -> list[dict[Tokens, np.ndarray]]:
    """For each prompt the proposed tokens, each by its path, with the logits [V] that it was picked
    from."""
    setup = pair.decoder({**options, "window": window, "rule": "exact"})
    _, drafter = pair.engine(setup, len(prompts), 64)
    rows = [Row(Noise(0, b""), list(prompt)) for prompt in prompts]
    for row in rows:  # heads go on from the target's last state
        generator = torch.Generator().manual_seed(sum(row.prefix))
        row.memory[drafter] = torch.randn(pair.target.hidden_size, generator=generator)
    with torch.inference_mode():
        draft = drafter.propose(replace(pair.context(setup), rows=rows), room)
    found = []
    for b, n in enumerate(draft.lengths.tolist()):
        paths: dict[int, Tokens] = {-1: ()}
        for i in range(n):
            parent = draft.parents[b][i] if draft.parents else i - 1
            paths[i] = (*paths[parent], int(draft.tokens[b, i]))
        found.append({paths[i]: draft.logits[b, i].numpy() for i in range(n)})
    return found


def reached(paths: dict[Tokens, np.ndarray], kind: str) -> set[Tokens]:
    """Those that a condition leaves of all paths, the longer ones after the shorter."""
    kept, open_ = set(), {()}
    for path in sorted(paths, key=len):
        doubted = chances(kind, paths[path], path[-1]) < LEAST[kind]
        if path[:-1] in open_ and not (doubted and kind == "fallback"):
            kept.add(path)
            open_ |= set() if doubted else {path}
    return kept


@pytest.mark.parametrize("kind", LEAST)
@pytest.mark.parametrize("tree", ["dynamic:9,top=48", "cartesian:3,2,1"])
@pytest.mark.parametrize("name", ["model", "medusa"])
@quick(6)
@given(prompts=prompt_lists(3))
def test_a_tree_ends_each_path_where_a_chain_would(
    name: str, tree: str, kind: str, drafters: dict[str, str], llama: Pair,
    prompts: list[list[int]],
) -> None:  # fmt: skip
    """Against the tree that is drafted without a condition; a dynamic one, against nearly all paths
    of two tokens, has the likeliest of those that are left."""
    dynamic, room = tree.startswith("dynamic"), [50] * len(prompts)
    window, options = 2 if dynamic else WINDOW, {"drafter": drafters[name]}
    whole = "dynamic:1024,top=48" if dynamic else tree
    all_ = proposed(llama, prompts, room, window, tree=whole, **options)
    stop = f"{kind}:{LEAST[kind]}"
    for paths, found in zip(
        all_, proposed(llama, prompts, room, window, tree=tree, stop=stop, **options)
    ):
        wanted = reached(paths, kind)
        if dynamic:
            score = {
                path: sum(
                    np.log(softmax(paths[path[:n]])[path[n - 1]])
                    for n in range(1, 1 + len(path))
                )
                for path in wanted
            }
            wanted = set(sorted(wanted, key=lambda path: -score[path])[:9])
        assert set(found) == wanted


@pytest.mark.parametrize("tree", ["dynamic:9", "cartesian:3,2,1", "cartesian:2,2,1,1"])
@pytest.mark.parametrize("name", ["model", "medusa", "exit"])
@quick(6)
@given(prompts=prompt_lists(3))
def test_what_is_drafted_does_not_depend_on_other_rows(
    name: str,
    tree: str,
    drafters: dict[str, str],
    llama: Pair,
    prompts: list[list[int]],
) -> None:
    """Also where these may be longer: a schedule has each row at a length of its own."""
    options = {"drafter": drafters[name], "tree": tree, "stop": "confidence:0.2"}
    rooms = [2 + 3 * i for i in range(len(prompts))]
    together = proposed(llama, prompts, rooms, WINDOW, **options)
    for prompt, room, found in zip(prompts, rooms, together):
        (alone,) = proposed(llama, [prompt], [room], WINDOW, **options)
        assert set(found) == set(alone)
        assert all(len(path) < room for path in found)


@pytest.mark.parametrize("name", ["model", "medusa"])
def test_a_schedule_says_how_deep_a_tree_may_be(
    name: str, drafters: dict[str, str], llama: Pair
) -> None:
    """It begins with five tokens."""
    options = {"drafter": drafters[name], "tree": "dynamic:30,top=2"}
    (found,) = proposed(llama, [[5, 6, 7]], [50], 9, stop="heuristic", **options)
    (fixed,) = proposed(llama, [[5, 6, 7]], [50], 5, **options)
    assert set(found) == set(fixed)
    assert max(map(len, found)) == (5 if name == "model" else 4)


@pytest.mark.parametrize("tree", ["dynamic:12", "cartesian:3,2,1,1,1,1"])
def test_paths_that_end_save_passes_of_the_draft(tree: str, llama: Pair) -> None:
    options = {"tree": tree, "window": WINDOW, "max_new_tokens": 40}
    plain = llama.generate([5, 6, 7, 9], **options)
    out = llama.generate([5, 6, 7, 9], stop="fallback:0.9", **options)
    assert out.tokens == plain.tokens
    assert (
        out.draft_passes / out.target_passes
        < 0.6 * plain.draft_passes / plain.target_passes
    )


@pytest.mark.parametrize("stop", ["confidence:0.3", "fallback:0.3", "heuristic"])
@pytest.mark.parametrize("tree", ["chain", "dynamic:7"])
@quick(4)
@given(prompts=prompt_lists(4))
def test_no_condition_changes_a_strict_answer(
    tree: str,
    stop: str,
    drafters: dict[str, str],
    llama: Pair,
    prompts: list[list[int]],
) -> None:
    wanted = [
        llama.generate(prompt, rule="target", max_new_tokens=24).tokens
        for prompt in prompts
    ]
    for drafter in drafters.values():
        outs = llama.generate_batch(
            prompts,
            batch_size=3,
            drafter=drafter,
            tree=tree,
            stop=stop,
            max_new_tokens=24,
        )
        assert [out.tokens for out in outs] == wanted


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (
            {"drafter": "exit:1", "stop": "{stop}"},
            "needs the draft model's states, and drafter ex",
        ),
        (
            {"drafter": "model", "stop": "{stop}", "tree": "dynamic:4"},
            "model's states, and a tree",
        ),
        (
            {"drafter": "ngram", "stop": "confidence:0.4"},
            "needs the chance of each token",
        ),
        (
            {"drafter": "ngram|model", "stop": "heuristic"},
            "a stop condition can end",
        ),
        (
            {"drafter": "model", "stop": "entropy:0.4,rate=0.8", "tree": "dynamic:4"},
            "needs windows that can be kept whole, and a tree has none",
        ),
    ],
)
def test_what_a_drafter_cannot_tell_is_refused(
    options: dict[str, str], says: str, llama: Pair, stop_folder: Path
) -> None:
    named = {
        name: value.format(stop=f"head:{stop_folder}")
        for name, value in options.items()
    }
    with pytest.raises(InputError, match=says):
        llama.generate("w1 w2", **named)


@pytest.mark.parametrize(
    "name", ["ngram", "suffix", "medusa", "blockwise", "exit", "eagle"]
)
def test_a_profile_tells_what_drafting_takes(
    name: str, drafters: dict[str, str], llama: Pair
) -> None:
    drafter = drafters.get(name, name)
    prompt = [5, 6, 7, 5, 6, 7, 5]
    begun = perf_counter()
    profile = Profile()
    out = llama.generate(prompt, drafter=drafter, profile=profile, max_new_tokens=30)
    passed = perf_counter() - begun
    assert out.drafted and profile.seconds["draft"] > 0
    # an answer's own time begins a moment later than its profile
    assert 0.5 * out.seconds < sum(profile.seconds.values()) < passed


@pytest.mark.parametrize(
    "stop", ["fallback:0.6", "fallback:0.3", "confidence:0.4", "entropy:0.3"]
)
@pytest.mark.parametrize("tree", ["dynamic:8", "dynamic:20,top=2"])
def test_a_row_of_a_dynamic_tree_drafts_alone_as_among_others(
    llama: Pair, tree: str, stop: str
) -> None:
    """Also one that proposes nothing at its first position, while others go deeper."""
    prompts = [[1 + (7 * i + j * j) % 40 for j in range(2 + i % 5)] for i in range(8)]
    options = {
        "rule": "topk:3",
        "tree": tree,
        "stop": stop,
        "window": 4,
        "max_new_tokens": 16,
    }
    together = llama.generate_batch(prompts, batch_size=8, **options)
    for prompt, out in zip(prompts, together):
        alone = llama.generate(prompt, **options)
        assert (out.tokens, out.drafted) == (alone.tokens, alone.drafted)
