"""The rules in vLLM's V2 runner: its own rejection sampler with its own kernels, which Triton
interprets on a CPU, in a runner whose model is a matrix.

    TRITON_INTERPRET=1 pytest tests/test_vllm_v2.py

runs it where vLLM is installed."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

if os.environ.get("TRITON_INTERPRET") != "1":
    reason = (
        "needs vLLM in an environment of its own, and TRITON_INTERPRET=1: docs/vllm.md"
    )
    pytest.skip(reason, allow_module_level=True)

# ruff: noqa: E402
import triton.backends
import triton.language as tl

active = SimpleNamespace(driver=SimpleNamespace(is_active=lambda: True))
triton.backends.backends["cpu"] = active
from vllm import SamplingParams
from vllm.v1.worker.gpu.model_runner import GPUModelRunner
from vllm.v1.worker.gpu.spec_decode import rejection_sampler as sampling
from vllm.v1.worker.gpu.spec_decode import rejection_sampler_utils as sampling_kernels

from lenience.core.context import Context, Row
from lenience.core.errors import InputError
from lenience.core.noise import Noise
from lenience.core.types import Draft, Reading, Verdict
from lenience.heads.head import Head, Inputs
from lenience.integrations.engine_rules import rule as served_rule
from lenience.integrations.vllm import v2
from lenience.integrations.vllm.checks import check_seams
from lenience.rules.parsing import parse_spec

# what Triton's interpreter has no function for
sampling_kernels.tldevice = SimpleNamespace(log1p=lambda x: tl.log(1 + x))
V, H, WINDOW, SLOTS = 31, 8, 3, 6


class States:
    """Requests' tokens by slot, as vLLM's RequestState has them."""

    def __init__(self) -> None:
        self.index_to_req_id: dict[int, str] = {}
        self.req_id_to_index: dict[str, int] = {}
        self.prompt_len = SimpleNamespace(np=np.zeros(SLOTS, dtype=np.int32))
        self.prefill_len = SimpleNamespace(gpu=torch.zeros(SLOTS, dtype=torch.int32))
        self.all_token_ids = SimpleNamespace(
            gpu=torch.zeros(SLOTS, 64, dtype=torch.int32)
        )
        self.total = [0] * SLOTS

    def add(self, slot: int, id: str, prompt: Sequence[int]) -> None:
        self.index_to_req_id[slot], self.req_id_to_index[id] = id, slot
        self.prompt_len.np[slot] = self.prefill_len.gpu[slot] = self.total[slot] = len(
            prompt
        )
        self.all_token_ids.gpu[slot, : len(prompt)] = torch.tensor(prompt)

    def give(self, slot: int, tokens: Sequence[int]) -> None:
        start = self.total[slot]
        self.all_token_ids.gpu[slot, start : start + len(tokens)] = torch.tensor(tokens)
        self.total[slot] += len(tokens)


class SamplingStates:
    def __init__(self) -> None:
        self.temperature = SimpleNamespace(np=np.zeros(SLOTS), gpu=torch.zeros(SLOTS))
        self.seeds = SimpleNamespace(gpu=torch.arange(SLOTS))

    def max_num_logprobs(self, _slots: Any) -> int:
        return -1

    def apply_temperature(
        self, logits: torch.Tensor, slots: torch.Tensor, _np: Any
    ) -> None:
        temperature = self.temperature.gpu[slots]
        logits /= torch.where(temperature > 0, temperature, 1)[:, None]


class Sampler:
    """What vLLM's rejection sampler asks of its Sampler, whose tensors need a GPU."""

    compute_nans = use_fp64_gumbel = return_sampling_mask = False
    logprobs_mode = "raw_logprobs"

    def __init__(self, states: States) -> None:
        self.req_states, self.sampling_states = states, SamplingStates()

    def add_request(self, req_idx: int, params: SamplingParams) -> None:
        self.sampling_states.temperature.np[req_idx] = params.temperature
        self.sampling_states.temperature.gpu[req_idx] = params.temperature

    def apply_sampling_params(
        self,
        logits: torch.Tensor,
        rows: torch.Tensor,
        _slots: Any,
        slots_np: Any,
        *_: Any,
    ) -> torch.Tensor:
        logits = logits.clone()
        self.sampling_states.apply_temperature(logits, rows, slots_np)
        return logits


class Runner:
    """The parts of vLLM's runner that lie around its sampling."""

    model_config = SimpleNamespace()
    batch_sharder = rejection_sampler = None

    def __init__(self) -> None:
        self.req_states = States()
        self.weight = torch.randn(H, V, generator=torch.Generator().manual_seed(5))
        self.draft_logits: torch.Tensor | None = None

    def load_model(self) -> None:
        self.sampler = Sampler(self.req_states)
        options = SimpleNamespace(
            num_speculative_tokens=WINDOW,
            enable_adaptive_verification=False,
            rejection_sample_method="standard",
        )
        self.rejection_sampler = sampling.RejectionSampler(
            self.sampler, options, torch.device("cpu")
        )

    def finish_requests(self, scheduler_output: Any) -> None:
        for id in scheduler_output.finished_req_ids:
            del self.req_states.index_to_req_id[self.req_states.req_id_to_index.pop(id)]

    def sample(
        self, hidden_states: torch.Tensor, input_batch: Any, grammar_output: Any
    ) -> Any:
        logits = hidden_states[input_batch.logits_indices] @ self.weight
        return self.rejection_sampler(
            logits, input_batch, self.draft_logits, grammar_output
        )

    def sample_tokens(self, grammar_output: Any) -> Any:
        self.sampled = self.sample(*self.step, grammar_output)
        return SimpleNamespace(model_runner_output=SimpleNamespace())


def batch_of(states: States, windows: dict[int, list[int]]) -> Any:
    """An InputBatch of slots and the tokens drafted for them: the last token of each and its
    window."""
    ids, positions, slots, places, ends = [], [], [], [], [0]
    for slot, drafted in windows.items():
        total = states.total[slot]
        ids += [int(states.all_token_ids.gpu[slot, total - 1]), *drafted]
        positions += range(total - 1, total + len(drafted))
        slots += [slot] * (len(drafted) + 1)
        places += range(len(drafted) + 1)
        ends.append(len(ids))
    whose = np.array(list(windows))
    return SimpleNamespace(
        num_reqs=len(windows),
        input_ids=torch.tensor(ids, dtype=torch.int32),
        positions=torch.tensor(positions),
        logits_indices=torch.arange(len(ids)),
        expanded_idx_mapping=torch.tensor(slots),
        expanded_local_pos=torch.tensor(places, dtype=torch.int32),
        cu_num_logits=torch.tensor(ends, dtype=torch.int32),
        cu_num_logits_np=np.array(ends),
        idx_mapping=torch.tensor(whose),
        idx_mapping_np=whose,
        seq_lens=torch.tensor(
            [states.total[slot] + len(windows[slot]) for slot in windows]
        ),
        seq_lens_cpu_upper_bound=torch.zeros(len(windows), dtype=torch.int32),
    )


@pytest.fixture
def judge(tmp_path: Path) -> str:
    weight = torch.randn(H, generator=torch.Generator().manual_seed(2)) * 2
    Head(weight, 0.0, Inputs(("target",), ("draft",)), 0.5, {}).save(tmp_path / "judge")
    return f"judge:{tmp_path / 'judge'}@0.5"


@pytest.fixture
def run(judge: str) -> Iterator[Callable[..., Any]]:
    """Starts a runner that decides by a rule, with requests in slots that ask for dials."""

    def started(requests: dict[int, SamplingParams]) -> Runner:
        runner = Runner()
        options = {"lenience": {"rule": judge, "allow": ["*"]}}
        server = served_rule.read(options)
        assert server is not None
        v2.install(runner, server)
        runner.load_model()
        for slot, params in requests.items():
            runner.req_states.add(slot, f"request-{slot}", [slot + 1, 7, 9])
            runner.sampler.add_request(slot, params)
            runner.req_states.give(slot, [slot + 5])  # the prefill's
        return runner

    yield started
    v2._runners.clear()


def step(
    runner: Runner, windows: dict[int, list[int]], seed: int, invalid: Any = None
) -> Any:
    """A step over windows, with random states: what it keeps of each slot, and the states."""
    batch = batch_of(runner.req_states, windows)
    states = torch.randn(
        len(batch.input_ids), H, generator=torch.Generator().manual_seed(seed)
    )
    runner.step = states, batch
    output = runner.sample_tokens(invalid)
    kept = runner.sampled.sampled_token_ids.tolist()
    counts = runner.sampled.num_sampled.tolist()
    given = {slot: row[:n] for slot, row, n in zip(windows, kept, counts)}
    starts = batch.cu_num_logits.tolist()
    own = {slot: states[a:b] for slot, a, b in zip(windows, starts, starts[1:])}
    return given, own, getattr(output.model_runner_output, "lenience", {})


def by_itself(
    runner: Runner, rule: str, slot: int, drafted: list[int], states: Any
) -> Any:
    """What a rule says of one window, asked alone."""
    total, prompt = runner.req_states.total[slot], 3
    tokens = runner.req_states.all_token_ids.gpu[slot, :total].tolist()
    params = runner.sampler.sampling_states
    seed = slot + 100
    row = Row(Noise.for_prompt(seed, tokens[:prompt]), tokens, total - prompt)
    probs = logits = None
    if runner.draft_logits is not None:
        temperature = float(params.temperature.gpu[slot]) or 1.0
        probs = torch.softmax(
            runner.draft_logits[slot, : len(drafted)] / temperature, -1
        )[None]
        logits = probs.log() * temperature
    draft = Draft(
        torch.tensor([drafted]),
        torch.tensor([len(drafted)]),
        logits=logits,
        probs=probs,
    )
    reading = Reading((states @ runner.weight)[None], states[None])
    ctx = Context(
        rows=[row], temperature=float(params.temperature.gpu[slot]), window=WINDOW
    )
    parsed = parse_spec(rule)
    (verdict,) = parsed(draft, reading, ctx)
    return verdict


def said_of(
    runner: Runner,
    rules: dict[int, str],
    given: Any,
    states: Any,
    windows: dict[int, list[int]],
) -> Iterator[tuple[int, Verdict]]:
    """What each slot's rule says of its window, as far as which vLLM has kept it."""
    for slot, drafted in windows.items():
        verdict = by_itself(runner, rules[slot], slot, drafted, states[slot])
        kept = verdict.num_accepted
        assert given[slot][:kept] == drafted[:kept] and len(given[slot]) == kept + 1
        yield slot, verdict


def windows_of(runner: Runner, slots: Sequence[int], seed: int) -> dict[int, list[int]]:
    rng = np.random.default_rng(seed)
    return {
        slot: rng.integers(0, V, rng.integers(1, WINDOW + 1)).tolist() for slot in slots
    }


def params(slot: int, rule: str | None, **options: Any) -> SamplingParams:
    extra = None if rule is None else {"lenience": rule}
    given = {
        "temperature": 0,
        "max_tokens": 40,
        "seed": slot + 100,
        "extra_args": extra,
    }
    return SamplingParams(**{**given, **options})


def test_every_place_is_as_this_version_has_it() -> None:
    check_seams(v2.SEAMS)
    named = ("load_model", "finish_requests", "sample", "sample_tokens")
    assert all(callable(getattr(GPUModelRunner, name)) for name in named)


@pytest.mark.parametrize("parts", [1, 2])
def test_greedy_windows_end_as_each_rule_says(
    run: Callable[..., Runner], judge: str, parts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where vLLM decides on a step in parts; strict requests are vLLM's own."""
    monkeypatch.setattr(
        sampling, "get_max_chunk_logits", lambda _v: 1000 if parts == 1 else 7
    )
    rules = {0: judge, 2: "topk:5", 3: "exact", 5: "typical:0.3,0.6", 4: judge}
    runner = run({slot: params(slot, rule) for slot, rule in rules.items()})
    lenient = 0
    for seed in range(12):
        windows = windows_of(runner, list(rules), seed)
        given, states, counts = step(runner, windows, seed)
        for slot, verdict in said_of(runner, rules, given, states, windows):
            drafted, kept = windows[slot], verdict.num_accepted
            best = (states[slot] @ runner.weight).argmax(-1).tolist()
            assert given[slot][kept] == best[kept]
            if rules[slot] == "exact":
                assert all(a == b for a, b in zip(drafted[:kept], best))
                assert f"request-{slot}" not in counts
            lenient += sum(not one for one in verdict.exact[:kept])
            runner.req_states.give(slot, given[slot])
        if seed == 8:  # the slots have room for no more
            break
    assert lenient > 10
    assert (
        counts["request-2"]["passes"] == 9 and counts["request-2"]["kept_leniently"] > 0
    )


def test_sampled_windows_end_as_each_rule_says(
    run: Callable[..., Runner], judge: str
) -> None:
    """The next token is the rule's own draw, also where it is the one that was rejected."""
    rules = {1: judge, 2: "fuzzy:js@0.4", 4: "topk:9,floor=0.2"}
    runner = run(
        {slot: params(slot, rule, temperature=0.8) for slot, rule in rules.items()}
    )
    runner.draft_logits = torch.randn(
        SLOTS, WINDOW, V, generator=torch.Generator().manual_seed(3)
    )
    redrawn = seen = 0
    for seed in range(40):
        windows = windows_of(runner, list(rules), seed)
        given, states, _ = step(runner, windows, seed)
        for slot, verdict in said_of(runner, rules, given, states, windows):
            drafted, kept = windows[slot], verdict.num_accepted
            if kept < len(drafted):
                assert given[slot][kept] == verdict.next_token
                redrawn += verdict.next_token == drafted[kept]
                seen += 1
    assert seen > 10 and redrawn > 0


def test_what_was_not_drafted_is_not_judged(
    run: Callable[..., Runner], judge: str
) -> None:
    """Slots without a request, requests that have got nothing yet, and what a grammar excludes; a
    window is judged up to there."""
    runner = run({slot: params(slot, "topk:31") for slot in (0, 1, 2)})
    runner.req_states.add(3, "fresh", [1, 2])
    runner.sampler.add_request(3, params(3, "topk:31"))
    runner.req_states.add(4, "trial", [1, 2])
    for slot, warmup in ((2, "_warmup_2_"), (1, "_v2_mixed_warmup_1")):
        trial = run({slot: params(slot, "topk:31")})
        trial.req_states.add(0, warmup, [1, 2])
        trial.sampler.add_request(0, params(0, "topk:31", min_p=0.1))
        trial.req_states.give(0, [3])
        given, states, counts = step(trial, {0: [7, 8, 9], slot: [7, 8, 9]}, 1)
        assert set(counts) == {f"request-{slot}"} and given[slot][:3] == [7, 8, 9]
        assert given[0][0] == int((states[0][0] @ trial.weight).argmax())
    windows = {slot: [7, 8, 9] for slot in range(5)}
    invalid = torch.zeros(20, dtype=torch.bool)
    invalid[2] = True  # the second token of the first window
    given, states, counts = step(runner, windows, 1, invalid)
    best = {
        slot: (states[slot] @ runner.weight).argmax(-1).tolist() for slot in windows
    }
    assert given[0] == [7, best[0][1]] and given[1] == [7, 8, 9, best[1][3]]
    assert given[3] == [best[3][0]] and given[4] == [best[4][0]]
    assert "fresh" not in counts and "trial" not in counts
    runner.sampler.add_request(5, params(5, "topk:31"))  # a trial run's, of no request
    kept = {
        id: one["kept_strictly"] + one["kept_leniently"] for id, one in counts.items()
    }
    assert kept == {"request-0": 1, "request-1": 3, "request-2": 3}


def test_a_budget_lasts_over_preemption_and_ends_with_the_request(
    run: Callable[..., Runner], judge: str
) -> None:
    runner = run({2: params(2, "topk:31,budget=4")})
    given, _, _ = step(runner, {2: [7, 8, 9]}, 1)
    runner.req_states.give(2, given[2])
    del runner.req_states.index_to_req_id[
        runner.req_states.req_id_to_index.pop("request-2")
    ]
    so_far = runner.req_states.all_token_ids.gpu[
        2, : runner.req_states.total[2]
    ].tolist()
    runner.req_states.add(5, "request-2", so_far)  # read again into another slot
    runner.req_states.prompt_len.np[5] = 3
    runner.sampler.add_request(5, params(2, "topk:31,budget=4"))
    runner.req_states.give(5, [1])
    # vLLM may drop a step in flight: the last token is another one now
    runner.req_states.all_token_ids.gpu[5, runner.req_states.total[5] - 2] = 30
    _, _, counts = step(runner, {5: [7, 8, 9]}, 2)
    assert counts["request-2"]["kept_leniently"] == 4
    (row,) = v2._runners[-1].deciding.rows.values()
    assert (
        row.prefix == runner.req_states.all_token_ids.gpu[5, : len(row.prefix)].tolist()
    )
    assert row.prefix[-2:] == [30, 1]
    runner.finish_requests(SimpleNamespace(finished_req_ids={"request-2"}))
    runner.req_states.add(1, "request-2", [4, 5])
    runner.sampler.add_request(1, params(2, "topk:31,budget=4"))
    runner.req_states.give(1, [1])
    _, _, counts = step(runner, {1: [7, 8, 9]}, 2)
    assert (
        counts["request-2"]["passes"] == 1
        and counts["request-2"]["kept_leniently"] <= 3
    )


def test_runners_that_deal_rows_out_in_other_ways_are_refused(judge: str) -> None:
    server = served_rule.read({"lenience": {"rule": judge}})
    assert server is not None
    for changes, message in (
        ({"batch_sharder": object()}, "samples parts of a batch on each GPU"),
        (
            {"load_model": lambda: None, "rejection_sampler": object()},
            "samples in its own way",
        ),
    ):
        runner = Runner()
        vars(runner).update(changes)
        v2.install(runner, server)
        with pytest.raises(InputError, match=message):
            runner.load_model()
