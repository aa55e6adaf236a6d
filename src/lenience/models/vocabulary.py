"""Draft vocabularies: LM heads for the most frequent tokens (FR-Spec, Zhao 2025).

EAGLE-3 (Li 2025) publishes such a vocabulary as d2t and t2d.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from lenience.core.errors import InputError, first_line
from lenience.core.files import read_json, write_json

FILE = "draft_vocab.json"
"""File in a model folder that lists the tokens of a draft vocabulary. It is JSON because engines
such as vLLM load every safetensors file in a folder as weights."""


def most_frequent(
    answers: Iterable[Sequence[int]], size: int, vocab_size: int, always: Iterable[int]
) -> Tensor:
    """Return the ids [size] of a draft vocabulary in ascending order: the tokens in `always`, then
    the most frequent tokens of the answers. The lowest ids that no answer has fill the rest. Raises
    InputError unless 1 ≤ size < vocab_size."""
    if not 1 <= size < vocab_size:
        raise InputError(
            f"--draft-vocab {size}: the target has {vocab_size} tokens; name fewer"
        )
    counts = Counter(token for answer in answers for token in answer)
    ranked = sorted(counts, key=lambda token: (-counts[token], token))
    order = dict.fromkeys([*always, *ranked, *range(vocab_size)])
    return torch.tensor(sorted(list(order)[:size]))


def widened(logits: Tensor, tokens: Tensor, vocab_size: int) -> Tensor:
    """Return logits [..., V] of the whole vocabulary from the logits [..., N] of `tokens` [N]; all
    others are -inf."""
    whole = logits.new_full((*logits.shape[:-1], vocab_size), -torch.inf)
    return whole.index_copy(-1, tokens, logits)


def ranks(tokens: Tensor, vocab_size: int, absent: int) -> Tensor:
    """Return [V]: the index of each token in `tokens` [N], or `absent` if it is not there."""
    places = torch.full((vocab_size,), absent)
    places[tokens] = torch.arange(len(tokens))
    return places


class DraftVocabularyHead(nn.Module):
    """An LM head with rows for some tokens only. Its logits cover the whole vocabulary."""

    tokens: Tensor

    def __init__(self, weight: Tensor, tokens: Tensor, vocab_size: int):
        super().__init__()
        self.weight = nn.Parameter(weight)
        self.register_buffer("tokens", tokens)
        self.vocab_size = vocab_size

    def forward(self, states: Tensor) -> Tensor:
        """Return logits [..., V] for states [..., H]."""
        logits = nn.functional.linear(states, self.weight)
        return widened(logits, self.tokens, self.vocab_size)


def vocabulary_of(model: PreTrainedModel) -> Tensor | None:
    """Return the tokens [N] of a model's draft vocabulary; None if the model uses the whole
    vocabulary."""
    head = model.get_output_embeddings()
    return head.tokens if isinstance(head, DraftVocabularyHead) else None


def restrict(model: PreTrainedModel, tokens: Tensor) -> None:
    """Restrict a model's LM head to the tokens of a draft vocabulary. Raises InputError for a head
    with a bias."""
    head: Any = model.get_output_embeddings()
    if getattr(head, "bias", None) is not None:
        raise InputError(
            f"--draft-vocab: the LM head of {type(model).__name__} has a bias; leave it out"
        )
    tokens = tokens.to(head.weight.device)
    rows = head.weight.detach()[tokens].clone()
    small = DraftVocabularyHead(rows, tokens, head.weight.shape[0])
    model.set_output_embeddings(cast(nn.Module, small))


def save_whole(model: PreTrainedModel, others: Tensor, folder: Path) -> None:
    """Save a restricted model in the format of `transformers`, with the list of its draft
    vocabulary. The saved LM head is whole; its missing rows are those of `others` [V, H]."""
    small = cast(DraftVocabularyHead, model.get_output_embeddings())
    weight = others.detach().to(small.weight).clone()
    weight[small.tokens] = small.weight.detach()
    whole = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    whole.weight = nn.Parameter(weight, requires_grad=False)
    tied = model.config.tie_word_embeddings
    model.set_output_embeddings(whole)
    model.config.tie_word_embeddings = False
    try:
        model.save_pretrained(folder)
        write_json(folder / FILE, {"tokens": small.tokens.tolist()})
    finally:
        model.set_output_embeddings(cast(nn.Module, small))
        model.config.tie_word_embeddings = tied


def restrict_as_saved(model: PreTrainedModel, folder: Path) -> None:
    """Restrict a loaded model to the draft vocabulary in its folder, if there is one. Raises
    InputError if the file is broken."""
    path = folder / FILE
    if not path.is_file():
        return
    content = read_json(path)
    try:
        tokens = torch.tensor(content["tokens"])
        if tokens.dtype != torch.long or tokens.dim() != 1:
            raise ValueError("its tokens are no list of ids")
        size = cast(Any, model.get_output_embeddings()).weight.shape[0]
        if int(tokens.min()) < 0 or int(tokens.max()) >= size:
            raise ValueError(f"it names ids outside the vocabulary of {size}")
    except (LookupError, TypeError, ValueError) as error:
        raise InputError(
            f"{path}: cannot be read ({first_line(error)}); delete it to use the whole vocabulary"
        ) from None
    restrict(model, tokens)
