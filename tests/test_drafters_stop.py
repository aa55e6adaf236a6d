"""Stop conditions on drafters other than the draft model, and on trees, against their definition in
numpy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

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
    paths = {kind: f"{kind}:{folder / kind}" for kind in ("medusa", "blockwise", "eagle")}
    return {"model": "model", "exit": "exit:1", "skip": "skip:1", **paths}


@pytest.fixture(scope="module")
def stop_folder(tmp_path_factory: pytest.TempPathFactory, llama: Pair) -> Path:
    folder = tmp_path_factory.mktemp("stop")
    weight, inputs = torch.ones(llama.draft.hidden_size), Inputs(("draft",), ("previous",))
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

    def observe(self, ctx: Context, reading: Reading, verdicts: Sequence[Verdict]) -> None:
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
    options = {"drafter": drafters[name], "stop": f"{kind}:{least}", "max_new_tokens": 40}
    setup = llama.setup({**options, "window": WINDOW, "rule": "exact"})
    session, inner = llama.engine(setup, WINDOW, 1, 128)
    drafter = Recorded(inner)
    request = Request(Row(Noise(0, b""), list(prompt)), Response(llama.target, 40, len(prompt), ()))
    waiting, tokens = [request], []
    ctx = llama.context(setup, WINDOW)
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
        asked = [chances(kind, draft.logits[0, i].numpy(), x) for i, x in enumerate(drafted)]
        if kind == "fallback":  # the doubted one is not proposed
            assert all(chance >= least for chance in asked)
            ended += n < most
        else:
            assert all(chance >= least for chance in asked[:-1])
            # it ends there, or is full, or ends the answer
            assert n == most or asked[-1] < least or drafted[-1] == 0
            ended += n < most
    assert ended


@pytest.mark.parametrize("kind", [*LEAST, "heuristic"])
@pytest.mark.parametrize("tree", ["dynamic:9", "cartesian:3,2,1"])
@pytest.mark.parametrize("name", ["model", "medusa"])
@quick(8)
@given(prompts=prompt_lists(3))
def test_a_tree_ends_each_path_where_a_chain_would(
    name: str, tree: str, kind: str, drafters: dict[str, str], llama: Pair,
    prompts: list[list[int]],
) -> None:  # fmt: skip
    """Against the tree that is drafted without a condition."""
    stop = kind if kind == "heuristic" else f"{kind}:{LEAST[kind]}"
    found = []
    for one in ("fixed", stop):
        options = {"drafter": drafters[name], "tree": tree, "stop": one, "rule": "exact"}
        setup = llama.setup({**options, "window": WINDOW})
        _, drafter = llama.engine(setup, WINDOW, len(prompts), 64)
        generator = torch.Generator().manual_seed(3)
        rows = [Row(Noise(0, b""), list(prompt)) for prompt in prompts]
        for row in rows:  # heads go on from the target's last state
            row.state = torch.randn(llama.target.hidden_size, generator=generator)
        ctx = replace(llama.context(setup, WINDOW), rows=rows)
        with torch.inference_mode():
            found.append(drafter.propose(ctx, [50] * len(rows)))
    whole, cut = found
    for b in range(len(prompts)):
        n = int(whole.lengths[b])
        kept: dict[int, int] = {-1: -1}
        depth = {-1: 0}
        wanted, ends = [], {-1: False}
        for i in range(n):
            token, parent = int(whole.tokens[b, i]), whole.parents[b][i]
            doubted = False
            if kind != "heuristic":
                doubted = chances(kind, whole.logits[b, i].numpy(), token) < LEAST[kind]
            depth[i], ends[i] = depth[parent] + 1, doubted
            reached = (
                parent in kept
                and not ends[parent]
                and depth[i] <= (5 if kind == "heuristic" else WINDOW)
            )
            if reached and not (doubted and kind == "fallback"):
                kept[i] = len(wanted)
                wanted.append((token, kept[parent]))
        m = int(cut.lengths[b])
        assert [*zip(cut.tokens[b, :m].tolist(), (cut.parents or [])[b][:m])] == wanted


@pytest.mark.parametrize("stop", ["confidence:0.3", "entropy:0.4,rate=0.8", "heuristic"])
@pytest.mark.parametrize("tree", ["chain", "dynamic:7"])
@quick(4)
@given(prompts=prompt_lists(4))
def test_no_condition_changes_a_strict_answer(
    tree: str, stop: str, drafters: dict[str, str], llama: Pair, prompts: list[list[int]]
) -> None:
    wanted = [llama.generate(prompt, rule="target", max_new_tokens=24).tokens for prompt in prompts]
    for drafter in drafters.values():
        outs = llama.generate_batch(
            prompts, batch_size=3, drafter=drafter, tree=tree, stop=stop, max_new_tokens=24
        )
        assert [out.tokens for out in outs] == wanted


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"drafter": "exit:1", "stop": "{stop}"}, "reads the draft model's states, and drafter ex"),
        ({"drafter": "model", "stop": "{stop}", "tree": "dynamic:4"}, "reads the draft's states"),
        ({"drafter": "ngram", "stop": "confidence:0.4"}, "reads what tokens are drawn from"),
    ],
)
def test_what_a_drafter_cannot_tell_is_refused(
    options: dict[str, str], says: str, llama: Pair, stop_folder: Path
) -> None:
    named = {name: value.format(stop=f"head:{stop_folder}") for name, value in options.items()}
    with pytest.raises(InputError, match=says):
        llama.generate("w1 w2", **named)


@pytest.mark.parametrize("name", ["ngram", "suffix", "medusa", "blockwise", "exit", "eagle"])
def test_a_profile_tells_what_drafting_takes(
    name: str, drafters: dict[str, str], llama: Pair
) -> None:
    profile, prompt = Profile(), [5, 6, 7, 5, 6, 7, 5]
    drafter = drafters.get(name, name)
    out = llama.generate(prompt, drafter=drafter, profile=profile, max_new_tokens=30)
    assert out.drafted and profile.seconds["draft"] > 0
    assert 0.5 * out.seconds < sum(profile.seconds.values()) < out.seconds
