"""Load a pair of models."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Unpack

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lenience.core.errors import InputError
from lenience.core.files import EMBEDDED
from lenience.decoding.options import Loading, LoadingOptions, takes_loading
from lenience.decoding.pair import Pair
from lenience.models.lm import LM, without_bars
from lenience.models.prompts import Chat
from lenience.models.quantized import quantization_config
from lenience.models.session import check_windows


@takes_loading
def load_pair(
    target: str | PreTrainedModel | None = None,
    draft: str | PreTrainedModel | None = None,
    **options: Unpack[LoadingOptions],
) -> Pair:
    """Load a target and a draft model: Hub names, local folders or GGUF files, or loaded
    `transformers` models with their `tokenizer`. A target alone serves drafters that need no draft
    model. Without names, load the built-in pair.

    The options are the fields of `lenience.decoding.options.Loading`. Raises InputError if a model
    cannot be loaded or used.
    """
    loading = Loading.of(options)
    if target is None and draft is not None:
        raise InputError("draft: name the target too, or neither for the built-in pair")
    named = all(
        model is None or isinstance(model, str | Path) for model in (target, draft)
    )
    if loading.tokenizer is not None and named:
        what = "the built-in pair" if target is None else target
        raise InputError(f"tokenizer: {what} comes with its own; leave it out")
    with without_bars():
        if target is None:
            pair = _built_in(loading)
        else:
            target_lm = _load(target, "target", loading)
            draft_lm = None if draft is None else _load(draft, "draft", loading)
            for lm in (target_lm, draft_lm):
                if lm is not None:
                    check_windows(lm)
            name = (
                target_lm.name
                if draft_lm is None
                else f"{target_lm.name} + {draft_lm.name}"
            )
            pair = Pair(target_lm, draft_lm, name)
    pair.target.chat = Chat(
        loading.chat, loading.system, loading.template_options or {}
    )
    pair.target.chat.check(pair.target.tokenizer, f"target {pair.target.name!r}")
    if loading.compile is not False:
        pair.compile(export=bool(loading.compile))
    return pair


def _built_in(loading: Loading) -> Pair:
    """Load the built-in pair, in float32 by default."""
    lms = {}
    for role in ("target", "draft"):
        folder = str(EMBEDDED / role)
        name = f"built-in {role}"
        lms[role] = LM.load(
            folder, role, _from_pretrained(loading, role, "float32"), name
        )
    return Pair(lms["target"], lms["draft"], "built-in")


def _load(source: str | PreTrainedModel, role: str, loading: Loading) -> LM:
    if isinstance(source, str | Path):
        return LM.load(str(source), role, _from_pretrained(loading, role, "auto"))
    if not isinstance(source, PreTrainedModel):
        raise InputError(
            f"{role} {source!r:.60}: is neither a name or folder nor a loaded transformers model"
        )
    of_target = ("quantization",) if role == "target" else ()
    for name in ("dtype", *of_target, f"{role}_kwargs"):
        if getattr(loading, name):
            raise InputError(f"{name}: the {role} is loaded already; leave it out")
    if loading.device != "auto":
        raise InputError(
            f"device: the {role} is loaded already; move the model to it (model.to)"
        )
    if not isinstance(loading.tokenizer, PreTrainedTokenizerBase):
        given = "" if loading.tokenizer is None else f", not {loading.tokenizer!r:.60}"
        raise InputError(
            f"tokenizer: give that of the loaded {role} (AutoTokenizer.from_pretrained){given}"
        )
    name = str(source.name_or_path or type(source).__name__)
    return LM(source, loading.tokenizer, name, role)


def _from_pretrained(loading: Loading, role: str, dtype: str) -> Mapping[str, Any]:
    """Return the keyword arguments of from_pretrained, and the device."""
    device = loading.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    kwargs = dict(
        (loading.target_kwargs if role == "target" else loading.draft_kwargs) or {}
    )
    for name in ("dtype", "device"):
        if name in kwargs:
            raise InputError(f"{role}_kwargs: give {name} by itself")
    if loading.quantization is not None and role == "target":
        if "quantization_config" in kwargs:
            raise InputError(
                "quantization: target_kwargs has a quantization_config too"
            )
        kwargs["quantization_config"] = quantization_config(loading.quantization)
    return {"dtype": loading.dtype or dtype, "device": device, **kwargs}
