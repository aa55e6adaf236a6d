"""Exported forward passes give what the models' own give."""

from __future__ import annotations

import gc
import inspect
import os
import shutil
import warnings
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from conftest import prompt_lists, quick
from hypothesis import given
from hypothesis import strategies as st
from onnx.reference import ReferenceEvaluator
from onnxscript import rewriter
from test_batch import assert_same

import lenience
from lenience.core.files import EMBEDDED
from lenience.decoding import loop
from lenience.decoding.generation import Reporting
from lenience.decoding.loading import load_pair
from lenience.decoding.pair import Pair
from lenience.models import onnx_export
from lenience.models.compile import compile_model, graph_path, shipped_path
from lenience.models.cuda_graphs import CudaGraphs
from lenience.models.lm import LM
from lenience.models.memory import token_bytes
from lenience.models.onnx_export import export_graph
from lenience.models.onnx_graph import Graph, GraphCache
from lenience.models.pass_cache import States
from lenience.models.session import Session
from lenience.models.threads import torch_threads

EXPORTED = ["llama", "qwen2", "qwen3", "gemma2", "mistral", "gpt2"]
rows = prompt_lists(5)


@pytest.fixture(scope="module", autouse=True)
def own_cache() -> Iterator[None]:
    """One for all workers, and none that other tests look into."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LENIENCE_CACHE", os.environ["LENIENCE_CACHE"] + "/tiny")
        yield


@pytest.fixture(scope="module")
def compiled(
    own_cache: None, checkpoints: Callable[[str], tuple[str, str]]
) -> Callable[[str], LM]:
    made: dict[tuple[str, str], LM] = {}

    def get(name: str, role: str = "target") -> LM:
        if (name, role) not in made:
            lm = getattr(load_pair(*checkpoints(name), dtype="float32"), role)
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                assert compile_model(lm)
            made[name, role] = lm
        return made[name, role]

    return get


@pytest.mark.parametrize("name", EXPORTED)
@given(st.lists(rows, min_size=1, max_size=3), st.integers(1, 3), st.integers(4, 40))
@quick(10)
def test_states_and_logits_are_the_models_own(
    name: str, compiled, readings, states, capacity
) -> None:
    """Rows of any lengths, one after the other in the same cache, which grows where it is too
    small."""
    lm = compiled(name)
    session = Session(lm, 5, capacity)
    for sequences in readings:
        sequences = [sequence + [7] * states for sequence in sequences]
        got = session.read(sequences, states)
        for row, sequence in enumerate(sequences):
            with torch.inference_mode():
                own = lm.model(torch.tensor([sequence]), output_hidden_states=True)
            torch.testing.assert_close(
                got.logits[row], own.logits[0, -states:], atol=2e-4, rtol=1e-3
            )
            torch.testing.assert_close(
                got.hidden[row],
                own.hidden_states[-1][0, -states:],
                atol=2e-4,
                rtol=1e-3,
            )


@pytest.mark.parametrize("layers", [(1,), (1, None)])
@pytest.mark.parametrize(("name", "role"), [("llama", "target"), ("gpt2", "draft")])
def test_states_after_layers_are_the_models_own(
    name: str, role: str, layers: tuple[int | None, ...], compiled
) -> None:
    lm = compiled(name, role)
    session = Session(lm, 2, 40, states=States(layers))
    assert isinstance(session.cache, GraphCache)
    sequences, on = [[3, 4, 5, 6, 7], [8, 9, 10, 11, 12]], 0 if role == "target" else 3
    session.read([[3], [8]])
    got = session.read(sequences, 1 if on else 4, lookahead=on)
    for row, sequence in enumerate(sequences):
        read = sequence + got.logits[row, :on].argmax(-1).tolist()
        with torch.inference_mode():
            own = lm.model(torch.tensor([read]), output_hidden_states=True)
        n = got.hidden.shape[1]
        assert n == (1 + on if on else 4)
        wanted = torch.cat(
            [own.hidden_states[layer or -1][0, -n:] for layer in layers], -1
        )
        torch.testing.assert_close(got.hidden[row], wanted, atol=2e-4, rtol=1e-3)
        torch.testing.assert_close(
            got.logits[row], own.logits[0, -n:], atol=2e-4, rtol=1e-3
        )


def test_without_an_export_of_a_layer_it_is_read_through_the_models_own_pass(
    compiled, checkpoints, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = graph_path(compiled("llama"))
    monkeypatch.setenv("LENIENCE_CACHE", str(tmp_path))
    graph_path(compiled("llama")).write_bytes(path.read_bytes())
    lm = load_pair(*checkpoints("llama"), dtype="float32", compile=None).target
    assert isinstance(Session(lm).cache, GraphCache)
    assert not isinstance(Session(lm, states=States((1,))).cache, GraphCache), (
        "nothing is exported unasked"
    )
    assert compile_model(lm)
    assert isinstance(Session(lm, states=States((1,))).cache, GraphCache), (
        "it is when it is asked for"
    )


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2"])
@given(st.lists(rows, min_size=1, max_size=3), st.integers(0, 9), st.integers(4, 40))
@quick(8)
def test_a_draft_that_reads_on_takes_what_is_most_probable(
    name: str, compiled, readings, on, capacity
) -> None:
    lm = compiled(name, "draft")
    session = Session(lm, 5, capacity)
    for sequences in readings:
        got = session.read(sequences, lookahead=on)
        n = got.logits.shape[1]
        room = min(map(session.room, sequences))
        # prompts are not read with short rows
        assert n == 1 + min(on, room) or (n == 1 and len(sequences) > 1)
        drafted = got.logits.argmax(-1).tolist()
        for row, sequence in enumerate(sequences):
            assert session.tokens()[row] == sequence + drafted[row][:-1]
            with torch.inference_mode():
                own = lm.model(
                    torch.tensor([session.tokens()[row]]), output_hidden_states=True
                )
            torch.testing.assert_close(
                got.logits[row], own.logits[0, -n:], atol=2e-4, rtol=1e-3
            )
            torch.testing.assert_close(
                got.hidden[row], own.hidden_states[-1][0, -n:], atol=2e-4, rtol=1e-3
            )


@given(
    rows,
    st.sampled_from(
        [("exact", 0.0), ("topk:3", 0.0), ("judge", 0.0), ("speculative", 0.8)]
    ),
    st.integers(0, 19),
    st.integers(1, 4),
)
@quick(15)
def test_a_compiled_pair_answers_as_a_plain_one(
    compiled, llama: Pair, judge: str, asked, how, window, size
) -> None:
    pair = Pair(compiled("llama"), compiled("llama", "draft"), "compiled")
    assert pair.compiled
    how = (judge if how[0] == "judge" else how[0], how[1])
    options = dict(
        zip(("rule", "temperature"), how),
        window=window,
        max_new_tokens=30,
        batch_size=size,
        seed=0,
    )
    assert_same(
        pair.generate_batch(asked, **options), llama.generate_batch(asked, **options)
    )


@pytest.mark.parametrize("drafter", ["exit:1", "skip:1", "skip:2"])
@pytest.mark.parametrize("tree", ["chain", "dynamic:6"])
def test_own_layers_draft_on_the_exported_targets_keys_and_values(
    compiled, llama: Pair, monkeypatch: pytest.MonkeyPatch, drafter: str, tree: str
) -> None:
    """As through plain passes: the same tokens are drafted, so the same are accepted, also after
    the memory has grown and rows have moved."""
    monkeypatch.setattr("lenience.models.onnx_graph.FIRST_CAPACITY", 12)
    pair = Pair(compiled("llama"), compiled("llama", "draft"), "compiled")
    asked = [[3, 4, 5], [9, 8, 7, 6, 5, 4, 3, 2], [20], [11, 30]]
    options = {
        "drafter": drafter,
        "tree": tree,
        "window": 3,
        "max_new_tokens": 40,
        "seed": 0,
    }
    for size in (1, 3):
        outs = pair.generate_batch(asked, batch_size=size, **options)
        assert_same(outs, llama.generate_batch(asked, batch_size=size, **options))
        assert sum(out.accepted_exact for out in outs) > 5


@pytest.mark.parametrize("how", ["exported", "recorded"])
def test_sessions_at_the_same_time_have_caches_of_their_own(
    compiled, llama: Pair, checkpoints, how: str
) -> None:
    if how == "exported":
        pair = Pair(compiled("llama"), compiled("llama", "draft"), "compiled")
    else:
        pair = load_pair(*checkpoints("llama"), dtype="float32", compile=False)
        pair.target.use(CudaGraphs())
        pair.draft.use(CudaGraphs())
    asked = [[3, 4, 5], [9, 8, 7, 6], [20]]
    wanted = [llama.generate(prompt, max_new_tokens=24).tokens for prompt in asked]
    for _ in range(2):
        streams = [pair.stream(prompt, max_new_tokens=24) for prompt in asked]
        told: list[list[int]] = [[] for _ in asked]
        for steps in zip_longest(*streams):  # in turns
            for tokens, step in zip(told, steps):
                tokens += step.tokens if step else []
        assert told == wanted
        del streams, steps


def test_a_recorded_cache_is_taken_over_and_forgets(checkpoints, llama: Pair) -> None:
    pair = load_pair(*checkpoints("llama"), dtype="float32", compile=False)
    pair.target.use(CudaGraphs())
    pair.draft.use(CudaGraphs())
    pair.generate([1], max_new_tokens=24)
    (kept,) = pair.target.backend._spare
    with torch.inference_mode():
        for states in kept.kept():
            states += torch.nan  # as after a pass that overflowed
    assert (
        pair.generate([2], max_new_tokens=24).tokens
        == llama.generate([2], max_new_tokens=24).tokens
    )
    assert pair.target.backend._spare == [kept]
    gone = weakref.ref(pair.target)
    del pair, kept, states
    gc.collect()
    assert gone() is None, (
        "a model that nobody uses is freed, and its spare cache with it"
    )


def test_an_exported_cache_takes_over_memory_that_is_forgotten(
    compiled, llama: Pair
) -> None:
    pair = Pair(compiled("llama"), compiled("llama", "draft"), "compiled")
    # for the long one a cache grows
    long, short = (
        [3 + i % 20 for i in range(170)],
        [2],
    )
    pair.generate(long, max_new_tokens=8)
    gc.collect()
    spare = pair.target.backend._spare
    kept = {
        key: memory for key, memory in spare.items() if key[0] == 1 and key[1] >= 160
    }
    assert len(kept) == 2
    with torch.inference_mode():
        for memory in kept.values():
            memory.states += torch.nan  # as after a pass that overflowed
    for prompt in (long, short):
        wanted = llama.generate(prompt, max_new_tokens=8).tokens
        assert pair.generate(prompt, max_new_tokens=8).tokens == wanted
        gc.collect()
    assert all(spare[key] is memory for key, memory in kept.items())


def test_the_built_in_pair_compiled_answers_as_plain(
    built_in: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    # where other tests take it from
    monkeypatch.setenv("LENIENCE_CACHE", str(Path(os.environ["LENIENCE_CACHE"]).parent))
    fast = load_pair(compile=True)
    assert fast.compiled and not built_in.compiled
    prompts = [
        sample.prompt
        for sample, _ in zip(lenience.task("wordmath").samples("test"), range(6))
    ]
    options = {"max_new_tokens": 200, "batch_size": 4}
    assert_same(
        fast.generate_batch(prompts, **options),
        built_in.generate_batch(prompts, **options),
    )
    device = built_in.target.device
    # while it grows there are two
    assert token_bytes(fast.target)[device] == 2 * token_bytes(built_in.target)[device]
    assert load_pair().compiled, "the exports are kept"
    assert not load_pair(compile=False).compiled


def test_what_cannot_be_exported_is_told_and_read_plainly(checkpoints) -> None:
    neo = load_pair(*checkpoints("gpt_neo"), dtype="float32").target
    with pytest.warns(UserWarning, match="is not compiled"):
        assert not compile_model(neo)
    Session(neo).read([[1, 2, 3]])
    half = load_pair(*checkpoints("llama"), dtype="bfloat16").target
    with pytest.warns(UserWarning, match="not all float32"):
        assert not compile_model(half)


def test_a_broken_or_foreign_export_is_not_used(
    checkpoints, compiled, tmp_path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = load_pair(*checkpoints("mistral"), dtype="float32", compile=False)
    compiled("mistral")
    whole = graph_path(pair.target).read_bytes()
    monkeypatch.setenv("LENIENCE_CACHE", str(tmp_path))
    path = graph_path(pair.target)
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.warns(UserWarning, match="is not compiled"):
        assert not compile_model(pair.target, export=False)
    assert not path.exists()
    for foreign in ("gemma2", "qwen3"):  # one whose weights differ, one whose pass does
        other = load_pair(*checkpoints(foreign), dtype="float32", compile=False).target
        export_graph(other, path)
        with pytest.warns(UserWarning, match="is not compiled"):
            assert not compile_model(pair.target, export=False)
        assert not path.exists()
    assert pair.target.backend is None


def test_rows_that_cannot_be_read_together_are_not_exported(checkpoints) -> None:
    lm = load_pair(*checkpoints("llama"), dtype="float32", compile=False).target
    lm.model.config.rope_parameters = {"rope_type": "longrope", "rope_theta": 1e4}
    with pytest.warns(UserWarning, match="cannot be read together"):
        assert not compile_model(lm)


def test_models_of_one_shape_share_a_graph_and_keep_their_weights(
    compiled, checkpoints
) -> None:
    """Also where weights are all alike when the graph is made, or scale what a constant adds to, as
    Gemma's norms do."""
    for name in ("llama", "gemma2"):
        path = graph_path(compiled(name))
        lm = load_pair(*checkpoints(name), dtype="float32", compile=False).target
        with torch.no_grad():
            for weight in lm.model.parameters():
                weight.add_(torch.randn_like(weight) * 0.1)
        assert graph_path(lm) == path
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert compile_model(lm, export=False)
        got = Session(lm).read([[3, 4, 5, 6]], 4)
        with torch.inference_mode():
            own = lm.model(torch.tensor([[3, 4, 5, 6]])).logits[0]
        torch.testing.assert_close(got.logits[0], own, atol=2e-4, rtol=1e-3)


def test_a_graph_holds_no_weights(compiled) -> None:
    lm = compiled("llama")
    largest = max(weight.numel() for weight in lm.model.parameters())
    graph = onnx.load(str(graph_path(lm)), load_external_data=False).graph
    outside = {
        c.name
        for c in graph.initializer
        if c.data_location == onnx.TensorProto.EXTERNAL
    }
    assert outside == {
        name for name, _ in lm.model.named_parameters(remove_duplicate=False)
    }
    inside = [len(c.raw_data) for c in graph.initializer if c.name not in outside]
    assert max(inside) < 4 * largest / 10


def test_an_export_traces_a_model_once(
    checkpoints: Callable[[str], tuple[str, str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What the exporter would decompose it would trace a second time."""

    def refuse(*_: Any) -> None:
        raise AssertionError("decomposed")

    monkeypatch.setattr(torch.export.ExportedProgram, "run_decompositions", refuse)
    target = load_pair(*checkpoints("gemma2"), dtype="float32", compile=False).target
    export_graph(target, tmp_path / "trees", trees=True)


def test_the_optimizer_goes_without_its_quadratic_rule_and_gets_it_back() -> None:
    rules = rewriter._DEFAULT_REWRITE_RULES
    with onnx_export._linear_rules():
        kept = rewriter._DEFAULT_REWRITE_RULES
    assert [rule.name for rule in rules if rule not in kept] == ["SlicesSplit"]
    assert rewriter._DEFAULT_REWRITE_RULES is rules


class Overwriting(torch.nn.Module):
    """Writes into a tensor that it has made, which a graph of ONNX cannot do."""

    model = torch.nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.model(x) + 1
        y[:, 0] = 7.0
        return y


def test_what_writes_into_its_argument_is_exported_the_slower_way() -> None:
    x, varies = torch.ones(2, 3), {0: "m"}
    with pytest.raises(ValueError, match="writes into its argument"):
        onnx_export._traced_once(Overwriting().eval(), (x,), (varies,))
    argument = {"x": (x, varies)}
    made = onnx_export._trace(Overwriting().eval(), argument, ["y"])
    evaluator = ReferenceEvaluator(ir.to_proto(made))
    rows = np.arange(12, dtype=np.float32).reshape(4, 3)
    (y,) = evaluator.run(None, {"x": rows})
    assert np.array_equal(y, np.c_[np.full(4, 7), rows[:, 1:] + 1])


def test_shipped_graphs_read_as_the_built_in_pair_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, built_in: Pair
) -> None:
    """Nothing is exported; a graph that is damaged, or another model's, is not used."""
    monkeypatch.setenv("LENIENCE_CACHE", str(tmp_path / "cache"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pair = load_pair()
    assert pair.compiled and not (tmp_path / "cache").exists()
    for options in ({"window": 0}, {"window": 8}, {"rule": "judge@0.99", "window": 8}):
        asked = {"max_new_tokens": 40, **options}
        assert pair.generate("Ann has 5 apples.", **asked).tokens == (
            built_in.generate("Ann has 5 apples.", **asked).tokens
        )
    embedded = tmp_path / "embedded"
    shutil.copytree(EMBEDDED / "graphs", embedded / "graphs")
    shipped = shipped_path(pair.target).name
    other = shipped_path(pair.draft).name
    for spoil in (
        lambda path: path.write_bytes(path.read_bytes()[:1000]),
        lambda path: shutil.copy(EMBEDDED / "graphs" / other, path),
    ):
        spoil(embedded / "graphs" / shipped)
        monkeypatch.setattr("lenience.models.compile.EMBEDDED", embedded)
        lm = load_pair(compile=False).target
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert not compile_model(lm, export=False)
        assert lm.backend is None and (embedded / "graphs" / shipped).exists()


@pytest.mark.parametrize("largest", [1 << 24, 4000, 300])
def test_long_prompts_are_read_in_parts(
    compiled, largest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lenience.models.onnx_graph.LARGEST_SCORES", largest)
    lm, prompts = (
        compiled("llama"),
        [[1 + (7 * i) % 40 for i in range(n)] for n in (200, 9, 71)],
    )
    for states in (1, 5):
        got = Session(lm, 3, 16).read(prompts, states)
        for row, prompt in enumerate(prompts):
            with torch.inference_mode():
                own = lm.model(torch.tensor([prompt])).logits[0, -states:]
            torch.testing.assert_close(got.logits[row], own, atol=2e-4, rtol=1e-3)


def test_a_pair_is_exported_while_it_decodes(checkpoints) -> None:
    pair = load_pair(*checkpoints("qwen2"), dtype="float32", compile=False)
    asked = [[3, 4, 5], [6, 7]]
    wanted = [out.tokens for out in pair.generate_batch(asked, max_new_tokens=30)]
    with ThreadPoolExecutor(1) as thread:
        exporting = thread.submit(pair.compile)
        while not exporting.done():
            assert [
                pair.generate(prompt, max_new_tokens=30).tokens for prompt in asked
            ] == wanted
    assert exporting.result() and pair.compiled


def test_the_public_function_takes_what_the_inner_one_takes() -> None:
    assert inspect.signature(lenience.load_pair) == inspect.signature(load_pair)


def test_a_passing_failure_keeps_the_export(
    compiled, checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled("qwen3")
    lm = load_pair(*checkpoints("qwen3"), dtype="float32", compile=False).target

    def fail(*_: object) -> None:
        raise MemoryError("none left")

    with (
        monkeypatch.context() as patch,
        pytest.warns(UserWarning, match="MemoryError: none left"),
    ):
        patch.setattr("lenience.models.onnx_graph.Graph", fail)
        assert not compile_model(lm, export=False)
    assert graph_path(lm).exists() and compile_model(lm, export=False)


def test_torch_has_one_thread_beside_graphs_and_gets_back_what_it_had(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also between steps, while caches are made, and where several decode at once."""
    built_in = load_pair(compile=True)
    assert built_in.compiled
    seen = set[tuple[str, int]]()

    def noted(owner: Any, name: str) -> None:
        inner = getattr(owner, name)

        def noting(*args: Any) -> Any:
            seen.add((name, torch.get_num_threads()))
            return inner(*args)

        monkeypatch.setattr(owner, name, noting)

    noted(loop, "_decide")
    noted(loop, "_run_target")
    noted(Graph, "memory")
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        setup = built_in.decoder({"window": 4, "max_new_tokens": 20})
        ids = [
            built_in.target.encode(prompt)
            for prompt in ("Ann has 5 apples.", "Bob has 6.")
        ]
        _, steps = built_in._decode(ids, setup, 2, Reporting())
        for _ in steps:
            assert torch.get_num_threads() == 3
        assert seen == {("_decide", 1), ("_run_target", 1), ("memory", 1)}
        with ThreadPoolExecutor(4) as workers:
            list(
                workers.map(
                    lambda _: built_in.generate(ids[0], max_new_tokens=20), range(8)
                )
            )
        assert torch.get_num_threads() == 3
        with pytest.raises(ZeroDivisionError), torch_threads(1):
            _ = 1 / 0
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
