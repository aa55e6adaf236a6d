"""Random draws keyed by what they are for, the same ones on every device and in any batch."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Noise:
    """Random draws keyed by (seed, request, position, purpose): a prompt gets the same ones alone
    or among others."""

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
        """Return a signed 64-bit number."""
        message = (
            struct.pack("<qq", self.seed, position) + self.request + purpose.encode()
        )
        return int.from_bytes(
            hashlib.blake2b(message, digest_size=8).digest(), "little", signed=True
        )


def uniform(keys: Tensor) -> Tensor:
    """Map int64 keys to numbers in (0, 1) by the finaliser of SplitMix64 (Steele 2014), the same on
    every device."""
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
    """Draw a token from each of `probs` […, V], which need not add up to 1, by an exponential race
    on `keys` […] (the Gumbel trick)."""
    return _race(probs, keys).argmax(-1)


def without_replacement(probs: Tensor, keys: Tensor, k: int) -> Tensor:
    """Return […, k]: tokens drawn one after the other from each of `probs` […, V], none twice, -1
    where none of any probability are left; the first is `gumbel_argmax`'s (Gumbel top-k, Vieira
    2014)."""
    first = _race(probs, keys).topk(min(k, probs.shape[-1]))
    tokens = first.indices.where(first.values > 0, -1)
    return torch.nn.functional.pad(tokens, (0, k - tokens.shape[-1]), value=-1)


def _race(probs: Tensor, keys: Tensor) -> Tensor:
    """Return […, V]: how early each token comes in; later than all where it has no probability."""
    lanes = torch.arange(1, probs.shape[-1] + 1, device=probs.device) * _GOLDEN
    return probs.double() / -uniform(keys[..., None] + lanes).log()
