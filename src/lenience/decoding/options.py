"""Options of decoding as names and texts, defined once. No torch.

Command-line flags, the keywords of `Pair.generate`, certificates, settings of a comparison and
journals are derived from them.
"""

from __future__ import annotations

import inspect
import math
import numbers
import textwrap
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from functools import cache
from types import NoneType
from typing import Any, Literal, TypedDict, TypeVar, get_args, get_type_hints

from docstring_parser import parse_from_object

from lenience.core import spec
from lenience.core.errors import InputError

OWN = "lenience"
"""Name of lenience's own decoding loop, the default engine."""
WHOLE_DECODERS: dict[str, str] = {}
"""Modules by the NAME of a rule `NAME:…` that stands for a whole decoder. The `resolve` of a module
makes the decoder of options with such a rule. `lenience/__init__.py` registers the modules."""
F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True)
class PlainOptions:
    """The options of decoding that are numbers or texts. Raises InputError for invalid values."""

    window: int | Literal["auto"] = 8
    """Maximum number of drafted tokens per cycle. Default: 8, or the certificate's; auto measures
    which window is fastest."""
    max_new_tokens: int = 256
    """Maximum number of new tokens in an answer. Default: 256, the task's own limit, or the
    certificate's."""
    temperature: float = 0.0
    """Sampling temperature of the target; 0 decodes greedily."""
    draft_temperature: float | None = None
    """Sampling temperature of the draft model. Default: the target's; 0 drafts greedily."""
    top_k: int | None = None
    """Number of most probable tokens to sample from. Default: the target's generation_config."""
    top_p: float | None = None
    """Share of the probability to sample from, most probable tokens first. Default: the target's
    generation_config."""
    seed: int = 0
    """Sampling seed. If omitted, `generate` draws one per prompt and reports it in
    `Generation.seed`. Certified rules use 0."""
    stop_strings: tuple[str, ...] = ()
    """Text that ends the answer and is left out of it; may be repeated."""

    def __post_init__(self) -> None:
        if isinstance(self.stop_strings, str):
            object.__setattr__(self, "stop_strings", (self.stop_strings,))
        if not isinstance(self.stop_strings, Iterable):
            raise InputError(
                f"stop_strings {self.stop_strings!r}: give a text, or several"
            )
        object.__setattr__(self, "stop_strings", tuple(self.stop_strings))
        for text in self.stop_strings:
            if not isinstance(text, str):
                raise InputError(f"stop_strings: {text!r} is not text")
        if "" in self.stop_strings:
            raise InputError(
                "stop_strings: an empty string would stop at once; leave it out"
            )
        self._check_kinds()
        if not -(2**63) <= self.seed < 2**63:
            raise InputError(f"seed {self.seed}: must fit into 64 bits")
        if self.window != "auto" and self.window < 0:
            raise InputError(
                f'window {self.window}: must be 0 (no drafting) or more, or "auto"'
            )
        if self.max_new_tokens < 1:
            raise InputError(f"max_new_tokens {self.max_new_tokens}: must be 1 or more")
        for name in ("temperature", "draft_temperature"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < math.inf:
                raise InputError(f"{name} {value}: must be 0 (greedy) or more")
            if value is not None and value < GREEDY_BELOW:
                object.__setattr__(self, name, 0.0)
        if self.top_k is not None and self.top_k < 0:
            raise InputError(f"top_k {self.top_k}: must be 0 (off) or more")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise InputError(f"top_p {self.top_p}: must be in (0, 1]")

    def _check_kinds(self) -> None:
        """Raise InputError if the value of a numeric option is not a number."""
        for name, kind in option_types().items():
            if kind in NUMBERS and not _fits(getattr(self, name), kind):
                raise InputError(
                    f"{name} {getattr(self, name)!r}: must be {NUMBERS[kind]}"
                )


@dataclass(frozen=True)
class Options(PlainOptions):
    """All options of decoding as names and texts. Specs are checked when they are parsed."""

    rule: str = "exact"
    """Acceptance rule, such as exact, speculative, topk:K, fuzzy:js@T or judge:PATH@T
    (docs/rules.md lists all). target or draft decodes with that model alone; certified:RUN decodes
    with the certified setting of a run."""
    drafter: str = "model"
    """Source of the drafted tokens: model (the pair's draft model), ngram or suffix (earlier text),
    datastore:PATH (a corpus), medusa:PATH, blockwise:PATH or eagle:PATH (trained heads), exit:6 or
    skip:2,5 (some of the target's layers), or a combination such as ngram|model, ngram>model or
    model:4+ngram (docs/drafters.md)."""
    tree: str = "chain"
    """Shape of the draft: chain (one token after another), dynamic:NODES, planned:NODES or
    cartesian:4,3,2. The deepest accepted path of a tree is kept."""
    stop: str = "fixed"
    """Condition that ends drafting early: fixed (none), heuristic, confidence:P, entropy:P,
    fallback:P, head:PATH@T or gate:PATH@T. With a gate the default rule is speculative."""

    def with_options(self, options: Mapping[str, Any]) -> Options:
        """Return the options with some of them changed. Raises InputError for an unknown name."""
        unknown = sorted(options.keys() - names())
        if unknown:
            known = f"there are {', '.join(names())}"
            fix = ELSEWHERE.get(unknown[0], known)
            raise InputError(
                f"{unknown[0]}: there is no such option of decoding; {fix}"
            )
        return replace(self, **options)

    def to_json(self) -> dict[str, Any]:
        """Return the options by name."""
        values = {name: getattr(self, name) for name in names()}
        found = dict[str, Any]()
        for name, v in values.items():
            found[name] = list(v) if isinstance(v, tuple) else v
        return found

    def text(self, changed: Mapping[str, Any]) -> str:
        """Return the text of a setting: the rule, then the `changed` options."""
        parts = [self.rule]
        for name, value in changed.items():
            if name != "rule":
                values = value if isinstance(value, list) else [value]
                parts += [
                    f"{name}={spec.quote_value(str(content))}" for content in values
                ]
        return "; ".join(parts)


@dataclass(frozen=True)
class Loading:
    """Options of loading a pair."""

    dtype: str | None = None
    """Precision of the weights: float32, bfloat16, … Default: the checkpoint's own; float32 for the
    built-in pair."""
    device: str = "auto"
    """Device: cpu, cuda, cuda:1, …; auto takes a GPU if there is one."""
    quantization: str | None = None
    """Rounding of the target's weights while it is loaded: int8 or int4 (torchao). The rounded
    target is another target: heads and certificates are bound to it."""
    compile: bool | None = None
    """True exports the models' forward passes for ONNX Runtime (`Pair.compile`), None uses exports
    that are in the cache, and False uses none."""
    tokenizer: Any = None
    """Tokenizer of models that are already loaded."""
    chat: bool | None = None
    """True applies the target's chat template to text. Default: True if the target has one."""
    system: str | None = None
    """System message, for prompts that do not begin with one."""
    template_options: dict[str, Any] | None = None
    """Further arguments of the chat template, such as enable_thinking."""
    target_kwargs: dict[str, Any] | None = None
    """Arguments of the target's from_pretrained (device_map, quantization_config, …)."""
    draft_kwargs: dict[str, Any] | None = None
    """Arguments of the draft's from_pretrained."""

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> Loading:
        """Make a record from the given options. Raises InputError for an unknown name."""
        known = [item.name for item in fields(cls)]
        unknown = sorted(options.keys() - set(known))
        if unknown:
            raise InputError(
                f"{unknown[0]}: there is no such option of loading; there are "
                f"{', '.join(known)}"
            )
        return cls(**options)


class LoadingOptions(TypedDict, total=False):
    """Keywords of `load_pair`; `Loading` describes them."""

    dtype: str | None
    device: str
    quantization: str | None
    compile: bool | None
    tokenizer: Any
    chat: bool | None
    system: str | None
    template_options: dict[str, Any] | None
    target_kwargs: dict[str, Any] | None
    draft_kwargs: dict[str, Any] | None


ELSEWHERE = {
    "assistant_model": "the draft is the pair's: load_pair(target, draft)",
    "attention_mask": "prompts of a batch may have any lengths: give each without padding",
    "do_sample": "a temperature above 0 samples",
    "eos_token_id": "it is the target's generation_config's; stop_strings end an answer too",
    "generation_config": "the target's own penalties and EOS are applied; "
    "say temperature, top_k and top_p here",
    "logits_processor": "those that the target's generation_config asks for are applied",
    "max_length": "max_new_tokens counts the answer alone",
    "num_beams": "one answer is decoded; give a temperature, and prompts as often as you like",
    "num_return_sequences": "give generate_batch the prompt as often; without a seed each answer "
    "is drawn by itself",
    "output_logits": "logprobs=True returns the target's log-probability of each token",
    "output_scores": "logprobs=True returns the target's log-probability of each token",
    "return_dict_in_generate": "a Generation holds tokens, text and counts",
    "stop_token_ids": "stop_strings end an answer, and the target's generation_config names EOS",
    "stopping_criteria": "stop_strings and max_new_tokens end an answer",
    "streamer": "pair.stream(prompt) gives each step",
}
"""Options of `transformers` or vLLM that have another name or form here, with a hint for each."""
GREEDY_BELOW = 1e-5
"""Temperatures below this are greedy, as in vLLM: dividing logits by them would overflow."""
NUMBERS: Mapping[object, str] = {
    int: "a whole number",
    int | None: "a whole number, or None",
    int | Literal["auto"]: 'a whole number, or "auto"',
    float: "a number",
    float | None: "a number, or None",
}
"""Types of numeric options, and their names in error messages."""
UNBOUND = ("rule", "seed")
"""Options that a certificate does not bind: the rule, which is what it certifies, and the seed,
because losses are averages."""


def names() -> tuple[str, ...]:
    """Return the names of all options, in the order used in settings."""
    window, *others = (item.name for item in fields(PlainOptions))
    return ("rule", "drafter", "tree", window, "stop", *others)


@cache
def default_options() -> Mapping[str, Any]:
    """Return the default values of all options, as in `Options.to_json`."""
    return Options().to_json()


def bound_names() -> tuple[str, ...]:
    """Return the names of the options that a certificate binds."""
    return tuple(name for name in names() if name not in UNBOUND)


def _fits(value: object, kind: Any) -> bool:
    """Return True if a value has one of the types in NUMBERS; booleans are not numbers."""
    others = get_args(kind)
    if value is None or isinstance(value, (bool, str)):
        return (value is None and NoneType in others) or (
            value == "auto" and len(others) > 1
        )
    number = numbers.Real if kind is float or float in others else numbers.Integral
    return isinstance(value, number)


@cache
def option_types() -> Mapping[str, Any]:
    """Return the type of each option when options are given as text, with rules and other specs as
    str."""
    types = get_type_hints(Options)
    return {name: types[name] for name in names()}


def given_options(text: str) -> dict[str, Any]:
    """Return the options in the text of a setting, see `Decoder.parse`. Raises InputError for wrong
    text."""
    try:
        rule, *rest = (part.strip() for part in spec.split(text, ";", escapes=True))
    except InputError as error:
        raise InputError(f"setting {text!r}: {error}") from None
    options: dict[str, Any] = {"rule": rule}
    types = option_types()
    for part in rest:
        name, *value = spec.split(part, "=", limit=1, escapes=True)
        if not part:
            raise InputError(
                f"setting {text!r}: after each ; write an option as name=value"
            )
        if name not in types:
            raise InputError(
                f"setting {text!r}: there is no {name!r}; there are {', '.join(types)}"
            )
        if not value:
            raise InputError(f"setting {text!r}: write {name}=…")
        content = spec.convert(
            f"setting {text!r}: {name}", spec.unquote_value(value[0]), types[name]
        )
        if isinstance(content, tuple):
            content = (*options.get(name, ()), *content)
        elif name in options:
            raise InputError(f"setting {text!r}: {name} is given twice")
        options[name] = content
    return options


def takes_options(function: F) -> F:
    """Add the options of decoding to a function's signature and docstring, for help() and
    editors."""
    return _with_keywords(
        function, Options, {**option_types(), "seed": int | None}, {"seed": None}
    )


def takes_loading(function: F) -> F:
    """Add the options of loading to a function's signature and docstring."""
    return _with_keywords(function, Loading, get_type_hints(Loading), {})


@cache
def option_descriptions(kind: type) -> Mapping[str, str]:
    """Return the docstring of each option of a class, as one line."""
    found = []
    for base in reversed(kind.__mro__[:-1]):
        found += parse_from_object(base).params
    made = {}
    for param in found:
        made[param.arg_name] = " ".join((param.description or "").split())
    return made


def _with_keywords(
    function: F, kind: Any, types: Mapping[str, Any], others: Mapping[str, Any]
) -> F:
    """Add the fields of `kind` to a function's signature and docstring as keywords. Their defaults
    are the fields' own, unless `others` has another default for the name."""
    signature = inspect.signature(function)
    defaults = kind()
    shown = []
    for item in signature.parameters.values():
        if item.kind is not item.VAR_KEYWORD:
            shown.append(item)
    keyword = inspect.Parameter.KEYWORD_ONLY
    for name, annotation in types.items():
        default = others.get(name, getattr(defaults, name))
        shown.append(
            inspect.Parameter(name, keyword, default=default, annotation=annotation)
        )
    with_options: Any = function
    with_options.__signature__ = signature.replace(parameters=shown)
    descriptions = option_descriptions(kind)
    lines = (
        textwrap.fill(f"{name}: {descriptions[name]}", 88, subsequent_indent="    ")
        for name in types
        if name in descriptions
    )
    with_options.__doc__ = "\n\n".join(
        [inspect.getdoc(function) or "", "Options:", *lines]
    )
    return function
