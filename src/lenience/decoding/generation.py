"""One answer and what it took."""

from __future__ import annotations

from dataclasses import dataclass, field

from lenience.core.types import Step, Trace

SHOWN = 60
"""Characters of the text in a repr."""


@dataclass(repr=False)
class Generation:
    """An answer with its counts."""

    prompt_tokens: list[int]
    window: int = 0
    """The draft window, as it was given or picked."""
    stop: str = "fixed"
    """Stop condition, as given or chosen."""
    tree: str = "chain"
    """The shape of what was drafted, as it was given or picked."""
    seed: int | None = None
    """Sampling seed, as given or drawn; None if greedy."""
    tokens: list[int] = field(default_factory=list)
    """The new tokens, EOS included if it was reached."""
    text: str = ""
    """Their text, without special tokens and, where a stop string ended it, what follows from
    there."""
    trace: list[Trace] = field(default_factory=list)
    target_passes: int = 0
    draft_passes: int = 0
    target_tokens: int = 0
    """Number of tokens that the target read, including the prompt and rejected tokens."""
    draft_tokens: int = 0
    drafted: int = 0
    accepted_exact: int = 0
    """Drafted tokens that the strict rule would have kept of the same windows."""
    accepted_lenient: int = 0
    """Drafted tokens kept beyond those: what lenience gained, tokens that the target did not read
    included."""
    finish: str = ""
    """Why it ended: "eos", "stop" (a stop string), "length" (max_new_tokens) or "context" (the
    model's context is full)."""
    seconds: float = 0.0

    def __repr__(self) -> str:
        text = self.text if len(self.text) <= SHOWN else f"{self.text[: SHOWN - 1]}…"
        counts = f"{len(self.tokens)} tokens, {self.tokens_per_pass:.2f} per pass"
        return (
            f"<Generation {text!r}: {counts}, ended by {self.finish or 'nothing yet'}>"
        )

    @property
    def logprobs(self) -> list[float | None]:
        """Return the logarithm of the probability that the target gave each token, at temperature
        1; None if log-probabilities were not asked for."""
        return [entry.logprob for entry in self.trace]

    @property
    def tokens_per_pass(self) -> float:
        """Return new tokens per pass of the target, corrections and bonus tokens included; 0 where
        the target read nothing."""
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
        """Record the seconds, and the whole text if it is known. `by_draft`: the draft decoded
        alone."""
        self.seconds = seconds
        if by_draft:
            self.target_passes, self.draft_passes = 0, self.target_passes
            self.target_tokens, self.draft_tokens = 0, self.target_tokens
        if text is not None:
            self.text = text
