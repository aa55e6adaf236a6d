"""Baselines: a model alone or a server, in place of a rule."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from lenience.core.context import Context
from lenience.core.protocols import Rule
from lenience.core.types import Draft, Reading, Verdict
from lenience.rules.combine import as_rule
from lenience.rules.strict import Exact

BASELINES = ("target", "draft")
"""Names of the models that may decode alone."""
SERVED = "served:"
"""Prefix of the name of an endpoint that decodes, see `lenience.integrations.endpoints`."""


@dataclass(frozen=True)
class Baseline(Rule):
    """A model that decodes alone, or a server that decodes, in place of a rule. Nothing is
    drafted."""

    role: str
    """Role "target" or "draft", or the name of an endpoint, "served:NAME"."""

    @property
    def goes_on_as_target(self) -> bool:
        return self.role == "target"

    def check(
        self, fingerprints: Callable[[], Mapping[str, str]], sizes: Mapping[str, int]
    ) -> None:
        return

    def __call__(self, draft: Draft, reading: Reading, ctx: Context) -> list[Verdict]:
        return as_rule(Exact())(draft, reading, ctx)

    def __str__(self) -> str:
        return self.role


def is_baseline(rule: object) -> bool:
    """Return True if a rule's spec names a model or a server."""
    return rule in BASELINES or (isinstance(rule, str) and rule.startswith(SERVED))


def served(rule: Rule) -> str | None:
    """Return the name of the endpoint that a rule stands for; None for any other rule."""
    role = rule.role if isinstance(rule, Baseline) else ""
    return role.removeprefix(SERVED) if role.startswith(SERVED) else None
