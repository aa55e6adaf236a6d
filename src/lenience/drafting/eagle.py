"""Drafting with EAGLE: a small model that continues from the target's states."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Self

import torch
from torch import Tensor

from lenience.core.errors import InputError
from lenience.core.needs import Parts, Sources
from lenience.core.protocols import Drafter, TrainedPart
from lenience.core.trees import Parents
from lenience.core.types import Reading
from lenience.drafting.after_target import AfterTarget, TargetSession
from lenience.drafting.base import DrafterSetup, DrafterSpec, check_fitted_to
from lenience.drafting.eagle_model import EagleModel, EagleWeights, load_eagle
from lenience.drafting.model import drafter_on
from lenience.models.compile import compile_model
from lenience.models.kv_cache import Forward, PlainCache
from lenience.models.lm import LM
from lenience.models.pass_cache import LAST
from lenience.models.session import Batch, common


@dataclass(frozen=True)
class Eagle(DrafterSpec):
    """Draft with a decoder layer on the target's states (EAGLE, Li 2024; EAGLE-3, Li 2025), trained
    here or published. The layer reads each token with the target's features of the token before;
    after drafted tokens, with its own states instead. The features are the final states (EAGLE) or
    the states after three layers (EAGLE-3)."""

    path: str
    layers: str | None = None
    """Layers of the target whose states are the features, such as 2-16-29. Default: those of the
    checkpoint."""
    name = "eagle"
    needs = Sources.LAYER_STATES
    offers = Parts.EARLY_ENDS | Parts.PROBS | Parts.CHANCES | Parts.TREES

    def __post_init__(self) -> None:
        if self.layers is not None and not re.fullmatch(
            r"[1-9]\d*(-[1-9]\d*)*", self.layers
        ):
            raise InputError(
                f"eagle's layers {self.layers!r}: must be numbers, 1 the first layer, as 2-16-29"
            )

    @cached_property
    def head(self) -> EagleWeights:
        return load_eagle(self.path)

    @property
    def fitted(self) -> tuple[TrainedPart, ...]:
        return (self,)

    def relocated(self, path: Callable[[str], str]) -> Self:
        return replace(self, path=path(self.path))

    def features(self, target: LM) -> tuple[int | None, ...]:
        if self.layers is None:
            return self.head.layers_of(target)
        return tuple(map(int, self.layers.split("-")))

    def check(self, target: LM, fingerprints: Callable[[], Mapping[str, str]]) -> None:
        self.head.check(target, self.features(target))
        check_fitted_to(f"eagle {self.path}", self.head.fingerprints, fingerprints())

    def models(self, setup: DrafterSetup) -> list[LM]:
        return [eagle_lm(self.head, setup.target)]

    def build(self, setup: DrafterSetup) -> Drafter:
        lm = eagle_lm(self.head, setup.target)
        backend = setup.target.backend
        if backend and lm.device.type == "cpu":
            compile_model(lm, export=backend.makes_others)
        session = FeatureSession(lm, setup)
        return AfterTarget(drafter_on(session, setup), session)


def eagle_lm(weights: EagleWeights, target: LM) -> LM:
    """Return a checkpoint as a draft model for a target, cached by the target."""

    def make() -> LM:
        config = copy.deepcopy(weights.config)
        config.max_position_embeddings = target.context_length or 1 << 20
        # part of the configuration, so that exported graphs are told apart
        config.lenience = [
            weights.fingerprint,
            weights.norm_before_residual,
            weights.norm_output,
        ]
        model = EagleModel(replace(weights, config=config), target)
        model.to(target.device, target.model.dtype)  # type: ignore[arg-type]
        model.restore_frequencies()
        return LM(model.requires_grad_(False), target.tokenizer, weights.path, "draft")

    return target.once(("eagle", weights.fingerprint, repr(weights.configured)), make)


class FeatureSession(TargetSession):
    """A session of EAGLE's model. Its rows lack the first token, since each token is read with the
    features of the token before. Drafted tokens are read with the model's own states, and again
    with the target's features once the target has read them."""

    def __init__(self, lm: LM, setup: DrafterSetup):
        assert setup.session is not None
        trees = not setup.tree.is_chain
        backend = lm.backend_for(LAST, trees=trees)
        ragged = not lm.has_states
        make = backend.cache if backend else partial(PlainCache, reads_ragged=ragged)
        cache = make(lm, setup.rows, setup.capacity)
        super().__init__(lm, setup.rows, setup.capacity, cache, setup.profile)
        self._inputs: dict[int, Tensor] = {}
        """[n, H] for the new tokens of each row: the states that they are read with."""
        self.target = setup.session
        self._rows = [_FeatureRow() for _ in range(setup.rows)]

    def begin(self, prefixes: Sequence[list[int]]) -> list[bool]:
        for row, prefix in enumerate(prefixes):
            features = self.target.features(row, prefix, 0)
            self._rows[row].ready = 1 <= len(prefix) - 1 <= len(features)
        return [self._rows[row].ready for row in range(len(prefixes))]

    def move(self, source: int, to: int) -> None:
        super().move(source, to)
        self._rows[to] = self._rows[source]
        self._rows[source] = _FeatureRow()

    def read(
        self,
        sequences: Sequence[list[int]],
        num_states: int = 1,
        device_tokens: Tensor | None = None,
        lookahead: int = 0,
        rows: Sequence[int] | None = None,
        parents: Sequence[Parents] | None = None,
    ) -> Reading:
        assert device_tokens is None and rows is None
        trees = parents or [[] for _ in sequences]
        shifted = []
        for row, (sequence, tree) in enumerate(zip(sequences, trees)):
            shifted.append(self._prepared(row, sequence, num_states, tree))
        reading = super().read(
            shifted, num_states, lookahead=lookahead, parents=parents
        )
        for row, (new, states) in enumerate(zip(shifted, reading.hidden)):
            first = len(new) - num_states
            self._rows[row].made |= {first + i: state for i, state in enumerate(states)}
        return reading

    def _forward(self, batch: Batch, group: list[int]) -> Forward:
        forward = super()._forward(batch, group)
        given = [self._inputs[row] for row in forward.rows]
        pad = torch.nn.functional.pad
        padded = [pad(new, (0, 0, forward.length - len(new), 0)) for new in given]
        return replace(forward, inputs=torch.stack(padded))

    def _prepared(
        self, row: int, sequence: list[int], num_states: int, tree: Parents
    ) -> list[int]:
        """Return a sequence without its first token, and prepare the features of its new tokens."""
        state = self._rows[row]
        start = len(sequence) - len(tree)
        features = self.target.features(row, sequence[:start], 0)
        if not state.ready or start < 2:  # no tokens are requested for this row
            sequence = [0, 0, *sequence[start:]] if tree else [0, 0]
            start = 2
            features = features.new_zeros(1, self.lm.model.model.feature_size)
        if state.first != sequence[0]:
            state.first = sequence[0]
            state.read_with_features = 0
            self.cut(row, 0)
        new = sequence[1:]
        num_known = min(len(features), start - 1)
        with_features = min(state.read_with_features, common(self.tokens()[row], new))
        if (
            with_features < num_known
        ):  # read again what was read with the model's own states
            self.cut(row, with_features)
            state.made = {}
        state.read_with_features = max(with_features, num_known)
        first = min(common(self.tokens()[row], new), len(new) - num_states)
        own = self._own(state, range(max(first, num_known), len(new)), start, tree)
        combined = self.lm.model.model.combine(
            features[first:num_known].to(self.lm.device)
        )
        self._inputs[row] = torch.cat([combined, *own])
        return new

    @staticmethod
    def _own(
        state: _FeatureRow, places: range, start: int, tree: Parents
    ) -> Iterator[Tensor]:
        """Yield the model's own state [1, H] before the token at each position. `start` tokens
        precede the tree."""
        for i in places:
            before = tree[i - start + 1] if i >= start - 1 and tree else i - start
            yield state.made[start - 1 + before][None]


@dataclass
class _FeatureRow:
    """State of a row of a FeatureSession."""

    ready: bool = False
    first: int = -1
    """First token of the row, which is not read."""
    read_with_features: int = 0
    """Number of tokens read with the target's features."""
    made: dict[int, Tensor] = field(default_factory=dict)
    """States [H] by position: after the last token read with features, and after drafted tokens."""
