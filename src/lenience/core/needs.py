"""Parts of windows: which are needed and which offered, and what drafters read."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Flag, auto

from lenience.core.errors import InputError

Layers = tuple[int | None, ...]
"""Layers of a model whose hidden states are concatenated: 1 is the first layer, -1 the last, and
None the final norm."""


class Parts(Flag):
    """Parts of a drafted window."""

    NOTHING = 0
    STATES = auto()
    PROBS = auto()
    CHANCES = auto()
    DRAWS = auto()
    KEPT_WHOLE = auto()
    EARLY_ENDS = auto()
    TREES = auto()
    OWN_TEMPERATURE = auto()

    def __str__(self) -> str:
        return ", ".join(_NAMES[part] for part in self)


_NAMES = {
    Parts.STATES: "the draft model's states",
    Parts.PROBS: "the distributions that tokens are drawn from",
    Parts.CHANCES: "the chance of each token while it drafts",
    Parts.DRAWS: "drawn tokens",
    Parts.KEPT_WHOLE: "windows that can be kept whole",
    Parts.EARLY_ENDS: "windows that a stop condition can end",
    Parts.TREES: "trees",
    Parts.OWN_TEMPERATURE: "tokens that a single model samples",
}


class Sources(Flag):
    """What a drafter reads besides the tokens of its row."""

    NOTHING = 0
    DRAFT_MODEL = auto()
    """The pair's draft model."""
    LAST_STATES = auto()
    """The target's last states."""
    LAYER_STATES = auto()
    """States of layers that the drafter names in `features`."""
    EARLIER_ANSWERS = auto()
    """Answers to other prompts, on which proposals then depend."""
    STATES = LAST_STATES | LAYER_STATES


@dataclass(frozen=True)
class Needs:
    """Inputs that a rule requires to decide."""

    window: Parts = Parts.NOTHING
    """Parts of the drafted windows; DRAWS is needed only when sampling."""
    layers: Layers | None = None
    """Layers of the target whose states the rule reads; None if it reads no states."""
    sampling: bool = False
    """True if the rule has no greedy form."""
    whole_window: bool = False
    """True if the decision on a token depends on later tokens. Each window then needs its own
    random draws: a draw that has decided must not be used again."""

    def __or__(self, other: Needs) -> Needs:
        """Combine the needs of two terms. Raises InputError if they read states of different
        layers."""
        if self.layers and other.layers and self.layers != other.layers:
            raise InputError(
                "its judges read states of different layers; train them on the same "
                "layers"
            )
        return Needs(
            self.window | other.window,
            self.layers or other.layers,
            self.sampling or other.sampling,
            self.whole_window or other.whole_window,
        )


@dataclass(frozen=True)
class Requirement:
    """Parts of windows that a part of a decoder needs."""

    who: str
    """Name of the part of the decoder, such as a rule with its spec."""
    parts: Parts
    otherwise: str = ""
    """Way to do without the parts, for messages."""

    def check(self, giver: str, offered: Parts, fix: str) -> None:
        """Raise InputError if `giver` does not offer the parts. `fix` says in the message what
        offers them."""
        for part in self.parts & ~offered:
            ways = " or ".join(filter(None, (fix, self.otherwise)))
            raise InputError(f"{self.who}: needs {part}, and {giver} has none; {ways}")
