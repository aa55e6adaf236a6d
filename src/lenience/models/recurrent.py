"""Recurrent and convolutional states of a cache's rows, with checkpoints to roll back to.

A state sums up all tokens before it, so it cannot be cut as keys and values can. Each row therefore
keeps checkpoints: copies of its states after some of its tokens. A pass continues from the last
checkpoint whose tokens the new sequence shares, and reads the tokens after it again together with
the new window. No pass is added; the pass is wider by the tokens read again.

The tokens up to a window are certain, so a checkpoint between them and the window is worth most.
Inside a pass each mixer (the module that updates a state) is therefore called on the tokens in two
pieces, and the states between the pieces are copied. All other modules read the tokens at once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from transformers import Cache
from transformers.cache_utils import LinearAttentionLayer

CHECKPOINTS = 6
"""Largest number of checkpoints of a row."""
V = TypeVar("V")


@dataclass(frozen=True)
class LayerState:
    """States of one layer and one row after some tokens, by the index of the state."""

    conv: dict[int, Tensor | None]
    """Inputs of the convolutions' last steps [1, D, K]."""
    recurrent: dict[int, Tensor | None]
    """Recurrent states [1, …]."""
    kernels: dict[int, int | None]
    """Kernel sizes of the convolutions."""

    def joined(self, other: LayerState) -> LayerState:
        """Return these states and those of other indices."""
        return LayerState(
            self.conv | other.conv,
            self.recurrent | other.recurrent,
            self.kernels | other.kernels,
        )

    def nbytes(self) -> int:
        """Return the bytes of all tensors."""
        tensors = [*self.conv.values(), *self.recurrent.values()]
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)


class StateLayer(LinearAttentionLayer):
    """State of one layer, of the row that a pass reads."""

    def state(self) -> LayerState:
        """Return copies of the present states."""
        return self.partial_state(range(self.number_of_states))

    def partial_state(self, indices: Iterable[int]) -> LayerState:
        """Return copies of the present states of these indices."""
        conv = {}
        recurrent = {}
        kernels = {}
        for i in indices:
            conv[i] = _copy(self.conv_states[i])
            recurrent[i] = _copy(self.recurrent_states[i])
            kernels[i] = self.conv_kernel_size[i]
        return LayerState(conv, recurrent, kernels)

    def continue_from(self, state: LayerState | None) -> None:
        """Continue from a copy of a state; None for a row without tokens."""
        indices = range(self.number_of_states)
        self.conv_states = {i: _copy(state.conv[i]) if state else None for i in indices}
        self.recurrent_states = {
            i: _copy(state.recurrent[i]) if state else None for i in indices
        }
        if state:
            self.conv_kernel_size = dict(state.kernels)
        self.is_conv_states_initialized = _present(self.conv_states)
        self.is_recurrent_states_initialized = _present(self.recurrent_states)
        self.has_previous_state = dict.fromkeys(indices, state is not None)


def _copy(state: Tensor | None) -> Tensor | None:
    return None if state is None else state.clone()


def _present(states: dict[int, Tensor | None]) -> dict[int, bool]:
    return {i: state is not None for i, state in states.items()}


class Checkpoints(Generic[V]):
    """Checkpoints of all rows of a cache, by the number of tokens before them."""

    def __init__(self, rows: int):
        self._rows: list[dict[int, V]] = [{} for _ in range(rows)]

    def of(self, row: int) -> dict[int, V]:
        """Return a row's checkpoints."""
        return self._rows[row]

    def resumable(self, row: int, length: int) -> int:
        """Drop a row's checkpoints after its first `length` tokens. Return the number of tokens
        before the last that is left, 0 if none is."""
        kept = self._rows[row]
        for after in [after for after in kept if after > length]:
            del kept[after]
        return max(kept, default=0)

    def at(self, row: int, length: int) -> V | None:
        """Return a row's checkpoint after `length` tokens; None at the beginning."""
        return self._rows[row].get(length)

    def keep(self, row: int, length: int, states: V) -> None:
        """Keep the states after a row's first `length` tokens. The last two, before and after a
        window, always stay. If there are too many checkpoints, another one is dropped, such that
        their distances from the end stay about a geometric sequence: rolling back by n tokens then
        reads a multiple of n again, whatever n is."""
        kept = self._rows[row]
        kept[length] = states
        while len(kept) > CHECKPOINTS:
            lengths = sorted(kept)
            ratios = {}
            for i in range(1, len(lengths) - 2):
                ratios[lengths[i]] = (length + 1 - lengths[i - 1]) / (
                    length + 1 - lengths[i + 1]
                )
            del kept[min(ratios, key=lambda after: ratios[after])]

    def copy(self, source: int, to: int, length: int) -> None:
        """Give row `to` the checkpoints of row `source` within its first `length` tokens. States
        are never changed in place, so both rows may hold the same."""
        own = self._rows[source]
        self._rows[to] = {after: own[after] for after in own if after <= length}


class MixerStates:
    """Checkpoints of the states of a cache's layers."""

    def __init__(self, layers: dict[int, StateLayer], rows: int):
        self.layers = layers
        """State layers by the index of their layer."""
        self.checkpoints: Checkpoints[list[LayerState]] = Checkpoints(rows)

    def enter(self, row: int, start: int, sizes: Sequence[int], certain: int) -> Pieces:
        """Continue from a row's checkpoint after `start` tokens. Return the pieces of the pass,
        whose first `certain` tokens lie before the window."""
        states = self.checkpoints.at(row, start)
        for i, layer in enumerate(self.layers.values()):
            layer.continue_from(states[i] if states else None)
        return Pieces(sizes, self.layers, certain)

    def leave(self, row: int, start: int, pieces: Pieces) -> None:
        """Keep the states before the window, and those after it."""
        before = [pieces.marked[i] for i in self.layers]
        self.checkpoints.keep(row, start + pieces.mark, before)
        end = sum(pieces.sizes)
        if pieces.mark < end:
            after = [layer.state() for layer in self.layers.values()]
            self.checkpoints.keep(row, start + end, after)

    def scale(self, row: int, factor: float) -> bool:
        """Multiply the recurrent states of a row's checkpoints, to see whether passes read them.
        Returns False if there are none."""
        found = False
        for states in self.checkpoints.of(row).values():
            for state in states:
                for tensor in state.recurrent.values():
                    if tensor is not None:
                        tensor *= factor
                        found = True
        return found

    def row_bytes(self) -> int:
        """Return the bytes of the checkpoints and the present states of a row."""
        present = sum(layer.state().nbytes() for layer in self.layers.values())
        return present * (CHECKPOINTS + 1)


@dataclass(frozen=True)
class Mixer:
    """What a mixer updates."""

    layer: int
    """Index of the mixer's layer."""
    states: frozenset[int]
    """Indices of the states among the layer's."""


class Pieces:
    """Pieces in which the mixers read the tokens of a pass, and what to do between two."""

    def __init__(self, sizes: Sequence[int], layers: dict[int, StateLayer], mark: int):
        """Take `sizes`: the numbers of tokens of the pieces; `layers`: the state layers by the
        index of their layer; `mark`: the number of tokens after which states are copied."""
        self.sizes = sizes
        self.marked: dict[int, LayerState] = {}
        """States after the first `mark` tokens, by the index of the layer."""
        self.mark = mark
        self._layers = layers

    def passed(self, mixer: Mixer, tokens: int) -> None:
        """Note that a mixer has read the first tokens of the pass."""
        if tokens != self.mark:
            return
        own = self._layers[mixer.layer].partial_state(mixer.states)
        before = self.marked.get(mixer.layer)
        self.marked[mixer.layer] = own if before is None else before.joined(own)


def sizes_of(tokens: int, certain: int, begins: bool, steps: int) -> list[int]:
    """Return the sizes of the pieces of a pass. The first `certain` of its tokens are a piece, and
    the window after them. Pieces of at most `steps` tokens are cut into single tokens, except for
    the first piece of a row that `begins`."""
    pieces = [certain, tokens - certain] if certain < tokens else [tokens]
    sizes = []
    for i, size in enumerate(pieces):
        whole = size > steps or (begins and i == 0)
        sizes += [size] if whole else [1] * size
    return sizes


def find_mixers(
    model: torch.nn.Module, cache: Cache, run: Callable[[], object]
) -> list[tuple[torch.nn.Module, Mixer]]:
    """Return the modules that update states, with what they update. They are found by `run()`, a
    pass over one token into `cache`. A layer may have several mixers, each with its own states."""
    updated: dict[torch.nn.Module, list[tuple[int, int]]] = {}
    running: list[torch.nn.Module] = []

    def noted(update: Callable[..., V]) -> Callable[..., V]:
        def call(states: Tensor, layer_idx: int, state_idx: int = 0, **named: Any) -> V:
            updated.setdefault(running[-1], []).append((layer_idx, state_idx))
            return update(states, layer_idx, state_idx=state_idx, **named)

        return call

    with _followed(model, running):
        for name in ("update_conv_state", "update_recurrent_state"):
            setattr(cache, name, noted(getattr(cache, name)))
        run()
    found = []
    for module, places in updated.items():
        states = frozenset(state for _, state in places)
        found.append((module, Mixer(places[0][0], states)))
    return found


@contextmanager
def _followed(model: torch.nn.Module, running: list[torch.nn.Module]) -> Iterator[None]:
    """Keep the modules that are running in `running`, the innermost last."""
    handles = []
    for module in model.modules():
        enter = lambda module, _: running.append(module)  # noqa: E731
        leave = lambda *_: running.pop() and None  # noqa: E731
        handles.append(module.register_forward_pre_hook(enter))
        handles.append(module.register_forward_hook(leave))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def read_in_pieces(
    module: torch.nn.Module,
    mixer: Mixer,
    pieces_in: Callable[[Any, Any], Pieces | None],
) -> None:
    """Make a mixer's module read the tokens of each pass in pieces. `pieces_in(args, kwargs)`
    returns the pieces of the pass that a call belongs to; None to read all tokens at once. The
    module's class changes, not its `forward`, so that copies of the model read in pieces too."""
    own = type(module)
    if issubclass(own, _InPieces):
        return
    given = {
        "mixer": mixer,
        "pieces_in": staticmethod(pieces_in),
        "__module__": own.__module__,
    }
    module.__class__ = type(own.__name__, (_InPieces, own), given)
    bound = vars(module).pop("forward", None)
    if bound is not None:  # placed there by accelerate's hooks
        module.read_at_once = bound


class _InPieces(torch.nn.Module):
    """A mixer that reads the tokens of each pass in pieces, before the mixer's own class."""

    mixer: Mixer
    pieces_in: Callable[[Any, Any], Pieces | None]

    def read_at_once(self, *args: Any, **kwargs: Any) -> Any:
        """Run the mixer's own forward pass."""
        return super().forward(*args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        pieces = self.pieces_in(args, kwargs)
        if pieces is None:
            return self.read_at_once(*args, **kwargs)
        tokens = sum(pieces.sizes)
        outputs = []
        for end, size in zip(accumulate(pieces.sizes), pieces.sizes):
            part = functools.partial(_part, start=end - size, end=end, of=tokens)
            named = {name: part(value) for name, value in kwargs.items()}
            outputs.append(self.read_at_once(*map(part, args), **named))
            pieces.passed(self.mixer, end)
        return _joined(outputs)


def _part(value: Any, start: int, end: int, of: int) -> Any:
    """Return the part of an argument for some of the tokens: of a tensor [1, T, …], or of each in a
    tuple. Other arguments are returned as they are."""
    if isinstance(value, tuple):
        return tuple(_part(item, start, end, of) for item in value)
    if isinstance(value, Tensor) and value.ndim > 1 and value.shape[1] == of:
        return value[:, start:end]
    return value


def _joined(outputs: list[Any]) -> Any:
    """Return the outputs of all pieces, tensors [1, n, …], joined along the tokens."""
    if len(outputs) == 1:
        return outputs[0]
    if isinstance(outputs[0], tuple):
        return tuple(map(_joined, map(list, zip(*outputs))))
    if isinstance(outputs[0], Tensor):
        return torch.cat(outputs, 1)
    return outputs[-1]
