"""Passes of fixed shapes give what passes of the shapes at hand give. What a GPU records is this code; recording itself needs
one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from conftest import VOCABULARY
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from test_batch import assert_same

from lenience.pair import Pair, load_pair
from lenience.replay import BLOCK, Replay, ReplayCache
from lenience.session import Session, reads_together_as_alone

QUICK = dict(derandomize=True, suppress_health_check=list(HealthCheck), phases=(Phase.explicit, Phase.generate))
prompts = st.lists(st.lists(st.integers(1, VOCABULARY - 1), min_size=1, max_size=30), min_size=1, max_size=5)


@pytest.fixture(scope="module", params=["llama", "gemma2", "gpt2"])
def replayed(request: pytest.FixtureRequest, checkpoints) -> Iterator[tuple[Pair, Pair]]:
    pair, plain = (load_pair(*checkpoints(request.param), dtype="float32", compile=False) for _ in range(2))
    for lm in (pair.target, pair.draft):
        lm.graph = Replay()
    yield pair, plain


@given(
    prompts,
    st.sampled_from([("exact", 0.0), ("topk:3", 0.0), ("speculative", 0.8), ("target", 0.0)]),
    st.sampled_from(["fixed", "confidence:0.03"]),
    st.integers(0, 12),
    st.integers(1, 4),
)
@settings(max_examples=15, deadline=None, **QUICK)
def test_answers_are_those_of_plain_passes(replayed, asked, how, stop, window, size) -> None:
    pair, plain = replayed
    options = dict(zip(("rule", "temperature"), how), window=window, stop=stop, max_new_tokens=30, batch_size=size)
    assert_same(pair.generate_batch(asked, **options), plain.generate_batch(asked, **options))


def test_it_passes_the_check_that_a_gpu_would_ask_for(replayed) -> None:
    for lm in (replayed[0].target, replayed[0].draft):
        cache = Replay().cache(lm, 3, 100)
        assert reads_together_as_alone(lm, cache)
        assert cache.place.capacity == BLOCK and len(cache._recorded) == 2


@pytest.mark.parametrize("n", [9, 64, 200])
def test_long_prompts_and_caches_that_grow(checkpoints, n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lenience.replay.BLOCK", 16)
    lm = load_pair(*checkpoints("llama"), dtype="float32", compile=False).draft
    prompt = [1 + (7 * i) % 40 for i in range(n)]
    cache = ReplayCache(lm, 2, 16)
    session = Session(lm, 2, cache=cache)
    session.read([[5], [6, 7]])
    session.read([[5, 8], [6, 7, 9]])
    got = session.read([prompt, prompt[: n - 3]], on=3)
    both = session.tokens
    again = session.read([[*tokens, 4] for tokens in both], on=2)
    assert cache.place.capacity >= n + 3
    for row, tokens in enumerate(both):
        with torch.inference_mode():
            own = lm.model(torch.tensor([tokens])).logits[0]
        before = [n, n - 3][row]
        torch.testing.assert_close(got.logits[row], own[before - 1 :][: got.logits.shape[1]], atol=2e-4, rtol=1e-3)
        torch.testing.assert_close(again.logits[row], own[-again.logits.shape[1] :], atol=2e-4, rtol=1e-3)


def test_rows_that_take_no_part_keep_their_states(checkpoints) -> None:
    lm = load_pair(*checkpoints("llama"), dtype="float32", compile=False).draft
    session = Session(lm, 3, cache=ReplayCache(lm, 3, BLOCK))
    rows = [[5, 6, 7], [8, 9, 10, 11], [12, 13]]
    session.read(rows)
    session.read([[*rows[0], 4]], on=3)  # the first row alone reads on
    got = session.read([session.tokens[0], [*rows[1], 14], [*rows[2], 15]])
    for row, sequence in enumerate(session.tokens):
        with torch.inference_mode():
            own = lm.model(torch.tensor([sequence])).logits[0, -1]
        torch.testing.assert_close(got.logits[row, 0], own, atol=2e-4, rtol=1e-3)
