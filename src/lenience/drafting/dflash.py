"""Drafting with DFlash: one pass over masked tokens, on the target's states."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from lenience.core.context import Context
from lenience.core.errors import InputError, first_line
from lenience.core.files import stamp
from lenience.core.hub import local
from lenience.core.identity import weights_fingerprint
from lenience.core.needs import Parts, Sources
from lenience.core.protocols import Drafter, TrainedPart
from lenience.drafting.base import DrafterSetup, DrafterSpec
from lenience.drafting.parallel import RowwiseDrafter
from lenience.drafting.published import BROKEN, tensors_in
from lenience.models.lm import LM

WEIGHTS = "model.safetensors"
RENAMED = {"fc.": "encoder.fc.", "hidden_norm.": "encoder.output_norm_enc."}
"""Beginnings of names in the layout of the method's authors, with those of transformers."""
SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "rms_norm_eps",
    "max_position_embeddings",
    "hidden_act",
)


@dataclass(frozen=True)
class DflashModel:
    """A DFlash checkpoint."""

    model: Any
    """The drafter's layers: transformers' MuseGlimmerAssistantModel."""
    layers: tuple[int, ...]
    """Layers of the target whose states the drafter reads, 1 the first."""
    block_size: int
    """Number of tokens that a pass reads: the last token and masked ones."""
    mask_token: int
    """Token id of the mask."""
    fingerprint: str
    prompts: tuple[str, ...] | None = None

    @property
    def feature_size(self) -> int:
        return int(self.model.encoder.fc.weight.shape[1])


@dataclass(frozen=True)
class Dflash(DrafterSpec):
    """Draft a block of tokens in one pass (DFlash, 2026, arXiv 2602.06036). Keys and values come
    from the target's states of the tokens so far; the pass reads the last token and masked ones,
    which attend to each other in both directions. Embedding and LM head are the target's."""

    path: str
    name = "dflash"
    needs = Sources.LAYER_STATES
    offers = Parts.EARLY_ENDS | Parts.PROBS | Parts.CHANCES | Parts.TREES

    @cached_property
    def head(self) -> DflashModel:
        return load_dflash(self.path)

    @property
    def fitted(self) -> tuple[TrainedPart, ...]:
        return (self,)

    @property
    def longest(self) -> int:
        return self.head.block_size - 1

    def relocated(self, path: Callable[[str], str]) -> Self:
        return replace(self, path=path(self.path))

    def features(self, target: LM) -> tuple[int | None, ...]:
        # transformers lists the state after the final norm as that of the last layer
        last = target.num_layers
        return tuple(None if layer == last else layer for layer in self.head.layers)

    def check(self, target: LM, fingerprints: Callable[[], Mapping[str, str]]) -> None:
        where = f"dflash {self.path}"
        for layer in self.head.layers:
            target.block(layer)
        width = int(self.head.model.config.hidden_size)
        given = len(self.head.layers) * target.hidden_size
        if self.head.feature_size != given or width != target.hidden_size:
            raise InputError(
                f"{where}: reads {self.head.feature_size} numbers of the target's states and "
                f"embeddings of {width}; the target has {given} and {target.hidden_size}; "
                "name a checkpoint of this target"
            )
        if self.head.mask_token >= target.vocab_size:
            raise InputError(
                f"{where}: its mask is token {self.head.mask_token}, and the target has "
                f"{target.vocab_size}; name a checkpoint of this target"
            )

    def build(self, setup: DrafterSetup) -> Drafter:
        return DflashDrafter(self.head, setup)


class DflashDrafter(RowwiseDrafter):
    """A drafter with a DFlash checkpoint."""

    def __init__(self, head: DflashModel, setup: DrafterSetup):
        super().__init__(setup, longest=head.block_size - 1, passes=1)
        self.head = head
        like = setup.target.embedding.weight
        # the checkpoint is shared by all pairs
        self.model = setup.target.once(
            ("dflash", head.fingerprint),
            lambda: copy.deepcopy(head.model).to(like.device, like.dtype),
        )

    def empty_cache(self) -> Any:
        from transformers.cache_utils import DFlashCache

        cache = DFlashCache(config=self.model.config)
        cache.activate_past_recording()
        return cache

    def row_logits(self, ctx: Context, b: int) -> tuple[Tensor, int]:
        prefix = ctx.rows[b].prefix
        known = prefix[:-1]
        cached = self.cached(b, known)
        start = len(cached.tokens)
        features = self.session.features(b, prefix, start)[: len(known) - start]
        device = self.model.device
        cached.cache.set_previous_accepted_tokens(len(features))
        masked = [self.head.mask_token] * (self.head.block_size - 1)
        block = torch.tensor([[prefix[-1], *masked]], device=self.target.device)
        end = len(known) + self.head.block_size
        out = self.model(
            noise_embeds=_embedded(self.target.embedding, block).to(device),
            context_hidden_states=features[None].to(device, self.model.dtype),
            position_ids=torch.arange(start, end, device=device)[None],
            attention_mask=torch.ones(1, end, dtype=torch.long, device=device),
            past_key_values=cached.cache,
        )
        # what is left are the states of the context
        cached.cache.crop(-self.head.block_size)
        cached.tokens = known
        states = out.last_hidden_state[:, 1:].to(self.target.output_matrix)
        logits: Tensor = self.target.model.get_output_embeddings()(states)
        return logits, len(features) + self.head.block_size


def _embedded(embedding: torch.nn.Embedding, ids: Tensor) -> Tensor:
    """Return embeddings [1, n, H], without the norm that some models have in their embedding, as
    transformers hands them to DFlash."""
    if getattr(embedding, "embed_norm", None) is None:
        return embedding(ids)
    return torch.nn.functional.embedding(ids, embedding.weight)


def load_dflash(folder: str | Path) -> DflashModel:
    """Return the checkpoint in a folder, or on the Hub as hf:org/name, in the layout of
    transformers or of the method's authors. Raises InputError if it is missing, broken or of
    another kind."""
    path = local(folder)
    files = [path / "config.json", path / WEIGHTS]
    if not all(file.is_file() for file in files):
        raise InputError(
            f"dflash {folder}: there is no config.json with {WEIGHTS} in it; name the folder of "
            "a DFlash checkpoint"
        )
    changed = tuple(map(stamp, files))
    return _load(str(folder), path, changed)


@lru_cache(maxsize=2)
def _load(named: str, path: Path, changed: tuple[tuple[int, int], ...]) -> DflashModel:
    from transformers import MuseGlimmerAssistantConfig, MuseGlimmerAssistantModel

    try:
        about = json.loads((path / "config.json").read_text())
        if about.get("speculators_model_type"):
            raise ValueError("its layout is that of speculators, which is not read")
        config = MuseGlimmerAssistantConfig(**_settings(about))
        model = MuseGlimmerAssistantModel(config).eval().requires_grad_(False)
        model.load_state_dict(_renamed(tensors_in(path / WEIGHTS)))
        fingerprint = weights_fingerprint(model.state_dict())
    except BROKEN as error:
        why = f"{type(error).__name__}: {first_line(error)}"
        raise InputError(f"dflash {named}: cannot be read ({why})") from None
    layers = tuple(layer + 1 for layer in config.target_layer_ids or ())
    return DflashModel(
        model, layers, config.block_size, config.mask_token_id, fingerprint
    )


def _settings(about: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration of transformers' DFlash from that of a checkpoint. Raises KeyError
    for one that names no mask, block size or layers."""
    own = about.get("dflash_config") or {}
    settings = {name: about[name] for name in SIZES if name in about}
    for name in ("block_size", "mask_token_id", "target_layer_ids"):
        settings[name] = own[name] if name in own else about[name]
    depth = about["num_hidden_layers"]
    settings["layer_types"] = about.get("layer_types") or ["full_attention"] * depth
    settings["sliding_window"] = about.get("sliding_window")
    rope = about.get("rope_parameters") or about.get("rope_scaling") or {}
    theta = rope.get("rope_theta") or about.get("rope_theta", 10000.0)
    settings["rope_parameters"] = {"rope_type": "default", **rope, "rope_theta": theta}
    return settings


def _renamed(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors by transformers' names."""
    renamed = {}
    for name, tensor in tensors.items():
        for old, new in RENAMED.items():
            if name.startswith(old):
                name = new + name.removeprefix(old)
        renamed[name] = tensor
    return renamed
