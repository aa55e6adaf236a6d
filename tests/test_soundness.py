"""Logits that are no numbers, temperatures near zero, ends that are special tokens, and text files
with unusual separators."""

from __future__ import annotations

import json
import math
import os
import shutil
import threading
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import COMMON, SMALL, VOCABULARY, save_model
from test_mining import ParityTask
from transformers import (
    AutoConfig,
    AutoTokenizer,
    GenerationConfig,
    LlamaConfig,
    Phi3Config,
    PretrainedConfig,
)

from lenience.core.errors import InputError, RunError
from lenience.core.files import read_lines, write_text
from lenience.decoding.loading import load_pair
from lenience.decoding.pair import Pair
from lenience.heads.fitting import FitConfig
from lenience.heads.head import Head, Inputs
from lenience.mining.search import MineConfig, mine
from lenience.models.session import Session
from lenience.tasks.rows import read_rows
from lenience.training.fit import HeadPlan, fit_run
from lenience.training.fit_drafter import DrafterPlan, fit_to_answers

PROMPTS = [[5, 6, 7], [9, 3, 8, 2], [11]]
RULES = (
    "exact",
    "topk:3",
    "typical:0.3,0.6",
    "fuzzy:js@0.5",
    "kl:0.5",
    "fly:0.1,2",
    "target",
)


@pytest.fixture
def spoilt(checkpoints: Callable[[str], tuple[str, str]]) -> Pair:
    """A pair of its own, to be spoilt."""
    return load_pair(*checkpoints("llama"), dtype="float32", compile=False)


def spoil(model: torch.nn.Module, value: float) -> None:
    with torch.no_grad():
        model.model.norm.weight.fill_(value)


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("rule", RULES)
def test_a_target_of_no_numbers_ends_the_answer(
    spoilt: Pair, rule: str, value: float
) -> None:
    spoil(spoilt.target.model, value)
    with pytest.raises(
        RunError, match=r"target .*NaN or infinite at position 3; .*float16"
    ):
        spoilt.generate(PROMPTS[0], rule=rule, window=4, max_new_tokens=12)


@pytest.mark.parametrize("tree", ["chain", "dynamic:6"])
def test_the_position_is_the_one_that_was_reached(spoilt: Pair, tree: str) -> None:
    """One token's embedding is NaN: the answer ends where that token was read."""
    whole = spoilt.generate(PROMPTS[0], rule="target", max_new_tokens=20)
    at = next(
        i
        for i in range(3, 15)
        if whole.tokens[i] not in [*PROMPTS[0], *whole.tokens[:i]]
    )
    with torch.no_grad():
        spoilt.target.model.model.embed_tokens.weight[whole.tokens[at]] = math.nan
    position = len(PROMPTS[0]) + at + 1
    with pytest.raises(RunError, match=f"at position {position};"):
        spoilt.generate(PROMPTS[0], tree=tree, window=4, max_new_tokens=20)
    with pytest.raises(RunError, match=f"at position {position};"):
        spoilt.generate_batch(
            [[40, 41], PROMPTS[0]], batch_size=2, window=4, max_new_tokens=20
        )


@pytest.mark.parametrize("rule", ["exact", "speculative", "block"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_draft_of_no_numbers_costs_speed_alone(
    spoilt: Pair, rule: str, temperature: float
) -> None:
    options = {"temperature": temperature, "seed": 3, "max_new_tokens": 20}
    # block draws anew for each window, so it is compared with itself without windows
    lossless = {"rule": "block", "window": 0} if rule == "block" else {"rule": "target"}
    alone = spoilt.generate_batch(PROMPTS, batch_size=3, **lossless, **options)
    spoil(spoilt.draft.model, math.nan)
    with pytest.warns(UserWarning, match="drafter's logits are NaN") as told:
        outs = spoilt.generate_batch(
            PROMPTS, rule=rule, window=4, batch_size=3, **options
        )
    assert [out.tokens for out in outs] == [out.tokens for out in alone]
    assert all(out.accepted_exact == 0 for out in outs)
    assert sum("drafter's logits" in str(one.message) for one in told) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        spoilt.generate(PROMPTS[0], rule=rule, window=4, **options)


@pytest.mark.parametrize("role", ["target", "draft"])
def test_nothing_is_mined_from_a_model_of_no_numbers(
    spoilt: Pair, role: str, tmp_path: Path
) -> None:
    spoil(getattr(spoilt, role).model, math.nan)
    with pytest.raises(RunError, match=f"{role} .*NaN or infinite at position 3"):
        mine(spoilt, ParityTask(), tmp_path, MineConfig(limit=4, max_new_tokens=12))


@pytest.mark.parametrize("role", ["judge", "stop", "gate"])
def test_no_head_learns_from_states_of_no_numbers(
    llama: Pair, role: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine(llama, ParityTask(), tmp_path, MineConfig(limit=12, max_new_tokens=12))
    read = Session.read

    def spoils(session: Session, *given: Any, **more: Any) -> Any:
        """As a model does whose last layer overflows at one token."""
        reading = read(session, *given, **more)
        return replace(
            reading, hidden=reading.hidden.index_fill(-1, torch.tensor([3]), math.inf)
        )

    monkeypatch.setattr(Session, "read", spoils)
    models = ("target", "draft") if role == "judge" else ("draft",)
    config = FitConfig("adam" if role == "gate" else "logistic", role=role)
    plan = HeadPlan(Inputs(models, ("previous",)), tmp_path / "head", config)
    with pytest.raises(
        RunError, match=r"sample train-.* hidden states are NaN or infinite"
    ):
        fit_run(llama, tmp_path, plan)


@pytest.mark.parametrize("drafter", ["medusa", "eagle", "model"])
def test_no_drafter_learns_from_a_loss_of_no_numbers(
    spoilt: Pair, drafter: str, tmp_path: Path
) -> None:
    answers = [([5, 6, 7 + i], [3, 4, 5, 6, 7, 8]) for i in range(20)]
    spoil(spoilt.target.model, math.nan)
    plan = DrafterPlan(drafter, tmp_path / "made", heads=2, epochs=1)
    what = "loss of epoch 1 is" if drafter == "model" else "hidden states are"
    with pytest.raises(RunError, match=f"{what} NaN"):
        fit_to_answers(spoilt, answers, plan)


def test_a_model_whose_states_are_no_numbers_is_named_when_it_is_loaded(
    spoilt: Pair, tmp_path: Path
) -> None:
    spoil(spoilt.target.model, math.nan)
    spoilt.target.model.save_pretrained(tmp_path)
    spoilt.target.tokenizer.save_pretrained(tmp_path)
    with pytest.raises(
        RunError, match=r"target .*its hidden states are NaN or infinite; usual"
    ):
        load_pair(str(tmp_path), compile=False)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_judge_of_no_number_rejects(
    llama: Pair, tmp_path: Path, value: float
) -> None:
    weight = torch.full((llama.target.hidden_size,), value)
    Head(weight, 0.0, Inputs(("target",), ("draft",)), 0.5, llama.fingerprints).save(
        tmp_path
    )
    for prompt in PROMPTS:
        out = llama.generate(
            prompt, rule=f"judge:{tmp_path}@0.5", window=4, max_new_tokens=20
        )
        assert (
            out.tokens == llama.generate(prompt, rule="exact", max_new_tokens=20).tokens
        )


@pytest.mark.parametrize("rule", ["exact", "speculative", "block", "lenient:0.9"])
def test_a_temperature_near_zero_is_greedy(llama: Pair, rule: str) -> None:
    greedy = llama.generate(PROMPTS[0], rule=rule, window=4, max_new_tokens=20)
    for temperature in (1e-6, 1e-30, 1e-44):
        near = llama.generate(
            PROMPTS[0], rule=rule, window=4, max_new_tokens=20, temperature=temperature
        )
        assert near.tokens == greedy.tokens


def tagged(
    checkpoints: Callable[[str], tuple[str, str]], folder: Path, *words: str
) -> str:
    """A target of which some words are special tokens, with a chat template that ends turns with
    the last of them."""
    shutil.copytree(checkpoints("llama")[0], folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_special_tokens({"additional_special_tokens": list(words)})
    tokenizer.chat_template = (
        "{% for m in messages %}{{ 'w1 ' + m.content + ' END ' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'w2' }}{% endif %}"
    ).replace("END", words[-1])
    tokenizer.save_pretrained(folder)
    return str(folder)


def test_a_stop_string_that_is_a_special_token_ends_the_answer(
    llama: Pair, checkpoints, tmp_path: Path
) -> None:
    plain = llama.generate(PROMPTS[0], rule="target", max_new_tokens=30)
    at = next(
        i
        for i, token in enumerate(plain.tokens)
        if i > 3 and token not in plain.tokens[:i]
    )
    word = f"w{plain.tokens[at]}"
    folder = tagged(checkpoints, tmp_path / "tagged", word)
    pair = load_pair(folder, dtype="float32", compile=False, chat=False)
    options = {"window": 0, "max_new_tokens": 30, "stop_strings": (word,)}
    out = pair.generate(PROMPTS[0], **options)
    assert out.finish == "stop" and out.tokens == plain.tokens[: at + 1]
    assert word not in out.text.split() and len(out.text.split()) == at
    assert "".join(step.text for step in pair.stream(PROMPTS[0], **options)) == out.text
    with pytest.raises(InputError, match=f"holds the special token '{word}' and more"):
        pair.generate(PROMPTS[0], window=0, stop_strings=(f"{word} w5",))


def test_a_chats_answer_ends_with_its_turn(checkpoints, tmp_path: Path) -> None:
    folder = tagged(checkpoints, tmp_path / "tagged", "w31")
    with pytest.warns(UserWarning, match="'w31', which ends a turn but is missing"):
        pair = load_pair(folder, dtype="float32", compile=False)
        assert pair.target.eos_ids == {0, 31}
    without = load_pair(folder, dtype="float32", compile=False, chat=False)
    assert without.target.eos_ids == {0}


def test_an_eos_that_is_no_special_token_is_in_no_text(
    llama: Pair, checkpoints
) -> None:
    base = llama.generate(PROMPTS[0], rule="target", max_new_tokens=30)
    eos = next(
        t for i, t in enumerate(base.tokens) if i > 3 and t not in base.tokens[:i]
    )
    pair = load_pair(*checkpoints("llama"), dtype="float32", compile=False)
    pair.target.model.generation_config = GenerationConfig(eos_token_id=[0, eos])
    whole = pair.generate(PROMPTS[0], max_new_tokens=30)
    streamed = "".join(step.text for step in pair.stream(PROMPTS[0], max_new_tokens=30))
    stopped = pair.generate(
        PROMPTS[0], max_new_tokens=30, stop_strings=("never there",)
    )
    assert whole.finish == "eos" and whole.tokens[-1] == eos
    assert whole.text == streamed == stopped.text
    assert whole.text.split()[-1] != f"w{eos}"


@pytest.mark.parametrize("separator", ["\u2028", "\u2029", "\u0085", "\x0c"])
def test_a_row_is_a_line_whatever_its_strings_hold(
    separator: str, tmp_path: Path
) -> None:
    rows = [{"id": "a", "prompt": f"one{separator}two"}, {"id": "b", "prompt": "three"}]
    path = tmp_path / "rows.jsonl"
    dumped = [json.dumps(row, ensure_ascii=False) for row in rows]
    for text in (
        "\n".join(dumped),
        "\r\n".join(dumped) + "\r\n",
        "\ufeff" + "\n".join(dumped),
    ):
        path.write_text(text, encoding="utf-8", newline="")
        assert [json.loads(line) for _, line in read_lines(path, "rows")] == rows
        assert [row for _, row in read_rows(path)] == rows


def test_what_is_no_regular_file_is_written_to_and_stays(tmp_path: Path) -> None:
    """Such as /dev/null, which root could otherwise replace by a file."""
    pipe, read = tmp_path / "pipe", list[str]()
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: read.append(pipe.read_text()), daemon=True)
    reader.start()
    write_text(pipe, "whole")
    reader.join(10)
    assert read == ["whole"] and pipe.is_fifo()
    assert [path.name for path in tmp_path.iterdir()] == ["pipe"]


SWITCH = 20
ROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 4,
    "long_factor": [1.0, 4.0, 12.0, 24.0],
    "factor": 4.0,
    "original_max_position_embeddings": SWITCH,
}
LONGROPE = {
    "llama": LlamaConfig(
        **COMMON, **SMALL, num_key_value_heads=2, rope_parameters=dict(ROPE)
    ),
    "phi3": Phi3Config(
        **COMMON,
        **SMALL,
        num_key_value_heads=2,
        rope_parameters=dict(ROPE),
        original_max_position_embeddings=SWITCH,
        sliding_window=None,
    ),
}


@pytest.mark.parametrize("name", LONGROPE)
def test_a_window_reaches_over_no_switch_of_rope_factors(
    name: str, tmp_path: Path
) -> None:
    """Answers that begin before, at and behind the switch are those of `transformers`, alone and in
    batches. Trees are refused."""
    config: PretrainedConfig = LONGROPE[name]
    target = save_model(tmp_path / "target", config, seed=1)
    draft = save_model(tmp_path / "draft", config, seed=1, noise=0.05)
    pair = load_pair(str(target), str(draft), dtype="float32", compile=False)
    assert pair.target.rope_switch == SWITCH
    prompts = [
        [1 + (5 * i + j) % 40 for j in range(n)]
        for i, n in enumerate((5, 19, 20, 21, 30))
    ]
    wanted = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        out = pair.target.model.generate(ids, do_sample=False, max_new_tokens=30)
        wanted.append(out[0, len(prompt) :].tolist())
    for options in ({"rule": "target"}, {"window": 1}, {"window": 8}):
        for size in (1, 5):
            outs = pair.generate_batch(
                prompts, max_new_tokens=30, batch_size=size, **options
            )
            assert [out.tokens for out in outs] == wanted, (options, size)
    with pytest.raises(InputError, match="rotary factors change after 20 tokens"):
        pair.generate(prompts[0], tree="dynamic:8")


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("camembert", {}),
        ("roformer", {"embedding_size": 32}),
        ("xlm-roberta", {}),
        ("roberta-prelayernorm", {}),
        ("bert-generation", {}),
    ],
)
def test_an_encoder_is_refused_by_name(
    kind: str, options: dict, tmp_path: Path
) -> None:
    config = AutoConfig.for_model(
        kind,
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=64,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=0,
        initializer_range=0.35,
        **options,
    )
    folder = str(save_model(tmp_path / kind, config, seed=1))
    with pytest.raises(
        InputError,
        match=r"reads a window otherwise|token by token|keeps a state|counts positions",
    ):
        load_pair(folder, dtype="float32", compile=False)
