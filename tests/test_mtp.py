"""Drafting with the MTP layer of a checkpoint proposes what transformers' `use_mtp` does."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import COMMON, SMALL, make_tokenizer
from safetensors.torch import load_file, save_file
from test_mining import ParityTask, brute_force, lines, mined
from transformers import Glm4MoeConfig, Glm4MoeForCausalLM
from transformers.cache_utils import MtpCache
from transformers.modeling_layers import MtpModel

import lenience
from lenience import InputError
from lenience.decoding.decoder import Decoder
from lenience.decoding.pair import Pair
from lenience.drafting.mtp import mtp_lm
from lenience.heads.head import Inputs
from lenience.training.fit import HeadPlan, fit_run

LAYERS = 2
PROMPTS = [[5, 6, 7], [*range(1, 20)], [9], [40, 2, 17]]
NEW = 24


def write(folder: Path, mtp_layers: int = 1) -> None:
    """Write a checkpoint of GLM-4.5's kind in its published layout, in which MTP layers follow the
    others. The layer passes the target's state on, so it proposes to repeat a token now and
    then, which is right at times."""
    config = Glm4MoeConfig(
        **COMMON,
        **SMALL,
        num_key_value_heads=2,
        head_dim=8,
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        first_k_dense_replace=1,
        num_mtp_layers=mtp_layers,
    )
    torch.manual_seed(1)
    model = Glm4MoeForCausalLM(config)
    mtp = MtpModel(model, mtp_layers)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, weight in mtp.layers.named_parameters():
            scale = 0.0 if name.endswith("bias") else 0.2
            weight.normal_(0, scale, generator=generator)
            if "norm" in name:
                weight.fill_(1.0)
            if "eh_proj" in name:
                weight[:, SMALL["hidden_size"] :] = torch.eye(SMALL["hidden_size"])
    layer = mtp.state_dict()
    model.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    tensors: dict[str, torch.Tensor] = {}
    for name, weight in layer.items():
        if not name.startswith("layers."):
            continue
        _, number, rest = name.split(".", 2)
        rest = rest.removeprefix("mtp_block.")
        rest = rest.replace("post_norm.", "shared_head.norm.")
        whole = f"model.layers.{LAYERS + int(number)}.{rest}"
        tensors |= published(whole, weight.clone())
    file = folder / "model.safetensors"
    save_file({**load_file(file), **tensors}, file, metadata={"format": "pt"})


def published(name: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return a tensor under its published name; experts are published one by one."""
    if name.endswith("experts.gate_up_proj"):
        parts = {}
        for i, both in enumerate(weight):
            for part, half in zip(("gate", "up"), both.chunk(2)):
                published_name = name.replace("gate_up_proj", f"{i}.{part}_proj.weight")
                parts[published_name] = half.contiguous()
        return parts
    if name.endswith("experts.down_proj"):
        return {
            name.replace("down_proj", f"{i}.down_proj.weight"): part.contiguous()
            for i, part in enumerate(weight)
        }
    return {name: weight}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    folder = tmp_path_factory.mktemp("glm4_moe")
    # transformers looks for the layer at the numbers of the published models
    layer = rf"model\.layers\.[{LAYERS}-9].*"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Glm4MoeForCausalLM, "_keys_to_ignore_on_load_unexpected", [layer])
        write(folder)
        loaded = lenience.load_pair(str(folder), dtype="float32", compile=False)
        # the checks of a model read tokens too
        loaded.generate([5], drafter="mtp", window=1, max_new_tokens=3)
    return loaded


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The tokens that each pass of the target reads."""
    tokens: list[list[int]] = []
    forward = Glm4MoeForCausalLM.forward

    @functools.wraps(forward)
    def noted(self: Any, input_ids: torch.Tensor, **options: Any) -> Any:
        tokens.append(input_ids[0].tolist())
        return forward(self, input_ids, **options)

    monkeypatch.setattr(Glm4MoeForCausalLM, "forward", noted)
    layer = rf"model\.layers\.[{LAYERS}-9].*"
    monkeypatch.setattr(
        Glm4MoeForCausalLM, "_keys_to_ignore_on_load_unexpected", [layer]
    )
    return tokens


def generated_by_transformers(pair: Pair, prompt: list[int]) -> list[int]:
    """Return the new tokens of transformers' own MTP generation."""
    ids = torch.tensor([prompt])
    out = pair.target.model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=NEW,
        do_sample=False,
        use_mtp=True,
    )
    new: list[int] = out[0, len(prompt) :].tolist()
    return new


@pytest.mark.parametrize("prompt", PROMPTS)
def test_each_pass_reads_the_proposals_of_transformers(
    pair: Pair, prompt: list[int], read: list[list[int]]
) -> None:
    wanted = generated_by_transformers(pair, prompt)
    theirs = list(read)
    del read[:]
    out = pair.generate(prompt, drafter="mtp", window=1, max_new_tokens=NEW)
    assert out.tokens == wanted
    # at an answer's end they draft one token more or less
    n = min(len(read), len(theirs)) - 1
    assert n > 2 and read[1:n] == theirs[1:n]


@pytest.fixture(scope="module", params=[2, 3])
def several(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Pair:
    """A target with several MTP layers."""
    folder = tmp_path_factory.mktemp("several")
    layer = rf"model\.layers\.[{LAYERS}-9].*"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Glm4MoeForCausalLM, "_keys_to_ignore_on_load_unexpected", [layer])
        write(folder, request.param)
        loaded = lenience.load_pair(str(folder), dtype="float32", compile=False)
        loaded.generate([5], drafter="mtp", window=1, max_new_tokens=3)
    return loaded


# transformers' own generation fails on prompts that are shorter than the number of layers
@pytest.mark.parametrize("prompt", [PROMPTS[0], PROMPTS[1], PROMPTS[3]])
def test_several_layers_propose_what_those_of_transformers_do(
    several: Pair, prompt: list[int], read: list[list[int]]
) -> None:
    layers = len(mtp_lm(several.target).model.model.modules_of_mtp.layers)
    wanted = generated_by_transformers(several, prompt)
    theirs = [until_eos(tokens) for tokens in read]
    del read[:]
    out = several.generate(prompt, drafter="mtp", window=layers, max_new_tokens=NEW)
    assert out.tokens == wanted
    n = min(len(read), len(theirs)) - layers
    assert n > 2 and read[1:n] == theirs[1:n]


@pytest.mark.parametrize(
    "options", [{"window": 2}, {"window": 8, "batch_size": 3}, {"window": 1}]
)
def test_answers_of_several_layers_are_the_targets_own(
    several: Pair, options: dict[str, Any]
) -> None:
    alone = several.generate_batch(PROMPTS, rule="target", max_new_tokens=NEW)
    outs = several.generate_batch(PROMPTS, drafter="mtp", max_new_tokens=NEW, **options)
    assert [out.tokens for out in outs] == [out.tokens for out in alone]
    assert sum(out.accepted_exact for out in outs) > 0
    # a stop condition that is never sure ends each window at its first token
    doubted = several.generate_batch(
        PROMPTS, drafter="mtp", max_new_tokens=NEW, stop="confidence:1", **options
    )
    assert [out.tokens for out in doubted] == [out.tokens for out in alone]
    assert all(out.drafted <= out.target_passes for out in doubted)
    with pytest.raises(InputError, match="one for each token of a chain"):
        several.generate([5], drafter="mtp", tree="dynamic:6")


def until_eos(tokens: list[int]) -> list[int]:
    return tokens[: tokens.index(0) + 1] if 0 in tokens else tokens


def test_some_proposals_are_right(pair: Pair) -> None:
    outs = pair.generate_batch(PROMPTS, drafter="mtp", max_new_tokens=NEW)
    assert sum(out.accepted_exact for out in outs) > 0


@pytest.mark.parametrize(
    "options",
    [
        {"window": 4},
        {"tree": "dynamic:6"},
        {"window": 3, "batch_size": 3},
        {"window": 3, "rule": "speculative", "temperature": 0.0},
        {"window": 4, "stop": "confidence:0.2"},
    ],
)
def test_strict_answers_are_the_targets_own(
    pair: Pair, options: dict[str, Any]
) -> None:
    options = {**options, "max_new_tokens": NEW}
    alone = pair.generate_batch(PROMPTS, rule="target", max_new_tokens=NEW)
    outs = pair.generate_batch(PROMPTS, drafter="mtp", **options)
    assert [out.tokens for out in outs] == [out.tokens for out in alone]
    assert sum(out.drafted for out in outs) > 0


def test_a_target_without_mtp_layers_is_refused_by_name(llama: Pair) -> None:
    with pytest.raises(InputError, match="has no MTP layers that transformers builds"):
        llama.generate([5], drafter="mtp")


def test_a_checkpoint_that_lacks_the_weights_is_refused_by_name(
    tmp_path: Path,
) -> None:
    write(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    kept = {name: tensors[name] for name in tensors if f"layers.{LAYERS}." not in name}
    save_file(kept, file, metadata={"format": "pt"})
    bare = lenience.load_pair(str(tmp_path), dtype="float32", compile=False)
    with pytest.raises(InputError, match="its MTP layers cannot be loaded"):
        bare.generate([5], drafter="mtp")


@torch.no_grad()
def test_it_is_mined_by_the_book_and_judged(pair: Pair, tmp_path: Path) -> None:
    """The layer's token is computed by transformers' own modules, from scratch."""
    mtp = mtp_lm(pair.target).model.model.modules_of_mtp

    def guessed(prompt: list[int], response: list[int]) -> int | None:
        if not response:  # the first cycle reads the prompt
            return None
        text = prompt + response
        read = torch.tensor([text[:-1]])
        states = pair.target.model(read, output_hidden_states=True).hidden_states[-1]
        tokens, _, _ = mtp(
            torch.tensor([text[1:]]),
            states,
            attention_mask=None,
            position_ids=torch.arange(1, len(text))[None],
            mtp_cache=MtpCache(config=mtp.config),
        )
        return int(tokens[0, 0])

    drafter = Decoder.of(drafter="mtp").drafter
    mined(pair, ParityTask(), tmp_path, limit=24, drafter=drafter)
    labels = set()
    for record in lines(tmp_path)[:3]:
        final, found = brute_force(pair, ParityTask(), record["prompt_ids"], guessed)
        assert record["final_ids"] == final
        assert [tuple(mismatch.values()) for mismatch in record["mismatches"]] == found
        labels |= {important for *_, important in found}
    assert labels >= {True, False}
    plan = HeadPlan(Inputs(("target",)), tmp_path / "judge")
    fit_run(pair, tmp_path, plan)
    for tree in ("chain", "dynamic:6"):
        strict, lenient = (
            pair.generate_batch(
                PROMPTS, rule=rule, drafter="mtp", tree=tree, max_new_tokens=NEW
            )
            for rule in ("exact", f"judge:{tmp_path / 'judge'}@0.01")
        )
        passes = [sum(o.target_passes for o in outs) for outs in (strict, lenient)]
        assert passes[1] < passes[0]
        assert sum(o.accepted_lenient for o in lenient) > 0
