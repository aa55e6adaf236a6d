"""Heads on hidden states: their inputs, scores, files and checks."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from lenience.core.context import Context
from lenience.core.errors import InputError
from lenience.core.files import digest_bytes, replacing, stamp, write_json
from lenience.core.hub import local
from lenience.core.types import Draft, Reading
from lenience.heads import lookahead

Role = Literal["judge", "stop", "gate", "mixture"]
MODELS = ("target", "draft")
TOKEN_KINDS = ("draft", "previous", "target")
FURTHEST = 64
"""Maximum number of tokens that a head may look ahead."""


@dataclass(frozen=True)
class Inputs:
    """Inputs of a head: hidden states of the named models after the named tokens, concatenated.

    A token is the drafted token, the previous token, or the target's own token (whose state
    decoding does not compute). The default is the first two of both models: on the built-in pair
    these states separate important tokens best, and decoding has all four (docs/architecture.md,
    Mining).
    """

    models: tuple[str, ...] = MODELS
    tokens: tuple[str, ...] = ("draft", "previous")
    layers: tuple[int | None, ...] = (None,)
    """Layers of the target whose states are read, concatenated: 1 is the first and -1 the last,
    before the final norm; None is the output of that norm."""
    ahead: int | None = None
    """Number of later drafted tokens whose logits are features too, with those of the drafted token
    itself (`lenience.heads.lookahead`); None for states alone."""

    def __post_init__(self) -> None:
        for what, given, known in (
            ("models", self.models, MODELS),
            ("tokens", self.tokens, TOKEN_KINDS),
        ):
            unknown = [name for name in given if name not in known]
            if unknown or not given:
                raise InputError(
                    f"{what} {','.join(given)!r}: name one or more of "
                    f"{', '.join(known)}"
                )
        if self.ahead is not None and not 0 <= self.ahead <= FURTHEST:
            raise InputError(f"ahead {self.ahead}: must be from 0 to {FURTHEST} tokens")
        shown = shown_layers(self.layers)
        if (
            not self.layers
            or len(set(self.layers)) < len(self.layers)
            or 0 in self.layers
        ):
            raise InputError(
                f"layers {shown or 'none'}: name layers, each once, counted from 1"
            )
        if self.layers != (None,) and "target" not in self.models:
            raise InputError(
                f"layers {shown}: belong to the target, whose states are not read"
            )

    def __str__(self) -> str:
        layer = (
            "" if self.layers == (None,) else f"-layer{shown_layers(self.layers, '+')}"
        )
        ahead = "" if self.ahead is None else f"-ahead{self.ahead}"
        return f"{'+'.join(self.models)}-{'+'.join(self.tokens)}{layer}{ahead}"

    def width(self, sizes: Mapping[str, int]) -> int:
        """Return the number of input features F, given the models' hidden sizes by role."""
        times = {"target": len(self.layers), "draft": 1}
        states = sum(sizes[model] * times[model] for model in self.models) * len(
            self.tokens
        )
        if self.ahead is None:
            return states
        return states + lookahead.width("draft" in self.models, self.ahead)


def shown_layers(layers: Sequence[int | None], mark: str = ",") -> str:
    """Return layers as users name them: by number, and `norm`."""
    return mark.join("norm" if layer is None else str(layer) for layer in layers)


@dataclass
class Head:
    """A trained head: score = sigmoid(x · weight + bias), the probability that a mismatch is
    unimportant. x are the states or, with a hidden layer, gelu(states · layer[0] + layer[1])."""

    weight: Tensor
    """[F] float32, with the scaling of the inputs folded in; [N] for a head with a hidden layer of
    N units."""
    bias: float
    inputs: Inputs
    threshold: float
    fingerprints: dict[str, str]
    """Fingerprints of the target, the draft and their tokenizer."""
    metrics: dict[str, Any] = field(default_factory=dict)
    prompts: tuple[str, ...] = ()
    """Digests of the prompts in the training data. They stay with the head wherever it is copied;
    empty for heads of earlier versions."""
    folder: str = ""
    role: Role = "judge"
    """Role of the head: "judge"; "stop" or "gate" for a head that ends drafting; "mixture" for one
    that weighs the target against the draft. The files are named after it."""
    temperature: float = 0.0
    """Sampling temperature of the answers in the training data; 0 for greedy answers."""
    drafter: dict[str, Any] | None = None
    """Drafter whose tokens are in a judge's training data, see `DrafterSpec.record`; None for the
    draft model."""
    layer: tuple[Tensor, Tensor] | None = None
    """[F, N] and [N] float32: weight and bias of the hidden layer, with the scaling of the inputs
    folded in."""
    _weights: dict[torch.device, list[tuple[Tensor, Tensor]]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    """Weights and biases of all layers, on each device that has needed them."""
    _kinds_on: dict[torch.device, Tensor] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    @property
    def kind(self) -> str:
        return "mlp" if self.layer else "logistic"

    def threshold_of(self, recall: float) -> float:
        """Return the lowest threshold that rejects a share `recall` of the important mismatches on
        samples outside the training data. Raises InputError for a recall that was not measured."""
        measured = self.metrics.get("by_recall")
        if measured is None:
            rows = self.metrics.get("thresholds", [])
            measured = {f"{row['recall']:g}": row["threshold"] for row in rows}
        known = measured.get(f"{recall:g}")
        if known is None:
            listed = ", ".join(measured) or "none"
            raise InputError(
                f"{self.role} {self.folder}: has no threshold for recall {recall:g}; "
                "it has "
                f"{listed}"
            )
        return float(known)

    def window_logits(self, draft: Draft, reading: Reading, ctx: Context) -> Tensor:
        """Return the logits [B, W] of the scores of all tokens in drafted windows."""
        parts = []
        for token in self.inputs.tokens:
            rows = (
                slice(1, draft.width + 1) if token == "draft" else slice(0, draft.width)
            )
            for model in self.inputs.models:
                state = reading.hidden if model == "target" else draft.hidden
                if state is None:
                    raise RuntimeError(
                        "the drafter did not keep the draft's hidden states"
                    )
                parts.append(state[:, rows].float())
        if self.inputs.ahead is not None:
            logits = draft.logits if "draft" in self.inputs.models else None
            values = lookahead.token_values(
                reading.logits[:, :-1],
                logits,
                draft.tokens,
                self._kinds(ctx, draft.tokens.device),
            )
            parts.append(lookahead.of_windows(values, draft.lengths, self.inputs.ahead))
        return self.logits(torch.cat(parts, -1))

    def _kinds(self, ctx: Context, device: torch.device) -> Tensor:
        """Return the kinds [V, 2] of the tokenizer's tokens on a device; computed once."""
        if device not in self._kinds_on:
            if ctx.token_mask is None:
                raise RuntimeError("a head that looks ahead reads tokens' texts")
            self._kinds_on[device] = lookahead.kinds_of(ctx.token_mask).to(device)
        return self._kinds_on[device]

    def logits(self, x: Tensor) -> Tensor:
        """Return the logits […] of the scores of inputs […, F]. Near 1 a logit distinguishes scores
        that are equal in float32."""
        x = x.float()
        if x.device not in self._weights:
            self._weights[x.device] = [
                (weight.to(x.device), bias.to(x.device))
                for weight, bias in self._layers()
            ]
        *layers, last = self._weights[x.device]
        for layer in layers:
            x = torch.nn.functional.gelu(torch.nn.functional.linear(x, *layer))
        return torch.nn.functional.linear(x, *last)[..., 0]

    def _layers(self) -> list[tuple[Tensor, Tensor]]:
        """Return the weight and the bias of each layer, as `torch.nn.functional.linear` takes
        them."""
        last = (self.weight[None], torch.tensor([self.bias], dtype=torch.float32))
        if not self.layer:
            return [last]
        return [(self.layer[0].T.contiguous(), self.layer[1]), last]

    @property
    def fingerprint(self) -> str:
        """Return a hash of everything that determines the head's decisions: weights, bias,
        threshold and inputs."""
        weights = b"".join(
            part.numpy().tobytes() for part in (self.weight, *(self.layer or ()))
        )
        numbers = weights + np.array([self.bias, self.threshold]).tobytes()
        return digest_bytes(numbers + str(self.inputs).encode())

    def check(self, fingerprints: Mapping[str, str], sizes: Mapping[str, int]) -> None:
        """Raise InputError unless the head can run on models of these fingerprints, by part, and
        hidden sizes, by role. Parts that `fingerprints` lacks are not compared."""
        if "target" in self.inputs.tokens:
            raise InputError(
                f"{self.role} {self.folder}: reads the state after the target's own "
                "token, which decoding does not compute; train one with --tokens draft "
                "or previous"
            )
        for part, value in self.fingerprints.items():
            if fingerprints.get(part, value) != value:
                raise InputError(
                    f"{self.role} {self.folder}: was trained for another {part} "
                    f"({value}, this is "
                    f"{fingerprints[part]}: other weights, or the same quantised otherwise); "
                    "train one for this pair, or add "
                    ",unchecked=true to its spec"
                )
        lacking = [model for model in self.inputs.models if model not in sizes]
        if lacking:
            raise InputError(
                f"{self.role} {self.folder}: reads states of the {lacking[0]}, and the "
                "pair has no "
                f"{lacking[0]} model"
            )
        width = self.inputs.width(sizes)
        reads = len(self.layer[0] if self.layer else self.weight)
        if reads != width:
            raise InputError(
                f"{self.role} {self.folder}: reads {reads} numbers, these models give "
                f"{width}"
            )

    def save(self, folder: Path) -> None:
        """Write ROLE.safetensors and ROLE.json, such as judge.json, each atomically. Loading
        refuses files that come from two different saves."""
        tensors = {
            "weight": self.weight,
            "bias": torch.tensor([self.bias], dtype=torch.float64),
        }
        if self.layer:
            tensors |= {
                "layer.weight": self.layer[0].contiguous(),
                "layer.bias": self.layer[1],
            }
        with replacing(folder / f"{self.role}.safetensors") as new:
            save_file(tensors, new)
        about = {
            "kind": self.kind,
            "fingerprint": self.fingerprint,
            "inputs": asdict(self.inputs),
            "threshold": self.threshold,
            "temperature": self.temperature,
            "drafter": self.drafter,
            "fingerprints": self.fingerprints,
            "metrics": self.metrics,
            "prompts": list(self.prompts),
        }
        write_json(folder / f"{self.role}.json", about)


def _how_to_fit(role: Role) -> str:
    return "lenience fit RUN" + ("" if role == "judge" else f" --{role}")


def load_head(folder: str | Path, role: Role = "judge") -> Head:
    """Return the head with a role that is saved in a folder. Raises InputError if there is none or
    a file is broken."""
    path = local(folder)
    if not (path / f"{role}.json").is_file():
        how = _how_to_fit(role)
        raise InputError(
            f"{role} {folder}: there is no {role}.json in it; `{how}` makes RUN/{role}"
        )
    return _load(path, role, stamp(path / f"{role}.json"))


@lru_cache(maxsize=8)
def _load(path: Path, role: Role, changed: tuple[int, int]) -> Head:
    try:
        about = json.loads((path / f"{role}.json").read_text())
        tensors = load_file(path / f"{role}.safetensors")
        asked = about["inputs"]
        models = tuple(asked["models"])
        tokens = tuple(asked["tokens"])
        # heads of earlier versions name a single layer
        layers = asked.get("layers", [asked.get("layer")])
        inputs = Inputs(models, tokens, tuple(layers), asked.get("ahead"))
        has_layer = about["kind"] == "mlp"
        head = Head(
            weight=tensors["weight"],
            bias=float(tensors["bias"]),
            inputs=inputs,
            threshold=about["threshold"],
            fingerprints=about["fingerprints"],
            metrics=about["metrics"],
            prompts=tuple(about.get("prompts", ())),
            folder=str(path),
            role=role,
            temperature=about.get("temperature", 0.0),
            drafter=about.get("drafter"),
            layer=(tensors["layer.weight"], tensors["layer.bias"])
            if has_layer
            else None,
        )
        if about["fingerprint"] != head.fingerprint:
            raise ValueError(
                f"{role}.json and {role}.safetensors come from different training runs"
            )
        return head
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise InputError(
            f"{role} {path}: is broken ({type(error).__name__}: {error}); fit it again"
        ) from None


@dataclass(frozen=True)
class HeadReference:
    """Path and threshold of a trained head, as rules and stop conditions name them."""

    path: str
    threshold: float | None = None
    """Threshold on the score; None for the threshold saved with the head."""
    unchecked: bool = False
    """True to run the head on models other than those it was trained for."""
    name: ClassVar[str]
    role: ClassVar[Role]
    built_in: ClassVar[str | None] = None
    """Path of the built-in pair's head, used if a spec has no path."""
    highest: ClassVar[float] = 1
    """Largest allowed threshold."""

    def __post_init__(self) -> None:
        if self.threshold is not None and not 0 <= self.threshold <= self.highest:
            percent = (
                f"; percent? write {self.threshold / 100:g}"
                if self.threshold >= 2
                else ""
            )
            raise InputError(
                f"{self.name}'s threshold {self.threshold}: a score is a probability, "
                "and must be "
                f"from 0 to 1{percent}"
            )

    @cached_property
    def head(self) -> Head:
        return load_head(self.path, self.role)

    @property
    def bound(self) -> float:
        """Return the threshold in force."""
        return self.head.threshold if self.threshold is None else self.threshold

    def relocated(self, path: Callable[[str], str]) -> Self:
        """Return the reference with `path` applied to its path, except for the built-in head."""
        return (
            self if self.path == self.built_in else replace(self, path=path(self.path))
        )

    def check(
        self, fingerprints: Callable[[], Mapping[str, str]], sizes: Mapping[str, int]
    ) -> None:
        """Raise InputError if the head cannot run on models of these fingerprints and hidden
        sizes."""
        head = self.head
        try:
            head.check({} if self.unchecked else fingerprints(), sizes)
        except InputError as error:
            if self.path != self.built_in:
                raise
            raise InputError(
                f"{self.name} without a path belongs to the built-in pair, and this is "
                f"another pair; name yours, {self.name}:RUN/{self.role}, which "
                f"`{_how_to_fit(self.role)}` "
                "makes"
            ) from error

    def check_temperature(self, temperature: float) -> None:
        """Raise InputError if the head was trained on answers sampled at another temperature. A
        head trained on greedy answers runs at any temperature."""
        learned = self.head.temperature
        if learned and learned != temperature and not self.unchecked:
            raise InputError(
                f"{self.role} {self.path}: learned from answers at temperature "
                f"{learned:g}, not "
                f"{temperature:g}; decode at that, or add ,unchecked=true to its spec"
            )
