"""Templates of pages, and the words that pages share. No torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jinja2 import Environment, PackageLoader, Template

ORIGINS = {
    "draft": "a drafted token that the target agrees with",
    "draft-lenient": "a drafted token, accepted although the target picks another",
    "draft-trusted": "a drafted token, accepted by the gate without verification",
    "correction": "the target's token in place of a rejected one",
    "bonus": "the target's token after a fully accepted window",
}
"""Origins of tokens, with their explanations."""


def read_template(name: str, **filters: Callable[..., Any]) -> Template:
    """Return a template of the package by its file name, with further filters. Values in HTML pages
    are escaped."""
    loader = PackageLoader("lenience", "templates")
    pages = name.endswith(".html")
    environment = Environment(loader=loader, autoescape=pages, trim_blocks=True)
    environment.filters |= filters
    return environment.get_template(name)
