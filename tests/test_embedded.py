"""The built-in pair is what it is said to be."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from lenience.certification.certificate import head_paths
from lenience.certification.certify import certify
from lenience.certification.question import CertifyConfig
from lenience.core.errors import InputError
from lenience.core.files import EMBEDDED
from lenience.decoding.auto_window import Drafting, learned_stops
from lenience.decoding.decoder import Decoder
from lenience.decoding.loading import load_pair
from lenience.decoding.pair import Pair
from lenience.drafting.parsing import parse_drafter, parse_stop
from lenience.drafting.stops import Likely
from lenience.evaluation.compare import CompareConfig
from lenience.rules.judge import BUILT_IN_JUDGE, Judge
from lenience.rules.parsing import parse_rule
from lenience.runs.uses import prompt_digest
from lenience.tasks import WordMath, take


def test_it_loads_as_plain_llama_checkpoints_with_one_tokenizer() -> None:
    models = {
        role: AutoModelForCausalLM.from_pretrained(EMBEDDED / role)
        for role in ("target", "draft")
    }
    a, b = (model.config for model in models.values())
    assert a.model_type == b.model_type == "llama"
    assert a.num_hidden_layers >= 8 and b.num_hidden_layers <= a.num_hidden_layers / 4
    assert a.head_dim == b.head_dim == 64
    tokenizers = [(EMBEDDED / role / "tokenizer.json").read_text() for role in models]
    assert tokenizers[0] == tokenizers[1]
    assert AutoTokenizer.from_pretrained(EMBEDDED / "target").get_vocab().keys() >= {
        "▁Ann",
        "▁1",
        "1",
        "</s>",
    }
    weights = [path for path in EMBEDDED.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in weights) < 30e6
    assert {path.suffix for path in weights} <= {
        ".json",
        ".jsonl",
        ".onnx",
        ".safetensors",
    }


def test_it_decodes_as_transformers_does(built_in: Pair) -> None:
    for sample in take(WordMath(), "test", 2):
        ids = built_in.target.encode(sample.prompt)
        with torch.inference_mode():
            plain = built_in.target.model.generate(
                torch.tensor([ids]), max_new_tokens=300, do_sample=False
            )
        for window in (4, 16):
            out = built_in.generate(sample.prompt, window=window, max_new_tokens=300)
            assert out.tokens == plain[0, len(ids) :].tolist()


def test_its_heads_draft_for_it(built_in_exported: Pair) -> None:
    """They say more than two tokens a pass, and the target's own."""
    prompts = [sample.prompt for sample in take(WordMath(), "test", 8)]
    plain = built_in_exported.generate_batch(prompts, rule="target", max_new_tokens=120)
    outs = built_in_exported.generate_batch(
        prompts, drafter="medusa", window=4, max_new_tokens=120
    )
    assert [out.tokens for out in outs] == [out.tokens for out in plain]
    passes = sum(out.target_passes for out in outs)
    assert sum(len(out.tokens) for out in outs) / passes > 2.2
    assert str(parse_drafter("medusa")) == "medusa"


def test_its_judge_keeps_what_does_not_matter(built_in_exported: Pair) -> None:
    """A third more tokens a pass than strict decoding, and at most five of fifty answers fewer that
    are right; the chance of a false alarm is below 1e-3 where it loses two of a hundred."""
    samples, task = take(WordMath(), "test", 50), WordMath()
    prompts = [sample.prompt for sample in samples]
    right, per_pass = dict[str, int](), dict[str, float]()
    for rule in ("exact", "judge@0.99"):
        outs = built_in_exported.generate_batch(
            prompts, batch_size=50, rule=rule, max_new_tokens=320
        )
        right[rule] = sum(
            task.correct(out.text, one) for out, one in zip(outs, samples)
        )
        passes = sum(out.target_passes for out in outs)
        per_pass[rule] = sum(len(out.tokens) for out in outs) / passes
    assert per_pass["judge@0.99"] > 1.33 * per_pass["exact"]
    assert right["judge@0.99"] >= right["exact"] - 5


def test_its_judge_needs_no_path() -> None:
    by_path = f"judge:{BUILT_IN_JUDGE}@0.9"
    assert parse_rule(by_path).heads == parse_rule("judge@0.9").heads
    assert str(Judge(threshold=0.9)) == str(parse_rule(by_path).heads[0]) == "judge@0.9"
    assert (
        str(Decoder.of(rule='judge@0.9,strict="[0-9]",by=2').without_paths().rule)
        == "judge:strict=[0-9],by=2.0@0.9"
    )
    assert str(Judge("run/judge", 0.9)) == "judge:run/judge@0.9"


def test_its_stop_has_learned_of_its_judge_and_needs_no_path() -> None:
    found = learned_stops(parse_rule("judge@0.98"))
    assert [str(stop) for stop in found] == ["head@0.3", "head@0.5", "head@0.7"]
    assert parse_stop(f"head:{Likely().path}@0.5") == parse_stop("head@0.5")
    for stop, shown in (
        (Likely("run/stop", 0.5), "head:stop@0.5"),
        ("head@0.5", "head@0.5"),
    ):
        assert str(Decoder.of(stop=stop).without_paths().stop) == shown


def test_its_stop_ends_windows_where_its_judge_would_reject(
    built_in_exported: Pair,
) -> None:
    """A tenth fewer tokens are drafted for each that is kept, and there are at most a fifth more
    passes: what it cuts off would mostly have been rejected."""
    prompts = [sample.prompt for sample in take(WordMath(), "test", 30)]
    drafted, kept, passes = list[int](), list[int](), list[int]()
    for stop in ("fixed", "head@0.5"):
        outs = built_in_exported.generate_batch(
            prompts,
            batch_size=30,
            rule="judge@0.98",
            window=16,
            stop=stop,
            max_new_tokens=320,
        )
        drafted.append(sum(out.drafted for out in outs))
        kept.append(sum(len(out.tokens) for out in outs))
        passes.append(sum(out.target_passes for out in outs))
    assert drafted[1] / kept[1] < 0.9 * drafted[0] / kept[0]
    assert passes[1] < 1.2 * passes[0]


def test_an_automatic_window_leaves_a_stop_of_another_draft_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though it would be the fastest."""
    fastest = partial(Drafting, tokens_per_second=1e9)
    monkeypatch.setattr(
        "lenience.decoding.auto_window.stopped", lambda *args: fastest(32, args[2])
    )
    shutil.copytree(EMBEDDED / "draft", tmp_path / "draft")
    weights = load_file(tmp_path / "draft/model.safetensors")
    weights["model.norm.weight"] *= 1.01
    save_file(weights, tmp_path / "draft/model.safetensors", metadata={"format": "pt"})
    pair = load_pair(str(EMBEDDED / "target"), str(tmp_path / "draft"), compile=False)
    prompts = [sample.prompt for sample in take(WordMath(), "test", 2)]
    asked = {"window": "auto", "max_new_tokens": 30}
    settled = pair.settle(prompts, rule="judge:unchecked=true@0.98", **asked)
    assert str(settled.stop) == "fixed"
    pair.check(settled)


def test_its_judge_is_certified_on_prompts_that_it_has_not_learned_from(
    built_in_exported: Pair, tmp_path: Path
) -> None:
    task, learned_from = WordMath(), set(Judge().head.prompts)
    assert len(learned_from) == 10000
    samples = take(task, "train", 100)
    digests = {
        one.id: prompt_digest(built_in_exported.target.encode(one.prompt))
        for one in samples
    }
    used = next(id for id in digests if digests[id] in learned_from)
    fresh = tuple(id for id in digests if digests[id] not in learned_from)[:4]
    with pytest.raises(InputError, match=f"{used}: has been used for fitting"):
        asked = CertifyConfig(("judge@0.9",), ids=(used,), home=tmp_path)
        certify(built_in_exported, task, tmp_path / "run", asked)
    asked = CertifyConfig(("judge@0.9",), ids=fresh, home=tmp_path)
    made = certify(built_in_exported, task, tmp_path / "run", asked)
    assert made.n == len(fresh) == 4


def test_its_judge_and_its_stop_are_not_asked_of_another_pair(llama: Pair) -> None:
    for rule in ("judge@0.9", "judge:unchecked=true@0.9"):
        with pytest.raises(
            InputError, match="judge without a path belongs to the built-in pair"
        ):
            llama.generate("1 2 3", rule=rule)
    with pytest.raises(
        InputError, match="this is another pair; name yours, head:RUN/stop, which"
    ):
        llama.generate("1 2 3", stop="head@0.5")


def test_what_is_kept_of_its_judge_names_no_path_of_the_machine(tmp_path: Path) -> None:
    judged = Decoder.of(rule="judge@0.9", stop="head@0.5", drafter="model")
    assert head_paths(judged, tmp_path) == {}
    assert head_paths(Decoder.of(rule="judge@0.9", drafter="medusa"), tmp_path) == {}
    asked = CompareConfig(("judge@0.9", f"judge:{tmp_path}@0.9"))
    assert set(asked.heads()) == {"built-in judge", str(tmp_path)}


def test_the_target_is_right_and_the_draft_often_not(built_in_exported: Pair) -> None:
    """A small check of the figures that tools/embedded/check.py measures; the chance of a false
    alarm is below 1e-6."""
    task, right = WordMath(), {"target": 0, "draft": 0}
    samples = take(task, "test", 40)
    prompts = [sample.prompt for sample in samples]
    for rule in right:
        outs = built_in_exported.generate_batch(
            prompts, batch_size=40, rule=rule, max_new_tokens=320
        )
        right[rule] = sum(
            task.correct(out.text, one) for out, one in zip(outs, samples)
        )
    assert right["target"] >= 30 and 4 <= right["draft"] <= 36
