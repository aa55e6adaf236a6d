"""Random draws keyed by their purpose: the same on every device and in any batch."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lenience.core.numeric import argmax


@dataclass(frozen=True)
class Noise:
    """Random draws keyed by (seed, request, position, purpose). A prompt gets the same draws alone
    or in a batch."""

    seed: int
    request: bytes

    @classmethod
    def for_prompt(cls, seed: int, prompt: Sequence[int]) -> Noise:
        return cls(
            seed,
            hashlib.blake2b(
                struct.pack(f"<{len(prompt)}q", *prompt), digest_size=16
            ).digest(),
        )

    def key(self, position: int, purpose: str) -> int:
        """Return the key of a position and a purpose, a signed 64-bit integer."""
        message = (
            struct.pack("<qq", self.seed, position) + self.request + purpose.encode()
        )
        return int.from_bytes(
            hashlib.blake2b(message, digest_size=8).digest(), "little", signed=True
        )


def uniform(keys: Tensor) -> Tensor:
    """Map int64 keys to float64 numbers in (0, 1) by the finaliser of SplitMix64 (Steele 2014),
    with the same result on every device."""
    bits = keys + _GOLDEN
    for shift, factor in (
        (30, -0x40A7B892E31B1A47),
        (27, -0x6B2FB644ECCEEE15),
        (31, 1),
    ):
        bits = (bits ^ ((bits >> shift) & ((1 << (64 - shift)) - 1))) * factor
    return (((bits >> 12) & ((1 << 52) - 1)).double() + 0.5) / 2**52


_GOLDEN = -0x61C8864680B583EB  # 2⁶⁴ divided by the golden ratio, as a signed number


def gumbel_argmax(probs: Tensor, keys: Tensor) -> Tensor:
    """Draw a token from each of `probs` […, V], which need not sum to 1, by an exponential race on
    `keys` […] (the Gumbel trick)."""
    return argmax(_race(probs, keys))


def without_replacement(probs: Tensor, keys: Tensor, k: int) -> Tensor:
    """Draw k different tokens from each of `probs` […, V], in order (Gumbel top-k, Vieira 2014).

    Returns […, k], with -1 where no token of positive probability is left. The first token is that
    of `gumbel_argmax`.
    """
    first = _race(probs, keys).topk(min(k, probs.shape[-1]))
    tokens = first.indices.where(first.values > 0, -1)
    return torch.nn.functional.pad(tokens, (0, k - tokens.shape[-1]), value=-1)


def _race(probs: Tensor, keys: Tensor) -> Tensor:
    """Return […, V]: each token's score in the race. The highest score wins; a token of probability
    0 scores 0."""
    lanes = torch.arange(1, probs.shape[-1] + 1, device=probs.device) * _GOLDEN
    return probs.double() / -uniform(keys[..., None] + lanes).log()
