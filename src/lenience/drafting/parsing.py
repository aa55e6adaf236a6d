"""Parse drafters, stop conditions and trees from their specs."""

from __future__ import annotations

from typing import TypeVar

from lenience.core import spec
from lenience.core.errors import InputError
from lenience.drafting.base import DrafterSpec
from lenience.drafting.cascade import Horizontal, Vertical
from lenience.drafting.merged import Merged
from lenience.drafting.registry import DRAFTERS, STOPS, TREES
from lenience.drafting.stops import Stop
from lenience.drafting.trees.shapes import Planned, Tree

T = TypeVar("T")


def parse_drafter(drafter: str | DrafterSpec) -> DrafterSpec:
    """Return a drafter from its spec: one such as "model", or a combination such as "ngram|model",
    "ngram>model" or "model:4+ngram". "|" binds least and "+" most. A DrafterSpec is returned
    unchanged. Raises InputError for a wrong spec."""
    if not isinstance(drafter, str):
        return spec.parse(drafter, "drafter", "drafter", DRAFTERS, DrafterSpec)
    try:
        merged = list(map(_vertical, spec.split(drafter, "|")))
        return merged[0] if len(merged) == 1 else Merged(tuple(merged))
    except InputError as error:
        raise InputError(f"drafter {drafter!r}: {error}") from None


def _vertical(text: str) -> DrafterSpec:
    *firsts, last = list(map(_horizontal, spec.split(text, ">")))
    return Vertical(_only(firsts, ">"), last) if firsts else last


def _horizontal(text: str) -> DrafterSpec:
    *firsts, last = spec.split(text, "+")
    if not firsts:
        return spec.parse_term(last, "drafter", DRAFTERS)
    name, *count = _only(firsts, "+").rsplit(":", 1)
    if not count or not count[0].isdigit():
        raise InputError(
            f"{firsts[0]}+: how many tokens come from it? Write {firsts[0]}:4+{last}, "
            "or put a "
            "path with + in double quotes"
        )
    first = spec.parse_term(name, "drafter", DRAFTERS)
    then = spec.parse_term(last, "drafter", DRAFTERS)
    return Horizontal(first, int(count[0]), then)


def _only(parts: list[T], mark: str) -> T:
    if len(parts) > 1:
        raise InputError(f"{mark} combines two drafters; leave the others out")
    return parts[0]


def parse_stop(stop: str | Stop) -> Stop:
    """Return a stop condition from its spec, such as "confidence:0.4" or "head:run/stop@0.5". A
    Stop is returned unchanged. Raises InputError for a wrong spec."""
    return spec.parse(stop, "stop", "stop condition", STOPS, Stop)


def parse_tree(tree: str | Tree, depth: int | None = None) -> Tree:
    """Return a tree from its spec, such as "dynamic:16". A planned tree becomes the best shape of
    at most `depth` levels; other Tree objects are returned unchanged. Raises InputError for a wrong
    spec."""
    parsed = spec.parse(tree, "tree", "tree", TREES, Tree)
    return parsed.shape(depth) if isinstance(parsed, Planned) else parsed
