"""Models whose layers keep a recurrent or convolutional state: rolled back to checkpoints, they
decode as transformers does."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conftest import VOCABULARY, WITH_STATES, prompt_lists, quick
from hypothesis import given
from hypothesis import strategies as st
from test_batch import assert_same
from test_decode import plain_greedy
from test_mining import ParityTask, brute_force, lines, mined

from lenience import InputError
from lenience.decoding import scheduler
from lenience.decoding.loading import load_pair
from lenience.decoding.pair import Pair
from lenience.models import memory, recurrent
from lenience.models.lm import LM
from lenience.models.recurrent import CHECKPOINTS, Checkpoints, LayerState
from lenience.models.session import Session

KINDS = sorted(WITH_STATES)
tokens = st.lists(st.integers(1, VOCABULARY - 1), min_size=1, max_size=6)


@pytest.mark.parametrize("name", KINDS)
@given(prompt_lists(3), st.integers(1, 8), st.integers(1, 30))
@quick(6)
def test_strict_answers_are_those_of_transformers(
    name: str, pairs, prompts, window, new
) -> None:
    pair = pairs(name)
    for out, prompt in zip(
        pair.generate_batch(prompts, window=window, max_new_tokens=new), prompts
    ):
        assert out.tokens == plain_greedy(pair, prompt, new)


@pytest.mark.parametrize("name", KINDS)
@given(
    prompt_lists(5),
    st.integers(1, 8),
    st.integers(2, 4),
    st.sampled_from(["exact", "topk:3", "fuzzy:js@0.3", "speculative", "target"]),
    st.sampled_from([0.0, 0.8]),
)
@quick(6)
def test_together_as_alone(
    name: str, pairs, prompts, window, size, rule, temperature
) -> None:
    pair = pairs(name)
    options = {
        "rule": rule,
        "window": window,
        "temperature": temperature,
        "max_new_tokens": 20,
    }
    together = pair.generate_batch(prompts, batch_size=size, **options)
    alone = [pair.generate(prompt, **options) for prompt in prompts]
    if temperature == 0:
        assert_same(together, alone)
    assert [len(out.tokens) for out in together] <= [20] * len(prompts)


@pytest.mark.parametrize("name", KINDS)
@given(st.lists(st.tuples(st.integers(0, 1), st.integers(0, 40), tokens)), st.data())
@quick(8)
def test_states_after_any_readings_are_the_models_own(
    name: str, pairs, readings, data
) -> None:
    """Sequences that share any part with what a row holds, in two rows that are copied too."""
    lm = pairs(name).target
    session = Session(lm, 2, 8)
    held: list[list[int]] = [[], []]
    for row, cut, more in readings:
        held[row] = held[row][:cut] + more
        n = data.draw(st.integers(1, len(held[row])))
        if data.draw(st.booleans()):
            session.copy(row, 1 - row)
            held[1 - row] = list(session.tokens()[1 - row])
        got = session.read([held[row]], n, rows=[row])
        with torch.inference_mode():
            own = lm.model(torch.tensor([held[row]]), output_hidden_states=True)
        torch.testing.assert_close(
            got.logits[0], own.logits[0, -n:], atol=2e-4, rtol=1e-3
        )
        torch.testing.assert_close(
            got.hidden[0], own.hidden_states[-1][0, -n:], atol=2e-4, rtol=1e-3
        )


@pytest.mark.parametrize("name", KINDS)
def test_no_pass_is_added_and_few_tokens_are_read_again(
    name: str, pairs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pass reads at most the tokens that the last one accepted, its correction and a window."""
    pair = pairs(name)
    read: list[int] = []
    forward = type(pair.target.model).forward

    def counted(self, input_ids=None, **options):
        if self is pair.target.model:
            read.append(input_ids.shape[1])
        return forward(self, input_ids, **options)

    pair.generate([1], max_new_tokens=2)  # measures memory
    monkeypatch.setattr(type(pair.target.model), "forward", counted)
    drafted = kept = 0
    for first in range(1, 9):
        read.clear()
        out = pair.generate([first, 6, 7, 8, 9], window=4, max_new_tokens=40)
        assert len(read) == out.target_passes
        assert read[0] == 5 + 4 and max(read) <= 5 + 4
        drafted += out.drafted
        kept += out.accepted_exact
    assert drafted > kept > 0, "windows were kept in part"


@pytest.mark.parametrize("name", KINDS)
def test_mined_by_the_book(
    name: str, pairs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler, "IN_FLIGHT_ON_CPU", 3)
    pair, task = pairs(name), ParityTask()
    mined(pair, task, tmp_path, limit=3)
    for record in lines(tmp_path):
        final, found = brute_force(pair, task, record["prompt_ids"])
        assert record["final_ids"] == final
        assert [tuple(mismatch.values()) for mismatch in record["mismatches"]] == found


def test_a_recurrent_draft_serves_another_kind_of_target(checkpoints) -> None:
    pair = load_pair(
        checkpoints("llama")[0], checkpoints("qwen3_5_text")[1], dtype="float32"
    )
    for prompt in ([5, 6, 7], [*range(1, 25)]):
        out = pair.generate(prompt, window=5, max_new_tokens=30)
        assert out.tokens == plain_greedy(pair, prompt, 30)


@pytest.mark.parametrize("name", KINDS)
def test_a_pass_that_failed_leaves_no_wrong_state(
    name: str, pairs, monkeypatch: pytest.MonkeyPatch
) -> None:
    lm = pairs(name).target
    session = Session(lm)
    session.read([[5, 6, 7, 8]], 2)
    wanted = Session(lm).read([[5, 6, 9, 9, 9]], 2).logits
    head = lm.model.get_output_embeddings()
    with monkeypatch.context() as patch:
        patch.setattr(head, "forward", lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            session.read([[5, 6, 9, 9]], 2)
    got = session.read([[5, 6, 9, 9, 9]], 2).logits
    torch.testing.assert_close(got, wanted, atol=2e-4, rtol=1e-3)


@pytest.mark.parametrize("name", KINDS)
def test_a_model_that_was_not_loaded_here_is_read_rightly(name: str, pairs) -> None:
    """Such as a copy that is trained; loading alone checks how windows are read. The modules that
    update states have a forward pass of their own, as accelerate's hooks give them."""
    loaded = pairs(name).target
    model = copy.deepcopy(loaded.model)
    for module in model.modules():
        if isinstance(module, recurrent._InPieces):
            module.__class__ = type(module).__mro__[2]
            module.forward = functools.partial(type(module).forward, module)
    lm = LM(model, loaded.tokenizer, "copy")
    session = Session(lm)
    session.read([[5, 6, 7]])
    ids = [5, 6, 7, 8, 9, 10, 11]
    got = session.read([ids], 3).logits[0]
    with torch.inference_mode():
        own = loaded.model(torch.tensor([ids])).logits[0, -3:]
    torch.testing.assert_close(got, own, atol=2e-4, rtol=1e-3)
    assert not lm.copies_cache


def test_the_states_around_a_window_are_never_dropped() -> None:
    checkpoints = Checkpoints[int](1)
    committed = 1
    for cycle in range(200):
        checkpoints.keep(0, committed, 0)
        window = 1 + cycle % 3
        checkpoints.keep(0, committed + window, 0)
        accepted = cycle % (window + 1)
        start = checkpoints.resumable(0, committed + accepted)
        assert start >= committed
        committed += accepted + 1


def test_trees_and_own_layers_are_refused_by_name(pairs) -> None:
    pair = pairs("qwen3_5_text")
    with pytest.raises(InputError, match="keeps a state, which follows one path"):
        pair.generate([5, 6], tree="dynamic:8")
    for drafter in ("exit:1", "skip:1"):
        with pytest.raises(InputError, match="cannot draft alone; take ngram"):
            pair.generate([5, 6], drafter=drafter)


def test_it_is_not_exported(checkpoints) -> None:
    with pytest.warns(UserWarning, match="more than keys and values"):
        load_pair(*checkpoints("lfm2"), dtype="float32", compile=True)


def of_length(length: int) -> list[LayerState]:
    return [LayerState({0: torch.full((1, 1), length)}, {}, {0: 1})]


@given(st.integers(1, 200), st.integers(0, 199))
def test_rolling_back_reads_about_as_many_tokens_again(whole: int, back: int) -> None:
    checkpoints = Checkpoints[list[LayerState]](1)
    for length in range(1, whole + 1):
        checkpoints.keep(0, length, of_length(length))
    length = max(whole - back, 1)
    start = checkpoints.resumable(0, length)
    assert 0 <= length - start <= 5 * (whole - length + 1)
    assert len(checkpoints.of(0)) <= CHECKPOINTS
    if start:
        (kept,) = checkpoints.of(0)[start]
        assert int(kept.conv[0]) == start


def test_memory_of_states_is_counted(
    pairs: Callable[[str], Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    lm = pairs("lfm2").target
    config = lm.model.config
    state = 4 * config.hidden_size * config.conv_L_cache
    assert memory.row_bytes(lm) == {lm.device: state * (CHECKPOINTS + 1)}
    assert memory.row_bytes(pairs("llama").target) == {}
    monkeypatch.setattr(memory, "free_bytes", lambda device: 100 * state)
    with pytest.raises(InputError, match="rows need"):
        pairs("lfm2").generate_batch([[5]] * 100, batch_size=100, max_new_tokens=1)


@pytest.mark.parametrize(
    ("tokens", "certain", "begins", "steps", "sizes"),
    [
        (7, 7, True, 0, [7]),
        (7, 3, True, 0, [3, 4]),
        (7, 3, False, 0, [3, 4]),
        (4, 2, True, 99, [2, 1, 1]),
        (4, 2, False, 99, [1, 1, 1, 1]),
        (9, 6, False, 4, [6, 1, 1, 1]),
    ],
)
def test_pieces_of_a_pass(tokens, certain, begins, steps, sizes) -> None:
    assert recurrent.sizes_of(tokens, certain, begins, steps) == sizes
