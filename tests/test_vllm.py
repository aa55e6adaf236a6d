"""Rules in vLLM: one engine of the built-in pair, asked in many ways; it is held against
`transformers` and against our own loop. Runs where vLLM is installed: see docs/vllm.md."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import groupby
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

reason = "needs vLLM, which is installed in an environment of its own: docs/vllm.md"
vllm = pytest.importorskip("vllm", reason=reason)

from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.exceptions import VLLMValidationError
from vllm.platforms import current_platform

from lenience.certification.certify import certify
from lenience.certification.question import CertifyConfig
from lenience.certification.tune import TuneConfig, tune
from lenience.core.errors import InputError
from lenience.core.files import EMBEDDED
from lenience.core.progress import silent
from lenience.decoding.decoder import Decoder
from lenience.decoding.loading import load_pair
from lenience.decoding.pair import Pair
from lenience.evaluation.compare import CompareConfig, Comparison
from lenience.heads.head import Head, Inputs
from lenience.integrations.engine_rules import rule as served_rule
from lenience.integrations.vllm import hooks, v1
from lenience.integrations.vllm.checks import check, check_seams, vllm_version
from lenience.integrations.vllm.counts import COUNTED
from lenience.integrations.vllm.engine import DIALOGUES, EngineUse, VllmPair
from lenience.mining.search import MineConfig, mine
from lenience.runs.journal import Journal
from lenience.runs.record import mined_samples, read_run
from lenience.tasks import Sample, load_task, take
from lenience.training.features import compute_features
from lenience.training.fit_drafter import DrafterPlan, fit_drafter

# engines of several tests run beside each other: each has one thread, and none a core of its own
os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
os.environ["NUMBA_NUM_THREADS"] = "1"  # of the n-gram proposer
# engines that are not eager are traced, but not compiled
os.environ["VLLM_CPU_CI_ENV"] = "1"
ROOT = Path(__file__).parents[1]
WINDOW = 4
CACHE = 1 << 27
"""Bytes of an engine's KV cache. Several engines of two workers share the machine."""
BLOCKS = 16
"""Of 32 tokens, in the crowded engine's cache: too few for eight answers."""
SPAN = 'topk:3,ratio=0.01,begin="Answer:",end="The final"'
ENGINE = dict(
    model=str(EMBEDDED / "target"),
    dtype="float32",
    max_model_len=512,
    max_num_seqs=8,
    enforce_eager=True,
    logprobs_mode="raw_logprobs",
    kv_cache_memory_bytes=CACHE,
)
DRAFT = dict(
    method="draft_model",
    model=str(EMBEDDED / "draft"),
    num_speculative_tokens=WINDOW,
    draft_sample_method="probabilistic",
)


def save_judge(folder: Path, pair: Pair, inputs: Inputs) -> str:
    """The path of a judge that accepts about half of what is rejected."""
    width = inputs.width({"target": pair.target.hidden_size})
    weight = torch.randn(width, generator=torch.Generator().manual_seed(1)) / 8
    Head(weight, 0.0, inputs, 0.5, pair.fingerprints).save(folder)
    return f"judge:{folder}"


@pytest.fixture(scope="module")
def pair() -> Pair:
    return load_pair(compile=False, dtype="float32")


@pytest.fixture(scope="module")
def judge(tmp_path_factory: pytest.TempPathFactory, pair: Pair) -> str:
    return save_judge(tmp_path_factory.mktemp("judge"), pair, Inputs(("target",)))


@pytest.fixture(scope="module")
def ahead(tmp_path_factory: pytest.TempPathFactory, pair: Pair) -> str:
    inputs = Inputs(("target",), ahead=3)
    return save_judge(tmp_path_factory.mktemp("ahead"), pair, inputs) + "@0.5"


@pytest.fixture(scope="module")
def allowed(ahead: str) -> list[str]:
    """What requests may ask for besides what is stricter than the server's rule."""
    return [
        ahead,
        SPAN,
        "typical:0.3,0.6",
        "topk:2",
        "fly:0.3,2",
        "fuzzy:js@0.3",
        "topk:4,budget=2",
        "topk:2,floor=0.7",
    ]


@pytest.fixture(scope="module")
def engine(judge: str, allowed: list[str]) -> Iterator[Any]:
    options = {"lenience": {"rule": f"{judge}@0.5", "allow": allowed}}
    yield vllm.LLM(**ENGINE, speculative_config=DRAFT, additional_config=options)


@pytest.fixture(scope="module")
def samples() -> list[Sample]:
    return list(take(load_task("wordmath"), "test", 8))


started = 0
"""Number of engines of this process."""


@contextmanager
def in_this_process() -> Iterator[None]:
    """Let a vLLM start without processes of its own, which takes a second in place of twenty."""
    global started
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        if started:  # vLLM 0.32 stumbles over other libraries the second time
            register = "register_triton_kernel_overrides"
            patch.setattr(type(current_platform), register, lambda *_: None)
        yield
    started += 1


def params(dial: object = None, **options: Any) -> SamplingParams:
    extra = None if dial is None else {"lenience": dial}
    return SamplingParams(
        **{"temperature": 0, "max_tokens": 160, "extra_args": extra, **options}
    )


def answers(
    engine: Any, samples: list[Sample], *served_rule: SamplingParams
) -> list[list[Any]]:
    """Each prompt's outputs for each of the parameters, all in one batch."""
    prompts = [sample.prompt for sample in samples for _ in served_rule]
    outs = engine.generate(prompts, [*served_rule] * len(samples), use_tqdm=False)
    return [
        outs[i : i + len(served_rule)] for i in range(0, len(outs), len(served_rule))
    ]


def tokens(out: Any) -> list[int]:
    """Without the EOS, which our own answers hold too."""
    ids = list(out.outputs[0].token_ids)
    return ids[:-1] if ids and ids[-1] == 0 else ids


def counts(out: Any) -> dict[str, int]:
    counted: dict[str, int] = out.kv_transfer_params["lenience"]
    return counted


@torch.inference_mode()
def greedily(pair: Pair, prompt: str, most: int) -> list[int]:
    """transformers' own."""
    ids = pair.target.tokenizer(prompt, return_tensors="pt")["input_ids"]
    whole = pair.target.model.generate(ids, max_new_tokens=most, do_sample=False)
    new = whole[0, ids.shape[1] :].tolist()
    return new[: new.index(0)] if 0 in new else new


def test_requests_of_different_dials_share_a_batch(
    engine: Any, pair: Pair, judge: str, allowed: list[str], samples: list[Sample]
) -> None:
    """The strict ones are transformers' own answers; the lenient ones what our loop comes to that
    begins, as vLLM does, with a token of the target's own."""
    rules = [
        f"{judge}@0.5",
        f"{judge}@0.8",
        *(rule for rule in allowed if "fuzzy" not in rule),
    ]
    served_rule = [params("exact"), params(), params(0.8), *map(params, rules[2:])]
    differing = dict.fromkeys(rules, 0)
    for sample, (strict, *lenient) in zip(
        samples, answers(engine, samples, *served_rule)
    ):
        assert tokens(strict) == greedily(pair, sample.prompt, 160)
        prompt = pair.target.encode(sample.prompt)
        for rule, out in zip(rules, lenient):
            first = list(out.outputs[0].token_ids)[:1]
            own = pair.generate(
                prompt + first, rule=rule, window=WINDOW, max_new_tokens=159
            )
            assert tokens(out) == first + [token for token in own.tokens if token]
            differing[rule] += tokens(out) != tokens(strict)
            counted = counts(out)
            assert counted["passes"] == own.target_passes and counted["unjudged"] == 0
            kept = counted["kept_strictly"] + counted["kept_leniently"]
            assert kept == sum(entry.origin.startswith("draft") for entry in own.trace)
            if "budget" in rule:
                assert counted["kept_leniently"] <= 2
    assert all(n for rule, n in differing.items() if "floor" not in rule), differing


def test_more_lenient_dials_are_refused(
    engine: Any, judge: str, samples: list[Sample]
) -> None:
    for dial in ("topk:5", f"{judge}@0.4", 0.3):
        with pytest.raises(
            VLLMValidationError, match="may be more lenient than the server's rule"
        ):
            answers(engine, samples[:1], params(dial))
    with pytest.raises(VLLMValidationError, match="keeps for sampled requests alone"):
        answers(engine, samples[:1], params("fuzzy:js@0.3"))
    assert tokens(answers(engine, samples[:1], params())[0][0])


def test_log_probabilities_stay_the_targets(
    engine: Any, pair: Pair, samples: list[Sample]
) -> None:
    (out,) = answers(engine, samples[:1], params("topk:2", logprobs=1))[0]
    prompt, new = list(out.prompt_token_ids), list(out.outputs[0].token_ids)
    with torch.inference_mode():
        logits = pair.target.model(torch.tensor([prompt + new])).logits[
            0, len(prompt) - 1 : -1
        ]
    expected = torch.log_softmax(logits, -1).gather(1, torch.tensor(new)[:, None])[:, 0]
    given = [place[token].logprob for place, token in zip(out.outputs[0].logprobs, new)]
    torch.testing.assert_close(torch.tensor(given), expected, atol=2e-3, rtol=2e-3)
    assert counts(out)["kept_leniently"] and float(expected.min()) < math.log(0.4)


@pytest.mark.parametrize("dial", [1.0, "speculative"])
def test_strict_dials_keep_the_sampled_distribution(
    engine: Any, pair: Pair, samples: list[Sample], dial: object
) -> None:
    """Goodness of fit of the first three tokens, of which all but one come from a drafted window:
    of a judge that accepts nothing, and of vLLM's own kernels."""
    n, prompt = 1500, samples[0].prompt
    drawn = [
        params(dial, temperature=1.0, seed=seed, max_tokens=3) for seed in range(n)
    ]
    outs = engine.generate([prompt] * n, drawn, use_tqdm=False)
    seen: dict[tuple[int, ...], int] = {}
    for out in outs:
        key = tuple(out.outputs[0].token_ids)
        seen[key] = seen.get(key, 0) + 1
        assert dial == "speculative" or counts(out)["kept_leniently"] == 0
    ids, expected = pair.target.encode(prompt), []
    for key in seen:
        with torch.inference_mode():
            logits = pair.target.model(torch.tensor([[*ids, *key]])).logits[0]
        probs = torch.softmax(logits[len(ids) - 1 : -1], -1)
        expected.append(math.prod(float(p[token]) for p, token in zip(probs, key)))
    common = [(count, n * p) for count, p in zip(seen.values(), expected) if n * p >= 5]
    rest = n - sum(count for count, _ in common), n - sum(p for _, p in common)
    chi2 = sum((count - p) ** 2 / p for count, p in [*common, rest])
    freedom = len(common)
    assert len(common) > 10 and chi2 < freedom + 4 * math.sqrt(2 * freedom)


def test_sampled_requests_are_judged(engine: Any, samples: list[Sample]) -> None:
    rules = (None, "typical:0.3,0.6", "fuzzy:js@0.3", "topk:2")
    served_rule = [params(rule, temperature=1.0, top_k=20) for rule in rules]
    for outs in zip(*answers(engine, samples[:6], *served_rule)):
        assert sum(counts(out)["kept_leniently"] for out in outs) > 0
        assert sum(counts(out)["unjudged"] for out in outs) == 0


@pytest.mark.parametrize("dial", ["exact", "topk:2"])
def test_a_greedy_request_is_the_same_among_sampled_ones(
    engine: Any, samples: list[Sample], dial: str
) -> None:
    alone = answers(engine, samples[:4], params(dial))
    among = answers(
        engine, samples[:4], params(dial), params(dial, temperature=0.9, top_p=0.9)
    )
    assert [tokens(outs[0]) for outs in alone] == [tokens(outs[0]) for outs in among]


@pytest.mark.parametrize("temperature", [0, 1.0])
def test_a_token_that_is_rejected_and_drawn_again_ends_its_window(
    engine: Any, pair: Pair, samples: list[Sample], temperature: float
) -> None:
    """As in our own loop, where a floor rejects the target's own choice."""
    rule = "topk:2,floor=0.7"
    outs = [
        row[0]
        for row in answers(engine, samples, params(rule, temperature=temperature))
    ]
    own = [
        pair.generate(
            list(out.prompt_token_ids) + list(out.outputs[0].token_ids)[:1],
            rule=rule,
            window=WINDOW,
            max_new_tokens=159,
            temperature=temperature,
        )
        for out in outs
    ]
    if not temperature:
        for out, ours in zip(outs, own):
            assert tokens(out)[1:] == [token for token in ours.tokens if token]
            assert counts(out)["passes"] == ours.target_passes
    given = sum(len(tokens(out)) - 1 for out in outs) / sum(
        counts(out)["passes"] for out in outs
    )
    ours_given = sum(len(out.tokens) for out in own) / sum(
        out.target_passes for out in own
    )
    assert given == pytest.approx(ours_given, rel=0.12)
    for out in outs:
        counted = counts(out)
        kept = counted["kept_strictly"] + counted["kept_leniently"]
        assert kept + counted["passes"] >= len(tokens(out)) - 1


def test_numbers_of_requests_are_laid_out_over_their_tokens() -> None:
    ends = torch.tensor([2, 2, 5], dtype=torch.int32)
    for given, replaced in (
        ([0.5, 3.0, 0.0], [0.5, 0.5, 1, 1, 1]),
        ([2.0, 3, 4], [2, 2, 4, 4, 4]),
    ):
        assert v1.expanded(torch.tensor(given), ends, 5, 0, 1).tolist() == replaced


def test_what_vllm_offers_besides_goes_with_a_lenient_rule(
    engine: Any, samples: list[Sample]
) -> None:
    from vllm.sampling_params import StructuredOutputsParams

    digits = StructuredOutputsParams(regex=r"( ?[0-9]){3}")
    served_rule = [
        params("topk:2", structured_outputs=digits, max_tokens=12),
        params("topk:2", repetition_penalty=1.3, presence_penalty=0.5),
        params("topk:2", stop=["."]),
        params("topk:2", bad_words=["the"]),
        params("topk:2", min_tokens=30, max_tokens=31),
        params("topk:2", n=2, temperature=0.8, seed=1),
    ]
    for constrained, penalised, stopped, without, least, twice in answers(
        engine, samples[:3], *served_rule
    ):
        assert constrained.outputs[0].text.replace(" ", "").isdigit()
        assert penalised.outputs[0].token_ids and counts(penalised)["passes"]
        assert "." not in stopped.outputs[0].text
        assert " the " not in f" {without.outputs[0].text} "
        assert 30 <= len(least.outputs[0].token_ids) <= 31
        assert len(twice.outputs) == 2
        kept = counts(stopped)
        assert (
            kept["passes"]
            and kept["kept_strictly"] + kept["kept_leniently"] <= 4 * kept["passes"]
        )
    with pytest.raises(VLLMValidationError, match="maximum context length"):
        engine.generate(
            [{"prompt_token_ids": [5] * 600}], params("topk:2"), use_tqdm=False
        )


def test_preempted_requests_go_on_as_they_would_have(
    engine: Any, judge: str, samples: list[Sample]
) -> None:
    """With too little room for all, some are stopped, forgotten and read again."""
    options = {"lenience": {"rule": f"{judge}@0.5"}}
    with in_this_process():
        crowded = vllm.LLM(
            **{**ENGINE, "max_model_len": 256},
            speculative_config=DRAFT,
            additional_config=options,
            block_size=32,
            num_gpu_blocks_override=BLOCKS,
            disable_log_stats=False,
        )
    served_rule = params(max_tokens=160)
    alone = [answers(engine, [sample], served_rule)[0][0] for sample in samples]
    together = [outs[0] for outs in answers(crowded, samples, served_rule)]
    preempted = next(
        m for m in crowded.get_metrics() if m.name == "vllm:num_preemptions"
    )
    assert preempted.value > 0
    for one, out in zip(alone, together):
        assert tokens(one) == tokens(out)
        assert counts(one)["kept_leniently"] == counts(out)["kept_leniently"]
    crowded.llm_engine.engine_core.shutdown()


def test_an_aborted_request_leaves_others_as_they_are(
    engine: Any, samples: list[Sample]
) -> None:
    (whole,) = answers(engine, samples[:1], params())[0]
    inner = engine.llm_engine
    for i in range(3):
        inner.add_request(f"abort-{i}", samples[i].prompt, params())
    for _ in range(4):
        inner.step()
    inner.abort_request([f"abort-{i}" for i in range(3)])
    while inner.has_unfinished_requests():
        inner.step()
    (again,) = answers(engine, samples[:1], params())[0]
    assert tokens(again) == tokens(whole) and counts(again) == counts(whole)


def asynchronously(folder: Path, asked: dict[str, Any]) -> dict[str, Any]:
    """What vLLM with asynchronous scheduling answers."""
    script = ROOT / "tests/asynchronous_vllm/answer.py"
    (folder / "asked.json").write_text(json.dumps(asked))
    subprocess.run(
        [sys.executable, script, folder / "asked.json", folder / "told.json"],
        check=True,
        env={**os.environ, "PYTHONPATH": str(script.parent)},
    )
    told: dict[str, Any] = json.loads((folder / "told.json").read_text())
    return told


ASKED = ("temperature", "max_tokens", "repetition_penalty", "seed")


def asked_of(options: dict[str, Any], requests: list[Any]) -> dict[str, Any]:
    """A request to `answer.py`: an engine's arguments, and prompts with their parameters."""
    return {
        "engine": {
            **ENGINE,
            "speculative_config": DRAFT,
            "disable_log_stats": False,
            **options,
        },
        "requests": [
            {
                "prompt": prompt,
                "params": {name: getattr(setting, name) for name in ASKED},
                "extra_args": setting.extra_args,
            }
            for prompt, setting in requests
        ],
    }


def test_asynchronous_scheduling_changes_no_answer(
    engine: Any,
    judge: str,
    allowed: list[str],
    samples: list[Sample],
    tmp_path: Path,
) -> None:
    """With asynchronous scheduling a step is laid out before the one before it is decided, and the
    runner has -1 in place of each token. Answers and counts are those without; also of rules that
    read the text so far."""
    dials = [None, "exact", *(rule for rule in allowed if "fuzzy" not in rule)]
    settings = [
        *map(params, dials),
        params("topk:2", repetition_penalty=1.3),
        params("topk:2", temperature=0.8, seed=3),
    ]
    requests = [(sample.prompt, setting) for sample in samples for setting in settings]
    options = {"lenience": {"rule": f"{judge}@0.5", "allow": allowed}}
    told = asynchronously(tmp_path, asked_of({"additional_config": options}, requests))
    expected = [out for row in answers(engine, samples, *settings) for out in row]
    for (_, setting), out, (found, counted) in zip(
        requests, expected, told["answers"], strict=True
    ):
        if not setting.temperature:  # vLLM draws drafts without the request's seed
            assert found == list(out.outputs[0].token_ids)
            assert counted == (out.kv_transfer_params or {}).get("lenience")


def test_preemption_with_asynchronous_scheduling_loses_no_count(
    pair: Pair, samples: list[Sample], tmp_path: Path
) -> None:
    """The first pass after a preemption has no window, so lenient answers differ from those of
    requests alone. Held against transformers' logits: each token is the target's own or its
    second; as many as are counted are not its own; and a budget and a span hold over the whole
    answer."""
    budget = "topk:2,budget=3"
    dials = ["exact", "topk:2", budget, SPAN.replace("topk:3,ratio=0.01", "topk:2")]
    requests = [(sample.prompt, params(dial)) for sample in samples for dial in dials]
    crowded = {
        "additional_config": {"lenience": {"rule": "topk:2", "allow": dials}},
        "block_size": 32,
        "num_gpu_blocks_override": BLOCKS,
        "max_model_len": 256,
    }
    told = asynchronously(tmp_path, asked_of(crowded, requests))
    assert told["preempted"] > 0
    spans = others = 0
    for (prompt, setting), (found, counted) in zip(
        requests, told["answers"], strict=True
    ):
        dial = setting.extra_args["lenience"]
        ids = pair.target.encode(prompt)
        with torch.inference_mode():
            logits = pair.target.model(torch.tensor([ids + found])).logits[0]
        best = logits[len(ids) - 1 : -1].topk(2).indices.tolist()
        assert all(token in two for token, two in zip(found, best))
        changed = [i for i, two in enumerate(best) if found[i] != two[0]]
        if dial == "exact":
            assert not changed and counted is None
            continue
        assert len(changed) == counted["kept_leniently"]
        if dial == budget:
            assert len(changed) <= 3
        elif dial != "topk:2":
            begins = prompt.endswith("Answer:")
            ends = [
                i
                for i in range(len(found) + 1)
                if "The final" in pair.target.decode(found[:i])
            ]
            assert begins and all(i <= min(ends, default=i) for i in changed)
            spans += len(changed)
        else:
            others += len(changed)
    assert others > 0 and spans > 0


# ---- our engine


@pytest.fixture(scope="module")
def eagle(pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> str:
    """An EAGLE-3 head, trained for a moment."""
    run = Path(
        shutil.copytree(EMBEDDED / "run", tmp_path_factory.mktemp("eagle") / "run")
    )
    journal = run / "journal.jsonl"
    few = journal.read_text().splitlines(keepends=True)[:60]
    journal.write_text("".join(few))
    plan = DrafterPlan("eagle", run / "eagle", epochs=1)
    fit_drafter(pair, run, plan)
    return f"eagle:{run / 'eagle'}"


class InThisProcess(VllmPair):
    """A pair whose engines start no processes."""

    def _engine(self, kind: EngineUse) -> Any:
        with in_this_process():
            return super()._engine(kind)


@pytest.fixture(scope="module")
def in_vllm() -> VllmPair:
    pair = load_pair(compile=False, dtype="float32")
    return InThisProcess(pair, {"enforce_eager": True, "kv_cache_memory_bytes": CACHE})


def test_a_pair_in_vllm_answers_as_our_own_loop(
    in_vllm: VllmPair, pair: Pair, judge: str, samples: list[Sample]
) -> None:
    """Each in the order of its own; what is kept of a window, where it came from and what it
    scored, from the target's first token on."""
    options = dict(window=WINDOW, max_new_tokens=160)
    prompts = [sample.prompt for sample in samples[:4]]
    for rule in ("target", "draft", "exact", f"{judge}@0.5"):
        alone = rule in ("target", "draft")
        outs = in_vllm.generate_batch(prompts, batch_size=3, rule=rule, **options)
        for prompt, out in zip(prompts, outs):
            first = [] if alone else out.tokens[:1]
            begun = pair.target.encode(prompt) + first
            own = pair.generate(
                begun, rule=rule, **options | {"max_new_tokens": 160 - len(first)}
            )
            assert out.tokens == first + own.tokens and out.finish == own.finish
            assert out.text == pair.target.decode(first + own.tokens)
            assert out.target_passes == own.target_passes + len(first)
            assert out.draft_passes == pytest.approx(own.draft_passes, abs=WINDOW)
            if rule.startswith("judge"):
                kept = out.trace[1:]
                assert [entry.origin for entry in kept] == [
                    entry.origin for entry in own.trace
                ]
                scores = [
                    [entry.score or 0 for entry in trace] for trace in (kept, own.trace)
                ]
                assert scores[0] == pytest.approx(scores[1], abs=1e-5) and any(
                    scores[0]
                )
                assert out.accepted_lenient == own.accepted_lenient > 0


@pytest.mark.parametrize("kind", ["ngram", "eagle"])
def test_every_drafter_in_vllm_drafts_as_our_own(
    in_vllm: VllmPair,
    pair: Pair,
    judge: str,
    samples: list[Sample],
    kind: str,
    request: pytest.FixtureRequest,
) -> None:
    """Both begin with the target's first token, as our own loop has no states before it."""
    drafter = (
        "ngram:oldest=true" if kind == "ngram" else request.getfixturevalue("eagle")
    )
    options = dict(window=WINDOW, max_new_tokens=160, drafter=drafter)
    prompts = [sample.prompt for sample in samples[:4]]
    lenient = 0
    for rule in ("exact", "topk:2", f"{judge}@0.5"):
        outs = in_vllm.generate_batch(prompts, batch_size=3, rule=rule, **options)
        for prompt, out in zip(prompts, outs):
            begun = pair.target.encode(prompt)
            first = out.tokens[:1] if kind == "ngram" else []
            own = pair.generate(
                begun + first,
                rule=rule,
                **options | {"max_new_tokens": 160 - len(first)},
            )
            lenient += out.accepted_lenient
            assert out.finish == own.finish
            if out.finish == "length":  # there the last windows have other lengths
                assert out.tokens[:-1] == (first + own.tokens)[:-1]
                continue
            assert out.tokens == first + own.tokens
            if rule == "exact":
                new = [token for token in out.tokens if token]
                assert new == greedily(pair, prompt, 160)
            else:  # vLLM itself does not tell whether a drafted EOS was accepted
                assert out.accepted_exact == own.accepted_exact
            assert out.target_passes == own.target_passes + len(first)
            assert out.accepted_lenient == own.accepted_lenient
    assert lenient > 0


def test_a_rule_without_its_distribution_is_refused(in_vllm: VllmPair) -> None:
    options = dict(rule="fuzzy:js@0.3", temperature=1.0, window=WINDOW)
    with pytest.raises(InputError, match="ngram"):
        in_vllm.generate("1", drafter="ngram:oldest=true", **options)


@pytest.mark.parametrize("kind", ["model", "eagle"])
def test_mining_in_vllm_finds_the_labels_of_our_own_loop(
    in_vllm: VllmPair,
    pair: Pair,
    tmp_path: Path,
    kind: str,
    request: pytest.FixtureRequest,
) -> None:
    drafter = "model" if kind == "model" else request.getfixturevalue("eagle")
    task, found = load_task("wordmath"), {}
    for one in (in_vllm, pair):
        folder = tmp_path / one.engine_name
        mine(
            one,
            task,
            folder,
            MineConfig(
                limit=2, batch_size=2, drafter=Decoder.of(drafter=drafter).drafter
            ),
        )
        found[one] = list(mined_samples(Journal(folder / "journal.jsonl")))
    for there, here in zip(found[in_vllm], found[pair], strict=True):
        of_theirs, of_ours = vars(there), vars(here)
        costs = [record.pop("cost") for record in (of_theirs, of_ours)]
        assert of_theirs == of_ours and len(there.mismatches) > 5
        # our own loop drafts with earlier responses too, and in wider windows
        assert 1 <= costs[0].target_passes / costs[1].target_passes < 3
        # its prefix cache holds whole blocks alone
        assert 1 <= costs[0].target_tokens / costs[1].target_tokens < 3
    run = tmp_path / in_vllm.engine_name
    assert read_run(run).engine == f"vllm {vllm_version()}"
    with pytest.raises(InputError, match="engine"):
        mine(
            pair,
            task,
            run,
            MineConfig(limit=3, drafter=Decoder.of(drafter=drafter).drafter),
        )
    compute_features(pair, run, Inputs(("target",)))


def test_a_command_that_has_mined_ends_well(tmp_path: Path) -> None:
    """Its two vLLMs end before Python does; where they did not, the thread that takes their outputs
    now and then aborted the process."""
    flags = ["--limit", "1", "--dtype", "float32", "--engine", "vllm"]
    for argument in ("enforce_eager=true", f"kv_cache_memory_bytes={CACHE}"):
        flags += ["--engine-arg", argument]
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "lenience",
            "mine",
            *flags,
            "--out",
            str(tmp_path / "run"),
        ],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "1 sample," in done.stderr and "exited unexpectedly" not in done.stderr


def test_on_a_gpu_a_vllm_ends_before_another_begins(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each takes nearly all memory but for the two that mine, which run beside each other."""
    free = "lenience.integrations.vllm.engine.free_bytes"
    monkeypatch.setattr(free, lambda _: 1 << 60)
    alone, ended = EngineUse("target", WINDOW, sampled=False), list[EngineUse]()
    for is_cpu, wanted in ((True, []), (False, [alone])):
        made = VllmPair(pair, {})
        for kind in (alone, *DIALOGUES):
            stop = partial(ended.append, kind)
            made._running[kind] = SimpleNamespace(
                engine_core=SimpleNamespace(shutdown=stop)
            )
        platform = SimpleNamespace(is_cpu=lambda is_cpu=is_cpu: is_cpu)
        monkeypatch.setattr("vllm.platforms.current_platform", platform)
        made._make_room(DIALOGUES[0])
        assert ended == wanted and (alone in made._running) == is_cpu
        assert (made.answers_at_a_time == 1) == is_cpu
    monkeypatch.undo()
    monkeypatch.setattr(free, lambda _: 0)
    made._running = {alone: SimpleNamespace(engine_core=SimpleNamespace(shutdown=int))}
    made._make_room(EngineUse("target", 2, sampled=False))
    assert alone not in made._running, "a CPU without memory"
    assert sum(kind.share for kind in DIALOGUES) == 1


def test_a_comparison_runs_in_vllm(
    in_vllm: VllmPair, judge: str, tmp_path: Path
) -> None:
    config = CompareConfig(
        rules=("exact", f"{judge}@0.5"),
        windows=(WINDOW,),
        options={"max_new_tokens": 200},
        limit=6,
        tuning=2,
        timed=2,
        repeats=1,
    )
    comparison = Comparison(in_vllm, load_task("wordmath"), config)
    with comparison.folder(tmp_path) as folder:
        frontier = comparison.carry_out(folder, silent)
    rows = {row.rule: row for row in frontier.rows}
    assert rows[f"{judge}@0.5"].tokens_per_pass > rows["exact"].tokens_per_pass
    assert rows["exact"].paired_loss == rows["exact"].paired_gain == 0
    assert f"vllm {vllm_version()}" in frontier.machine


def test_an_answer_after_a_reset_reads_its_prompt(in_vllm: VllmPair) -> None:
    decoder = in_vllm.decoder({"rule": "exact", "window": WINDOW, "max_new_tokens": 8})
    prompt = [3 + i % 80 for i in range(300)]  # longer than a block of the cache

    def cached() -> int:
        """Tokens of the prompt that are in the prefix cache."""
        engine = list(in_vllm._running.values())[-1]  # the most recently used one
        engine.add_request("again", {"prompt_token_ids": prompt}, params(max_tokens=1))
        outs: list[Any] = []
        while engine.has_unfinished_requests():
            outs += engine.step()
        return int(outs[-1].num_cached_tokens)

    in_vllm.generate(prompt, decoder)
    assert cached() > 0
    in_vllm.reset_prefix_cache()
    assert cached() == 0


def test_tuning_in_vllm_races_engines_and_certifies(
    in_vllm: VllmPair, pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Path(shutil.copytree(EMBEDDED / "run", tmp_path / "run"))
    judge = save_judge(run / "judge", pair, Inputs(("target",)))
    options = {"max_new_tokens": 120}
    question = CertifyConfig(
        (judge,),
        max_drop=0.4,
        thresholds=(1.0,),
        limit=40,
        options=options,
        allow_weak_target=True,
    )
    asked: list[tuple[int, str]] = []
    answered = in_vllm.generate

    def watched(prompt: Any, decoder: Decoder) -> Any:
        asked.append((int(decoder.window), str(decoder.rule)))
        return answered(prompt, decoder)

    monkeypatch.setattr(in_vllm, "generate", watched)
    config = TuneConfig(question, windows=(2, WINDOW), drafters=("model",), prompts=16)
    made = tune(in_vllm, load_task("wordmath"), run, config)
    shifts = [window for window, _ in groupby(window for window, _ in asked)]
    assert shifts[:3] == [0, 2, WINDOW], "each engine once in the heat"
    assert f"vllm {vllm_version()} enforce_eager=True" in made.races.machine
    assert Decoder.parse(made.races.alone.setting).window == 0
    assert Decoder.parse(made.races.strict.setting).window in (2, WINDOW)
    assert made.certificate.certified and made.speeds is not None
    assert made.certificate.binds["engine"] == f"vllm {vllm_version()}"
    assert made.certificate.tried[0].losses == 0, "lossless decoding comes first"


def test_windows_that_the_draft_has_no_room_for_are_not_judged(
    in_vllm: VllmPair, pair: Pair, judge: str, samples: list[Sample]
) -> None:
    """Where one request has outgrown the draft's context vLLM fills all windows of the step with
    zeros, which a judge that accepts all would keep: EOS, here."""
    outgrown = (pair.target.encode("Ann has 5 apples.") * 300)[: 1024 - 2 * WINDOW]
    prompts = [outgrown, *(sample.prompt for sample in samples[:4])]
    options = dict(rule=f"{judge}@0", window=WINDOW, max_new_tokens=200)
    first, *others = in_vllm.generate_batch(prompts, batch_size=5, **options)
    assert len(outgrown) + len(first.tokens) == 1024 and first.finish == "length"
    for out in others:
        assert any(entry.origin == "draft-lenient" for entry in out.trace)
        assert len(out.tokens) > 20


def test_what_vllm_does_not_do_for_us_is_refused_by_name(
    in_vllm: VllmPair, judge: str
) -> None:
    for options, message in (
        ({"stop": "confidence:0.4"}, "vLLM drafts whole windows"),
        ({"tree": "dynamic:8"}, "vLLM drafts chains"),
        ({"drafter": "ngram"}, "vLLM uses the oldest; take ngram:oldest=true"),
        ({"drafter": "suffix"}, "vLLM has none like it"),
        ({"window": "auto"}, "name one"),
        ({"rule": "fuzzy:js@0.3"}, "give a temperature above 0"),
    ):
        with pytest.raises(InputError, match=message):
            in_vllm.generate("1", **options)
    with pytest.raises(InputError, match="engine argument model: is set by the pair"):
        VllmPair(in_vllm, {"model": "other"})


def test_a_certificate_made_with_vllm_is_served_and_binds_it(
    in_vllm: VllmPair, pair: Pair, tmp_path: Path
) -> None:
    run = Path(shutil.copytree(EMBEDDED / "run", tmp_path / "run"))
    judge = save_judge(run / "judge", pair, Inputs(("target",)))
    options = {"window": WINDOW, "max_new_tokens": 200}
    question = CertifyConfig((f"{judge}@1",), max_drop=0.1, limit=200, options=options)
    made = certify(in_vllm, load_task("wordmath"), run, question)
    assert made.certified and made.binds["engine"] == f"vllm {vllm_version()}"
    with pytest.raises(
        InputError, match=r"certified with engine 'vllm .*', not 'lenience'"
    ):
        pair.generate("1", rule=f"certified:{run}")
    greedy = {**DRAFT, "draft_sample_method": "greedy"}
    served = asks(f"certified:{run}")
    config = configured(**served, speculative_config=greedy)
    server = served_rule.read(config.additional_config)
    assert server and str(server.rule) == f"{judge}@1.0"
    assert "at most 10.00% lost with 95% confidence" in check(server, config)
    for changes, message in (
        (
            {"speculative_config": {**greedy, "num_speculative_tokens": 3}},
            "window 4, not 3",
        ),
        ({"speculative_config": DRAFT}, "a draft_sample_method 'greedy'"),
        (
            {"speculative_config": greedy, "dtype": "bfloat16"},
            "dtype 'float32', not 'bfloat16'",
        ),
        (
            {"speculative_config": greedy, "hf_overrides": {"rope_theta": 5.0}},
            "hf_overrides",
        ),
        (
            {"speculative_config": {**greedy, **scheduled(4)}},
            "certified for one window",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            configured(**{**served, **changes})
    _at_several_windows(run, served, greedy)
    with in_this_process():
        serving = vllm.LLM(**ENGINE, speculative_config=greedy, **served)
    sample = next(load_task("wordmath").samples("test"))
    (out,) = serving.generate([sample.prompt], params(max_tokens=200), use_tqdm=False)
    assert (
        tokens(out) == greedily(pair, sample.prompt, 200) and counts(out)["passes"] > 5
    )
    for sooner in ({"max_tokens": 5}, {"max_tokens": 200, "stop": ["="]}):
        (begun,) = serving.generate([sample.prompt], params(**sooner), use_tqdm=False)
        assert 0 < len(tokens(begun)) < len(tokens(out))
        assert tokens(out)[: len(tokens(begun))] == tokens(begun)
    with pytest.raises(
        VLLMValidationError, match=r"max_tokens 201.*were certified with"
    ):
        serving.generate([sample.prompt], params(max_tokens=201), use_tqdm=False)
    serving.llm_engine.engine_core.shutdown()
    processor = SimpleNamespace(vllm_config=config)
    taken = params(max_tokens=200)
    hooks._requested(None, processor, taken)
    hooks._requested(None, processor, params("exact", max_tokens=9, temperature=1))
    hooks._requested(None, processor, params(max_tokens=9, stop=["."]))
    for given, message in (
        (params(max_tokens=201), "max_tokens 201.*were certified with"),
        (params(max_tokens=200, temperature=0.5), "temperature.*were certified with"),
        (
            params(max_tokens=200, repetition_penalty=1.2),
            "repetition_penalty.*were certified",
        ),
        (
            params(max_tokens=200, stop_token_ids=[13]),
            "stop_token_ids.*were certified with",
        ),
        (params(0.5, max_tokens=200), "certified at one setting"),
    ):
        with pytest.raises(VLLMValidationError, match=message):
            hooks._requested(None, processor, given)
    again = pair.fingerprints | {"tokenizer": pair.fingerprints["tokenizer"]}
    Head(torch.ones(640), 0.0, Inputs(("target",)), 0.5, again).save(run / "judge")
    served_rule._read.cache_clear()
    with pytest.raises(ValueError, match="was certified with heads"):
        configured(**served, speculative_config=greedy)


def scheduled(*windows: int) -> dict[str, Any]:
    """Numbers of drafted tokens by batch size."""
    schedule = [(1 + 4 * i, 4 + 4 * i, window) for i, window in enumerate(windows)]
    return {"num_speculative_tokens_per_batch_size": schedule}


def _at_several_windows(
    run: Path, served: dict[str, Any], greedy: dict[str, Any]
) -> None:
    """A server may have each window of a certificate for several, and a schedule of them."""
    path = run / "certificate.json"
    before = path.read_text()
    made = json.loads(before)
    made["binds"]["windows"] = [2, WINDOW]
    path.write_text(json.dumps(made))
    served_rule._read.cache_clear()
    for allowed in ({}, {"num_speculative_tokens": 2}, scheduled(WINDOW, 2, 0)):
        configured(**served, speculative_config={**greedy, **allowed})
    for other in ({"num_speculative_tokens": 3}, scheduled(WINDOW, 3)):
        with pytest.raises(ValueError, match="window 2, 4, not 3"):
            configured(**served, speculative_config={**greedy, **other})
    path.write_text(before)
    served_rule._read.cache_clear()


# ---- configurations


def configured(**changes: Any) -> Any:
    """The configuration that vLLM makes of an engine's arguments, without starting it."""
    arguments = {**ENGINE, "speculative_config": DRAFT, **changes}
    return EngineArgs(**arguments).create_engine_config()


def asks(rule: str, **options: Any) -> dict[str, Any]:
    return {"additional_config": {"lenience": {"rule": rule, **options}}}


def test_every_place_is_as_this_version_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    check_seams([*hooks.SEAMS, *v1.SEAMS])
    assert vllm_version() == vllm.__version__.split("+")[0]

    def changed(self: Any, output: Any) -> None: ...

    monkeypatch.setattr(hooks.Scheduler, "update_from_output", changed)
    with pytest.raises(
        ValueError, match=r"Scheduler\.update_from_output takes self, output, not"
    ):
        configured(**asks("topk:3"))


def test_what_cannot_be_done_as_asked_is_refused_before_the_start(
    pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    both = tmp_path / "both"
    weight = torch.zeros(Inputs().width({"target": 320, "draft": 128}))
    Head(weight, 0.0, Inputs(), 0.5, pair.fingerprints).save(both)
    other = tmp_path / "other"
    wrong = {**pair.fingerprints, "target": "another"}
    Head(torch.zeros(640), 0.0, Inputs(("target",)), 0.5, wrong).save(other)
    ngram = dict(method="ngram", num_speculative_tokens=4, prompt_lookup_max=3)
    synthetic = {**DRAFT, "rejection_sample_method": "synthetic"}
    synthetic["synthetic_acceptance_rates"] = [0.5] * WINDOW
    for changes, message in (
        (asks("topk"), "topk needs k"),
        (asks("topk:3", windw=4), "has windw, which is unknown"),
        (asks(f"judge:{both}@0.5"), "take a judge trained with --models target"),
        (asks(f"judge:{other}@0.5"), "was trained for another target"),
        ({**asks("topk:3"), "speculative_config": None}, "does not draft"),
        ({**asks("topk:3"), "speculative_config": synthetic}, "is a rule of its own"),
        (
            {**asks("fuzzy:js@0.3"), "speculative_config": ngram},
            "distribution with the target's, and ngram has none",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            configured(**changes)
    monkeypatch.setenv("LENIENCE_RULE", "tpk:3")
    with pytest.raises(ValueError, match="there is no rule 'tpk'"):
        configured()
    monkeypatch.setenv("LENIENCE_RULE", "topk:3")
    monkeypatch.setenv("LENIENCE_FORBID", "1")
    with pytest.raises(ValueError, match="LENIENCE_FORBID=1 forbids"):
        configured()
    monkeypatch.delenv("LENIENCE_RULE")
    assert configured().additional_config == {}


# ---- a server


def post(url: str, body: dict[str, Any]) -> dict[str, Any]:
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        got: dict[str, Any] = json.load(answer)
        return got


def documented(folder: Path, port: int) -> tuple[str, str]:
    """What docs/vllm.md has a user of the built-in pair type after installing: what makes a judge,
    and what starts a server."""
    page = (ROOT / "docs/vllm.md").read_text()
    block = next(
        code for code in re.findall(r"```sh\n(.*?)```", page, re.S) if "MODELS=" in code
    )
    block = block.replace(".venv-vllm/bin/", f"{Path(sys.executable).parent}/")
    block = block.replace("MODELS=src/lenience/embedded", f"MODELS={EMBEDDED}")
    lines = [
        line
        for line in block.splitlines()
        if " -m venv " not in line and "pip " not in line
    ]
    begin = next(i for i, line in enumerate(lines) if line.startswith("MODELS="))
    server = "\n".join(["set -e", f"cd {folder}", *lines[begin:]]).replace(
        "VLLM_CPU", "exec env VLLM_CPU"
    )
    return "\n".join(
        ["set -e", f"cd {folder}", *lines[:begin]]
    ), f"{server} --port {port}"


def test_the_documented_server_takes_dials_and_counts_for_prometheus(
    samples: list[Sample], tmp_path: Path
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    judging, serving = documented(tmp_path, port)
    subprocess.run(["bash", "-c", judging], check=True)
    serving += " --per-request-spec-decode-metrics detailed"
    server = subprocess.Popen(["bash", "-c", serving])
    url = f"http://127.0.0.1:{port}"
    body = {"model": "wordmath", "temperature": 0, "max_tokens": 120}
    total = dict.fromkeys(COUNTED, 0)
    try:
        wait_for(f"{url}/health", server)
        for sample in samples:
            served_rule = {**body, "prompt": sample.prompt}
            answer = post(f"{url}/v1/completions", served_rule)
            lenient = answer["kv_transfer_params"]["lenience"]
            kept = lenient["kept_strictly"] + lenient["kept_leniently"]
            reported = answer["metrics"]["speculative_decoding"]
            check_reported(reported, lenient["passes"], kept)
            assert streamed(f"{url}/v1/completions", served_rule) == reported
            # each prompt was answered twice
            total = {name: value + 2 * lenient[name] for name, value in total.items()}
            strict = post(
                f"{url}/v1/completions",
                {**served_rule, "vllm_xargs": {"lenience": "exact"}},
            )
            assert strict["kv_transfer_params"] is None
        assert total["kept_leniently"] > 0
        with pytest.raises(urllib.error.HTTPError) as refused:
            post(
                f"{url}/v1/completions",
                {**served_rule, "vllm_xargs": {"lenience": "topk:9"}},
            )
        assert refused.value.code == 400
        assert "may be more lenient" in refused.value.read().decode()
        metrics = urllib.request.urlopen(f"{url}/metrics", timeout=30).read().decode()
        for name, value in total.items():
            assert f"lenience:{name}_total {float(value)}" in metrics
    finally:
        server.terminate()
        server.wait(60)


def check_reported(reported: dict[str, Any], passes: int, kept: int) -> None:
    """vLLM's own figures of a request, which AIPerf reads, are those of the rule. They include
    tokens after the end of the answer in its last window."""
    assert 0 <= reported["num_accepted_draft_tokens"] - kept <= WINDOW
    assert reported["num_spec_steps"] == passes == len(reported["per_step_accepted"])
    assert sum(reported["acceptance_histogram"]) == passes
    accepted = sum(
        n * times for n, times in enumerate(reported["acceptance_histogram"])
    )
    assert accepted == reported["num_accepted_draft_tokens"]


def streamed(url: str, body: dict[str, Any]) -> dict[str, Any]:
    """vLLM's own figures at the end of a stream."""
    asked = {**body, "stream": True, "stream_options": {"include_usage": True}}
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(url, json.dumps(asked).encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        lines = [line.decode().removeprefix("data: ").strip() for line in answer]
    last = json.loads([line for line in lines if line and line != "[DONE]"][-1])
    found: dict[str, Any] = last["metrics"]["speculative_decoding"]
    return found


def wait_for(url: str, server: subprocess.Popen[bytes]) -> None:
    """Until it answers."""
    for _ in range(240):
        try:
            urllib.request.urlopen(url, timeout=5)
            return
        except (urllib.error.URLError, ConnectionError):
            assert server.poll() is None, "the server has ended"
            time.sleep(1)
    raise TimeoutError(url)


def test_a_killed_worker_ends_requests_with_an_error(
    engine: Any, samples: list[Sample]
) -> None:
    """The last test: the engine is gone after it."""
    import psutil

    workers = [
        p for p in psutil.Process().children(recursive=True) if "Worker" in p.name()
    ]
    if not workers:
        workers = psutil.Process().children(recursive=True)[-1:]
    began = time.monotonic()
    engine.llm_engine.add_request("killed", samples[0].prompt, params())
    for worker in workers:
        worker.kill()
    with pytest.raises(Exception, match=r"(?i)dead|engine|worker"):
        while engine.llm_engine.has_unfinished_requests():
            engine.llm_engine.step()
            assert time.monotonic() - began < 120
