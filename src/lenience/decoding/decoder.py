"""Decoder: everything besides the models that determines an answer, as one typed record.

It is built where options enter, from the command line's flags, keywords, JSON or a setting's text.
No code further in parses a spec.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, TypedDict, Unpack, cast

from lenience.core.errors import InputError
from lenience.core.needs import Layers, Sources
from lenience.core.protocols import Rule, TrainedPart
from lenience.decoding.generation import Generation
from lenience.decoding.options import (
    OWN,
    WHOLE_DECODERS,
    Options,
    PlainOptions,
    bound_names,
    default_options,
    given_options,
    names,
)
from lenience.drafting.base import DrafterSpec
from lenience.drafting.model import DraftModel
from lenience.drafting.parsing import parse_drafter, parse_stop, parse_tree
from lenience.drafting.stops import Fixed, Gate, Stop
from lenience.drafting.trees.shapes import Chain, Tree
from lenience.models.pass_cache import LAST
from lenience.rules.base import Term
from lenience.rules.baselines import Baseline, is_baseline
from lenience.rules.combine import AnyOf, as_rule
from lenience.rules.parsing import parse_rule
from lenience.rules.strict import Exact

SPECS = ("rule", "drafter", "tree", "stop")
"""Options that are given as specs."""


def _resolver(rule: object) -> str | None:
    """Return the module that makes a decoder of a rule `NAME:…`; None for other rules."""
    name, colon, _ = rule.partition(":") if isinstance(rule, str) else ("", "", "")
    return WHOLE_DECODERS.get(name) if colon else None


class DecoderOptions(TypedDict, total=False):
    """Keywords of `Pair.generate` and similar functions; `Options` describes them."""

    rule: str | Rule | Term
    drafter: str | DrafterSpec
    tree: str | Tree
    window: int | Literal["auto"]
    stop: str | Stop
    max_new_tokens: int
    temperature: float
    draft_temperature: float | None
    top_k: int | None
    top_p: float | None
    seed: int | None
    stop_strings: str | Iterable[str]


class DecoderParts(TypedDict, total=False):
    """Fields of a decoder that may be changed, with their types."""

    rule: Rule
    drafter: DrafterSpec
    tree: Tree
    window: int | Literal["auto"]
    stop: Stop
    max_new_tokens: int
    stop_strings: tuple[str, ...]


@dataclass(frozen=True)
class Ends:
    """Ends of answers that come earlier than the certified end. The windows are those of the
    certified setting, so the result is the beginning of a certified answer."""

    max_new_tokens: int | None = None
    stop_strings: tuple[str, ...] = ()


@dataclass(frozen=True)
class Binding:
    """Facts for which a decoder is certified."""

    source: str
    """Rule as requested, such as certified:RUN."""
    binds: Mapping[str, Any]
    """Certified options, models, heads and templates, as in `Pair.binding`."""
    windows: tuple[int, ...] = ()
    """Windows that an answer may be decoded with, if there are several."""


@dataclass(frozen=True)
class Decoder(PlainOptions):
    """How answers are decoded: `Options` with their specs parsed. Hashable."""

    rule: Rule = field(default_factory=lambda: as_rule(Exact()))
    drafter: DrafterSpec = field(default_factory=DraftModel)
    tree: Tree = field(default_factory=Chain)
    stop: Stop = field(default_factory=Fixed)
    ends: Ends = field(default_factory=Ends)
    seeds_by_prompt: bool = False
    """True if each prompt has its own seed because no seed was given."""
    bound_to: Binding | None = field(default=None, compare=False)
    """Binding of the certificate that the decoder comes from; None without a certificate."""

    @classmethod
    def of(
        cls, options: Mapping[str, Any] | Options | None = None, /, **named: Any
    ) -> Decoder:
        """Make a decoder from options; missing options and None stand for the defaults. Rules,
        drafters, trees and stop conditions may be specs or objects. Raises InputError for a wrong
        option."""
        given = {
            **(vars(options) if isinstance(options, Options) else options or {}),
            **named,
        }
        if given.keys() <= set(names()):  # else report the unknown name
            given = {name: value for name, value in given.items() if value is not None}
        resolver = _resolver(given.get("rule"))
        if resolver:
            return cast(Decoder, import_module(resolver).resolve(given))
        if "rule" not in given and str(given.get("stop", "")).startswith(
            f"{Gate.name}:"
        ):
            given["rule"] = "speculative"  # as SPRINTER verifies rejected tokens
        return cls().with_options(given)

    @classmethod
    def parse(cls, text: str) -> Decoder:
        """Make a decoder from a setting's text, such as "judge:run/judge@0.99; window=16;
        stop=confidence:0.4", with the rule first. Raises InputError for wrong text."""
        return cls.of(given_options(text))

    def with_options(self, options: Mapping[str, Any]) -> Decoder:
        """Return the decoder with some options changed, no longer bound to a certificate. Raises
        InputError for an unknown option or a wrong value."""
        if not options:
            return self
        if _resolver(options.get("rule")):
            raise InputError(
                f"rule {options['rule']}: names a whole decoder, which cannot be added to the "
                "options of another"
            )
        texts = {}
        for name, value in options.items():
            texts[name] = str(value) if name in SPECS else value
        checked = Options().with_options(texts)
        changed = {}
        for name in options:
            if name not in SPECS:
                changed[name] = getattr(checked, name)
        specs = {}
        for name, read in _READERS.items():
            if name in options:
                specs[name] = read(options[name])
        if "tree" in options:  # a planned tree is at most as deep as the window
            window = changed.get("window", self.window)
            depth = window if isinstance(window, int) and window > 0 else None
            specs["tree"] = parse_tree(options["tree"], depth)
        return replace(self, **changed, **specs, ends=Ends(), bound_to=None)

    def with_parts(self, **parts: Unpack[DecoderParts]) -> Decoder:
        """Return the decoder with some fields changed, no longer bound to a certificate and its
        earlier ends. Nothing is parsed."""
        return replace(self, **parts, ends=Ends(), bound_to=None)

    def for_target(self) -> Decoder:
        """Return the decoder of the target alone, with the same options otherwise."""
        return self.with_parts(rule=Baseline("target"))

    def for_strict(self) -> Decoder:
        """Return the decoder with the strict rule."""
        return self.with_parts(rule=as_rule(Exact()))

    @cached_property
    def options(self) -> Options:
        """Return the options with their specs as text."""
        values: dict[str, Any] = {}
        for name in names():
            value = getattr(self, name)
            values[name] = str(value) if name in SPECS else value
        return Options(**values)

    def to_json(self) -> dict[str, Any]:
        """Return the options by name, with specs as texts."""
        return self.options.to_json()

    def changed(self) -> dict[str, Any]:
        """Return the options that differ from the defaults, as in `to_json`. With a gate, the rule
        is always included, because the gate changes the default rule."""
        defaults = {
            **default_options(),
            **({"rule": None} if isinstance(self.stop, Gate) else {}),
        }
        found = dict[str, Any]()
        for name, value in self.to_json().items():
            if value != defaults[name]:
                found[name] = value
        return found

    def differing(self, other: Decoder) -> dict[str, Any]:
        """Return the options, other than rule and window, whose values differ from those of another
        decoder, as in `to_json`."""
        own = self.to_json()
        others = other.to_json()
        beside = [name for name in own if name not in ("rule", "window")]
        return {name: own[name] for name in beside if own[name] != others[name]}

    def bound(self) -> dict[str, Any]:
        """Return the options that a certificate binds, as in `to_json`."""
        values = self.to_json()
        return {name: values[name] for name in bound_names()}

    def __str__(self) -> str:
        """Return the text that `parse` takes."""
        return self.options.text(self.changed())

    @property
    def alone(self) -> str | None:
        """Return the role of the model that decodes alone, or the name of an endpoint,
        "served:NAME". None if drafted tokens are verified."""
        return self.rule.role if isinstance(self.rule, Baseline) else None

    @property
    def is_exact(self) -> bool:
        """Return True if the rule is `exact`."""
        return self.rule == as_rule(Exact())

    @property
    def proposer(self) -> DrafterSpec | None:
        """Return the drafter; None if a model decodes alone."""
        return None if self.alone else self.drafter

    @property
    def heads(self) -> list[TrainedPart]:
        """Return the trained heads of the rule, the stop condition and the drafter."""
        return [*self.rule.heads, *self.stop.heads, *self.drafter.fitted]

    def relocated(self, path: Callable[[str], str]) -> Decoder:
        """Return the decoder with its heads at other paths."""
        rule = self.rule
        if isinstance(rule, AnyOf):
            rule = rule.with_terms(lambda term: term.relocated(path))
        drafter = self.drafter.relocated(path)
        stop = self.stop.relocated(path)
        return replace(self, rule=rule, drafter=drafter, stop=stop)

    def without_paths(self) -> Decoder:
        """Return the decoder with only the last part of each head's path, for records without
        folders."""
        return self.relocated(lambda path: Path(path).name)

    @property
    def branches(self) -> bool:
        """Return True if a window may be a tree."""
        return self.proposer is not None and (
            self.drafter.branches or not self.tree.is_chain
        )

    @property
    def tree_shapes(self) -> list[Tree]:
        """Return the trees that a window may be, without chains."""
        shapes = self.tree.choices() or [self.tree]
        return [shape for shape in shapes if not shape.is_chain]

    @property
    def layers(self) -> Layers:
        """Return the layers of the target whose states the session keeps for the rule."""
        return self.rule.needs.layers or LAST.layers

    @property
    def keeps_last(self) -> bool:
        """Return True if the target must keep its last states separately for the drafter, because
        the rule reads other layers."""
        drafter = self.proposer
        reads = drafter is not None and Sources.LAST_STATES in drafter.needs
        return reads and self.layers != LAST.layers

    @property
    def verifies_draws(self) -> bool:
        """Return True if trees are verified by the probabilities with which their tokens were
        sampled."""
        draws = self.temperature > 0 and self.tree.draws is not None
        return draws and self.rule.verifies is not None

    @property
    def answer_tokens(self) -> int:
        """Return the maximum number of new tokens in an answer, with `ends` applied."""
        return self.ends.max_new_tokens or self.max_new_tokens

    @property
    def answer_stops(self) -> tuple[str, ...]:
        """Return the stop strings of an answer, with those of `ends`."""
        return (*self.stop_strings, *self.ends.stop_strings)

    def seed_of(self, number: int) -> int:
        """Return the sampling seed of the prompt with this index."""
        return self.seed + (number if self.seeds_by_prompt else 0)

    def answer(self, prompt: list[int], window: int, number: int) -> Generation:
        """Return an empty record for the answer to the prompt with this index."""
        seed = self.seed_of(number) if self.temperature else None
        return Generation(prompt, window, str(self.stop), str(self.tree), seed)

    def columns(self, window: int) -> int:
        """Return the maximum number of tokens that any model reads after a prefix."""
        return self.tree.columns(window) * (
            len(self.proposer.members) if self.proposer else 1
        )


def read_rule(rule: object) -> Rule:
    """Return a rule from its spec, or a baseline (target, draft, served:NAME). A rule object is
    returned unchanged. Raises InputError for a wrong spec."""
    if isinstance(rule, Baseline):
        return rule
    return Baseline(str(rule)) if is_baseline(rule) else parse_rule(cast(Any, rule))


def relocated_options(
    options: Mapping[str, Any], path: Callable[[str], str]
) -> dict[str, Any]:
    """Return options with the heads of the stop condition and the drafter at other paths."""
    named = {name: options[name] for name in ("stop", "drafter") if name in options}
    relocated = Decoder.of({"rule": "exact", **named}).relocated(path).to_json()
    return {**options, **{name: relocated[name] for name in named}}


_READERS: dict[str, Callable[[Any], Any]] = {
    "rule": read_rule,
    "drafter": parse_drafter,
    "stop": parse_stop,
}


def check_binding(binding: Binding, now: Mapping[str, Any]) -> None:
    """Raise InputError for the first model, head or template that differs from the certified one;
    `now` is the result of `Pair.binding`."""
    bound = {"engine": OWN, **binding.binds}
    for name, value in {"engine": OWN, **now}.items():
        if bound[name] != value:
            what = f"{name} {_difference(bound[name], value)}"
            raise InputError(
                f"{binding.source}: was certified with {what}; certify again"
            )


def _difference(before: Any, now: Any) -> str:
    if isinstance(before, dict) and isinstance(now, dict):
        part = next(
            (key for key in {**before, **now} if before.get(key) != now.get(key)), None
        )
        return f"{part} {_difference(before.get(part), now.get(part))}"
    return f"{before!r}, not {now!r}"
