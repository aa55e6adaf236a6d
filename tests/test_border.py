"""Text stops at the border: specs are read where a decoder is made, and nowhere below."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, get_type_hints

import pytest

import lenience
from lenience.core.context import Row
from lenience.core.errors import InputError
from lenience.decoding.decoder import SPECS, Binding, Decoder, DecoderOptions, Ends
from lenience.decoding.options import (
    Loading,
    LoadingOptions,
    Options,
    names,
    option_types,
)
from lenience.decoding.pair import Pair

SOURCE = Path(lenience.__file__).parent
READERS = ("parse_rule", "parse_spec", "parse_drafter", "parse_tree", "parse_stop")
BORDER = (
    "__init__.py",  # lenience.rule
    "decoding/decoder.py",  # keywords, settings and JSON
    "rules/parsing.py",
    "rules/settings.py",  # what names of rules stand for
    "integrations/engine_rules/rule.py",  # vLLM's configuration
    "serving/dial.py",  # a request's rule
)
"""Files in which a spec may be read."""
DECODERS_MADE = {
    "decoding/decoder.py": "the decoder itself",
    "decoding/pair.py": "keywords",
    "integrations/endpoints/pair.py": "keywords",
    "evaluation/compare.py": "the fields of a configuration; windows.json",
    "evaluation/human.py": "windows.json",
    "certification/certificate.py": "certificate.json",
    "certification/question.py": "the fields of a configuration",
    "certification/tune.py": "the fields of a configuration; races.json",
    "certification/calibration.py": "window.json",
    "mining/search.py": "the fields of a configuration",
    "mining/worker.py": "what the first process sends",
    "training/fit.py": "run.json",
}
"""Files outside the command line in which a decoder may be made from texts, with where these come
from."""


def calls(names: tuple[str, ...]) -> Iterator[str]:
    for path in sorted(SOURCE.rglob("*.py")):
        where = str(path.relative_to(SOURCE))
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(
                node.func, ast.Name | ast.Attribute
            ):
                called = (
                    node.func.id if isinstance(node.func, ast.Name) else node.func.attr
                )
                if called in names:
                    yield where


def test_specs_are_read_at_the_border_alone() -> None:
    assert set(calls(READERS)) == set(BORDER)


def test_decoders_are_made_from_texts_at_the_border_alone() -> None:
    found = set()
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.Call(func=ast.Attribute(ast.Name("Decoder"), "of" | "parse")):
                    found.add(str(path.relative_to(SOURCE)))
                case ast.Call(func=ast.Attribute(_, "with_options")):
                    found.add(str(path.relative_to(SOURCE)))
    below = {where for where in found if not where.startswith("cli/")}
    assert below == set(DECODERS_MADE)


def test_no_code_below_the_border_names_a_part_by_its_spec() -> None:
    """As in `pair.generate(prompt, rule="target")`; there it takes the object."""
    for path in SOURCE.rglob("*.py"):
        where = str(path.relative_to(SOURCE))
        if where.startswith("cli/"):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            for keyword in node.keywords if isinstance(node, ast.Call) else ():
                if keyword.arg in SPECS:
                    assert not isinstance(keyword.value, ast.Constant), (
                        where,
                        keyword.arg,
                    )


@pytest.mark.parametrize(
    "method", ["generate", "generate_batch", "as_completed", "stream"]
)
def test_every_keyword_has_a_type_for_editors_and_for_help(method: str) -> None:
    """Statically by DecoderOptions, at run time by the signature; both are Options' own."""
    assert DecoderOptions.__annotations__.keys() == set(names())
    function = getattr(Pair, method)
    shown = inspect.signature(function).parameters
    for name, kind in option_types().items():
        assert shown[name].annotation in (kind, kind | None), name
        default = None if name == "seed" else getattr(Options(), name)
        assert shown[name].default == default
        told = f"\n{name}: "
        assert told in (inspect.getdoc(function) or "").replace("\n    ", "\n"), name
    static = get_type_hints(DecoderOptions)
    for name, kind in option_types().items():
        assert accepts(static[name], kind), name


def test_every_keyword_of_loading_has_its_type() -> None:
    assert get_type_hints(LoadingOptions) == get_type_hints(Loading)
    shown = inspect.signature(lenience.load_pair).parameters
    for name, kind in get_type_hints(Loading).items():
        assert shown[name].annotation == kind
        assert shown[name].default == getattr(Loading(), name)


def test_a_certificate_is_a_whole_decoder() -> None:
    """It is not added to a decoder that has options of its own."""
    with pytest.raises(InputError, match="certified:run: names a whole decoder, which"):
        Decoder.of(window=3).with_options({"rule": "certified:run"})


def accepts(wide: Any, narrow: Any) -> bool:
    """Whether a type takes all that another does, as far as its members are named."""
    from typing import get_args

    if narrow == tuple[str, ...]:
        return True  # an iterable of texts
    return set(get_args(narrow) or (narrow,)) <= set(get_args(wide) or (wide,)) | {
        type(None)
    }


def test_a_decoder_is_data() -> None:
    options = {
        "rule": "topk:3",
        "window": 4,
        "stop": "confidence:0.4",
        "drafter": "ngram|model",
    }
    decoder = Decoder.of(options)
    assert decoder == Decoder.of(decoder.to_json()) == Decoder.parse(str(decoder))
    assert (
        len({decoder, Decoder.of(options), Decoder.of({**options, "window": 5})}) == 2
    )
    assert decoder == Decoder.of({**options, "rule": lenience.rule("topk:3")})


def test_a_certified_decoder_with_another_option_is_certified_no_longer() -> None:
    """Nor does it end where the certified one was asked to end."""
    ends = Ends(max_new_tokens=8)
    certified = replace(Decoder(), ends=ends, bound_to=Binding("certified:run", {}))
    assert certified.with_options({}).bound_to is certified.bound_to
    changed = certified.with_options({"rule": "topk:2", "max_new_tokens": 20})
    assert changed.bound_to is None and changed.answer_tokens == 20


def test_a_decoder_with_other_parts_is_the_one_that_is_read_from_their_texts() -> None:
    settings = {"window": 7, "temperature": 0.5, "stop": "confidence:0.3", "seed": 3}
    decoder = Decoder.of(settings, rule="topk:2", tree="dynamic:6")
    bound = replace(
        decoder, bound_to=Binding("certified:run", {}), ends=Ends(5, ("w1",))
    )
    for changed, texts in (
        (bound.for_target(), {"rule": "target"}),
        (bound.for_strict(), {"rule": "exact"}),
        (
            bound.with_parts(window=2, max_new_tokens=9),
            {"window": 2, "max_new_tokens": 9},
        ),
    ):
        assert changed == decoder.with_options(texts)
        assert changed.bound_to is None and changed.ends == Ends()
    with pytest.raises(InputError, match="max_new_tokens 0: must be 1 or more"):
        bound.with_parts(max_new_tokens=0)


def test_a_row_has_one_open_place() -> None:
    fields = {"noise", "prefix", "position", "ahead", "last", "lenient", "memory"}
    fields.add("sampling")  # what the request asked for, not state of a part
    assert set(Row.__dataclass_fields__) == fields
