"""Targets whose weights are rounded while they are loaded: strict decoding is lossless towards the
rounded target, and what was trained for other weights is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import CONFIGS, save_model
from test_decode import plain_greedy
from test_mining import ParityTask, mined
from transformers import LlamaConfig, TorchAoConfig

import lenience
from lenience import InputError
from lenience.core.files import EMBEDDED
from lenience.core.identity import weights_fingerprint
from lenience.decoding.pair import Pair
from lenience.heads.head import Inputs
from lenience.models.quantized import WAYS
from lenience.training.fit import HeadPlan, fit_run

PROMPTS = [[5, 6, 7], [*range(1, 20)], [9]]


@pytest.fixture(scope="module")
def quantized(
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str | None, Pair]:
    folder = tmp_path_factory.mktemp("quantized")
    config = LlamaConfig(**{**CONFIGS["llama"].to_dict(), "intermediate_size": 64})
    models = [
        str(save_model(folder / role, config, seed=1, noise=noise))
        for role, noise in (("target", 0.0), ("draft", 0.15))
    ]
    return {
        way: lenience.load_pair(
            *models, dtype="float32", compile=False, quantization=way
        )
        for way in (None, *WAYS)
    }


@pytest.mark.parametrize("way", WAYS)
def test_strict_answers_are_the_rounded_targets_own(
    quantized: dict[str | None, Pair], way: str
) -> None:
    pair = quantized[way]
    options = {"max_new_tokens": 20, "batch_size": 3}
    for how in ({"window": 1}, {"window": 5}, {"drafter": "ngram"}, {"tree": "auto"}):
        how = how if how != {"tree": "auto"} else {"tree": "dynamic:8"}
        outs = pair.generate_batch(PROMPTS, **options, **how)
        assert [out.tokens for out in outs] == [
            plain_greedy(pair, prompt, 20) for prompt in PROMPTS
        ]


@pytest.mark.parametrize(("way", "levels"), [("int8", 127), ("int4", 7)])
def test_weights_are_the_rounded_ones(
    quantized: dict[str | None, Pair], way: str, levels: int
) -> None:
    """Against rounding by hand: each weight is within half a step of the float32 one."""
    whole = quantized[None].target.model.model.layers[0].self_attn.q_proj.weight
    rounded = quantized[way].target.model.model.layers[0].self_attn.q_proj.weight
    error = (rounded.dequantize() - whole).abs().max()
    largest = whole.abs().max()
    assert 0 < error <= largest / levels * 0.51
    assert len(rounded.dequantize().unique()) <= (2 * levels + 2) * whole.numel() // 32


def test_fingerprints_tell_quantisations_apart(
    quantized: dict[str | None, Pair],
) -> None:
    prints = {pair.fingerprints["target"] for pair in quantized.values()}
    assert len(prints) == 3
    assert len({pair.fingerprints["draft"] for pair in quantized.values()}) == 1
    target = quantized["int8"].target
    assert weights_fingerprint(target.model.state_dict()) == target.fingerprint


def test_a_judge_is_fitted_to_a_quantised_target_and_bound_to_it(
    quantized: dict[str | None, Pair], tmp_path: Path
) -> None:
    mined(quantized["int8"], ParityTask(), tmp_path, limit=40)
    fit_run(quantized["int8"], tmp_path, HeadPlan(Inputs(), tmp_path / "judge"))
    rule = f"judge:{tmp_path / 'judge'}@0.5"
    assert quantized["int8"].generate([5], rule=rule, max_new_tokens=8).tokens
    for way in (None, "int4"):
        with pytest.raises(InputError, match="or the same quantised otherwise"):
            quantized[way].generate([5], rule=rule)


def test_rounded_activations_are_refused() -> None:
    from torchao.quantization import Int8DynamicActivationInt8WeightConfig

    rounding = TorchAoConfig(Int8DynamicActivationInt8WeightConfig())
    with pytest.raises(InputError, match="rounds activations"):
        lenience.load_pair(
            str(EMBEDDED / "target"),
            dtype="float32",
            target_kwargs={"quantization_config": rounding},
        )


def test_wrong_requests_are_one_line(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model", CONFIGS["llama"], seed=1)
    for options, match in (
        ({"quantization": "int3"}, "name one of int8, int4"),
        (
            {"quantization": "int8", "target_kwargs": {"quantization_config": {}}},
            "target_kwargs has a quantization_config too",
        ),
    ):
        with pytest.raises(InputError, match=match):
            lenience.load_pair(str(folder), **options)
    torn = tmp_path / "model.gguf"
    torn.write_bytes(b"GGUF")
    with pytest.raises(InputError, match="rounded already"):
        lenience.load_pair(str(torn), quantization="int8")


def test_no_graph_of_other_weights_is_used() -> None:
    pair = lenience.load_pair(quantization="int8")
    assert pair.target.backend is None and pair.draft.backend is not None
    with pytest.warns(UserWarning, match="its weights are quantised"):
        assert not pair.compile()


def test_layers_that_no_group_divides_are_told(tmp_path: Path) -> None:
    folder = str(save_model(tmp_path / "narrow", CONFIGS["llama"], seed=1))
    with pytest.raises(InputError, match="int8 takes any"):
        lenience.load_pair(folder, quantization="int4", dtype="float32")
    pair = lenience.load_pair(folder, quantization="int8", dtype="float32")
    out = pair.generate([5, 6], drafter="ngram", max_new_tokens=8)
    assert out.tokens == plain_greedy(pair, [5, 6], 8)
