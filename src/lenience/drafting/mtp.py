"""Drafting with the multi-token prediction (MTP) layers that ship inside checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.masking_utils import create_causal_mask
from transformers.modeling_outputs import (
    BaseModelOutputWithPast,
    CausalLMOutputWithPast,
)

from lenience.core.errors import InputError, first_line
from lenience.core.needs import Parts
from lenience.core.protocols import Drafter
from lenience.drafting.after_target import AfterTarget
from lenience.drafting.base import DrafterSetup, DrafterSpec
from lenience.drafting.eagle import FeatureSession
from lenience.drafting.model import drafter_on
from lenience.models.lm import LM, cache_argument

ALTERNATIVES = "take --drafter ngram, or train heads with lenience fit --drafter eagle"


@dataclass(frozen=True)
class Mtp(DrafterSpec):
    """Draft with the first multi-token prediction layer of the target's checkpoint (DeepSeek-V3,
    2024, section 2.2), through the modules that transformers builds for `use_mtp`. The layer reads
    each token with the target's last state of the token before; after drafted tokens, with its own
    state instead, as vLLM does. So one layer drafts windows and trees of any depth."""

    name = "mtp"
    offers = Parts.EARLY_ENDS | Parts.PROBS | Parts.CHANCES
    grows_trees = True

    def features(self, target: LM) -> tuple[int | None, ...]:
        return (None,)

    def check(self, target: LM, fingerprints: Callable[[], Mapping[str, str]]) -> None:
        mtp_lm(target)

    def models(self, setup: DrafterSetup) -> list[LM]:
        return [mtp_lm(setup.target)]

    def build(self, setup: DrafterSetup) -> Drafter:
        session = FeatureSession(mtp_lm(setup.target), setup)
        return AfterTarget(drafter_on(session, setup), session)


def mtp_lm(target: LM) -> LM:
    """Return the MTP layer of a target's checkpoint as a draft model, cached by the target. Raises
    InputError if the checkpoint holds none, or transformers builds none for its kind."""

    def make() -> LM:
        model = MtpDraft(target.model, _modules(target))
        model.to(target.device, target.model.dtype)  # type: ignore[arg-type]
        return LM(model.requires_grad_(False), target.tokenizer, "mtp", "draft")

    return target.once("mtp", make)


def _modules(target: LM) -> Any:
    """Return the MTP modules of transformers, with the weights of the target's checkpoint."""
    what = f"drafter mtp: {target.role} {target.name!r} ({type(target.model).__name__})"
    try:
        from transformers.modeling_layers import MtpModel
    except ImportError:
        raise InputError(
            "drafter mtp: this version of transformers has no MTP layers; install 5.23 or newer"
        ) from None
    if not getattr(target.model.config.get_text_config(), "num_mtp_layers", None):
        raise InputError(
            f"{what} has no MTP layers that transformers builds; {ALTERNATIVES}"
        )
    try:
        return MtpModel.from_pretrained(target.model)
    except (OSError, RuntimeError, ValueError) as error:
        raise InputError(
            f"{what}: its MTP layers cannot be loaded ({first_line(error)}); {ALTERNATIVES}"
        ) from error


class MtpDecoder(nn.Module):
    """An MTP layer, which maps tokens [m, T] and inputs [m, T, H] to states [m, T, H]. The states
    are also the inputs of the next tokens."""

    def __init__(self, modules: Any):
        super().__init__()
        self.modules_of_mtp = modules
        self.feature_size = int(modules.config.hidden_size)

    def combine(self, features: Tensor) -> Tensor:
        """Return the layer's inputs [n, H] from the target's features [n, H]."""
        return features

    def forward(
        self,
        input_ids: Tensor,
        inputs: Tensor | None = None,
        position_ids: Tensor | None = None,
        attention_mask: Any = None,
        past_key_values: Any = None,
        **_options: Any,
    ) -> BaseModelOutputWithPast:
        mtp = self.modules_of_mtp
        tokens = mtp.embed_tokens(input_ids)
        inputs = torch.zeros_like(tokens) if inputs is None else inputs
        if position_ids is None:
            past = _length(past_key_values)
            position_ids = past + torch.arange(tokens.shape[1], device=tokens.device)
            position_ids = position_ids[None]
        mask = create_causal_mask(
            mtp.config,
            tokens,
            attention_mask,
            past_key_values,
            position_ids=position_ids,
        )
        # rows lack the first token
        positions = position_ids + 1
        rotated = mtp.rotary_emb and mtp.rotary_emb(tokens, position_ids=positions)
        state = mtp.layers[0](
            tokens,
            inputs.to(tokens.dtype),
            position_embeddings=rotated,
            attention_mask=mask,
            position_ids=positions,
            **cache_argument(mtp.layers[0], past_key_values),
        )
        if mtp.use_shared_post_norm:
            state = mtp.shared_post_norm(state)
        return BaseModelOutputWithPast(state)


def _length(past_key_values: Any) -> int:
    return 0 if past_key_values is None else int(past_key_values.get_seq_length())


class MtpDraft(PreTrainedModel):
    """An MTP layer with the target's embedding and LM head, as a model that reads inputs."""

    _supports_sdpa = True

    def __init__(self, target: PreTrainedModel, modules: Any):
        super().__init__(modules.config)
        self.model = MtpDecoder(modules)
        embedding = cast(nn.Embedding, target.get_input_embeddings())
        self.vocab_size = embedding.num_embeddings

    @classmethod
    def _can_set_experts_implementation(cls) -> bool:
        return True

    def get_input_embeddings(self) -> nn.Module:
        return cast(nn.Module, self.model.modules_of_mtp.embed_tokens)

    def get_output_embeddings(self) -> nn.Module:
        return cast(nn.Module, self.model.modules_of_mtp.shared_head)

    def get_decoder(self) -> nn.Module:
        return self.model

    def forward(
        self,
        input_ids: Tensor,
        inputs: Tensor | None = None,
        past_key_values: Any = None,
        logits_to_keep: int = 0,
        use_cache: bool = False,
        **options: Any,
    ) -> CausalLMOutputWithPast:
        """Run the layer. `inputs` [m, T, H] holds, for each token, the state of the token before
        it."""
        out = self.model(input_ids, inputs, past_key_values=past_key_values, **options)
        state = out.last_hidden_state[:, -logits_to_keep:]
        logits = self.model.modules_of_mtp._project_to_logits(state)
        return CausalLMOutputWithPast(None, logits, past_key_values)
