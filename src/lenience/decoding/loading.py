"""Loading a pair."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from lenience.core.errors import InputError
from lenience.decoding.pair import Pair
from lenience.models.lm import LM

EMBEDDED = Path(__file__).parents[1] / "embedded"


def load_pair(
    target: str | None = None,
    draft: str | None = None,
    *,
    dtype: str | None = None,
    device: str = "auto",
    compile: bool | None = None,
    target_kwargs: dict[str, Any] | None = None,
    draft_kwargs: dict[str, Any] | None = None,
) -> Pair:
    """Load a pair: Hub names or local folders; without names the built-in pair (float32 unless `dtype` says otherwise).

    `dtype` defaults to the checkpoint's own; `device` "auto" takes a GPU if there is one; `compile` True exports the models'
    forward passes for ONNX Runtime (`Pair.compile`), None uses such exports where earlier ones lie in the cache, and False
    does not; `target_kwargs` and `draft_kwargs` reach from_pretrained (device_map, quantization_config, …). Raises
    InputError where a model can't be loaded or used, or the vocabularies differ.
    """
    if (target is None) != (draft is None):
        raise InputError("name both the target and the draft, or neither for the built-in pair")
    built_in = target is None or draft is None
    names = {"target": target or str(EMBEDDED / "target"), "draft": draft or str(EMBEDDED / "draft")}
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if dtype is None:
        dtype = "float32" if built_in else "auto"
    given = {"target": target_kwargs or {}, "draft": draft_kwargs or {}}
    lms = {role: LM.load(names[role], role, dtype=dtype, device=device, kwargs=given[role]) for role in names}
    if built_in:
        for role, lm in lms.items():
            lm.name = f"built-in {role}"
    pair = Pair(lms["target"], lms["draft"], "built-in" if built_in else f"{target} + {draft}")
    if compile is not False:
        pair.compile(export=bool(compile))
    return pair
