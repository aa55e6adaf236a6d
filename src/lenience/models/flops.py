"""Floating-point operations of a forward pass; a multiply-add counts as two."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from lenience.models.lm import LM


@dataclass(frozen=True)
class ReadingCost:
    """The cost of a model's forward passes in FLOPs."""

    per_token: float
    """FLOPs per token in the matrices, the output matrix included. With several experts all of them
    count."""
    per_key: float
    """FLOPs per token in attention, for each key that the token attends to."""
    lookup: float
    """FLOPs per token of the embedding if it is counted as a matrix product, as SPRINTER (Zhong
    2025) does."""

    @classmethod
    def of(cls, lm: LM) -> ReadingCost | None:
        """Return the costs of a model; None if the model is quantised or its number of heads is
        unknown. Computed once per model."""
        return lm.once("reading cost", lambda: _measured(lm))

    def read(self, tokens: int, length: int) -> float:
        """Return the FLOPs of a pass over `tokens` new tokens in a text of `length` tokens. Each
        token is taken to attend to half of the text."""
        return tokens * (self.per_token + self.per_key * length / 2)


def _measured(lm: LM) -> ReadingCost | None:
    config = lm.model.config.get_text_config()
    embedding = lm.embedding.weight
    heads = getattr(config, "num_attention_heads", None)
    if not isinstance(heads, int) or getattr(lm.model, "is_quantized", False):
        return None
    head_size = getattr(config, "head_dim", None) or lm.hidden_size // heads
    tables = []
    for part in lm.model.modules():
        if isinstance(part, torch.nn.Embedding):
            tables.append(part.weight)
    # embedding tables are looked up, not multiplied
    looked_up = {id(table) for table in tables} - {id(lm.output_matrix)}
    parts = [part for part in lm.model.parameters() if part.ndim > 1]
    matrices = sum(part.numel() for part in parts if id(part) not in looked_up)
    per_key = 4 * lm.num_layers * heads * head_size
    return ReadingCost(2.0 * matrices, float(per_key), 2.0 * embedding.numel())
