"""Many prompts decoded together: each gets the answer that it gets alone."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from conftest import CONFIGS, prompt_lists, quick
from hypothesis import given
from hypothesis import strategies as st

from lenience import InputError
from lenience.decoding.generation import Generation
from lenience.decoding.loading import load_pair
from lenience.decoding.pair import Pair
from lenience.models.kv_cache import PlainCache
from lenience.models.lm import LM
from lenience.models.memory import token_bytes
from lenience.models.session import Session, probe_masks

prompts = prompt_lists(7)


def assert_same(together: list[Generation], alone: list[Generation]) -> None:
    """All that must not depend on the company a prompt is decoded in; how much is drafted past an
    end may."""
    for a, b in zip(together, alone, strict=True):
        for key in (
            "prompt_tokens",
            "tokens",
            "text",
            "target_passes",
            "accepted_exact",
            "accepted_lenient",
            "finish",
        ):
            assert getattr(a, key) == getattr(b, key), key
        assert [entry.origin for entry in a.trace] == [
            entry.origin for entry in b.trace
        ]
        for x, y in zip(a.trace, b.trace):
            assert x.score == y.score or x.score == pytest.approx(y.score, abs=1e-4)


@pytest.mark.parametrize("name", CONFIGS)
@given(
    prompts,
    st.integers(0, 9),
    st.integers(1, 40),
    st.integers(1, 5),
    st.sampled_from(["exact", "topk:3", "speculative", "target", "draft"]),
    st.sampled_from([0.0, 0.8]),
)
@quick(6)
def test_together_as_alone(
    name: str, pairs, given_prompts, window, new, size, rule, temperature
) -> None:
    pair = pairs(name)
    options = {
        "rule": rule,
        "window": window,
        "max_new_tokens": new,
        "temperature": temperature,
        "seed": 5,
    }
    together = pair.generate_batch(given_prompts, batch_size=size, **options)
    assert_same(
        together, [pair.generate(prompt, **options) for prompt in given_prompts]
    )


@pytest.mark.parametrize("name", ["llama", "gpt_neo"])
@given(
    prompts,
    st.integers(0, 12),
    st.integers(1, 40),
    st.integers(1, 5),
    st.sampled_from(["exact", "topk:3", "speculative"]),
)
@quick(6)
def test_tokens_that_stay_on_the_device_make_no_difference(
    name: str, pairs, given_prompts, window, new, size, rule
) -> None:
    pair = pairs(name)
    options = {"rule": rule, "window": window, "max_new_tokens": new}
    alone = [pair.generate(prompt, **options) for prompt in given_prompts]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PlainCache, "needs_host_tokens", False)  # as on a GPU
        assert_same(
            pair.generate_batch(given_prompts, batch_size=size, **options), alone
        )


@given(prompts, st.integers(1, 9), st.integers(1, 40), st.integers(1, 5))
@quick(8)
def test_a_judge_scores_each_row_as_alone(
    llama, judge, given_prompts, window, new, size
) -> None:
    options = {"rule": judge, "window": window, "max_new_tokens": new}
    together = llama.generate_batch(given_prompts, batch_size=size, **options)
    assert_same(
        together, [llama.generate(prompt, **options) for prompt in given_prompts]
    )


def test_exact_together_is_the_targets_own_greedy_answer(
    pairs: Callable[[str], Pair],
) -> None:
    pair = pairs("qwen2")
    asked = [[i + 1, *range(1, 4 * i % 11 + 2)] for i in range(9)]
    for prompt, out in zip(
        asked, pair.generate_batch(asked, batch_size=4, max_new_tokens=24)
    ):
        with torch.inference_mode():
            plain = pair.target.model.generate(
                torch.tensor([prompt]), max_new_tokens=24, do_sample=False
            )
        assert out.tokens == plain[0, len(prompt) :].tolist()


def test_a_row_that_takes_anothers_place_is_not_read_again(llama: Pair) -> None:
    asked = [[1 + (7 * i + j) % 47 for j in range(40)] for i in range(16)]
    outs = llama.generate_batch(asked, max_new_tokens=60)
    lengths = [len(out.tokens) for out in outs]
    short, long = lengths.index(min(lengths)), lengths.index(max(lengths))
    assert lengths[short] < lengths[long] - 10
    together = llama.generate_batch([asked[short], asked[long]], max_new_tokens=60)[1]
    alone = llama.generate(asked[long], max_new_tokens=60)
    assert together.target_tokens == alone.target_tokens
    assert together.draft_tokens < alone.draft_tokens + len(asked[long])


def test_an_answer_that_ends_early_makes_room_for_the_next(built_in: Pair) -> None:
    asked = [
        "Ann has 12 apples. Answer:",
        "Bob has 5 apples. How many apples does Bob have left? Answer:",
    ] * 4
    outs = built_in.generate_batch(
        asked, batch_size=3, max_new_tokens=60, stop_strings=["12", "5"]
    )
    alone = [
        built_in.generate(prompt, max_new_tokens=60, stop_strings=["12", "5"])
        for prompt in asked
    ]
    assert_same(outs, alone)
    assert {out.finish for out in outs} & {"stop"}


@pytest.mark.parametrize("name", CONFIGS)
def test_rows_that_reach_the_context_end_there(
    name: str, pairs: Callable[[str], Pair]
) -> None:
    pair, asked = pairs(name), [[3] * 250, [5, 4], [1 + i % 40 for i in range(255)]]
    for rule in ("exact", "topk:3"):
        alone = [
            pair.generate(prompt, rule=rule, max_new_tokens=30, window=8)
            for prompt in asked
        ]
        assert_same(
            pair.generate_batch(
                asked, rule=rule, batch_size=3, max_new_tokens=30, window=8
            ),
            alone,
        )
        assert len(asked[2]) + len(alone[2].tokens) == 256


def test_what_is_past_the_context_is_not_read(pairs: Callable[[str], Pair]) -> None:
    lm = pairs("gpt2").target
    long, short = [1 + i % 40 for i in range(259)], [4, 5, 6, 7, 8, 9]
    reading = Session(lm, 2).read([long, short], 5)
    with torch.inference_mode():
        whole = lm.model(torch.tensor([long[:256]])).logits[0]
    # after the tokens 255 and 256
    torch.testing.assert_close(reading.logits[0, :2], whole[-2:], atol=2e-4, rtol=1e-3)


def test_a_pass_that_fails_leaves_nothing_that_is_believed(llama: Pair) -> None:
    session = Session(llama.target)
    session.read([[1, 2, 3, 4, 5]])

    def fail(*_call: object) -> None:
        raise MemoryError

    # the first layer has written by then
    watch = llama.target.model.model.layers[1].register_forward_pre_hook(fail)
    with pytest.raises(MemoryError):
        session.read([[1, 2, 9, 9]])
    watch.remove()
    fresh = Session(llama.target).read([[1, 2, 3, 4, 5, 6]])
    torch.testing.assert_close(session.read([[1, 2, 3, 4, 5, 6]]).logits, fresh.logits)


def test_no_prompts_no_answers_and_wrong_options_are_told_before_any_work(
    llama: Pair,
) -> None:
    assert llama.generate_batch([]) == []
    calls: list[object] = []
    watch = llama.target.model.register_forward_pre_hook(
        lambda *call: calls.append(call)
    )
    with pytest.raises(InputError, match="batch_size 0"):
        llama.generate_batch([[1]], batch_size=0)
    with pytest.raises(InputError, match="prompt is empty"):
        llama.generate_batch([[1], []])
    watch.remove()
    assert not calls


def test_a_cache_that_cannot_fit_is_refused_with_what_would(
    llama: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    each = sum(sum(token_bytes(lm).values()) for lm in (llama.target, llama.draft)) * (
        1 + 20 + 8 + 1
    )
    monkeypatch.setattr("lenience.models.memory.free_bytes", lambda device: 3 * each)
    assert len(llama.generate_batch([[1]] * 4, batch_size=3, max_new_tokens=20)) == 4
    with pytest.raises(InputError, match="at most 3 rows fit"):
        llama.generate_batch([[1]] * 4, batch_size=4, max_new_tokens=20)


@pytest.mark.parametrize("name", CONFIGS)
def test_the_cache_takes_what_it_is_said_to_take(
    name: str, pairs: Callable[[str], Pair]
) -> None:
    lm = pairs(name).target
    session = Session(lm, 3, 50)
    session.read([[1, 2], [3], [4]])
    taken = sum(kept.nbytes for kept in session.cache.kept())
    # one column more, for padding
    assert taken == 3 * 51 * sum(token_bytes(lm).values())


def test_a_length_limit_beyond_the_context_takes_no_more_than_the_context(
    llama: Pair,
) -> None:
    assert llama.generate([5], window=2, max_new_tokens=10**9).finish in (
        "context",
        "eos",
    )


def test_the_cache_grows_where_it_is_full_and_keeps_what_it_holds(llama: Pair) -> None:
    small, large = Session(llama.target, 2, 6), Session(llama.target, 2, 64)
    rows = [[5, 6, 7, 8, 9, 1], [2, 3]]  # the first fills its row exactly
    for session in (small, large):
        session.read(rows)
    for more in ([4], [4, 5, 6, 7]):
        grown = [row + more for row in rows]
        torch.testing.assert_close(
            small.read(grown, 1).logits, large.read(grown, 1).logits
        )


def test_rows_are_read_one_by_one_where_a_model_places_its_own_mask(
    pairs: Callable[[str], Pair],
) -> None:
    assert {name: probe_masks(pairs(name).target) for name in CONFIGS} == dict.fromkeys(
        CONFIGS, True
    ) | {"gpt_neo": False}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_a_model_that_places_masks_otherwise_is_found_out(
    name: str, dtype: str, checkpoints, monkeypatch
) -> None:
    lm = load_pair(*checkpoints(name), dtype=dtype).target
    assert probe_masks(lm)
    lm = load_pair(*checkpoints(name), dtype=dtype).target
    masks = LM.masks

    def shifted(self: LM, at: torch.Tensor, keys: torch.Tensor):
        return masks(self, (at - 1).clamp(min=0), keys)

    monkeypatch.setattr(LM, "masks", shifted)
    with pytest.warns(UserWarning, match="one by one"):
        assert not probe_masks(lm)


def test_threads_that_use_one_pair_do_not_mix(checkpoints, judge: str) -> None:
    pair = load_pair(*checkpoints("llama"), dtype="float32")
    asked = [
        [[i + 1, *range(1, 3 * i % 9 + 2)] for i in range(k, k + 6)]
        for k in range(0, 24, 6)
    ]
    options = {"rule": judge, "batch_size": 3, "max_new_tokens": 30}
    with ThreadPoolExecutor(4) as threads:
        outs = list(
            threads.map(lambda prompts: pair.generate_batch(prompts, **options), asked)
        )
    for prompts, together in zip(asked, outs):
        assert_same(together, pair.generate_batch(prompts, **options))


def test_in_bfloat16_answers_part_only_at_near_ties(checkpoints) -> None:
    pair = load_pair(*checkpoints("llama"), dtype="bfloat16")
    asked = [[i + 1] * (i % 5 + 1) for i in range(12)]
    for prompt, out in zip(
        asked, pair.generate_batch(asked, batch_size=6, max_new_tokens=20)
    ):
        alone = pair.generate(prompt, max_new_tokens=20)
        parted = next(
            (i for i, (a, b) in enumerate(zip(out.tokens, alone.tokens)) if a != b),
            None,
        )
        if parted is not None:
            with torch.inference_mode():
                logits = (
                    pair.target.model(torch.tensor([prompt + alone.tokens[:parted]]))
                    .logits[0, -1]
                    .float()
                )
            gap = (logits[alone.tokens[parted]] - logits[out.tokens[parted]]).abs()
            assert gap < 0.03 * logits.abs().max()
