"""An answer with its counts, and the extra outputs that may be requested with it."""

from __future__ import annotations

from dataclasses import dataclass, field

from lenience.core.errors import InputError
from lenience.core.profile import Profile
from lenience.core.types import Step, Trace

SHOWN = 60
"""Maximum number of characters of the text in a repr."""


@dataclass(frozen=True)
class Reporting:
    """Extra outputs requested with an answer."""

    profile: Profile | None = None
    """Profile that receives wall-clock times."""
    logprobs: bool = False
    """True if log-probabilities of the tokens are reported."""
    stream: bool = False
    """True if each step carries its text."""

    def __post_init__(self) -> None:
        if self.profile is not None and not isinstance(self.profile, Profile):
            raise InputError(f"profile {self.profile!r:.60}: give a Profile()")


@dataclass(repr=False)
class Generation:
    """An answer with its counts."""

    prompt_tokens: list[int]
    window: int = 0
    """Draft window, as given or chosen."""
    stop: str = "fixed"
    """Stop condition, as given or chosen."""
    tree: str = "chain"
    """Tree shape, as given or chosen."""
    seed: int | None = None
    """Sampling seed, as given or drawn; None if greedy."""
    tokens: list[int] = field(default_factory=list)
    """New tokens, including EOS if reached."""
    text: str = ""
    """Text of the new tokens, without special tokens; it ends before a stop string."""
    trace: list[Trace] = field(default_factory=list)
    target_passes: int = 0
    draft_passes: int = 0
    target_tokens: int = 0
    """Number of tokens that the target read, including the prompt and rejected tokens."""
    draft_tokens: int = 0
    drafted: int = 0
    accepted_exact: int = 0
    """Number of drafted tokens that the strict rule would have accepted in the same windows."""
    accepted_lenient: int = 0
    """Number of further drafted tokens accepted: the gain by lenience, including tokens that the
    target did not read."""
    finish: str = ""
    """Reason for the end: "eos", "stop" (a stop string), "length" (max_new_tokens) or "context"
    (the model's context is full)."""
    seconds: float = 0.0

    def __repr__(self) -> str:
        text = self.text if len(self.text) <= SHOWN else f"{self.text[: SHOWN - 1]}…"
        counts = f"{len(self.tokens)} tokens, {self.tokens_per_pass:.2f} per pass"
        return (
            f"<Generation {text!r}: {counts}, ended by {self.finish or 'nothing yet'}>"
        )

    @property
    def logprobs(self) -> list[float | None]:
        """Return the target's log-probability of each token, at temperature 1 and before logits
        processors. Entries are None if log-probabilities were not requested."""
        return [entry.logprob for entry in self.trace]

    @property
    def tokens_per_pass(self) -> float:
        """Return the number of new tokens per target pass, including corrections and bonus tokens;
        0 without target passes."""
        return len(self.tokens) / self.target_passes if self.target_passes else 0.0

    @property
    def tokens_per_second(self) -> float:
        return len(self.tokens) / self.seconds if self.seconds else 0.0

    def add(self, step: Step) -> None:
        self.trace += step.trace
        self.tokens += step.tokens
        self.target_passes += step.target_passes
        self.draft_passes += step.draft_passes
        self.target_tokens += step.target_tokens
        self.draft_tokens += step.draft_tokens
        self.drafted += step.drafted
        self.accepted_exact += step.accepted_exact
        self.accepted_lenient += step.accepted_lenient
        self.text += step.text
        self.finish = step.finish or ""

    def end(self, seconds: float, text: str | None, by_draft: bool) -> None:
        """Record the seconds, and the whole text if it is known. `by_draft` is True if the draft
        model decoded alone: its counts are then those of the draft."""
        self.seconds = seconds
        if by_draft:
            self.target_passes, self.draft_passes = 0, self.target_passes
            self.target_tokens, self.draft_tokens = 0, self.target_tokens
        if text is not None:
            self.text = text
