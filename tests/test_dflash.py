"""DFlash proposes what transformers' own DFlash generation does."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import SMALL
from safetensors.torch import load_file, save_file
from transformers import (
    LlamaForCausalLM,
    MuseGlimmerAssistantConfig,
    MuseGlimmerAssistantModel,
)

import lenience
from lenience import InputError
from lenience.decoding.pair import Pair

PROMPTS = [[5, 6, 7], [*range(1, 20)], [9], [40, 2, 17]]
NEW = 24
BLOCK = 5


def write(folder: Path, **settings: Any) -> str:
    """Write a checkpoint in transformers' layout."""
    config = MuseGlimmerAssistantConfig(
        **{**SMALL, "num_key_value_heads": 2, "head_dim": 8, **settings},
        layer_types=["full_attention", "sliding_attention"],
        sliding_window=12,
        block_size=BLOCK,
        mask_token_id=3,
        target_layer_ids=[0, 1],
    )
    torch.manual_seed(4)
    model = MuseGlimmerAssistantModel(config)
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.normal_(0, 0.3, generator=generator)
            if "norm" in name:
                weight.fill_(1.0)
    model.save_pretrained(folder)
    return f"dflash:{folder}"


@pytest.fixture(scope="module")
def drafter(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write(tmp_path_factory.mktemp("dflash"))


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The tokens that each pass of the target reads."""
    tokens: list[list[int]] = []
    forward = LlamaForCausalLM.forward

    @functools.wraps(forward)
    def noted(self: Any, input_ids: torch.Tensor, **options: Any) -> Any:
        tokens.append(input_ids[0].tolist())
        return forward(self, input_ids, **options)

    monkeypatch.setattr(LlamaForCausalLM, "forward", noted)
    return tokens


def until_eos(tokens: list[int]) -> list[int]:
    return tokens[: tokens.index(0) + 1] if 0 in tokens else tokens


@pytest.mark.parametrize("prompt", PROMPTS)
def test_each_pass_reads_the_proposals_of_transformers(
    llama: Pair, drafter: str, prompt: list[int], read: list[list[int]]
) -> None:
    options = {"drafter": drafter, "window": BLOCK - 1, "max_new_tokens": NEW}
    llama.generate([5], **options)  # the checks of a model read tokens too
    ids = torch.tensor([prompt])
    del read[:]
    wanted = llama.target.model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=NEW,
        do_sample=False,
        assistant_model=MuseGlimmerAssistantModel.from_pretrained(drafter[7:]).eval(),
        speculation_type="dflash",
    )
    theirs = list(read)
    del read[:]
    out = llama.generate(prompt, **options)
    assert out.tokens == wanted[0, len(prompt) :].tolist()
    # windows end where the answer does; theirs go on
    n = min(len(read), len(theirs)) - BLOCK
    assert n > 2 and read[1:n] == [*map(until_eos, theirs[1:n])]


def test_some_proposals_are_right(llama: Pair, drafter: str) -> None:
    outs = llama.generate_batch(PROMPTS, drafter=drafter, max_new_tokens=NEW)
    assert sum(out.accepted_exact for out in outs) > 0


def test_passes_are_counted(
    llama: Pair, drafter: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = []
    forward = MuseGlimmerAssistantModel.forward

    @functools.wraps(forward)
    def noted(self: Any, *args: Any, **options: Any) -> Any:
        runs.append(options["noise_embeds"].shape[1])
        return forward(self, *args, **options)

    monkeypatch.setattr(MuseGlimmerAssistantModel, "forward", noted)
    out = llama.generate(PROMPTS[0], drafter=drafter, max_new_tokens=NEW)
    assert out.draft_passes == len(runs) > 2


def test_an_answer_costs_the_same_after_and_beside_others(
    llama: Pair, drafter: str
) -> None:
    options: dict[str, Any] = {"drafter": drafter, "max_new_tokens": NEW}
    alone = [llama.generate(prompt, **options) for prompt in PROMPTS]
    again = [llama.generate(prompt, **options) for prompt in PROMPTS for _ in range(2)]
    assert [out.drafted for out in again[1::2]] == [out.drafted for out in alone]
    # answers end one after another, and rows move to the places of those that ended
    beside = llama.generate_batch(PROMPTS, batch_size=4, **options)
    assert len({out.target_passes for out in beside}) > 2
    assert [out.draft_tokens for out in beside] == [out.draft_tokens for out in alone]


@pytest.mark.parametrize(
    "options",
    [
        {"window": 2},
        {"window": 9},
        {"tree": "dynamic:6"},
        {"window": 3, "batch_size": 3},
        {"window": 4, "stop": "confidence:0.2"},
    ],
)
def test_strict_answers_are_the_targets_own(
    llama: Pair, drafter: str, options: dict[str, Any]
) -> None:
    alone = llama.generate_batch(PROMPTS, rule="target", max_new_tokens=NEW)
    outs = llama.generate_batch(PROMPTS, drafter=drafter, max_new_tokens=NEW, **options)
    assert [out.tokens for out in outs] == [out.tokens for out in alone]
    assert sum(out.drafted for out in outs) > 0


def test_the_layout_of_the_methods_authors_is_read(
    llama: Pair, drafter: str, tmp_path: Path
) -> None:
    folder = Path(drafter.split(":")[1])
    about = json.loads((folder / "config.json").read_text())
    own = {name: about.pop(name) for name in ("mask_token_id", "target_layer_ids")}
    about["dflash_config"] = own
    about["model_type"] = "qwen3"
    about["architectures"] = ["DFlashDraftModel"]
    about["rope_theta"] = about.pop("rope_parameters")["rope_theta"]
    (tmp_path / "config.json").write_text(json.dumps(about))
    renamed = {
        name.replace("encoder.fc.", "fc.").replace(
            "encoder.output_norm_enc.", "hidden_norm."
        ): tensor
        for name, tensor in load_file(folder / "model.safetensors").items()
    }
    assert "fc.weight" in renamed and "hidden_norm.weight" in renamed
    save_file(renamed, tmp_path / "model.safetensors")
    outs = [
        llama.generate([5, 6], drafter=spec, window=4, max_new_tokens=NEW)
        for spec in (drafter, f"dflash:{tmp_path}")
    ]
    assert outs[0].tokens == outs[1].tokens
    assert outs[0].accepted_exact == outs[1].accepted_exact
    assert outs[0].target_passes == outs[1].target_passes


def test_pairs_of_two_precisions_share_a_checkpoint(
    llama: Pair, drafter: str, checkpoints: Callable[[str], tuple[str, str]]
) -> None:
    options = {"drafter": drafter, "window": 4, "max_new_tokens": NEW}
    wanted = llama.generate(PROMPTS[1], **options)
    steps = llama.stream(PROMPTS[1], **options)
    first = next(steps)
    target, _ = checkpoints("llama")
    half = lenience.load_pair(target, dtype="bfloat16", compile=False)
    half.generate(PROMPTS[1], **options)
    tokens = [*first.tokens, *(token for step in steps for token in step.tokens)]
    assert tokens == wanted.tokens


def test_broken_and_foreign_checkpoints_are_refused(
    llama: Pair, drafter: str, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match="there is no config"):
        llama.generate([5], drafter=f"dflash:{tmp_path}")
    other = write(tmp_path / "wide", hidden_size=48)
    with pytest.raises(InputError, match="name a checkpoint of this target"):
        llama.generate([5], drafter=other)
    broken = tmp_path / "broken"
    broken.mkdir()
    for name in ("config.json", "model.safetensors"):
        content = (Path(drafter.split(":")[1]) / name).read_bytes()
        (broken / name).write_bytes(content[: len(content) // 2])
    with pytest.raises(InputError, match="cannot be read"):
        llama.generate([5], drafter=f"dflash:{broken}")
