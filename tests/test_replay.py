"""Passes of fixed shapes give what passes of the shapes at hand give. What a GPU records is this
code; recording itself needs one."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from conftest import prompt_lists, quick
from hypothesis import given
from hypothesis import strategies as st
from test_batch import assert_same
from torch.utils._python_dispatch import TorchDispatchMode

from lenience.core import numeric
from lenience.decoding import loop, soundness
from lenience.decoding.loading import load_pair
from lenience.decoding.pair import Pair
from lenience.heads.head import Head, Inputs
from lenience.models import session
from lenience.models.cuda_graphs import BLOCK, CudaGraphCache, CudaGraphs
from lenience.models.pass_cache import States
from lenience.models.session import Session, reads_together_as_alone
from lenience.rules import judge as judging

prompts = prompt_lists(5)


@pytest.fixture(scope="module", params=["llama", "gemma2", "gpt2"])
def replayed(
    request: pytest.FixtureRequest, checkpoints
) -> Iterator[tuple[Pair, Pair]]:
    pair, plain = (
        load_pair(*checkpoints(request.param), dtype="float32", compile=False)
        for _ in range(2)
    )
    for lm in (pair.target, pair.draft):
        lm.use(CudaGraphs())
    yield pair, plain


@given(
    prompts,
    st.sampled_from(
        [("exact", 0.0), ("topk:3", 0.0), ("speculative", 0.8), ("target", 0.0)]
    ),
    st.sampled_from(["fixed", "confidence:0.03"]),
    st.integers(0, 12),
    st.integers(1, 4),
)
@quick(15)
def test_answers_are_those_of_plain_passes(
    replayed, asked, how, stop, window, size
) -> None:
    pair, plain = replayed
    options = dict(
        zip(("rule", "temperature"), how),
        window=window,
        stop=stop,
        max_new_tokens=30,
        batch_size=size,
        seed=0,
    )
    assert_same(
        pair.generate_batch(asked, **options), plain.generate_batch(asked, **options)
    )


def test_a_judge_on_a_layer_is_asked_of_recorded_passes(
    replayed, tmp_path: Path
) -> None:
    pair, plain = replayed
    weight = torch.randn(
        pair.target.hidden_size, generator=torch.Generator().manual_seed(1)
    )
    inputs = Inputs(("target",), ("draft",), (1,))
    Head(weight / 100, 1.0, inputs, 0.5, pair.fingerprints).save(tmp_path)
    assert isinstance(Session(pair.target, states=States((1,))).cache, CudaGraphCache)
    asked = [[i, 7, 9, 2 * i] for i in range(1, 20, 3)]
    options = {"rule": f"judge:{tmp_path}@0.5", "window": 4}
    together = pair.generate_batch(asked, max_new_tokens=30, **options)
    assert_same(together, plain.generate_batch(asked, max_new_tokens=30, **options))
    states = [
        Session(one.target, states=States((1,))).read(asked[:1], 3).hidden
        for one in (pair, plain)
    ]
    torch.testing.assert_close(*states, atol=2e-4, rtol=1e-3)


def test_it_passes_the_check_that_a_gpu_would_ask_for(replayed) -> None:
    for lm in (replayed[0].target, replayed[0].draft):
        cache = CudaGraphs().cache(lm, 3, 100)
        assert reads_together_as_alone(lm, cache)
        assert cache.slots.capacity == BLOCK and len(cache._recorded) == 2


@pytest.mark.parametrize("n", [9, 64, 200])
def test_long_prompts_and_caches_that_grow(
    checkpoints, n: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lenience.models.cuda_graphs.BLOCK", 16)
    lm = load_pair(*checkpoints("llama"), dtype="float32", compile=False).draft
    prompt = [1 + (7 * i) % 40 for i in range(n)]
    cache = CudaGraphCache(lm, CudaGraphs(), 2, 16)
    session = Session(lm, 2, cache=cache)
    session.read([[5], [6, 7]])
    session.read([[5, 8], [6, 7, 9]])
    got = session.read([prompt, prompt[: n - 3]], lookahead=3)
    again = session.read([[*tokens, 4] for tokens in session.tokens()], lookahead=2)
    assert cache.slots.capacity >= n + 3
    for row, tokens in enumerate(session.tokens()):
        with torch.inference_mode():
            own = lm.model(torch.tensor([tokens])).logits[0]
        before = [n, n - 3][row]
        torch.testing.assert_close(
            got.logits[row],
            own[before - 1 :][: got.logits.shape[1]],
            atol=2e-4,
            rtol=1e-3,
        )
        torch.testing.assert_close(
            again.logits[row], own[-again.logits.shape[1] :], atol=2e-4, rtol=1e-3
        )


def test_rows_that_take_no_part_keep_their_states(checkpoints) -> None:
    lm = load_pair(*checkpoints("llama"), dtype="float32", compile=False).draft
    session = Session(lm, 3, cache=CudaGraphCache(lm, CudaGraphs(), 3, BLOCK))
    rows = [[5, 6, 7], [8, 9, 10, 11], [12, 13]]
    session.read(rows)
    session.read([[*rows[0], 4]], lookahead=3)  # the first row alone reads on
    got = session.read([session.tokens()[0], [*rows[1], 14], [*rows[2], 15]])
    for row, sequence in enumerate(session.tokens()):
        with torch.inference_mode():
            own = lm.model(torch.tensor([sequence])).logits[0, -1]
        torch.testing.assert_close(got.logits[row, 0], own, atol=2e-4, rtol=1e-3)


def test_windows_of_many_lengths_are_drafted_in_few(
    llama: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each takes a recording of its own."""
    monkeypatch.setattr(llama.draft, "backend", CudaGraphs())
    for prompt, new in (([5, 6, 7], 60), ([8, 9], 47), ([10], 30)):
        llama.generate(prompt, window=20, max_new_tokens=new)
        assert {
            shape.lookahead + 1 for shape in llama.draft.backend._spare[0]._recorded
        } <= {
            1,
            8,
            16,
            20,
        }


def test_what_stays_on_the_device_is_read_once(
    llama: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = llama.generate([5, 6, 7], window=8, max_new_tokens=60)
    for lm in (llama.target, llama.draft):
        monkeypatch.setattr(lm, "backend", CudaGraphs())
    out = llama.generate([5, 6, 7], window=8, max_new_tokens=60)
    assert (out.target_tokens, out.draft_tokens) == (
        plain.target_tokens,
        plain.draft_tokens,
    )


class Looks(TorchDispatchMode):
    """Which functions ask on the host what a tensor holds: a GPU must come to an end before it can
    say."""

    def __init__(self, patch: pytest.MonkeyPatch):
        super().__init__()
        self.by: list[str] = []
        for name in (
            "tolist",
            "item",
            "numpy",
            "cpu",
            "__bool__",
            "__int__",
            "__float__",
            "__index__",
        ):
            patch.setattr(torch.Tensor, name, self._noting(getattr(torch.Tensor, name)))
        patch.setattr(torch, "tensor", self._noting_uploads(torch.tensor))

    def _noting(self, method):
        def noted(tensor, *given, **more):
            self.by.append(sys._getframe(1).f_code.co_name)
            return method(tensor, *given, **more)

        return noted

    def _noting_uploads(self, tensor):
        """To make a tensor of numbers on a GPU is to wait for it."""

        def noted(numbers, *, device="cpu", **more):
            if device != "cpu":
                self.by.append(f"upload in {sys._getframe(1).f_code.co_name}")
            return tensor(numbers, device=device, **more)

        return noted

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        by_mask = func.overloadpacket is torch.ops.aten.index and any(
            index is not None and index.dtype == torch.bool for index in args[1]
        )
        aten = torch.ops.aten
        if by_mask or func.overloadpacket in (
            aten.nonzero,
            aten.masked_select,
            aten.equal,
            aten.repeat_interleave,
        ):
            self.by.append(f"{func} in {sys._getframe(1).f_code.co_name}")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "rule", ["exact", "topk:3,floor=0.001", "judge", "judge&topk:5|exact"]
)
def test_a_cycle_waits_for_the_device_once(
    llama: Pair, judge: str, rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the first pass of a cycle and its verdicts the host looks at nothing that the cycle
    has made."""
    looks, late = Looks(monkeypatch), session.to_host_async

    def of_this_cycle(numbers):
        found, made = late(numbers), looks.by.count("_verdicts")

        def arrived():
            assert looks.by.count("_verdicts") > made
            return found()

        return arrived

    for module in (session, loop, soundness):
        monkeypatch.setattr(module, "to_host_async", of_this_cycle)
    for module in (judging, soundness, numeric):
        # as on a GPU
        monkeypatch.setattr(module, "looks_cheaply", lambda tensor: False)
    for lm in (llama.target, llama.draft):
        monkeypatch.setattr(lm, "backend", CudaGraphs())
    steps = llama.stream(
        [5, 6, 7], rule=rule.replace("judge", judge), window=9, max_new_tokens=60
    )
    # what is found out once
    llama.generate([5, 6, 7], rule=rule.replace("judge", judge), window=9)
    looks.by.clear()
    with looks:
        cycles = len(list(steps))
    assert cycles > 3 and looks.by.count("_verdicts") == cycles
    assert (
        set(looks.by) == {"_verdicts", "arrived"}
        and looks.by.count("arrived") <= 4 * cycles
    )
