"""EAGLE's drafters: their arithmetic, their files, and that they change no strict answer."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest
import torch
from conftest import VOCABULARY, prompt_lists, quick
from hypothesis import given
from safetensors.torch import save_file
from torch import Tensor

from lenience.core.context import Context, Row
from lenience.core.errors import InputError
from lenience.core.noise import Noise
from lenience.core.profile import Profile
from lenience.decoding.loading import load_pair
from lenience.decoding.pair import Pair
from lenience.drafting.base import DrafterSetup
from lenience.drafting.eagle import eagle_lm
from lenience.drafting.eagle_model import load_eagle
from lenience.drafting.parsing import parse_drafter, parse_tree
from lenience.drafting.stops import Fixed
from lenience.models.cuda_graphs import CudaGraphs
from lenience.models.lm import LM
from lenience.models.onnx_graph import GraphCache
from lenience.models.pass_cache import States
from lenience.models.session import Session
from lenience.training.eagle import EagleFit
from lenience.training.fit_drafter import DrafterPlan, fit_to_answers

SIZE, HEADS, INNER, SMALLER = 32, 4, 40, 30
"""Hidden size, heads, inner size, and how many tokens a smaller draft vocabulary has."""
CONFIG = {
    "hidden_size": SIZE, "intermediate_size": INNER, "num_attention_heads": HEADS,
    "num_key_value_heads": 2, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu",
}  # fmt: skip


def tensors(
    version: int, seed: int = 0, layers: int = 1, more: Sequence[str] = ()
) -> dict[str, Tensor]:
    """A checkpoint of random weights, in speculators' names; `more` says which of the parts it has
    that some have."""
    generator = torch.Generator().manual_seed(seed)

    def of(*shape: int, scale: float = 0.3) -> Tensor:
        return torch.randn(*shape, generator=generator) * scale

    made: dict[str, Tensor] = {}
    for i in range(layers):
        read = 2 * SIZE if version == 3 and i == 0 else SIZE
        shapes = {
            "self_attn.q_proj": (SIZE, read), "self_attn.k_proj": (SIZE // 2, read),
            "self_attn.v_proj": (SIZE // 2, read), "self_attn.o_proj": (SIZE, SIZE),
            "mlp.gate_proj": (INNER, SIZE), "mlp.up_proj": (INNER, SIZE),
            "mlp.down_proj": (SIZE, INNER),
        }  # fmt: skip
        made |= {
            f"layers.{i}.{name}.weight": of(*shape) for name, shape in shapes.items()
        }
        norms = ["post_attention_layernorm"]
        norms += ["input_layernorm"] if version == 3 or i else []
        norms += ["hidden_norm"] if version == 3 and not i else []
        made |= {f"layers.{i}.{name}.weight": 1 + of(SIZE) for name in norms}
    if version == 1:
        return made | {"fc.weight": of(SIZE, 2 * SIZE), "fc.bias": of(SIZE)}
    if "input_norm" in more:
        made["input_norm.weight"] = 1 + of(3 * SIZE)
    if "fc_norm" in more:
        made |= {f"fc_norm.{i}.weight": 1 + of(SIZE) for i in range(3)}
    if "embed_tokens" in more:
        made["embed_tokens.weight"] = of(VOCABULARY, SIZE, scale=1.0)
    made |= {"fc.weight": of(SIZE, 3 * SIZE), "norm.weight": 1 + of(SIZE)}
    if "whole vocabulary" in more:
        return made | {"lm_head.weight": of(VOCABULARY, SIZE, scale=1.0)}
    offsets = torch.sort(
        torch.randperm(VOCABULARY, generator=generator)[:SMALLER]
    ).values
    return made | {
        "lm_head.weight": of(SMALLER, SIZE, scale=1.0),
        "d2t": offsets - torch.arange(SMALLER),
        "t2d": torch.zeros(VOCABULARY, dtype=torch.bool).index_fill(0, offsets, True),
    }


def write(
    folder: Path,
    version: int,
    seed: int = 0,
    layout: str = "original",
    layers: int = 1,
    more: Sequence[str] = (),
) -> Path:
    """A checkpoint in one of the layouts; what is `more` and no tensor is said in its
    configuration."""
    saved = tensors(version, seed, layers, more)
    folder.mkdir(parents=True, exist_ok=True)
    if layout == "speculators":
        about = {
            "transformer_layer_config": CONFIG,
            "eagle_aux_hidden_state_layer_ids": [1, 2, 2],
        }
        save_file(saved, folder / "model.safetensors")
    else:
        about = {
            **CONFIG,
            "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 1]},
        }
        saved = {name.replace("layers.0.", "midlayer.") if version == 3 else name: part
                 for name, part in saved.items()}  # fmt: skip
        torch.save(saved, folder / "pytorch_model.bin")
    about |= {
        name: True for name in ("norm_before_residual", "norm_output") if name in more
    }
    (folder / "config.json").write_text(json.dumps(about))
    return folder


def rms(x: Tensor, weight: Tensor) -> Tensor:
    return weight * x * (x.pow(2).mean(-1, keepdim=True) + 1e-5).rsqrt()


def rotate(x: Tensor) -> Tensor:
    """Rotary positions of heads [n, h, d]."""
    n, _, d = x.shape
    angles = torch.arange(n)[:, None] * 10000.0 ** (-torch.arange(0, d, 2) / d)
    cos, sin = (
        f(torch.cat([angles, angles], 1))[:, None] for f in (torch.cos, torch.sin)
    )
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin


def layer(t: dict[str, Tensor], i: int, x: Tensor, residual: Tensor) -> Tensor:
    """A Llama layer over x [n, …] that stand one after the other, its norm in front left out."""
    w = {name.removeprefix(f"layers.{i}."): part for name, part in t.items()}
    n, d = len(x), SIZE // HEADS
    q, k = (
        rotate((x @ w[f"self_attn.{p}_proj.weight"].T).view(n, -1, d)) for p in "qk"
    )
    v = (x @ w["self_attn.v_proj.weight"].T).view(n, -1, d)
    k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
    scores = torch.einsum("qhd,khd->hqk", q, k) * d**-0.5
    scores = scores.masked_fill(torch.ones(n, n).triu(1).bool(), -torch.inf)
    out = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).reshape(n, SIZE)
    state = residual + out @ w["self_attn.o_proj.weight"].T
    y = rms(state, w["post_attention_layernorm.weight"])
    gate = torch.nn.functional.silu(y @ w["mlp.gate_proj.weight"].T)
    return (
        state + (gate * (y @ w["mlp.up_proj.weight"].T)) @ w["mlp.down_proj.weight"].T
    )


def by_formula(
    version: int,
    t: dict[str, Tensor],
    target: LM,
    text: list[int],
    window: int,
    layers: tuple[int, ...] = (1, 2, 2),
    depth: int = 1,
    more: Sequence[str] = (),
) -> list[int]:
    """What EAGLE drafts greedily after a text of which the target has read all but the last token:
    row i has token i + 1 and what was made of token i."""
    model = target.model
    out = model(torch.tensor([text[:-1]]), output_hidden_states=True)
    if version == 3:
        # the last layer's are after the final norm in transformers' list, and before it here
        last: list[Tensor] = []
        hook = model.model.layers[-1].register_forward_hook(
            lambda m, a, out: last.append(out)
        )
        model(torch.tensor([text[:-1]]))
        hook.remove()
        after = {1: out.hidden_states[1][0], 2: last[0][0]}
        read = [after[i] for i in layers]
        if "fc_norm" in more:
            read = [rms(part, t[f"fc_norm.{i}.weight"]) for i, part in enumerate(read)]
        joined = torch.cat(read, -1)
        if "input_norm" in more:
            joined = rms(joined, t["input_norm.weight"])
        inputs = joined @ t["fc.weight"].T
    else:
        inputs = out.hidden_states[-1][0]
    tokens, drafted = text[1:], []
    for _ in range(window):
        embedded = model.get_input_embeddings()(torch.tensor(tokens))
        if "embed_tokens" in more:
            embedded = t["embed_tokens.weight"][tokens]
        if version == 3:
            w = {name.removeprefix("layers.0."): part for name, part in t.items()}
            x = [
                rms(embedded, w["input_layernorm.weight"]),
                rms(inputs, w["hidden_norm.weight"]),
            ]
            states = layer(
                t,
                0,
                torch.cat(x, -1),
                x[1] if "norm_before_residual" in more else inputs,
            )
            for i in range(1, depth):
                normed = rms(states, t[f"layers.{i}.input_layernorm.weight"])
                states = layer(t, i, normed, states)
            normed = rms(states, t["norm.weight"])
            states = normed if "norm_output" in more else states  # what is gone on with
            best = int((normed[-1] @ t["lm_head.weight"].T).argmax())
            best += int(t["d2t"][best]) if "d2t" in t else 0
        else:
            joined = torch.cat([embedded, inputs], -1) @ t["fc.weight"].T + t["fc.bias"]
            states = layer(t, 0, joined, joined)
            best = int((states[-1] @ model.get_output_embeddings().weight.T).argmax())
        drafted.append(best)
        if best == 0:
            break
        tokens, inputs = [*tokens, best], torch.cat([inputs, states[-1:]])
    return drafted


def test_training_reads_as_drafting_does(llama: Pair) -> None:
    # an answer that is what the model drafts after each of its beginnings
    prompt, texts = [7, 3, 9, 9, 12, 30], []
    fit = EagleFit(llama.target, [(prompt, [1, 2])], [], seed=4)
    with torch.no_grad():
        for weight in fit.weights.values():
            weight += 0.3 * torch.randn(
                weight.shape, generator=torch.Generator().manual_seed(5)
            )
    t = {name: part.detach() for name, part in fit.fitted.tensors.items()}
    t["d2t"] = torch.zeros(VOCABULARY, dtype=torch.long)
    assert fit.states.features == (2, 1, 1)  # of two layers
    with torch.no_grad():
        for n in (4, 6, 9):
            text = [*prompt, 11, 4, 17][:n]
            drafted = by_formula(3, t, llama.target, text, 5, (2, 1, 1))
            texts.append((text, drafted))
        steps = [logits for logits, _ in fit._steps(texts)]
    for b, (text, drafted) in enumerate(texts):
        start = len(text) - 2  # the row of the last token
        found = [int(step[b, start + k].argmax()) for k, step in enumerate(steps)]
        assert found[: len(drafted)] == drafted


def test_eagle_learns_and_goes_on_after_a_stop(llama: Pair, tmp_path: Path) -> None:
    prompts = [[1 + i, 1 + 7 * i % 40] for i in range(12)]
    outs = llama.generate_batch(prompts, rule="target", max_new_tokens=30)
    answers = [(out.prompt_tokens, out.tokens) for out in outs]
    answers.sort(key=lambda answer: -len(answer[1]))
    answers = answers[:1] * 3 + answers[1:]  # the first is held out, and learned too
    plan = DrafterPlan("eagle", tmp_path / "eagle", epochs=16)
    before = fit_to_answers(
        llama, answers, replace(plan, out=tmp_path / "none", epochs=0)
    )
    whole = fit_to_answers(llama, answers, plan)
    assert whole.metrics["tokens_per_pass"] > before.metrics["tokens_per_pass"]
    assert not (plan.out / "training.safetensors").exists()
    assert all(weight.grad is None for weight in llama.target.model.parameters())

    def stopping(what: str, done: float, total: float) -> None:
        if done == 2:
            raise KeyboardInterrupt

    again, seen = replace(plan, out=tmp_path / "again"), []
    with pytest.raises(KeyboardInterrupt):
        fit_to_answers(llama, answers, again, stopping)
    resumed = fit_to_answers(
        llama, answers, again, lambda what, done, total: seen.append(done)
    )
    assert seen == [*range(2, 17)]
    assert resumed.fingerprint == whole.fingerprint
    spec = f"eagle:{plan.out}"
    decoder = llama.decoder({"drafter": spec})
    assert llama.binding(decoder)["heads"] == [whole.fingerprint]
    assert llama.binding(decoder)["drafter"] == "eagle:eagle"
    # what a pass keeps on the answer held out, counted by decoding from each of its places; the
    # first follows a prompt, which the target has not read then
    prompt, answer = answers[0]
    steps = [
        next(islice(llama.stream(prompt + answer[:n], drafter=spec, window=5), 1, None))
        for n in range(len(answer) - 1)
    ]
    total = (whole.metrics["tokens_per_pass"] - 1) * len(answer)
    at_first = total - sum(step.kept for step in steps)
    assert (
        at_first == pytest.approx(round(at_first), abs=1e-6)
        and -1e-6 < at_first <= 5 + 1e-6
    )
    assert sum(step.kept for step in steps) > 2
    (plan.out / "eagle.json").write_text(
        json.dumps(
            {**json.loads((plan.out / "eagle.json").read_text()), "fingerprint": "0"}
        )
    )
    with pytest.raises(InputError, match="come from different training runs"):
        _ = parse_drafter(spec).head


def test_a_cast_model_keeps_its_frequencies_and_leaves_the_target(
    checkpoints: Callable[[str], tuple[str, str]], tmp_path: Path
) -> None:
    target = load_pair(*checkpoints("llama"), dtype="bfloat16", compile=False).target
    lm = eagle_lm(load_eagle(write(tmp_path, 1)), target)
    assert lm.dtype == "bfloat16"
    assert lm.model.model.rotary_emb.inv_freq.dtype == torch.float32
    own = {id(module) for module in lm.model.modules()}
    assert not own & {id(module) for module in target.model.modules()}
    # and takes no memory for what is the target's
    shared = {weight.data_ptr() for weight in target.model.parameters()}
    assert lm.model.lm_head.weight.data_ptr() in shared
    assert lm.model.model.embed_tokens.weight.data_ptr() in shared


def test_prompts_of_one_token_are_learned_from(llama: Pair, tmp_path: Path) -> None:
    fit = EagleFit(llama.target, [([4], [5, 6, 7])], [], seed=0)
    ((tokens, features, wanted),) = [fit._read(fit.answers)]
    assert tokens.tolist() == [[5, 6]] and wanted.tolist() == [[6, 7]]
    assert features.shape == (1, 2, 3 * SIZE)


def test_a_checkpoint_of_another_kind_is_refused(llama: Pair, tmp_path: Path) -> None:
    def refused(spec: str, match: str) -> None:
        with pytest.raises(InputError, match=match):
            llama.generate("w1", drafter=spec)

    folder = write(tmp_path / "eagle", 3, layout="speculators")
    refused(f"eagle:{tmp_path / 'none'}", "no config.json")
    refused(f"eagle:{folder},layers=1-2", "reads 96 numbers.*layers 1-2 are 64")
    refused(f"eagle:{folder},layers=1-2-3", "layer 3.*has 2")
    refused(f"eagle:{folder},layers=0-1-2", "must be numbers")
    saved = tensors(3)
    save_file(
        saved | {"layers.0.self_attn.q_norm.weight": torch.ones(8)},
        folder / "model.safetensors",
    )
    refused(f"eagle:{folder}", "q_norm.weight, which Llama layers lack")
    save_file(saved | {"d2t": saved["d2t"] + 40}, folder / "model.safetensors")
    refused(
        f"eagle:{folder}", f"predicts 8[0-9] tokens, and the target has {VOCABULARY}"
    )
    del saved["layers.0.mlp.up_proj.weight"]
    save_file(saved, folder / "model.safetensors")
    refused(f"eagle:{folder}", "cannot be read.*up_proj")
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"")
    refused(f"eagle:{folder}", "cannot be read")
    torch.save([torch.ones(1)], folder / "pytorch_model.bin")
    refused(f"eagle:{folder}", "cannot be read")
    torch.save({"fc.weight": Path("x")}, folder / "pytorch_model.bin")
    refused(f"eagle:{folder}", "holds more than tensors")


@pytest.mark.usefixtures("graphs")
@pytest.mark.parametrize("recorded", [False, True], ids=["exported", "recorded"])
def test_features_of_exported_and_recorded_passes(
    recorded: bool,
    checkpoints: Callable[[str], tuple[str, str]],
    tmp_path: Path,
    llama: Pair,
) -> None:
    # without a draft model, whose export would take as long as the target's
    pair = load_pair(checkpoints("llama")[0], dtype="float32", compile=False)
    if recorded:
        pair.target.use(CudaGraphs())
    else:
        pair.compile()
    prompts = [[5, 6, 7], list(range(1, 20)), [9]]
    for version, tree in ((3, "chain"), (3, "dynamic:7"), (1, "chain")):
        options = {
            "drafter": f"eagle:{write(tmp_path / str(version), version)}",
            "tree": tree,
        }
        for size in (1, 2):
            both = [
                one.generate_batch(
                    prompts, batch_size=size, max_new_tokens=20, **options
                )
                for one in (llama, pair)
            ]
            for plain, other in zip(*both):
                assert other.tokens == plain.tokens
                # the same is drafted, so what it is drafted from is the same
                assert (other.drafted, other.target_passes) == (
                    plain.drafted,
                    plain.target_passes,
                )
    if not recorded:
        states = States(features=(1, 2, 2))
        assert isinstance(Session(pair.target, states=states).cache, GraphCache)


@pytest.mark.parametrize(
    ("version", "layout", "depth", "more"),
    [
        (3, "original", 1, ()),
        (3, "speculators", 1, ()),
        (1, "original", 1, ()),
        (3, "speculators", 1, ("norm_before_residual", "fc_norm", "embed_tokens")),
        (3, "original", 1, ("norm_output", "input_norm", "whole vocabulary")),
        (3, "speculators", 2, ("norm_before_residual", "whole vocabulary")),
    ],
)
def test_eagle_drafts_as_its_formula_says(
    version: int,
    layout: str,
    depth: int,
    more: tuple[str, ...],
    llama: Pair,
    tmp_path: Path,
) -> None:
    folder = write(tmp_path / "eagle", version, layout=layout, layers=depth, more=more)
    t = tensors(version, layers=depth, more=more)
    prompt = [7, 3, 9, 9, 12, 30]
    steps = []
    for step in llama.stream(
        prompt, drafter=f"eagle:{folder}", window=4, max_new_tokens=25, rule="exact"
    ):
        steps.append(step)
    text = list(prompt)
    assert len(steps) > 3 and steps[0].drafted == 0
    drafted = {}
    spec = parse_drafter(f"eagle:{folder}")
    session = Session(llama.target, states=States(features=spec.features(llama.target)))
    setup = DrafterSetup(
        llama.target, None, 1, 256, Fixed(), parse_tree("chain"), keep_states=False,
        profile=Profile(), session=session,
    )  # fmt: skip
    drafter = spec.build(setup)
    with torch.inference_mode():
        for step in steps:
            ctx = Context(
                [Row(Noise(0, b""), list(text), position=len(drafted))], window=4
            )
            draft = drafter.propose(ctx, [1000])
            found = draft.tokens[0, : int(draft.lengths[0])].tolist()
            drafted[len(text)] = found
            assert len(found) == step.drafted
            if len(text) > len(prompt):
                wanted = by_formula(
                    version, t, llama.target, text, 4, depth=depth, more=more
                )
                assert found == wanted
            # the target also reads what is not kept
            session.read([text + found], len(found) + 1)
            text += step.tokens
    assert any(len(set(found)) > 1 for found in drafted.values())


CASES = [
    (3, "chain"),
    (3, "dynamic:8"),
    (3, "cartesian:2,2"),
    (1, "chain"),
    (1, "dynamic:6"),
]


@pytest.mark.parametrize(("version", "tree"), CASES)
@quick(5)
@given(prompts=prompt_lists(5))
def test_eagle_changes_no_strict_answer(
    version: int, tree: str, llama: Pair, tmp_path_factory: pytest.TempPathFactory,
    prompts: list[list[int]],
) -> None:  # fmt: skip
    folder = write(tmp_path_factory.mktemp("eagle"), version)
    for temperature in (0.0, 0.8):
        options = {"max_new_tokens": 30, "temperature": temperature, "seed": 3}
        alone = llama.generate_batch(prompts, rule="target", **options)
        options |= {"drafter": f"eagle:{folder}", "tree": tree, "window": 3}
        for size in (1, 3):
            outs = llama.generate_batch(
                prompts, batch_size=size, rule="exact", **options
            )
            assert [out.tokens for out in outs] == [out.tokens for out in alone]
            assert all(out.drafted for out in outs if len(out.tokens) > 1)
