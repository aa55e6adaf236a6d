"""EAGLE's draft model: a decoder layer on tokens and the target's states."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import DynamicCache, LlamaConfig, PreTrainedModel
from transformers.modeling_outputs import (
    BaseModelOutputWithPast,
    CausalLMOutputWithPast,
)
from transformers.models.llama.modeling_llama import (
    LlamaDecoderLayer,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
)

from lenience.core.errors import InputError, first_line
from lenience.core.files import digest_bytes, replacing, stamp, write_json
from lenience.core.hub import local
from lenience.drafting.published import (
    BROKEN,
    has_shape,
    shown_shape,
    table,
    tensors_in,
)
from lenience.models.lm import LM
from lenience.models.pass_cache import cache_argument, positions_and_mask

ABOUT = "eagle.json"
"""File with the training record, next to the files of the published layout."""
WEIGHTS = ("model.safetensors", "pytorch_model.bin")
FIX = "`lenience fit RUN --drafter eagle` makes RUN/eagle"
LAYER = r"(layers\.\d+|midlayer)\."
KNOWN_WEIGHTS = re.compile(
    rf"{LAYER}(self_attn\.[qkvo]_proj|mlp\.(gate|up|down)_proj)\.(weight|bias)"
    rf"|{LAYER}(input_layernorm|post_attention_layernorm|hidden_norm)\.weight"
    r"|fc\.(weight|bias)|(norm|input_norm|fc_norm\.\d+|lm_head|embed_tokens)\.weight|d2t|t2d"
)
"""Pattern of the names of a checkpoint's tensors."""
CONFIGURED = (
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "rms_norm_eps",
    "hidden_act",
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
)
"""Fields of a configuration that describe the layers; the other sizes follow from the tensors'
shapes."""


@dataclass(frozen=True)
class EagleWeights:
    """A checkpoint of EAGLE-1, -2 or -3, published or trained here."""

    path: str
    config: LlamaConfig
    tensors: dict[str, Tensor] = field(repr=False)
    """Tensors by their names in speculators' layout: layers.0.self_attn.q_proj.weight, fc.weight,
    …"""
    features: tuple[int, ...] | None
    """Layers of the target whose states are the features; None if the checkpoint does not name
    them."""
    norm_before_residual: bool = False
    norm_output: bool = False
    fingerprints: Mapping[str, str] = field(default_factory=dict)
    """Fingerprints of the target and the tokenizer; empty if unknown."""
    metrics: Mapping[str, Any] = field(default_factory=dict)
    prompts: tuple[str, ...] | None = None
    """Digests of the training prompts; None if someone else trained the checkpoint."""

    @property
    def configured(self) -> list[Any]:
        """Return the settings of the checkpoint besides its tensors."""
        numbers = {name: getattr(self.config, name, None) for name in CONFIGURED}
        return [numbers, self.features, self.norm_before_residual, self.norm_output]

    @property
    def is_first(self) -> bool:
        """Return True for EAGLE-1 and EAGLE-2, which share a model: their layer reads states and
        tokens that a linear layer joins first."""
        reads = self.tensors["layers.0.self_attn.q_proj.weight"].shape[1]
        return bool(reads == self.size)

    @property
    def size(self) -> int:
        return self.tensors["fc.weight"].shape[0]

    @property
    def feature_size(self) -> int:
        """Return the size of the target's features that are read together with each token."""
        return self.tensors["fc.weight"].shape[1] - (self.size if self.is_first else 0)

    @cached_property
    def fingerprint(self) -> str:
        """Return a hash that identifies the predictions. It covers the configuration of a published
        checkpoint; the configuration of our own checkpoints follows from the tensors."""
        parts = [] if self.fingerprints else [repr(self.configured).encode()]
        parts += [name.encode() for name in sorted(self.tensors)]
        parts += [
            self.tensors[name].float().cpu().numpy().tobytes()
            for name in sorted(self.tensors)
        ]
        return digest_bytes(b"".join(parts))

    def check_shapes(self) -> None:
        """Raise ValueError if a tensor's shape contradicts the configuration or other tensors, and
        KeyError if a tensor is missing."""
        for name, wanted in self._shapes().items():
            tensor = self.tensors[name]
            if not has_shape(tensor, wanted):
                raise ValueError(
                    f"{name} is {shown_shape(tensor)}, not {shown_shape(wanted)}"
                )
        for name, tensor in self.tensors.items():
            if name not in ("d2t", "t2d") and not tensor.is_floating_point():
                raise ValueError(f"{name} has whole numbers")
        self._check_norms()
        offsets = self.tensors.get("d2t")
        if offsets is not None:
            if (
                len(offsets) != len(self.tensors["lm_head.weight"])
                or offsets.is_floating_point()
            ):
                raise ValueError(
                    "d2t has no whole number for each row of lm_head.weight"
                )
            if int((torch.arange(len(offsets)) + offsets.long()).min()) < 0:
                raise ValueError("d2t names a token below 0")

    def _check_norms(self) -> None:
        """Raise ValueError if the norms of the target's layers do not cover equal parts of the
        features, one norm each."""
        norms = {}
        for name, part in self.tensors.items():
            if name.startswith("fc_norm."):
                norms[name] = part
        reads = self.tensors["fc.weight"].shape[1]
        for i in range(len(norms)):
            norm = norms.get(f"fc_norm.{i}.weight")
            if norm is None or norm.shape != (reads / len(norms),):
                raise ValueError(
                    f"fc_norm.{i} is not one of {len(norms)} equal parts of the "
                    f"{reads} numbers "
                    "that fc reads"
                )

    def _shapes(self) -> dict[str, tuple[int | None, ...]]:
        """Return the required shape of each tensor; None stands for any size."""
        size = self.config.hidden_size
        reads = self.tensors["fc.weight"].shape[-1]
        with torch.device("meta"):
            layer = LlamaDecoderLayer(self.config, 0)
        shapes: dict[str, tuple[int | None, ...]] = {"fc.weight": (size, None)}
        for i in range(self.config.num_hidden_layers):
            own = {
                f"layers.{i}.{name}": part.shape
                for name, part in layer.named_parameters()
            }
            shapes |= {name: tuple(shape) for name, shape in own.items()}
        if (
            self.is_first
        ):  # EAGLE-1 uses the target's head and mostly has no norm before the layer
            if "layers.0.input_layernorm.weight" not in self.tensors:
                del shapes["layers.0.input_layernorm.weight"]
            shapes |= {"norm.weight": (size,)} if self.norm_output else {}
        else:
            for part in "qkv":
                name = f"layers.0.self_attn.{part}_proj.weight"
                shapes[name] = (shapes[name][0], 2 * size)
            shapes |= {"layers.0.hidden_norm.weight": (size,), "norm.weight": (size,)}
            shapes["lm_head.weight"] = (None, size)
        held: dict[str, tuple[int | None, ...]] = {
            "embed_tokens.weight": (None, size),
            "input_norm.weight": (reads,),
            "d2t": (None,),
        }
        for name in self.tensors:
            if name.endswith(".bias"):
                held[name] = (
                    self.tensors[name.removesuffix("bias") + "weight"].shape[0],
                )
        return shapes | {
            name: shape for name, shape in held.items() if name in self.tensors
        }

    def layers_of(self, target: LM) -> tuple[int | None, ...]:
        """Return the layers of the target whose states are the features: the layers that the
        checkpoint names, else a low, a middle and a high one (EAGLE-3, Li 2025, section 3). Those
        are the 2nd, the one at depth // 2, and the one at depth - 3, counted from 1. (None,) stands
        for the final states of EAGLE-1 and -2."""
        if self.is_first:
            return (None,)
        depth = target.num_layers
        return self.features or (min(2, depth), max(1, depth // 2), max(1, depth - 3))

    @property
    def is_partial(self) -> bool:
        """Return True if the head predicts a smaller draft vocabulary, as named by the tensor
        t2d."""
        return "t2d" in self.tensors

    def save(self, folder: Path) -> None:
        """Write config.json and model.safetensors in the original layout, and eagle.json with the
        training record. Each file is written atomically."""
        named = {}
        for name, part in self.tensors.items():
            named[re.sub(r"^layers\.0\.", "midlayer.", name)] = (
                part.detach().contiguous()
            )
        with replacing(folder / WEIGHTS[0]) as new:
            save_file(named, new)
        vocabulary = self.tensors["lm_head.weight"].shape[0]
        config = {
            "architectures": ["LlamaForCausalLMEagle3"],
            "model_type": "llama",
            **{
                name: getattr(self.config, name)
                for name in CONFIGURED
                if "rope" not in name
            },
            "rope_theta": cast(Any, self.config).rope_parameters["rope_theta"],
            "num_hidden_layers": 1,
            "max_position_embeddings": self.config.max_position_embeddings,
            "vocab_size": len(self.tensors["t2d"]) if self.is_partial else vocabulary,
            "draft_vocab_size": vocabulary,
        }
        about = {
            "fingerprint": self.fingerprint,
            "fingerprints": dict(self.fingerprints),
            "metrics": dict(self.metrics),
            "prompts": self.prompts and list(self.prompts),
        }
        write_json(folder / "config.json", config)
        write_json(folder / ABOUT, about)

    def check(self, target: LM, layers: tuple[int | None, ...]) -> None:
        """Raise InputError unless the checkpoint can draft for a target from the states after these
        layers."""
        where = f"eagle {self.path}"
        given = len(layers) * target.hidden_size
        for layer in layers:
            if layer is not None:
                target.block(layer)
        if self.feature_size != given:
            named = "-".join(
                "last" if layer is None else str(layer) for layer in layers
            )
            raise InputError(
                f"{where}: reads {self.feature_size} numbers of the target's states, "
                "and those of "
                f"layers {named} are {given}; name a checkpoint of this target, or its "
                "layers="
            )
        own = self.tensors.get("embed_tokens.weight")
        known, width = (target.embedding.weight if own is None else own).shape
        if width != self.size:
            raise InputError(
                f"{where}: reads tokens of {self.size} numbers, and the target's have "
                f"{width}; "
                "name a checkpoint of this target"
            )
        if known < (tokens := min(target.vocab_size, len(target.tokenizer))):
            raise InputError(
                f"{where}: knows {known} tokens, and the target has {tokens}; name a "
                "checkpoint of "
                "this target"
            )
        ids = self.tensors.get("lm_head.weight", target.output_matrix).shape[0]
        if "d2t" in self.tensors:
            offsets = self.tensors["d2t"].long()
            ids = int((torch.arange(len(offsets)) + offsets).max()) + 1
        if ids > target.vocab_size:
            raise InputError(
                f"{where}: predicts {ids} tokens, and the target has "
                f"{target.vocab_size}; name a "
                "checkpoint of this target"
            )


class EagleDecoder(nn.Module):
    """The decoder of EAGLE (Li 2024, section 3.1) and EAGLE-3 (Li 2025, section 3). It maps tokens
    [m, T] and inputs [m, T, H] to states [m, T, H], which are also the inputs of the next
    tokens."""

    def __init__(self, weights: EagleWeights, embedding: nn.Module):
        super().__init__()
        self.config = weights.config
        tensors = weights.tensors
        self.feature_size = weights.feature_size
        self.is_first = weights.is_first
        self.norm_before_residual = weights.norm_before_residual
        self.embed_tokens = embedding
        self.fc = _linear(tensors, "fc")
        self.layers = nn.ModuleList(
            [
                _layer(tensors, self.config, i)
                for i in range(self.config.num_hidden_layers)
            ]
        )
        self.rotary_emb = LlamaRotaryEmbedding(config=self.config)
        self.fc_norm = nn.ModuleList()
        """Norms of the features: one per layer of the target, one for all, or none."""
        if "input_norm.weight" in tensors:
            self.fc_norm.append(self._norm(tensors, "input_norm"))
        while f"fc_norm.{len(self.fc_norm)}.weight" in tensors:
            self.fc_norm.append(self._norm(tensors, f"fc_norm.{len(self.fc_norm)}"))
        if not self.is_first:
            self.layers[0].hidden_norm = self._norm(tensors, "layers.0.hidden_norm")
        self.output_norm = self._norm(tensors, "norm") if weights.norm_output else None

    def _norm(self, tensors: Mapping[str, Tensor], name: str) -> LlamaRMSNorm:
        weight = tensors[f"{name}.weight"]
        norm = LlamaRMSNorm(len(weight), eps=self.config.rms_norm_eps)
        norm.weight = nn.Parameter(weight)
        return norm

    def combine(self, features: Tensor) -> Tensor:
        """Return the layer's inputs [n, H] from the target's features [n, F]."""
        if self.is_first:
            return features
        if len(self.fc_norm):
            parts = features.chunk(len(self.fc_norm), -1)
            features = torch.cat(
                [norm(part) for norm, part in zip(self.fc_norm, parts)], -1
            )
        return cast(Tensor, self.fc(features))

    def forward(
        self,
        input_ids: Tensor,
        inputs: Tensor | None = None,
        position_ids: Tensor | None = None,
        attention_mask: Any = None,
        past_key_values: Any = None,
        **_options: Any,
    ) -> BaseModelOutputWithPast:
        tokens = self.embed_tokens(input_ids).to(self.fc.weight.dtype)
        inputs = torch.zeros_like(tokens) if inputs is None else inputs
        position_ids, mask = positions_and_mask(
            self.config, tokens, position_ids, attention_mask, past_key_values
        )
        options = {
            "attention_mask": mask,
            "position_ids": position_ids,
            "position_embeddings": self.rotary_emb(tokens, position_ids=position_ids),
            **cache_argument(self.layers[0], past_key_values),
        }
        if self.is_first:
            state = self.fc(torch.cat([tokens, inputs], -1))
            rest = self.layers
        else:
            state = self._fused(tokens, inputs, options)
            rest = self.layers[1:]
        for layer in rest:
            state = layer(state, **options)
        return BaseModelOutputWithPast(
            self.output_norm(state) if self.output_norm else state
        )

    def _fused(self, tokens: Tensor, inputs: Tensor, options: dict[str, Any]) -> Tensor:
        """Run EAGLE-3's first layer, whose attention reads tokens and inputs concatenated."""
        layer: Any = self.layers[0]
        normed = layer.hidden_norm(inputs)
        both = torch.cat([layer.input_layernorm(tokens), normed], -1)
        attended, _ = layer.self_attn(hidden_states=both, **options)
        state = (normed if self.norm_before_residual else inputs) + attended
        return cast(Tensor, state + layer.mlp(layer.post_attention_layernorm(state)))


class EagleModel(PreTrainedModel):
    """EAGLE's model with a head: logits over the target's vocabulary, −inf for tokens that a
    smaller draft vocabulary lacks."""

    config_class = LlamaConfig
    _supports_sdpa = True

    def __init__(self, weights: EagleWeights, target: LM):
        super().__init__(weights.config)
        self.made_of = weights, target
        own = weights.tensors.get("embed_tokens.weight")
        # own modules on the target's weights, because this model may be moved
        weight = target.embedding.weight.detach() if own is None else own
        embedding = nn.Embedding.from_pretrained(weight)
        self.model = EagleDecoder(weights, embedding)
        self.vocab_size = target.vocab_size
        self.ids = cast(Tensor | None, None)
        """[N]: id in the target's vocabulary of each token of the draft vocabulary; None if both
        are the same."""
        self.norm: nn.Module | None = None
        if weights.is_first:
            bias = getattr(target.model.get_output_embeddings(), "bias", None)
            parts = {"lm_head.weight": target.output_matrix.detach()}
            parts |= {} if bias is None else {"lm_head.bias": bias.detach()}
            self.lm_head = _linear(parts, "lm_head")
            return
        self.lm_head = _linear(weights.tensors, "lm_head")
        if not weights.norm_output:
            self.norm = self.model._norm(weights.tensors, "norm")
        if "d2t" in weights.tensors:
            offsets = weights.tensors["d2t"].long()
            self.ids = (torch.arange(len(offsets)) + offsets).to(target.device)

    def with_attention(self, name: str) -> EagleModel:
        """Return a model on the same weights with another attention implementation."""
        weights, target = self.made_of
        config = copy.deepcopy(weights.config)
        other = EagleModel(replace(weights, config=config), target)
        config._attn_implementation = name
        other.load_state_dict(self.state_dict(), assign=True)
        return other.eval()

    def restore_frequencies(self) -> None:
        """Reset the rotary frequencies to float32 after the model was cast."""
        rotary = LlamaRotaryEmbedding(config=self.model.config)
        self.model.rotary_emb = rotary.to(self.model.fc.weight.device)

    def get_input_embeddings(self) -> nn.Module:
        return self.model.embed_tokens

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def get_decoder(self) -> nn.Module:
        return self.model

    def forward(
        self,
        input_ids: Tensor,
        inputs: Tensor | None = None,
        past_key_values: Any = None,
        logits_to_keep: int | Tensor = 0,
        use_cache: bool = False,
        **options: Any,
    ) -> CausalLMOutputWithPast:
        """Run the head. `inputs` [m, T, H] holds, for each token, the feature of the token before
        it."""
        if use_cache and past_key_values is None:
            past_key_values = DynamicCache(config=self.config)
        out = self.model(input_ids, inputs, past_key_values=past_key_values, **options)
        kept = logits_to_keep
        state = out.last_hidden_state
        state = state[:, -kept:] if isinstance(kept, int) else state[:, kept]
        return CausalLMOutputWithPast(None, self.logits(state), past_key_values)

    def logits(self, state: Tensor) -> Tensor:
        """Return the logits […, V] for states […, H]."""
        logits = self.lm_head(state if self.norm is None else self.norm(state))
        if self.ids is None:
            return cast(Tensor, logits)
        whole = logits.new_full((*logits.shape[:-1], self.vocab_size), -torch.inf)
        return whole.index_copy(-1, self.ids, logits)


def _linear(tensors: Mapping[str, Tensor], name: str) -> nn.Linear:
    weight = tensors[f"{name}.weight"]
    bias = tensors.get(f"{name}.bias")
    made = nn.Linear(
        weight.shape[1], weight.shape[0], bias=bias is not None, device="meta"
    )
    made.weight = nn.Parameter(weight)
    if bias is not None:
        made.bias = nn.Parameter(bias)
    return made


def _layer(
    tensors: Mapping[str, Tensor], config: LlamaConfig, i: int
) -> LlamaDecoderLayer:
    """Build a Llama layer from a checkpoint's tensors."""
    with torch.device("meta"):
        layer = LlamaDecoderLayer(config, i)
    for name, part in [*layer.named_modules()]:
        whole = f"layers.{i}.{name}"
        if isinstance(part, nn.Linear):
            owner, _, last = name.rpartition(".")
            setattr(layer.get_submodule(owner), last, _linear(tensors, whole))
        elif isinstance(part, LlamaRMSNorm):
            weight = tensors.get(f"{whole}.weight")
            if weight is not None:
                part.weight = nn.Parameter(weight)
            elif (i, name) == (0, "input_layernorm"):  # EAGLE-1 lacks it
                layer.input_layernorm = cast(LlamaRMSNorm, nn.Identity())
            else:
                raise KeyError(f"{whole}.weight")
    return layer


def load_eagle(folder: str | Path) -> EagleWeights:
    """Return the checkpoint in a folder, or on the Hub as hf:org/name, in the original layout (also
    ours) or that of speculators. Raises InputError if it is missing, broken or of another kind."""
    path = local(folder)
    found = [path / name for name in WEIGHTS if (path / name).is_file()]
    if not found or not (path / "config.json").is_file():
        raise InputError(
            f"eagle {folder}: there is no config.json with {' or '.join(WEIGHTS)} in "
            f"it; {FIX}"
        )
    files = [path / name for name in ("config.json", ABOUT)]
    changed = [stamp(file) for file in (found[0], *files) if file.is_file()]
    return _load(str(folder), found[0], tuple(changed))


@lru_cache(maxsize=2)
def _load(named: str, file: Path, changed: tuple[tuple[int, int], ...]) -> EagleWeights:
    path = file.parent
    try:
        about = json.loads((path / "config.json").read_text())
        ours = (
            json.loads((path / ABOUT).read_text()) if (path / ABOUT).is_file() else {}
        )
        tensors = _tensors(file)
        weights = EagleWeights(
            named,
            _layer_config(about, tensors),
            tensors,
            _features(about),
            norm_before_residual=bool(about.get("norm_before_residual")),
            norm_output=bool(about.get("norm_output")),
            fingerprints=table(ours.get("fingerprints", {}), "fingerprints"),
            metrics=table(ours.get("metrics", {}), "metrics"),
            prompts=ours.get("prompts") and tuple(ours["prompts"]),
        )
        if ours and ours["fingerprint"] != weights.fingerprint:
            raise ValueError(
                f"{ABOUT} and {file.name} come from different training runs"
            )
        weights.check_shapes()
        EagleDecoder(weights, nn.Identity())
        return weights
    except BROKEN as error:
        why = f"{type(error).__name__}: {first_line(error)}"
        raise InputError(f"eagle {named}: cannot be read ({why}); {FIX}") from None


def _tensors(file: Path) -> dict[str, Tensor]:
    """Return a checkpoint's tensors, named as in speculators' layout."""
    saved = tensors_in(file)
    tensors = {name: part for name, part in saved.items() if "rotary_emb" not in name}
    strange = [name for name in tensors if not KNOWN_WEIGHTS.fullmatch(name)]
    if strange:
        raise ValueError(f"it has {strange[0]}, which Llama layers lack")
    found = dict[str, Tensor]()
    for name, part in tensors.items():
        found[re.sub(r"^midlayer\.", "layers.0.", name)] = part
    return found


def _layer_config(
    about: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> LlamaConfig:
    kind = about.get("speculators_model_type")
    if kind not in (None, "eagle", "eagle3"):
        raise ValueError(f"its kind is {kind}, not EAGLE")
    said = about.get("transformer_layer_config", about)
    layers = {name.split(".")[1] for name in tensors if name.startswith("layers.")}
    config = {name: said[name] for name in CONFIGURED if said.get(name) is not None}
    try:
        return LlamaConfig(**config, num_hidden_layers=len(layers))
    except Exception as error:  # validation errors of its fields
        raise ValueError(f"config.json: {first_line(error)}") from None


def _features(about: Mapping[str, Any]) -> tuple[int, ...] | None:
    """Return the layers whose states are the features, counted from 1. The nested `eagle_config`
    (SpecForge) counts from 0."""
    name = "eagle_aux_hidden_state_layer_ids"
    if about.get(name):
        return tuple(map(int, about[name]))
    nested = (about.get("eagle_config") or {}).get(name)
    return tuple(int(layer) + 1 for layer in nested) if nested else None
