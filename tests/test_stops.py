"""Stop conditions and windows that are picked, against definitions in numpy and known answers."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import CONFIGS, VOCABULARY, prompt_lists, quick, save_model
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binomtest
from test_batch import assert_same
from test_mining import ParityTask
from transformers import RepetitionPenaltyLogitsProcessor

from lenience import InputError
from lenience.core.context import Context, Row
from lenience.core.noise import Noise
from lenience.core.profile import Profile
from lenience.core.types import Step, Trace
from lenience.decoding.auto_window import (
    CANDIDATES,
    PILOT_TOKENS,
    Cycle,
    Drafting,
    fastest_window,
    learned_stops,
    stopped,
)
from lenience.decoding.decoder import Decoder
from lenience.decoding.generation import Generation
from lenience.decoding.loading import load_pair
from lenience.decoding.pair import Pair
from lenience.drafting.parsing import parse_stop
from lenience.drafting.registry import STOPS
from lenience.drafting.stops import Fixed, Gate, Heuristic, Likely
from lenience.heads.fitting import FitConfig
from lenience.heads.head import Head, Inputs, load_head
from lenience.mining.search import MineConfig, mine
from lenience.rules.parsing import parse_rule
from lenience.runs.record import MinedSample
from lenience.training.features import compute_features, load_features
from lenience.training.fit import HeadPlan, fit_run
from lenience.training.stop_examples import GATE_PREFIXES, STOP_WINDOW, decided_states

prompts = prompt_lists(5)
SHORT = {**CONFIGS["gpt2"].to_dict(), "n_positions": 16}


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory, llama: Pair) -> Head:
    weight = torch.randn(
        llama.draft.hidden_size, generator=torch.Generator().manual_seed(2)
    )
    made = Head(
        weight,
        1.0,
        Inputs(("draft",), ("previous",)),
        0.5,
        llama.fingerprints,
        role="stop",
    )
    folder = tmp_path_factory.mktemp("stop")
    made.save(folder)
    made.folder = str(folder)
    return made


@pytest.mark.parametrize(
    "spec",
    [
        "fixed",
        "heuristic",
        "confidence:0.4",
        "entropy:0.3",
        "fallback:0.6",
        "entropy:0.3,gamma=0.5",
        "entropy:0.3,rate=0.9",
        "head:run/stop@0.5",
    ],
)
def test_a_spec_comes_back(spec: str) -> None:
    assert str(parse_stop(spec)) == spec
    assert parse_stop(parse_stop(spec)) == parse_stop(spec)


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        (
            "sometimes",
            "there is no stop condition 'sometimes'; there are fixed, heuristic, confidence, "
            "fallback, entropy, head, gate",
        ),
        ("confidence", "confidence needs least"),
        ("confidence:1.5", "must be from 0 to 1"),
        ("entropy:0.3,gamma=0", "must be above 0"),
        ("entropy:0.3,rate=1.5", "rate 1.5: must be in (0, 1]"),
        ("fixed@0.3", "takes no @threshold"),
        ("head:x@7", "must be from 0 to 1"),
        ("confidence:0.4,least=0.9", "confidence's least is given twice"),
        (
            "head:nowhere@0.5",
            "no stop.json in it; `lenience fit RUN --stop` makes RUN/stop",
        ),
    ],
)
def test_wrong_conditions_are_refused(llama: Pair, spec: str, said: str) -> None:
    with pytest.raises(InputError, match=re.escape(said)):
        llama.generate([3, 4], stop=spec)


@given(
    st.integers(0, 10_000),
    st.sampled_from([0.0, 0.7]),
    st.floats(0, 1),
    st.floats(0.05, 2),
)
@quick(30)
def test_chances_are_what_their_definitions_say(
    head: Head, seed: int, temperature: float, least: float, gamma: float
) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(2, 4, 9, generator=generator)
    logits[0, 0, :8] = -torch.inf  # all on one token
    hidden = torch.randn(2, 4, len(head.weight), generator=generator)
    tokens = torch.randint(9, (2, 4), generator=generator)
    ctx, rows = Context(temperature=temperature), [Row(Noise.for_prompt(0, []))] * 2
    p = softmax(logits.numpy() / (temperature or 1))
    chosen = np.take_along_axis(p, tokens.numpy()[..., None], 2)[..., 0]
    logs = np.log(p, out=np.zeros_like(p), where=p > 0)
    bound = 1 - np.sqrt(gamma * -(p * logs).sum(-1).clip(max=0))
    own = 1 / (1 + np.exp(-(hidden.numpy() @ head.weight.numpy() + 1.0)))
    for spec, wanted in (
        (f"confidence:{least}", chosen),
        (f"fallback:{least}", p.max(-1)),
        (f"entropy:{least},gamma={gamma}", bound),
        (f"head:{head.folder}@{least}", own),
    ):
        stop = parse_stop(spec)
        chances = stop.acceptance_probs(logits, hidden, tokens, ctx)
        np.testing.assert_allclose(chances.numpy(), wanted, atol=1e-5)
        ends = (
            1 - np.cumprod(wanted, 1) > least
            if spec.startswith("head")
            else wanted < least
        )
        clear = (
            np.abs(
                (1 - np.cumprod(wanted, 1) if spec.startswith("head") else wanted)
                - least
            )
            > 1e-5
        )
        assert (stop.stop_mask(chances, rows).numpy() == ends)[clear].all()


def test_the_schedule_grows_by_two_and_falls_by_one() -> None:
    row, lengths = Row(Noise.for_prompt(0, [1])), []
    for origin in (
        "bonus",
        "bonus",
        "correction",
        "correction",
        "bonus",
        *["correction"] * 9,
    ):
        lengths.append(Heuristic().max_tokens(row, 8))
        row.last = Step([Trace(1, origin)], lengths[-1], 0, 0, "")
    assert lengths == [5, 7, 8, 7, 6, 8, 7, 6, 5, 4, 3, 2, 1, 1]
    # nothing was drafted: there was no room
    row.last = Step([Trace(1, "bonus")], 0, 0, 0, "")
    assert Heuristic().max_tokens(row, 8) == 1


@given(
    prompts,
    st.integers(0, 9),
    st.sampled_from([name for name in STOPS if name != "gate"]),
    st.sampled_from(["exact", "topk:2", "speculative"]),
    st.integers(1, 4),
)
@quick(20)
def test_a_stop_neither_changes_strict_answers_nor_depends_on_company(
    llama: Pair,
    head: Head,
    asked: list[list[int]],
    window: int,
    name: str,
    rule: str,
    size: int,
) -> None:
    spec = {
        "confidence": "confidence:0.03",
        "fallback": "fallback:0.03",
        "entropy": "entropy:0.2,rate=0.9",
        "head": f"head:{head.folder}@0.6",
    }.get(name, name)
    options = {"rule": rule, "window": window, "stop": spec, "max_new_tokens": 30}
    together = llama.generate_batch(asked, batch_size=size, **options)
    assert_same(together, [llama.generate(prompt, **options) for prompt in asked])
    if rule != "topk:2":
        assert [out.tokens for out in together] == [
            llama.generate(prompt, rule="target", max_new_tokens=30).tokens
            for prompt in asked
        ]


@pytest.mark.parametrize("rule", ["target", "draft", "exact"])
def test_nothing_is_drafted_where_nothing_may_be(llama: Pair, rule: str) -> None:
    out = llama.generate(
        [3, 4, 5], rule=rule, window=0, stop="heuristic", max_new_tokens=20
    )
    assert out.drafted == 0 and len(out.tokens) == max(
        out.target_passes, out.draft_passes
    )


@pytest.mark.parametrize("name", ["confidence", "entropy", "head"])
def test_windows_end_where_the_definition_says(
    llama: Pair, head: Head, name: str
) -> None:
    """Of each window, by the draft's own passes over the whole of it."""
    spec = {
        "confidence": "confidence:0.03",
        "entropy": "entropy:0.2",
        "head": f"head:{head.folder}@0.6",
    }[name]
    stop, prefix, lengths = parse_stop(spec), [5, 9, 2], set()
    for step in llama.stream(
        prefix, rule="topk:9", window=7, stop=spec, max_new_tokens=60
    ):
        ids, logits, states = list(prefix), [], []
        for _ in range(step.drafted):
            with torch.inference_mode():
                out = llama.draft.model(torch.tensor([ids]), output_hidden_states=True)
            logits.append(out.logits[0, -1])
            states.append(out.hidden_states[-1][0, -1])
            ids.append(int(out.logits[0, -1].argmax()))
        if step.drafted:
            tokens = torch.tensor([ids[len(prefix) :]])
            ends = stop.stop_mask(
                stop.acceptance_probs(
                    torch.stack(logits)[None],
                    torch.stack(states)[None],
                    tokens,
                    Context(),
                ),
                [Row(Noise.for_prompt(0, []))],
            )[0].tolist()
            assert not any(ends[:-1])
            room = 60 - (len(prefix) - 3) - 1
            assert (
                ends[-1]
                or step.drafted == min(7, room)
                or ids[-1] in llama.target.eos_ids
            )
            lengths.add(step.drafted)
        prefix += step.tokens
    assert len(lengths) > 1, "some windows were cut, others not"


def test_a_stop_is_fitted_to_what_the_target_rejects(
    llama: Pair, tmp_path: Path
) -> None:
    mine(
        llama,
        ParityTask(),
        tmp_path,
        MineConfig(answers_only=True, limit=30, max_new_tokens=20),
    )
    inputs = Inputs(("draft",), ("previous",))
    compute_features(llama, tmp_path, inputs, "stop")
    examples = load_features(tmp_path, inputs, "stop")
    x, rejected, samples = examples.x, ~examples.harmless, examples.samples
    records = [
        json.loads(line)
        for line in (tmp_path / "journal.jsonl").read_text().splitlines()
    ]
    at = 0
    for i, record in enumerate(records):
        with torch.inference_mode():
            out = llama.draft.model(
                torch.tensor([record["prompt_ids"] + record["response_ids"]]),
                output_hidden_states=True,
            )
        begin, n = len(record["prompt_ids"]) - 1, len(record["response_ids"])
        wanted = out.logits[0, begin : begin + n].argmax(-1).tolist()
        assert rejected[at : at + n].tolist() == [
            a != b for a, b in zip(wanted, record["response_ids"])
        ]
        np.testing.assert_allclose(
            x[at : at + n], out.hidden_states[-1][0, begin : begin + n], atol=1e-4
        )
        assert (samples[at : at + n] == i).all()
        at += n
    assert at == len(x)
    plan = HeadPlan(inputs, tmp_path / "stop", FitConfig(role="stop"))
    made = fit_run(llama, tmp_path, plan)
    assert made.role == "stop" and made.threshold == 0.5
    assert (
        llama.generate([3, 4], stop=f"head:{tmp_path / 'stop'}@0.9").tokens
        == llama.generate([3, 4]).tokens
    )
    with pytest.raises(InputError, match=r"no judge\.json"):
        llama.generate([3, 4], rule=f"judge:{tmp_path / 'stop'}")


@pytest.mark.parametrize("token", ["previous", "draft"])
def test_a_stop_of_drawn_answers_learns_what_decoding_rejects(
    llama: Pair, tmp_path: Path, token: str
) -> None:
    drawn = {"temperature": 1.0, "top_k": 8, "top_p": 0.9}
    config = MineConfig(limit=20, max_new_tokens=20, draw_seed=5, **drawn)
    mine(llama, ParityTask(), tmp_path, config)
    compute_features(llama, tmp_path, Inputs(("draft",), (token,)), "stop")
    examples = load_features(tmp_path, Inputs(("draft",), (token,)), "stop")
    rejected, at, seen = (~examples.harmless).tolist(), 0, [0, 0]
    for record in map(
        json.loads, (tmp_path / "journal.jsonl").read_text().splitlines()
    ):
        out = llama.generate(
            record["prompt_ids"],
            rule="exact",
            window=8,
            seed=5,
            max_new_tokens=20,
            **drawn,
        )
        assert out.tokens == record["response_ids"]
        for i, entry in enumerate(out.trace):
            if entry.origin != "bonus":  # no token was drafted for these
                assert rejected[at + i] == (entry.origin == "correction"), (
                    record["id"],
                    i,
                )
                seen[rejected[at + i]] += 1
        at += len(out.tokens)
    assert at == len(rejected) and min(seen) > 20


def decided_by_topk(
    pair: Pair, ids: list[int], new: int, k: int, most: int
) -> list[tuple]:
    """Greedy decoding with topk:k in windows of `most`, through transformers' models alone: of each
    place where the draft proposed a token its states before and after it, and whether the token was
    rejected."""

    def last(lm, ids: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        with torch.inference_mode():
            out = lm.model(torch.tensor([ids]), output_hidden_states=True)
        return out.logits[0, -1], out.hidden_states[-1][0, -1]

    ids, start, window, decided = list(ids), len(ids), 0, list[tuple]()
    while len(ids) - start < new and not (
        len(ids) > start and ids[-1] in pair.target.eos_ids
    ):
        target, _ = last(pair.target, ids)
        if window == most or len(ids) - start == new - 1:
            ids, window = [*ids, int(target.argmax())], 0  # what follows a whole window
            continue
        draft, state = last(pair.draft, ids)
        token = int(draft.argmax())
        rejected = token not in target.topk(k).indices.tolist()
        decided.append((state, last(pair.draft, [*ids, token])[1], rejected))
        ids.append(int(target.argmax()) if rejected else token)
        window = 0 if rejected else window + 1
    return decided


@pytest.mark.parametrize(("token", "which"), [("previous", 0), ("draft", 1)])
def test_a_stop_learns_what_the_rule_rejects_that_will_decode(
    llama: Pair, tmp_path: Path, token: str, which: int
) -> None:
    mine(
        llama,
        ParityTask(),
        tmp_path,
        MineConfig(answers_only=True, limit=30, max_new_tokens=20),
    )
    inputs = Inputs(("draft",), (token,))
    compute_features(llama, tmp_path, inputs, "stop", of=parse_rule("topk:2"))
    examples = load_features(tmp_path, inputs, "stop", of=parse_rule("topk:2"))
    records = [
        json.loads(line)
        for line in (tmp_path / "journal.jsonl").read_text().splitlines()
    ]
    longest = max(len(record["response_ids"]) for record in records)
    for i, record in enumerate(records):
        decided = decided_by_topk(llama, record["prompt_ids"], longest, 2, STOP_WINDOW)
        mine_ = examples.samples == i
        assert (~examples.harmless[mine_]).tolist() == [
            rejected for *_, rejected in decided
        ]
        wanted = torch.stack([states[which] for *states, _ in decided])
        np.testing.assert_allclose(examples.x[mine_], wanted, atol=1e-4)
    made = fit_run(
        llama,
        tmp_path,
        HeadPlan(
            inputs, tmp_path / "stop", FitConfig(role="stop"), of=parse_rule("topk:2")
        ),
    )
    assert made.metrics["of"] == "topk:2"
    options = {"rule": "topk:2", "stop": f"head:{tmp_path / 'stop'}@0.5"}
    assert llama.generate([3, 4], **options).tokens


def test_a_stop_may_read_the_state_after_what_is_drafted(
    llama: Pair, tmp_path: Path
) -> None:
    """As SpecDec++'s does; the token is the draft's, also where the answer has another."""
    mine(
        llama,
        ParityTask(),
        tmp_path,
        MineConfig(answers_only=True, limit=8, max_new_tokens=20),
    )
    inputs = Inputs(("draft",), ("draft",))
    compute_features(llama, tmp_path, inputs, "stop")
    examples, wanted = load_features(tmp_path, inputs, "stop"), []
    for record in map(
        json.loads, (tmp_path / "journal.jsonl").read_text().splitlines()
    ):
        for i in range(len(record["response_ids"])):
            ids = torch.tensor([record["prompt_ids"] + record["response_ids"][:i]])
            with torch.inference_mode():
                token = llama.draft.model(ids).logits[:, -1:].argmax(-1)
                out = llama.draft.model(
                    torch.cat([ids, token], 1), output_hidden_states=True
                )
            wanted.append(out.hidden_states[-1][0, -1])
    np.testing.assert_allclose(examples.x, torch.stack(wanted), atol=1e-4)
    assert not examples.harmless.all()
    with pytest.raises(
        InputError, match=re.escape("mentored:0.2 rejects drawn tokens")
    ):
        compute_features(llama, tmp_path, inputs, "stop", of=parse_rule("mentored:0.2"))


def test_an_answer_of_which_nothing_was_drafted_teaches_a_stop_nothing(
    llama: Pair,
) -> None:
    answers = {"target": None, "final": None, "reference": None}
    cost = {"target_passes": 1, "target_tokens": 3, "draft_tokens": 0, "seconds": 0.0}
    record = {"id": "a", "prompt_ids": [3, 4], "response_ids": [7], "final_ids": [7]}
    one = MinedSample.read(
        {**record, "mismatches": [], "answers": answers, "cost": cost}, "here"
    )
    ((x, rejected),) = decided_states(
        llama, [one], Inputs(("draft",), ("previous",)), parse_rule("topk:2")
    )
    assert x.shape == (0, llama.draft.hidden_size) and rejected.shape == (0,)


def test_what_a_stop_learned_of_one_head_is_not_taken_for_another_at_its_path(
    llama: Pair, tmp_path: Path
) -> None:
    mine(
        llama,
        ParityTask(),
        tmp_path,
        MineConfig(answers_only=True, limit=6, max_new_tokens=20),
    )
    inputs, width = Inputs(("draft",), ("previous",)), llama.target.hidden_size
    rule, harmless = f"judge:{tmp_path / 'judge'}@0.5", list[np.ndarray]()
    for bias in (9.0, -9.0):
        reads = Inputs(("target",), ("previous",))
        Head(torch.zeros(width), bias, reads, 0.5, llama.fingerprints).save(
            tmp_path / "judge"
        )
        compute_features(llama, tmp_path, inputs, "stop", of=parse_rule(rule))
        harmless.append(
            load_features(tmp_path, inputs, "stop", of=parse_rule(rule)).harmless
        )
    assert harmless[0].all() and not harmless[1].all()


def test_an_automatic_window_is_picked_once_and_said(llama: Pair) -> None:
    asked = [[3, 4, 5], [6, 7], [8]]
    outs = llama.generate_batch(asked, batch_size=2, window="auto", max_new_tokens=20)
    picked = outs[0].window
    assert picked in CANDIDATES and {out.window for out in outs} == {picked}
    settled = llama.settle(asked, batch_size=2, window="auto", max_new_tokens=20)
    assert settled == Decoder.of(window=picked, max_new_tokens=20)
    assert_same(
        outs,
        [llama.generate(prompt, window=picked, max_new_tokens=20) for prompt in asked],
    )
    assert llama.generate([1], rule="target", window="auto").window == 0
    assert llama.generate([1], window=5).window == 5
    assert llama.settle([], window="auto").window == 0
    assert llama.settle([[3]], window=5, seed=4) == Decoder.of(window=5, seed=4)
    with pytest.raises(InputError, match=r"window .some.: must be a whole number"):
        llama.generate([1], window="some")


@pytest.mark.parametrize(("cost", "picked"), [(1e-6, 32), (1.0, 0), (0.3, 1)])
def test_the_window_with_most_tokens_a_second_is_picked(
    llama: Pair, monkeypatch: pytest.MonkeyPatch, cost: float, picked: int
) -> None:
    """A draft of the target itself, all of whose tokens are kept; a pass costs 1, a drafted token
    `cost`, beyond one four times."""
    pair = Pair(llama.target, llama.target, "itself")
    seconds = {w: 1 + cost * (w if w < 2 or cost < 0.1 else 4 * w) for w in CANDIDATES}
    seconds[0] = 1.0 if cost < 1 else 0.4
    monkeypatch.setattr(
        "lenience.decoding.auto_window.cycle_seconds", lambda *_: seconds
    )
    assert pair.settle([[3, 4, 5]], window="auto", max_new_tokens=40).window == picked


@pytest.mark.parametrize(
    ("asking", "window", "speed"),
    # by hand: of cycles that drafted 32 and kept 32, 2 and 2 of them, the window 2 makes 3 + 6
    # tokens in 3 (1 + 2 / 4) s; ended at 32, 3 and 2 they make 3 + 36 in 3 + 37 / 4 s
    [(0.0, 32, 39 / (3 + 37 / 4)), (0.5, 2, 9 / 4.5)],
)
def test_a_stop_is_worth_what_it_spares(
    asking: float, window: int, speed: float
) -> None:
    seconds = {w: 1 + w / 4 for w in (0, 2, 32)}
    fixed = fastest_window([(32, 32), (32, 2), (32, 2)], seconds, Fixed())
    assert (fixed.window, fixed.tokens_per_second) == (2, 9 / 4.5)
    slower = {w: taken + asking * w for w, taken in seconds.items()}
    by_stop = stopped([(32, 32), (3, 2), (2, 2)], slower, Likely("stop", 0.5))
    best = max(fixed, by_stop, key=lambda one: one.tokens_per_second)
    assert best.window == window and best.tokens_per_second == pytest.approx(speed)


@pytest.mark.parametrize("bonus", [True, False])
def test_narrow_windows_are_estimated_from_wide_ones(bonus: bool) -> None:
    """Stretches that are kept are long here and short there, so that where a window starts tells
    how much of it is kept."""
    rng = np.random.default_rng(0)
    stretches = np.where(rng.random(4000) < 0.5, 0, rng.integers(8, 20, 4000))
    accepts = [flag for n in stretches for flag in [*[True] * n, False]]

    def cycles(window: int) -> list[Cycle]:
        at, found = 0, []
        while at + window < len(accepts):
            drafted = accepts[at : at + window]
            kept = drafted.index(False) if False in drafted else window
            found.append((window, kept))
            at += kept + (bonus or kept < window)
        return found

    stop = Fixed() if bonus else Gate("gate", 0.5)
    for window in (1, 2, 4, 8):
        narrow = cycles(window)
        tokens = sum(kept + (bonus or kept < window) for _, kept in narrow)
        estimated = fastest_window(cycles(32), {window: 1.0}, stop).tokens_per_second
        assert estimated == pytest.approx(tokens / len(narrow), rel=0.02), window


def test_an_automatic_window_takes_the_stop_of_its_own_judge_alone(
    llama: Pair, judge: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(judge[len("judge:") : -len("@0.5")], tmp_path / "judge")
    rule = f"judge:{tmp_path / 'judge'}@0.5"
    mine(
        llama,
        ParityTask(),
        tmp_path,
        MineConfig(answers_only=True, limit=20, max_new_tokens=20),
    )
    plan = HeadPlan(
        Inputs(("draft",), ("previous",)), tmp_path / "stop", FitConfig(role="stop")
    )
    curve = {w: 1.0 + w for w in CANDIDATES}
    monkeypatch.setattr("lenience.decoding.auto_window.cycle_seconds", lambda *_: curve)
    asked: dict = {"rule": rule, "window": "auto", "max_new_tokens": 40}
    fit_run(llama, tmp_path, plan)  # of what the strict rule rejects
    assert learned_stops(parse_rule(rule)) == []
    fit_run(llama, tmp_path, replace(plan, of=parse_rule(rule)))
    found = learned_stops(parse_rule(rule))
    assert {stop.path for stop in found} == {str(tmp_path / "stop")} and len(found) == 3
    tried: list[tuple[Likely, list[Cycle]]] = []
    fastest = found[-1]

    def best(cycles: list[Cycle], seconds: dict[int, float], stop: Likely) -> Drafting:
        tried.append((stop, cycles))
        return Drafting(32, stop, 99.0 if stop == fastest else 0.0)

    monkeypatch.setattr("lenience.decoding.auto_window.stopped", best)
    out = Pair(llama.target, llama.draft, "anew").generate([3, 4, 5], **asked)
    assert (out.window, out.stop) == (32, str(fastest))
    assert [stop for stop, _ in tried] == found
    again = llama.generate(
        [3, 4, 5], rule=rule, window=32, stop=str(fastest), max_new_tokens=40
    )
    assert out.tokens == again.tokens
    for stop, cycles in tried:
        pilot = llama.generate(
            [3, 4, 5], rule=rule, window=32, stop=str(stop), max_new_tokens=PILOT_TOKENS
        )
        assert sum(1 + kept for _, kept in cycles) >= len(pilot.tokens)
        assert sum(drafted for drafted, _ in cycles) == pilot.drafted
    # a condition that is named stays
    named = Pair(llama.target, llama.draft, "anew").settle(
        [[3]], **asked, stop="confidence:0.2"
    )
    assert str(named.stop) == "confidence:0.2"


def test_a_profile_accounts_for_all_of_the_time(llama: Pair) -> None:
    profile = Profile()
    out = llama.generate([3, 4, 5], profile=profile, max_new_tokens=60)
    assert profile.cycles == out.target_passes
    assert all(seconds > 0 for seconds in profile.seconds.values())
    told = sum(profile.seconds.values())
    # an answer begins after its cycle does
    assert 0.5 * out.seconds < told < out.seconds + 0.01
    before = dict(profile.seconds)
    llama.generate([3, 4, 5], profile=profile, rule="target", max_new_tokens=5)
    assert (
        profile.seconds["draft"] == before["draft"]
        and profile.seconds["target"] > before["target"]
    )


def test_a_stop_is_fitted_to_what_decoding_drafts(checkpoints, tmp_path: Path) -> None:
    """With the target's logits processors, as transformers applies them."""
    pair = load_pair(*checkpoints("llama"), dtype="float32", compile=False)
    pair.target.model.generation_config.repetition_penalty = 2.0
    mine(
        pair,
        ParityTask(),
        tmp_path,
        MineConfig(answers_only=True, limit=8, max_new_tokens=20),
    )
    inputs = Inputs(("draft",), ("previous",))
    compute_features(pair, tmp_path, inputs, "stop")
    rejected = ~load_features(tmp_path, inputs, "stop").harmless
    penalty, wanted, unprocessed = RepetitionPenaltyLogitsProcessor(2.0), [], []
    for record in map(
        json.loads, (tmp_path / "journal.jsonl").read_text().splitlines()
    ):
        ids = list(record["prompt_ids"])
        for token in record["response_ids"]:
            with torch.inference_mode():
                logits = pair.draft.model(torch.tensor([ids])).logits[:, -1]
            wanted.append(
                int(penalty(torch.tensor([ids]), logits.clone()).argmax()) != token
            )
            unprocessed.append(int(logits.argmax()) != token)
            ids.append(token)
    assert rejected.tolist() == wanted != unprocessed


def step(drafted: int, kept: int) -> Step:
    trace = [Trace(1, "draft")] * kept + [Trace(2, "correction")]
    return Step(
        trace, drafted=drafted, accepted_exact=kept, accepted_lenient=0, text=""
    )


def test_a_threshold_is_adapted_to_what_is_accepted() -> None:
    """By hand, after AdaEDL (Zhang 2023's constants): half of the share before and half of the last
    cycle's, and a tenth of a step of 0.01 towards the rate."""
    stop, row = parse_stop("entropy:0.4,rate=0.9"), Row(Noise.for_prompt(0, []))
    assert stop.max_tokens(row, 8) == 8 and not row.memory
    wanted = [(4, 4, 0.399), (4, 2, 0.4), (2, 2, 0.401), (2, 2, 0.4), (0, 0, 0.4)]
    # shares of late: 1, 0.75, 0.875, 0.9375
    for drafted, kept, least in wanted:
        row.last = step(drafted, kept)
        stop.max_tokens(row, 8)
        assert row.memory[stop].least == pytest.approx(least)
    chances = torch.tensor([[0.3999, 0.4001]])
    assert stop.stop_mask(chances, [row]).tolist() == [[True, False]]
    row.memory[stop] = row.memory[stop]._replace(least=0.5)
    assert stop.stop_mask(chances, [row]).tolist() == [[True, True]]


def bild(
    pair: Pair, ids: list[int], fallback: float, rollback: float, new: int
) -> list[int]:
    """BiLD, greedy, through transformers' models alone: the small model writes on while it is sure;
    where it is not the large one reads all, takes back the first token that surprises it, and
    writes one itself."""

    def probs(lm, ids: list[int]) -> torch.Tensor:
        with torch.inference_mode():
            return lm.model(torch.tensor([ids])).logits[0, -1].double().softmax(-1)

    ids, start, eos = list(ids), len(ids), pair.target.eos_ids
    settled = start
    while settled - start < new and not (settled > start and ids[settled - 1] in eos):
        small = probs(pair.draft, ids)
        full = len(ids) - start == new - 1 or (len(ids) > settled and ids[-1] in eos)
        if not full and len(ids) - settled < 8 and small.max() >= fallback:
            ids.append(int(small.argmax()))
            continue
        for place in range(settled, len(ids)):
            large = probs(pair.target, ids[:place])
            if -large[ids[place]].log() > rollback:
                ids = ids[:place]
                break
        if len(ids) == settled or ids[-1] not in eos:
            ids.append(int(probs(pair.target, ids).argmax()))
        settled = len(ids)
    return ids[start:]


@pytest.mark.parametrize(
    ("fallback", "rollback"), [(0.3, 3.0), (0.2, 1.0), (0.9, 2.0), (0.0, 4.0)]
)
def test_fallback_and_rollback_are_bild(
    llama: Pair, fallback: float, rollback: float
) -> None:
    options = {"rule": f"rollback:{rollback}", "stop": f"fallback:{fallback}"}
    for prompt in ([5, 9], [7], [1, 2, 3, 4, 5, 6]):
        out = llama.generate(prompt, **options, window=8, max_new_tokens=30)
        assert out.tokens == bild(llama, prompt, fallback, rollback, 30)


# ---- SPRINTER's gate


@pytest.fixture(scope="module", params=["draft", "previous"])
def gate(request, tmp_path_factory: pytest.TempPathFactory, llama: Pair) -> str:
    weight = (
        torch.randn(llama.draft.hidden_size, generator=torch.Generator().manual_seed(4))
        / 2
    )
    folder = tmp_path_factory.mktemp("gate")
    Head(
        weight,
        0.5,
        Inputs(("draft",), (request.param,)),
        0.5,
        llama.fingerprints,
        role="gate",
    ).save(folder)
    return str(folder)


def sprint(
    pair: Pair, folder: str, prompt: list[int], threshold: float, bonus: bool
) -> tuple[list[int], list[str], int]:
    """SPRINTER, greedy, through transformers' models alone, token by token, or with the target's
    own token after a doubted one that is right: 30 new tokens, where each came from, and how often
    the target was asked."""
    head, n, eos = load_head(folder, "gate"), 30, pair.target.eos_ids

    def look(lm, ids: list[int]) -> tuple[int, torch.Tensor]:
        with torch.inference_mode():
            out = lm.model(torch.tensor([ids]), output_hidden_states=True)
        return int(out.logits[0, -1].argmax()), out.hidden_states[-1][0, -1]

    ids, origins, asked, window = list(prompt), [], 0, 0
    while len(ids) - len(prompt) < n and not (
        origins and ids[-1] in pair.target.eos_ids
    ):
        token, before = look(pair.draft, ids)
        states = {"previous": before, "draft": look(pair.draft, [*ids, token])[1]}
        score = torch.sigmoid(
            torch.cat([states[which] for which in head.inputs.tokens]) @ head.weight
            + head.bias
        )
        window += 1
        if score >= threshold:
            ids.append(token)
            origins.append("draft-trusted")
            continue
        asked += 1
        for back in range(1, window):  # the target has read them now
            place = len(ids) - back
            origins[-back] = (
                "draft"
                if look(pair.target, ids[:place])[0] == ids[place]
                else "draft-lenient"
            )
        best, _ = look(pair.target, ids)
        ids.append(best)
        origins.append("draft" if best == token else "correction")
        window = 0
        if bonus and best == token and len(ids) - len(prompt) < n and best not in eos:
            ids.append(look(pair.target, ids)[0])
            origins.append("bonus")
    return ids[len(prompt) :], origins, asked


@pytest.mark.parametrize("bonus", [False, True])
@pytest.mark.parametrize("threshold", [0.3, 0.5, 0.7])
def test_a_gate_is_sprinter(
    gate: str, llama: Pair, threshold: float, bonus: bool
) -> None:
    asked = [[5, 9], [7], [1, 2, 3, 4, 5, 6]]
    stop = (
        f"gate:{gate}@{threshold},bonus=true" if bonus else f"gate:{gate}@{threshold}"
    )
    options = {"stop": stop, "window": 64, "max_new_tokens": 30}
    outs = llama.generate_batch(asked, batch_size=2, **options)
    for prompt, out in zip(asked, outs):
        tokens, origins, passes = sprint(llama, gate, prompt, threshold, bonus)
        assert out.tokens == tokens
        assert [entry.origin for entry in out.trace] == origins
        assert out.target_passes == passes
        assert llama.generate(prompt, **options).tokens == tokens, "alone as in company"


def test_where_the_draft_is_full_a_gate_asks_the_target(
    tmp_path: Path, checkpoints
) -> None:
    """Nothing is drafted there, and nothing would be kept on a gate's word for ever."""
    short = save_model(tmp_path / "short", CONFIGS["gpt2"].from_dict(SHORT), seed=1)
    pair = load_pair(checkpoints("gpt2")[0], str(short), dtype="float32", compile=False)
    inputs = Inputs(("draft",), ("previous",))
    weight = torch.zeros(pair.draft.hidden_size)
    Head(weight, 9.0, inputs, 0.5, pair.fingerprints, role="gate").save(
        tmp_path / "gate"
    )
    out = pair.generate(
        [3, 4, 5], stop=f"gate:{tmp_path / 'gate'}@0.5", window=4, max_new_tokens=40
    )
    whole = pair.generate(
        out.prompt_tokens + out.tokens[:20], rule="target", max_new_tokens=20
    )
    assert out.tokens[20:] == whole.tokens[: len(out.tokens) - 20]
    assert all(entry.origin == "bonus" for entry in out.trace[20:])


def test_what_no_gate_objects_to_is_never_read_by_the_target(
    gate: str, llama: Pair
) -> None:
    options = {
        "stop": f"gate:{gate}@0.0",
        "max_new_tokens": 40,
        "temperature": 0.8,
        "top_k": 20,
    }
    options["seed"] = 0
    for window in (8, 64):
        out = llama.generate([5, 9], window=window, **options)
        assert out.target_passes == out.target_tokens == 0
        assert {entry.origin for entry in out.trace} == {"draft-trusted"}
        assert (
            out.tokens
            == llama.generate(
                [5, 9], rule="draft", **{**options, "stop": "fixed"}
            ).tokens
        )
        assert out.accepted_exact == 0 and out.accepted_lenient == len(out.tokens)


@pytest.mark.parametrize("rule", ["exact", "speculative"])
def test_a_gate_that_always_objects_is_a_window_of_one(
    gate: str, llama: Pair, rule: str
) -> None:
    options = {"rule": rule, "temperature": 0.9, "max_new_tokens": 30, "seed": 2}
    out = llama.generate(
        [5, 9], stop=f"gate:{gate}@1.0,bonus=true", window=8, **options
    )
    one = llama.generate([5, 9], window=1, **options)
    assert (out.tokens, out.target_passes) == (one.tokens, one.target_passes)


def test_tokens_that_models_read_are_counted(gate: str, llama: Pair) -> None:
    prompt = [5, 9, 3]
    options = {
        "stop": f"gate:{gate}@0.5,bonus=true",
        "window": 64,
        "max_new_tokens": 30,
    }
    out = llama.generate(prompt, **options)
    read = sum(step.target_tokens for step in llama.stream(prompt, **options))
    last = max(
        i
        for i, entry in enumerate(out.trace)
        if entry.origin in ("correction", "bonus")
    )
    rejected = sum(entry.origin == "correction" for entry in out.trace)
    assert out.target_tokens == read == len(prompt) + last + rejected, (
        "all before the last answer of the target, and what it rejected"
    )
    plain = llama.generate(prompt, rule="target", max_new_tokens=30)
    assert (plain.target_tokens, plain.draft_tokens) == (
        len(prompt) + len(plain.tokens) - 1,
        0,
    )
    alone = llama.generate(prompt, rule="draft", max_new_tokens=30)
    assert (alone.target_tokens, alone.draft_tokens) == (
        0,
        len(prompt) + len(alone.tokens) - 1,
    )


def test_half_of_an_interleaved_prefix_is_the_drafts(
    llama: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outs = list[Generation]()
    generate = Pair.generate_batch

    def kept(pair: Pair, prompts: list, decoder: Decoder, **more) -> list[Generation]:
        for out in (made := list(generate(pair, prompts, decoder, **more))):
            outs.extend([out] if str(decoder.rule).startswith("random") else [])
        return made

    mine(
        llama,
        ParityTask(),
        tmp_path,
        MineConfig(answers_only=True, limit=12, max_new_tokens=24),
    )
    monkeypatch.setattr(Pair, "generate_batch", kept)
    compute_features(llama, tmp_path, Inputs(("draft",), ("previous",)), "gate")
    origins = [entry.origin.partition("-")[0] for out in outs for entry in out.trace]
    of_draft = sum(origin == "draft" for origin in origins)
    assert len(outs) == 12 and binomtest(of_draft, len(origins)).pvalue > 1e-3


def test_without_a_rule_a_doubted_token_is_verified_as_sprinter_does(gate: str) -> None:
    assert str(Decoder.of({"stop": f"gate:{gate}"}).rule) == "speculative"
    assert str(Decoder.of({"stop": f"gate:{gate}", "rule": "exact"}).rule) == "exact"
    assert str(Decoder.of({"stop": "confidence:0.4"}).rule) == "exact"
    for rule in ("exact", "speculative", "topk:3"):
        one = Decoder.of(rule=rule, stop=f"gate:{gate}@0.5")
        assert Decoder.of(one.changed()) == one and Decoder.parse(str(one)) == one
    assert str(parse_stop("gate:run/gate@0.5")) == "gate:run/gate,bonus=false@0.5"
    assert (
        str(parse_stop("gate:run/gate@0.5,bonus=true"))
        == "gate:run/gate,bonus=true@0.5"
    )
    assert parse_stop(str(parse_stop("gate:run/gate"))) == parse_stop("gate:run/gate")


def test_a_gate_learns_from_four_kinds_of_prefix(llama: Pair, tmp_path: Path) -> None:
    mine(
        llama,
        ParityTask(),
        tmp_path,
        MineConfig(answers_only=True, limit=12, max_new_tokens=24),
    )
    for tokens in (("draft",), ("previous",)):
        inputs = Inputs(("draft",), tokens)
        compute_features(llama, tmp_path, inputs, "gate")
    examples = load_features(tmp_path, inputs, "gate", tau=1.2)
    x, important, samples = examples.x, ~examples.harmless, examples.samples
    assert np.bincount(samples).tolist() == [4 * GATE_PREFIXES] * 12
    stricter = ~load_features(tmp_path, inputs, "gate", tau=1.0).harmless
    assert (stricter >= important).all() and 0 < important.sum() < stricter.sum() < len(
        x
    )
    # the prompt is one prefix, after which several tokens are drawn; their states tell them apart
    record = json.loads((tmp_path / "journal.jsonl").read_text().splitlines()[0])
    after = load_features(tmp_path, Inputs(("draft",), ("draft",)), "gate").x
    ids, drawn = record["prompt_ids"], set[int]()
    with torch.inference_mode():
        draft, target = (
            lm.model(torch.tensor([ids]), output_hidden_states=True)
            for lm in (llama.draft, llama.target)
        )
        each = torch.tensor([[*ids, token] for token in range(VOCABULARY)])
        states = llama.draft.model(each, output_hidden_states=True).hidden_states[-1][
            :, -1
        ]
    p, q = (softmax(out.logits[0, -1].double().numpy()) for out in (target, draft))
    for i in range(GATE_PREFIXES):
        np.testing.assert_allclose(x[i], draft.hidden_states[-1][0, -1], atol=1e-4)
        token = int((states - torch.tensor(after[i])).abs().sum(1).argmin())
        assert stricter[i] == (q[token] > p[token])
        drawn.add(token)
    assert len(drawn) > 1
    config = FitConfig(kind="adam", role="gate")
    made = fit_run(
        llama, tmp_path, HeadPlan(inputs, tmp_path / "gate", config, tau=1.2)
    )
    assert made.role == "gate" and made.threshold == 0.5 and made.metrics["tau"] == 1.2
    again = load_head(tmp_path / "gate", "gate")
    assert torch.equal(again.weight, made.weight)
    assert llama.generate(
        [3, 4], stop=f"gate:{tmp_path / 'gate'}", max_new_tokens=10
    ).tokens


def test_a_gate_reads_one_state_of_the_draft(llama: Pair, tmp_path: Path) -> None:
    for name, inputs in (
        ("both", Inputs(("draft",), ("draft", "previous"))),
        ("target", Inputs(("target",), ("draft",))),
    ):
        width = llama.draft.hidden_size * len(inputs.tokens)
        Head(
            torch.zeros(width), 0.0, inputs, 0.5, llama.fingerprints, role="gate"
        ).save(tmp_path / name)
        with pytest.raises(InputError, match="reads one state of the draft"):
            llama.generate([1], stop=f"gate:{tmp_path / name}@0.5")
