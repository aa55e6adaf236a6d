"""Floating-point operations of reading tokens; a multiply-add counts as two."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from lenience.models.lm import LM


@dataclass(frozen=True)
class ReadingCost:
    """Of one model."""

    per_token: float
    """FLOPs in the matrices, the output matrix included; of all experts if a model has several."""
    per_key: float
    """FLOPs in attention, for each token that a token sees."""
    lookup: float
    """FLOPs of the embedding as a product, which SPRINTER (Zhong 2025) counts."""

    @classmethod
    def of(cls, lm: LM) -> ReadingCost | None:
        """Return the costs of a model; None if it is quantised or its number of heads is
        unknown."""
        return lm.once("reading cost", lambda: _measured(lm))

    def read(self, tokens: int, length: int) -> float:
        """Return the operations of a pass over `tokens` in a text of `length`, half of which each
        token sees on average."""
        return tokens * (self.per_token + self.per_key * length / 2)


def _measured(lm: LM) -> ReadingCost | None:
    config = lm.model.config.get_text_config()
    embedding = lm.embedding.weight
    heads = getattr(config, "num_attention_heads", None)
    if not isinstance(heads, int) or getattr(lm.model, "is_quantized", False):
        return None
    head_size = getattr(config, "head_dim", None) or lm.hidden_size // heads
    tables = [
        part.weight
        for part in lm.model.modules()
        if isinstance(part, torch.nn.Embedding)
    ]
    # multiplies nothing
    looked_up = {id(table) for table in tables} - {id(lm.output_matrix)}
    parts = [part for part in lm.model.parameters() if part.ndim > 1]
    matrices = sum(part.numel() for part in parts if id(part) not in looked_up)
    per_key = 4 * lm.num_layers * heads * head_size
    return ReadingCost(2.0 * matrices, float(per_key), 2.0 * embedding.numel())
