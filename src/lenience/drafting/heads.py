"""Drafting with heads on the target's last state, one for each of the next tokens."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, Self

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from lenience.core import spec
from lenience.core.context import Context
from lenience.core.errors import InputError, first_line
from lenience.core.files import EMBEDDED, digest_bytes, replacing, stamp, write_json
from lenience.core.hub import local
from lenience.core.needs import Parts, Sources
from lenience.core.protocols import Drafter, TrainedPart
from lenience.core.types import Reading, Verdict
from lenience.drafting.base import DrafterSetup, DrafterSpec, check_fitted_to
from lenience.drafting.model import wide_as_target
from lenience.drafting.parallel import ParallelDrafter
from lenience.drafting.published import (
    BROKEN,
    has_shape,
    shown_shape,
    table,
    tensors_in,
)
from lenience.models.lm import LM
from lenience.models.vocabulary import widened

BUILT_IN_HEADS = EMBEDDED / "medusa"
HUB_FILE = "medusa_lm_head.pt"
PUBLISHED = re.compile(r"(\d+)\.(\d+)\.(?:linear\.(weight|bias)|weight)")
"""Names of the tensors in Medusa-1's file: those of a head's blocks and, without `linear`, the
head's vocabulary matrix."""
VOCABULARY = "draft_vocab"
"""Name of the tensor that lists a draft vocabulary."""
FIX = "`lenience fit RUN --drafter {kind}` makes RUN/{kind}"


@dataclass
class DraftHeads:
    """Heads that predict tokens from the target's last state. Head i predicts the token i + 2
    positions after the state's own token; the target itself predicts the next one."""

    kind: str
    """Kind of the heads. blockwise: x + W₂ · relu(W₁ · x) and the target's vocabulary matrix (Stern
    2018, section 3). medusa: blocks x + silu(W · x + b), mostly with a matrix per head (Cai 2024,
    section 2.1.1)."""
    blocks: list[list[dict[str, Tensor]]]
    """Blocks of each head, with `weight` [H, H] and `bias` [H] or, for blockwise, `into` [N, H],
    `into_bias` [N], `out` [H, N] and `out_bias` [H]."""
    matrices: list[Tensor] | None
    """Vocabulary matrix [V, H] of each head; None for the target's."""
    fingerprints: dict[str, str]
    """Fingerprints of the target and the tokenizer; empty if the file has none."""
    metrics: dict[str, Any]
    prompts: tuple[str, ...] | None = None
    """Digests of the training prompts; None if someone else trained the heads."""
    tokens: Tensor | None = None
    """[N]: ids of the draft vocabulary, one per row of the matrices [N, H]; None for the whole
    vocabulary."""

    _on: dict[tuple[torch.device, torch.dtype], DraftHeads] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    """Copies of the heads by device and dtype."""

    @property
    def hidden_size(self) -> int:
        first = self.blocks[0][0] if self.blocks[0] else None
        if first is None:
            assert self.matrices is not None
            return self.matrices[0].shape[1]
        return int(first["into" if self.kind == "blockwise" else "weight"].shape[1])

    @cached_property
    def fingerprint(self) -> str:
        """Return a hash that identifies the heads' predictions."""
        content = []
        for _, tensor in sorted(self.tensors().items()):
            content.append(tensor.float().cpu().numpy().tobytes())
        return digest_bytes(b"".join(content) + self.kind.encode())

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors by their names in the file."""
        named = {
            f"{i}.{j}.{name}": tensor
            for i, blocks in enumerate(self.blocks)
            for j, block in enumerate(blocks)
            for name, tensor in block.items()
        }
        named |= {f"{i}.matrix": matrix for i, matrix in enumerate(self.matrices or ())}
        return named if self.tokens is None else {**named, VOCABULARY: self.tokens}

    def to(self, device: torch.device, dtype: torch.dtype) -> DraftHeads:
        """Return a copy of the heads on a device, in a dtype, cached."""
        if (device, dtype) not in self._on:
            blocks = []
            for of_head in self.blocks:
                blocks.append(
                    [
                        {name: part.to(device, dtype) for name, part in block.items()}
                        for block in of_head
                    ]
                )
            matrices = self.matrices and [
                matrix.to(device, dtype) for matrix in self.matrices
            ]
            tokens = None if self.tokens is None else self.tokens.to(device)
            self._on[device, dtype] = replace(
                self, blocks=blocks, matrices=matrices, tokens=tokens
            )
        return self._on[device, dtype]

    def states(self, x: Tensor) -> Tensor:
        """Return each head's states […, n, H] from the target's states […, H]."""
        done = []
        for blocks in self.blocks:
            state = x
            for block in blocks:
                state = state + self._block(block, state)
            done.append(state)
        return torch.stack(done, -2)

    def _block(self, block: Mapping[str, Tensor], x: Tensor) -> Tensor:
        linear = torch.nn.functional.linear
        if self.kind == "blockwise":
            inner = torch.relu(linear(x, block["into"], block["into_bias"]))
            return linear(inner, block["out"], block["out_bias"])
        return torch.nn.functional.silu(linear(x, block["weight"], block["bias"]))

    def logits(self, x: Tensor, matrix: Tensor) -> Tensor:
        """Return the heads' logits […, n, V] from the target's states […, H]. `matrix` [V, H] is
        the target's vocabulary matrix."""
        logits = self.row_logits(x, matrix)
        if self.tokens is None:
            return logits
        return widened(logits, self.tokens, len(matrix))

    def row_logits(self, x: Tensor, matrix: Tensor) -> Tensor:
        """Return the heads' logits […, n, N] over the draft vocabulary alone, see `logits`."""
        states = self.states(x)
        if self.matrices is None:
            return states @ matrix.T
        each = zip(states.unbind(-2), self.matrices)
        return torch.stack([state @ own.T for state, own in each], -2)

    def check_shapes(self) -> None:
        """Raise ValueError if a part is missing or its shape does not fit the other parts."""
        if not self.blocks:
            raise ValueError("it has no heads")
        for i, blocks in enumerate(self.blocks):
            if not blocks and self.matrices is None:
                raise ValueError(f"head {i} has nothing")
        size = self.hidden_size
        for i, blocks in enumerate(self.blocks):
            for j, block in enumerate(blocks):
                self._check_block(f"block {j} of head {i}", block, size)
        first = self.matrices[0] if self.matrices else None
        if self.tokens is not None:
            rows = (len(self.matrices[0]) if self.matrices else 0,)
            if self.tokens.dtype != torch.long or not has_shape(self.tokens, rows):
                raise ValueError("its draft vocabulary has no id for each row")
        for i, matrix in enumerate(self.matrices or ()):
            wanted = (None if first is None else first.shape[0], size)
            if not has_shape(matrix, wanted):
                raise ValueError(
                    f"head {i}'s matrix is {shown_shape(matrix)}, not "
                    f"{shown_shape(wanted)}"
                )

    def _check_block(self, where: str, block: Mapping[str, Tensor], size: int) -> None:
        shapes: dict[str, tuple[int | None, ...]] = {
            "weight": (size, size),
            "bias": (size,),
        }
        if self.kind == "blockwise":
            inner = len(block["into_bias"]) if "into_bias" in block else None
            shapes = {
                "into": (inner, size),
                "into_bias": (inner,),
                "out": (size, inner),
                "out_bias": (size,),
            }
        for part in sorted(block.keys() ^ shapes.keys()):
            raise ValueError(f"{where} has {'no' if part in shapes else 'a'} {part}")
        for part, wanted in shapes.items():
            if not has_shape(block[part], wanted):
                raise ValueError(
                    f"{where}: its {part} is {shown_shape(block[part])}, not "
                    f"{shown_shape(wanted)}"
                )

    def check(self, where: str, target: LM, fingerprints: Mapping[str, str]) -> None:
        """Raise InputError unless the heads can draft for a target."""
        if self.hidden_size != target.hidden_size:
            raise InputError(
                f"{where}: reads states of {self.hidden_size} numbers, and the "
                "target's have "
                f"{target.hidden_size}; name heads of this target"
            )
        for matrix in self.matrices or ():
            known = matrix.shape[0]
            if self.tokens is not None:
                known = int(self.tokens.max()) + 1
            if known > target.vocab_size:
                raise InputError(
                    f"{where}: predicts {known} tokens, and the target has "
                    f"{target.vocab_size}; name heads of this target"
                )
        check_fitted_to(where, self.fingerprints, fingerprints)

    def save(self, folder: Path) -> None:
        """Write KIND.safetensors and KIND.json, such as medusa.json, each atomically."""
        with replacing(folder / f"{self.kind}.safetensors") as new:
            save_file(
                {name: part.detach().clone() for name, part in self.tensors().items()},
                new,
            )
        about = {
            "kind": self.kind,
            "heads": len(self.blocks),
            "fingerprint": self.fingerprint,
            "fingerprints": self.fingerprints,
            "metrics": self.metrics,
            "prompts": self.prompts and list(self.prompts),
        }
        write_json(folder / f"{self.kind}.json", about)


def load_heads(folder: str | Path, kind: str) -> DraftHeads:
    """Return the heads of a kind in a folder, or on the Hub as hf:org/name. They were saved here
    or, for medusa, published as medusa_lm_head.pt. Raises InputError if they are missing or
    broken."""
    path = local(folder)
    if (path / f"{kind}.json").is_file():
        return _load(str(folder), path, kind, stamp(path / f"{kind}.json"))
    if kind == "medusa" and (path / HUB_FILE).is_file():
        return _load_published(str(folder), path, stamp(path / HUB_FILE))
    published = f" and no {HUB_FILE}" if kind == "medusa" else ""
    fix = FIX.format(kind=kind)
    raise InputError(
        f"{kind} {folder}: there is no {kind}.json in it{published}; {fix}"
    )


@lru_cache(maxsize=4)
def _load(named: str, path: Path, kind: str, changed: tuple[int, int]) -> DraftHeads:
    try:
        about = json.loads((path / f"{kind}.json").read_text())
        tensors = load_file(path / f"{kind}.safetensors")
        if about["heads"] < 1:
            raise ValueError(f"{about['heads']} heads")
        heads = _from_tensors(kind, tensors, about["heads"])
        heads = replace(
            heads,
            fingerprints=table(about["fingerprints"], "fingerprints"),
            metrics=table(about["metrics"], "metrics"),
            prompts=about["prompts"] and tuple(about["prompts"]),
        )
        if heads.fingerprint != about["fingerprint"]:
            raise ValueError(
                f"{kind}.json and {kind}.safetensors come from different training runs"
            )
        return heads
    except BROKEN as error:
        why = f"{type(error).__name__}: {first_line(error)}"
        raise InputError(f"{kind} {named}: is broken ({why}); train it again") from None


def _from_tensors(kind: str, tensors: Mapping[str, Tensor], count: int) -> DraftHeads:
    """Return heads from tensors with the names of `DraftHeads.tensors`. Raises ValueError or
    LookupError if the tensors do not fit together."""
    blocks: list[list[dict[str, Tensor]]] = [[] for _ in range(count)]
    matrices: dict[int, Tensor] = {}
    vocabulary = tensors.get(VOCABULARY)
    for name in sorted(tensors.keys() - {VOCABULARY}):
        head, *rest = name.split(".")
        if rest == ["matrix"]:
            matrices[int(head)] = tensors[name]
            continue
        number, part = rest
        while len(blocks[int(head)]) <= int(number):
            blocks[int(head)].append({})
        blocks[int(head)][int(number)][part] = tensors[name]
    for i in range(count):
        if matrices and i not in matrices:
            raise ValueError(f"head {i} has no matrix")
    own = [matrices[i] for i in range(count)] if matrices else None
    heads = DraftHeads(kind, blocks, own, {}, {}, tokens=vocabulary)
    heads.check_shapes()
    return heads


@lru_cache(maxsize=2)
def _load_published(named: str, path: Path, changed: tuple[int, int]) -> DraftHeads:
    """Return Medusa-1 heads in the published layout. The number of heads comes from the file,
    because published configurations state another number."""
    try:
        saved = tensors_in(path / HUB_FILE)
        tensors = {}
        numbers = set[str]()
        for name, tensor in saved.items():
            found = PUBLISHED.fullmatch(str(name))
            if found is None or not isinstance(tensor, Tensor):
                raise ValueError(f"it has {str(name)!r:.60}, which Medusa-1 heads lack")
            head, block, part = found.groups()
            numbers.add(head)
            tensors[f"{head}.{block}.{part}" if part else f"{head}.matrix"] = tensor
        return _from_tensors("medusa", tensors, len(numbers))
    except BROKEN as error:
        why = f"{type(error).__name__}: {first_line(error)}"
        raise InputError(f"medusa {named}: {HUB_FILE} cannot be read ({why})") from None


@dataclass(frozen=True)
class _Heads(DrafterSpec):
    """Trained heads stored in a folder."""

    path: str
    needs = Sources.LAST_STATES
    offers = Parts.EARLY_ENDS | Parts.PROBS | Parts.CHANCES | Parts.TREES

    @cached_property
    def head(self) -> DraftHeads:
        return load_heads(self.path, self.name)

    def check(self, target: LM, fingerprints: Callable[[], Mapping[str, str]]) -> None:
        self.head.check(f"{self.name} {self.path}", target, fingerprints())

    def relocated(self, path: Callable[[str], str]) -> Self:
        return replace(self, path=path(self.path))

    @property
    def longest(self) -> int:
        return len(self.head.blocks)

    @property
    def fitted(self) -> tuple[TrainedPart, ...]:
        return (self,)

    def build(self, setup: DrafterSetup) -> Drafter:
        return HeadsDrafter(self.head, setup)


@dataclass(frozen=True)
class Medusa(_Heads):
    """Draft with Medusa heads: residual blocks on the target's last state, each with its own
    vocabulary matrix (Medusa-1, Cai 2024, section 2.1.1). Heads trained here and published ones
    work; without a path, those of the built-in target."""

    path: str = field(default=str(BUILT_IN_HEADS), metadata=spec.PLACED)
    name = "medusa"

    def relocated(self, path: Callable[[str], str]) -> Self:
        return self if self.path == str(BUILT_IN_HEADS) else super().relocated(path)


@dataclass(frozen=True)
class Blockwise(_Heads):
    """Draft with feed-forward heads on the target's last state that share its vocabulary matrix
    (blockwise parallel decoding, Stern 2018, section 3). The pass that verifies a window also
    predicts the next one."""

    name = "blockwise"


class HeadsDrafter(ParallelDrafter):
    """A drafter with heads. It proposes nothing in an answer's first cycle, which reads the prompt,
    and later at most one token per head."""

    def __init__(self, heads: DraftHeads, setup: DrafterSetup):
        super().__init__(setup, longest=len(heads.blocks))
        self.session = setup.session if setup.keeps_last else None
        self.matrix = setup.target.output_matrix
        self.heads = heads.to(self.matrix.device, self.matrix.dtype)

    def ready(self, ctx: Context) -> list[bool]:
        if self.session is not None:
            for b, row in enumerate(ctx.rows):
                kept = self.session.features(b, row.prefix, max(len(row.prefix) - 2, 0))
                # not in the first cycle, though the row may hold an equal prompt's features
                begun = row.position > row.ahead and len(kept) > 0
                row.memory[self] = kept[0].clone() if begun else None
        return [row.memory.get(self) is not None for row in ctx.rows]

    def logits(self, ctx: Context, drafts: Sequence[bool], width: int) -> Tensor:
        blank = torch.zeros(self.heads.hidden_size, device=self.matrix.device)
        states = torch.stack(  # [B, H], before the window
            [
                row.memory[self] if wanted else blank
                for row, wanted in zip(ctx.rows, drafts)
            ]
        )
        logits = self.heads.logits(states.to(self.matrix), self.matrix)  # [B, n, V]
        return wide_as_target(logits[:, :width], self.target)

    def observe(
        self, ctx: Context, reading: Reading, verdicts: Sequence[Verdict]
    ) -> None:
        if self.session is not None:
            return
        for b, (row, verdict) in enumerate(zip(ctx.rows, verdicts)):
            row.memory[self] = reading.hidden[
                b, verdict.path[-1] + 1 if verdict.path else 0
            ].clone()
