"""Translation between the vocabularies of a target and a draft of another tokenizer."""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import bytes_to_unicode

from lenience.models.lm import LM

INCOMPLETE = "\N{REPLACEMENT CHARACTER}"
"""The character that stands for bytes that are no whole character."""
BYTE = re.compile(r"<0x([0-9A-F]{2})>")
"""A SentencePiece token that stands for a byte."""


def shares_vocabulary(target: LM, draft: LM) -> bool:
    """Return True if two models use the same tokens with the same ids."""
    return target.once(
        ("shares vocabulary", draft.tokenizer_fingerprint),
        lambda: target.tokenizer.get_vocab() == draft.tokenizer.get_vocab(),
    )


class Translation:
    """Translation of tokens through their text, and of the tokens that both vocabularies share."""

    def __init__(self, target: LM, draft: LM):
        self.target = target.tokenizer
        self.draft = draft.tokenizer
        self.known = draft.vocab_size
        """Number of ids that the draft has embeddings of."""
        self.first = [] if draft.tokenizer.bos_token_id is None else _begins(draft)
        """The draft's BOS, if its tokenizer begins texts with it."""
        self.shared = _shared(target, draft)
        """[V of the target]: the draft's id of each token that both share, else -1."""

    def to_draft(self, ids: Sequence[int]) -> list[int]:
        """Return the draft's tokens of a text given in the target's. Special tokens of the target
        are spelled out, but for a BOS at the beginning, which becomes the draft's."""
        bos = self.target.bos_token_id
        own = ids[1:] if bos is not None and ids[:1] == [bos] else ids
        tokens = self.first + _encoded(self.draft, _text(self.target, own))
        return [min(token, self.known - 1) for token in tokens]

    def to_target(
        self, prefix: list[int], before: list[int], drafted: list[int]
    ) -> list[int]:
        """Return the target's tokens of the draft's tokens `drafted` after `before`. `prefix` holds
        the target's tokens of the text before. The list ends before an incomplete character, and is
        empty if the target has no tokens for the text after `prefix`."""
        start = _text(self.draft, before)
        whole = _text(self.draft, before + drafted)
        if not whole.startswith(start):
            return []
        more = whole[len(start) :].split(INCOMPLETE)[0]
        said = _text(self.target, prefix)
        ids = _encoded(self.target, said + more)
        # a text may be tokenised otherwise than it was written, as after a special token
        alone = ids[: len(prefix)] != prefix
        new = _encoded(self.target, more) if alone else ids[len(prefix) :]
        means_it = _text(self.target, prefix + new) == said + more
        return new if means_it else []

    def to_target_logits(self, logits: Tensor) -> Tensor:
        """Return logits [..., V] over the target's vocabulary from the draft's [..., N]; -inf for
        tokens that are not shared (token-level intersection, Timor 2025, algorithm 4)."""
        shared = self.shared.to(logits.device)
        found = logits[..., shared.clamp(min=0)]
        return found.masked_fill(shared < 0, -torch.inf)


def _begins(draft: LM) -> list[int]:
    """Return the tokens with which a draft's tokenizer begins each text."""
    empty = list(draft.tokenizer("")["input_ids"])
    return empty[:1] if empty[:1] == [draft.tokenizer.bos_token_id] else []


def _text(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> str:
    return str(
        tokenizer.decode(
            list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
    )


def _encoded(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def _shared(target: LM, draft: LM) -> Tensor:
    """Return [V of the target]: the draft's id of each shared token, else -1. Tokens are the same
    if they stand for the same bytes; EOS tokens are the same whatever they are called."""
    theirs = {}
    for token, text in reversed(_bytes_of(draft.tokenizer).items()):
        if token < draft.vocab_size:
            theirs[text] = token
    shared = torch.full((target.vocab_size,), -1)
    for token, text in _bytes_of(target.tokenizer).items():
        if token < target.vocab_size and text in theirs:
            shared[token] = theirs[text]
    ends = [token for token in sorted(draft.eos_ids) if token < draft.vocab_size]
    if ends:
        shared[sorted(target.eos_ids)] = ends[0]
    return shared


def _bytes_of(tokenizer: PreTrainedTokenizerBase) -> dict[int, bytes]:
    """Return the bytes that each token stands for, without special tokens."""
    vocabulary = tokenizer.get_vocab()
    special = set(tokenizer.all_special_ids)
    to_byte = {character: byte for byte, character in bytes_to_unicode().items()}
    # "Ġ" is a space in byte-level vocabularies, and "▁" in those of SentencePiece
    byte_level = any(token.startswith("Ġ") for token in vocabulary)
    found = {}
    for token, number in sorted(vocabulary.items(), key=lambda item: item[1]):
        if number in special:
            continue
        byte = BYTE.fullmatch(token)
        if byte:
            found[number] = bytes([int(byte[1], 16)])
        elif byte_level and all(character in to_byte for character in token):
            found[number] = bytes(to_byte[character] for character in token)
        else:
            found[number] = token.replace("▁", " ").encode()
    return found
