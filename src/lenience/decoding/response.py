"""The end of a response, and its text as it streams."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from lenience.core.errors import InputError
from lenience.core.types import Finish, Origin, Step, Trace, Verdict
from lenience.models.lm import LM
from lenience.models.prompts import special_tokens


@dataclass
class Response:
    """A response that grows until an end: EOS, a stop string, the maximum number of new tokens, or
    the model's context. Nothing past the end is kept, counted or shown; the text ends before a stop
    string."""

    lm: LM
    max_new_tokens: int
    prompt_length: int
    stop_strings: Sequence[str] = ()
    stream: bool = False
    """True if steps carry their text. With stop strings they always do."""
    shown: int | None = None
    """Maximum number of new tokens in the answer; it may be below the limit of decoding."""
    ignore_eos: bool = False
    """True if the answer continues after an EOS."""
    new: int = 0
    finish: Finish | None = None

    def __post_init__(self) -> None:
        self._text: TextStream | None = None
        if self.stream or self.stop_strings:
            self._text = TextStream(self.lm, self.stop_strings)
        context = self.lm.context_length
        self._most_tokens = self.max_new_tokens
        self._cut = cast(Finish, "length")
        if context and context - self.prompt_length < self.max_new_tokens:
            self._most_tokens = context - self.prompt_length
            self._cut = "context"

    @property
    def room(self) -> int:
        """Return the remaining number of new tokens."""
        return self._most_tokens - self.new

    def clip(self, verdict: Verdict) -> Step:
        """Return the step of a verdict, cut at the end of the response."""
        trace = list[Trace]()
        text = ""
        for entry in _entries(verdict):
            self.new += 1
            entry = self._forced(entry)
            trace.append(entry)
            if self._text and self.stop_strings:  # one may end the answer here
                text += self._text.push(entry.token)
            self.finish = self._ending(entry.token)
            if self.finish:
                break
        if self._text and not self.stop_strings:
            text = self._text.push(*(entry.token for entry in trace))
        if self._text and self.finish:
            text += self._text.flush()
        drafted = sum(entry.origin.startswith("draft") for entry in trace)
        # tokens past the end are not counted
        counted = drafted if self.finish else len(verdict.drafted)
        exact = verdict.kept_exactly(counted)
        return Step(
            trace=trace,
            drafted=len(verdict.drafted),
            accepted_exact=exact,
            accepted_lenient=drafted - exact,
            text=text,
            finish=self.finish,
            target_passes=int(verdict.read),
        )

    def _forced(self, entry: Trace) -> Trace:
        """Return the entry of the next token, which a model's `forced_eos_token_id` replaces where
        the answer reaches its maximum number of tokens."""
        forced = self.lm.forced_eos
        longest = self.shown or self.max_new_tokens
        if forced is None or self.new != longest or entry.token == forced:
            return entry
        return Trace(forced, "correction", None, None)

    def _ending(self, token: int) -> Finish | None:
        """Return the reason why the response ends with a token; None if it continues."""
        if token in self.lm.eos_ids and not self.ignore_eos:
            return "eos"
        if self._text and self._text.stopped:
            return "stop"
        if self.new == self.shown:
            return "length"
        return self._cut if self.room == 0 else None


def until_stop(
    lm: LM, tokens: Sequence[int], stop_strings: Sequence[str]
) -> tuple[list[int], str]:
    """Return a response's tokens up to the one that completes a stop string, and the text before
    the stop string; all tokens and text if there is no stop string."""
    if not stop_strings:
        return list(tokens), lm.decode(tokens)
    stream = TextStream(lm, stop_strings)
    text = ""
    for n, token in enumerate(tokens, 1):
        text += stream.push(token)
        if stream.stopped:
            return list(tokens[:n]), text
    return list(tokens), text + stream.flush()


def completes_stop(lm: LM, tokens: Sequence[int], stop_strings: Sequence[str]) -> bool:
    """True if a response contains a stop string."""
    stream = TextStream(lm, stop_strings)
    for token in tokens if stop_strings else ():
        stream.push(token)
    return stream.stopped


def _entries(verdict: Verdict) -> list[Trace]:
    """Return the trace of the tokens that a verdict keeps."""
    lenient: Origin = "draft-lenient" if verdict.read else "draft-trusted"
    entries = []
    nothing = [None] * (len(verdict.path) + 1)
    details = list(zip(verdict.logprobs or nothing, verdict.alternatives or nothing))
    for i, of_target in zip(verdict.path, details):
        origin: Origin = "draft" if verdict.exact[i] else lenient
        entries.append(Trace(verdict.drafted[i], origin, verdict.scores[i], *of_target))
    if verdict.next_token is None:
        return entries
    if verdict.rejected is None:
        return [*entries, Trace(verdict.next_token, "bonus", None, *details[-1])]
    score = verdict.scores[verdict.rejected]
    return [*entries, Trace(verdict.next_token, "correction", score, *details[-1])]


class TextStream:
    """A converter from tokens to text as they arrive. Incomplete characters, and text that may
    begin a stop string, are held back."""

    def __init__(self, lm: LM, stop_strings: Sequence[str] = ()):
        self.lm = lm
        self.stop_strings = stop_strings
        self.stopped = False
        self._stop_ids = _special_among(stop_strings, lm)
        self._ids: list[int] = []
        self._start = 0
        """Index of the first id that is decoded again with each new token, so that spaces between
        tokens are right."""
        self._done = ""  # text so far of the ids from _start on
        self._held = ""

    def push(self, *tokens: int) -> str:
        """Return the new text that is certain after further tokens; with stop strings, after one
        token."""
        if self._stop_ids and self._stop_ids.intersection(tokens):
            rest = self.flush()
            self.stopped = True
            return rest
        shown = [token for token in tokens if token not in self.lm.eos_ids]
        if not shown:
            return ""
        self._ids += shown
        whole = self.lm.decode(self._ids[self._start :])
        if whole.endswith("�"):
            return ""
        new = whole[len(self._done) :]
        self._done = whole
        if (
            len(self._ids) - self._start > 32
        ):  # keep the part that is decoded again short
            self._start = len(self._ids) - 4
            self._done = self.lm.decode(self._ids[self._start :])
        return self._release(new)

    def flush(self) -> str:
        """Return the text still held back, at the end of the response."""
        whole = self.lm.decode(self._ids[self._start :])
        rest = "" if self.stopped else self._held + whole[len(self._done) :]
        self._held = ""
        self._done = whole
        return rest

    def _release(self, new: str) -> str:
        text = self._held + new
        found = [at for at in map(text.find, self.stop_strings) if at >= 0]
        if found:
            self.stopped = True
            self._held = ""
            return text[: min(found)]
        longest = max((_overlap(text, stop) for stop in self.stop_strings), default=0)
        self._held = text[len(text) - longest :]
        return text[: len(text) - longest]


def _special_among(stop_strings: Sequence[str], lm: LM) -> set[int]:
    """Return the ids of stop strings that are special tokens. Text does not show special tokens, so
    these stops are searched for by id. Raises InputError for a stop string with a special token and
    more text."""
    if not stop_strings:
        return set()
    special = special_tokens(lm.tokenizer)
    found = set()
    for stop in stop_strings:
        if stop.strip() in special:
            found.add(special[stop.strip()])
        elif held := next(
            (token for token in special if token and token in stop), None
        ):
            raise InputError(
                f"stop_strings {stop!r}: holds the special token {held!r} and more, which no text "
                f"of an answer shows; give {held!r} alone"
            )
    return found


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest end of `text` that is a proper beginning of `stop`."""
    return next(
        (
            n
            for n in range(min(len(text), len(stop) - 1), 0, -1)
            if text.endswith(stop[:n])
        ),
        0,
    )


def pieces(lm: LM, tokens: Sequence[int]) -> list[str]:
    """Return each token's part of the text. An incomplete character belongs to the token that
    completes it."""
    stream = TextStream(lm)
    parts = list(map(stream.push, tokens))
    if parts:
        parts[-1] += stream.flush()
    return parts
