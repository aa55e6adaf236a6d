"""vLLM's counterparts of lenience's drafters."""

from __future__ import annotations

from typing import Any

from lenience.core.errors import InputError
from lenience.core.hub import local
from lenience.drafting.base import DrafterSpec
from lenience.drafting.eagle import Eagle
from lenience.drafting.lookup import Ngram
from lenience.drafting.model import DraftModel
from lenience.drafting.mtp import Mtp

EAGLE = ("eagle", "eagle3")
WITH_PROBS = ("draft_model", *EAGLE, "mtp", "dflash", "dspark")
"""Methods that draft with a model, and so have distributions if they sample."""
WITHOUT_PROBS = ("ngram", "ngram_gpu", "suffix", "medusa", "custom_class")
"""Methods that draft the most likely tokens, or find them in texts."""
METHODS = (*WITH_PROBS, *WITHOUT_PROBS)
"""vLLM's methods with which the plugin decides."""
SHORTEST_MATCH = 1
"""Value of prompt_lookup_min: lenience's `ngram` has no other."""


def speculation(drafter: DrafterSpec, draft: str | None) -> dict[str, Any]:
    """Return vLLM's --speculative-config for a drafter, without the window. `draft` is the pair's
    draft model. Raises InputError if vLLM has no drafter that drafts the same tokens."""
    if isinstance(drafter, DraftModel):
        return {"method": "draft_model", "model": draft}
    if isinstance(drafter, Mtp):
        return {"method": "mtp"}
    if isinstance(drafter, Eagle):
        if drafter.layers is not None:
            raise InputError(
                f"drafter {drafter}: vLLM takes the layers from the checkpoint; leave them out"
            )
        method = "eagle" if drafter.head.is_first else "eagle3"
        return {"method": method, "model": str(local(drafter.path))}
    if isinstance(drafter, Ngram):
        if not drafter.oldest:
            raise InputError(
                f"drafter {drafter}: of equally long matches vLLM uses the oldest; take "
                "ngram:oldest=true"
            )
        return {
            "method": "ngram",
            "prompt_lookup_min": SHORTEST_MATCH,
            "prompt_lookup_max": drafter.max,
        }
    raise InputError(
        f"drafter {drafter}: vLLM has none like it; take model, eagle:DIR, mtp or "
        "ngram:oldest=true"
    )


def drafter_of(speculative: Any) -> DrafterSpec | None:
    """Return the drafter that a server's SpeculativeConfig describes; None if lenience has none
    that drafts the same tokens."""
    method = speculative.method
    if method == "draft_model":
        return DraftModel()
    if method == "mtp":
        return Mtp()
    if method in EAGLE:
        return Eagle(str(speculative.draft_model_config.model))
    if method == "ngram" and speculative.prompt_lookup_min == SHORTEST_MATCH:
        return Ngram(max=speculative.prompt_lookup_max, oldest=True)
    return None


def check_method(speculative: Any) -> None:
    """Raise InputError for a method of drafting that the plugin does not know."""
    if speculative.method not in METHODS:
        raise InputError(
            f"method {speculative.method!r} in --speculative-config: is not known; lenience "
            f"decides with {', '.join(METHODS)}"
        )


def has_probs(speculative: Any) -> bool:
    """Return True if vLLM keeps the distributions of sampled drafts."""
    lacks = speculative.method not in WITH_PROBS or _is_xpress(speculative)
    return speculative.draft_sample_method == "probabilistic" and not lacks


def _is_xpress(speculative: Any) -> bool:
    """Return True for XPress (vLLM 0.33), a DFlash that leaves its distributions unwritten."""
    asked = getattr(speculative, "is_xpress", None)
    return bool(asked and asked())
