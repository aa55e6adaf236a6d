"""Drafting with the multi-token prediction (MTP) layers that ship inside checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_layers import MtpModel
from transformers.modeling_outputs import (
    BaseModelOutputWithPast,
    CausalLMOutputWithPast,
)

from lenience.core.context import Context
from lenience.core.errors import InputError, first_line
from lenience.core.needs import Parts, Sources
from lenience.core.protocols import Drafter
from lenience.drafting.after_target import AfterTarget
from lenience.drafting.base import DrafterSetup, DrafterSpec
from lenience.drafting.eagle import FeatureSession
from lenience.drafting.model import drafter_on, wide_as_target
from lenience.drafting.parallel import CachedRow, RowwiseDrafter
from lenience.models.lm import LM
from lenience.models.pass_cache import cache_argument, positions_and_mask

ALTERNATIVES = "take --drafter ngram, or train heads with lenience fit --drafter eagle"


@dataclass(frozen=True)
class Mtp(DrafterSpec):
    """Draft with the multi-token prediction layers of the target's checkpoint (DeepSeek-V3, 2024,
    section 2.2), through the modules that transformers builds for `use_mtp`. A layer reads each
    token with the target's last state of the token before. A single layer reads its own state after
    drafted tokens, as in vLLM, so it drafts windows and trees of any depth. Of several layers each
    drafts one token, so windows are chains of at most as many tokens."""

    name = "mtp"
    needs = Sources.LAYER_STATES
    offers = Parts.EARLY_ENDS | Parts.PROBS | Parts.CHANCES | Parts.TREES

    def features(self, target: LM) -> tuple[int | None, ...]:
        return (None,)

    def check(self, target: LM, fingerprints: Callable[[], Mapping[str, str]]) -> None:
        mtp_lm(target)

    def models(self, setup: DrafterSetup) -> list[LM]:
        return [mtp_lm(setup.target)]

    def build(self, setup: DrafterSetup) -> Drafter:
        modules = mtp_lm(setup.target).model.model.modules_of_mtp
        if len(modules.layers) > 1:
            if not setup.tree.is_chain:
                raise InputError(
                    f"drafter mtp: the target has {len(modules.layers)} MTP layers, one for each "
                    "token of a chain; take --tree chain"
                )
            return LayersDrafter(modules, setup)
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


class LayersDrafter(RowwiseDrafter):
    """A drafter of chains with several MTP layers. Layer k reads the tokens shifted by k, with the
    states of the layer before, and drafts the k-th token. A token that a layer reads is drawn as
    the window's token is, so that both are the same. Each layer's cache lacks the first tokens."""

    def __init__(self, modules: Any, setup: DrafterSetup):
        layers = len(modules.layers)
        super().__init__(setup, longest=layers, passes=layers)
        self.mtp = modules

    def empty_cache(self) -> Any:
        from transformers.cache_utils import MtpCache

        cache = MtpCache(config=self.mtp.config)
        cache.activate_past_recording()
        return cache

    def row_logits(self, ctx: Context, b: int) -> tuple[Tensor, int]:
        one_row = replace(ctx, rows=[ctx.rows[b]])
        prefix = ctx.rows[b].prefix
        cached = self.cached(b, prefix)
        # layers lack the first token, and read each token with the state of the one before
        start = max(len(cached.tokens), 1)
        states = self.session.features(b, prefix, start - 1)[: len(prefix) - start]
        device = self.target.device
        states = states[None].to(device)
        ids = torch.tensor([prefix[start:]], device=device)
        positions = torch.arange(start, len(prefix), device=device)[None]
        drafted = ids[:, :0]
        parts = []
        for k in range(self.longest):
            states = self.mtp.forward_layer(
                k, states, positions + k, cached.cache, input_ids=ids
            )
            parts.append(self._logits(one_row, states[:, -1:], drafted))
            token = one_row.draw(parts[-1], k).to(device)
            drafted = torch.cat([drafted, token], 1)
            ids = torch.cat([ids[:, 1:], token], 1)
        self._forget_drafted(cached, prefix)
        return torch.cat(parts, 1), len(prefix) - start

    def _logits(self, one_row: Context, states: Tensor, drafted: Tensor) -> Tensor:
        """Return the logits [1, 1, V] of the next token, after the model's processors."""
        logits = wide_as_target(self.mtp._project_to_logits(states), self.target)
        return one_row.process(logits, drafted)

    def _forget_drafted(self, cached: CachedRow, prefix: list[int]) -> None:
        """Cut what the layers have read to tokens that no layer read as a drafted one."""
        forgotten = min(len(self.mtp.layers), len(prefix) - 1)
        cached.cache.crop(-forgotten)
        cached.tokens = prefix[: len(prefix) - forgotten]


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
        position_ids, mask = positions_and_mask(
            mtp.config, tokens, position_ids, attention_mask, past_key_values
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
