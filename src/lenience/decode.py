"""The decoding loop: propose, read, judge, keep. Everything that generates text goes through it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch

from lenience.core.context import Context, Row
from lenience.core.protocols import Drafter, Rule
from lenience.core.types import Draft, Finish, Origin, Step, Trace, Verdict
from lenience.models.lm import LM
from lenience.models.session import Session


@dataclass
class Request:
    """A prompt that is being answered."""

    row: Row
    limits: Limits
    number: int = 0
    began: float = field(default_factory=time.perf_counter)


def decode(
    session: Session,
    drafter: Drafter,
    rule: Rule,
    ctx: Context,
    follow: Callable[[Request | None], Request | None],
    size: int = 1,
) -> Iterator[tuple[Request, Step]]:
    """Answer requests, `size` of them together, one cycle at a time. `follow` gives the request that takes the row of one that
    has reached a limit, so that what they have in common need not be read again, or of none; it gives None when there are
    no more."""
    active, profile = list[Request](), session.profile
    while True:
        profile.start()
        while len(active) < size and (request := follow(None)):
            active.append(request)
        if not active:
            return
        ctx.rows = [request.row for request in active]
        draft, read, verdicts = cycle(session, drafter, rule, ctx, [request.limits.room for request in active])
        for b, (request, verdict) in enumerate(zip(active, verdicts)):
            step = request.limits.clip(verdict, draft.passes, draft.read[b] if draft.read else 0, read[b])
            request.row.prefix += step.tokens
            request.row.position += len(step.tokens)
            request.row.lenient += sum(entry.origin == "draft-lenient" for entry in step.trace)
            request.row.last = step
            profile.lap("rest")
            yield request, step
            profile.start()
        rows = [follow(request) if request.limits.finish else request for request in active]
        for i in reversed([i for i, row in enumerate(rows) if row is None]):
            last = rows.pop()  # the last row fills the gap
            if i < len(rows):
                rows[i] = last
                session.move(len(rows), i)
                drafter.move(len(rows), i)
        active = [row for row in rows if row]
        profile.lap("cache")


@torch.inference_mode()
def cycle(
    session: Session, drafter: Drafter, rule: Rule, ctx: Context, room: Sequence[int]
) -> tuple[Draft, Sequence[int], list[Verdict]]:
    """Propose windows for the rows of `ctx`, which may have `room` new tokens more, read them, and judge them: the windows, how
    many tokens the target read for each row, and the verdicts."""
    draft = drafter.propose(ctx, room)
    session.profile.cycles += 1
    if draft.trusted is None:
        return draft, *_judge(session, rule, ctx, draft)
    lengths, trusted, tokens = draft.lengths.tolist(), draft.trusted.tolist(), draft.tokens.tolist()
    asked = [b for b, (length, n) in enumerate(zip(lengths, trusted)) if n < length or not length]
    judged = {}
    if asked:
        part = replace(ctx, rows=[ctx.rows[b] for b in asked])
        judged = dict(zip(asked, zip(*_judge(session, rule, part, draft.rows(asked), asked))))
    unread = [(0, Verdict(row[:n], n, None, [False] * n, [None] * n)) for row, n in zip(tokens, lengths)]
    read, verdicts = zip(*(judged.get(b, unread[b]) for b in range(len(tokens))))
    return draft, read, list(verdicts)


def _judge(
    session: Session, rule: Rule, ctx: Context, draft: Draft, rows: Sequence[int] | None = None
) -> tuple[Sequence[int], list[Verdict]]:
    """How many tokens the target reads for each row, and the rule's verdicts; `rows` are the session's, where not its first."""
    reading = session.read([row.prefix for row in ctx.rows], draft.width + 1, draft.tokens, rows=rows)
    if ctx.processors:
        reading = replace(reading, logits=ctx.process(reading.logits, draft.tokens))
    session.profile.lap("rest")
    verdicts = rule(draft, reading, ctx)
    session.profile.lap("rule")
    return reading.read, verdicts


@dataclass
class Limits:
    """What ends a response: EOS, stop strings, a number of new tokens, the model's context. Nothing is kept, counted or
    shown past the end; the text ends before a stop string."""

    lm: LM
    max_new_tokens: int
    prompt_length: int
    stop_strings: Sequence[str] = ()
    stream: bool = False
    """Whether steps carry their text; with stop strings they always do."""
    new: int = 0
    finish: Finish | None = None

    def __post_init__(self) -> None:
        self._text = TextStream(self.lm, self.stop_strings) if self.stream or self.stop_strings else None
        context = self.lm.context
        self._left = min(self.max_new_tokens, context - self.prompt_length) if context else self.max_new_tokens
        self._cut: Finish = "length" if self._left == self.max_new_tokens else "context"

    @property
    def room(self) -> int:
        """How many more new tokens are allowed."""
        return self._left - self.new

    def clip(self, verdict: Verdict, draft_passes: int, draft_tokens: int = 0, target_tokens: int = 0) -> Step:
        """The step that a verdict comes to, cut off where the response ends; what the models read is counted in it."""
        n, k = len(verdict.drafted), verdict.accepted
        lenient: Origin = "draft-trusted" if verdict.token is None else "draft-lenient"
        found = [
            Trace(token, "draft" if exact else lenient, score)
            for token, exact, score in zip(verdict.drafted[:k], verdict.exact, verdict.scores)
        ]
        if verdict.token is not None:
            found.append(Trace(verdict.token, "bonus") if k == n else Trace(verdict.token, "correction", verdict.scores[k]))
        trace: list[Trace] = []
        text = ""
        for entry in found:
            trace.append(entry)
            self.new += 1
            if self._text:
                text += self._text.push(entry.token)
            if entry.token in self.lm.eos_ids:
                self.finish = "eos"
            elif self._text and self._text.stopped:
                self.finish = "stop"
            elif self.room == 0:
                self.finish = self._cut
            if self.finish:
                text += self._text.flush() if self._text else ""
                break
        drafted = sum(entry.origin.startswith("draft") for entry in trace)
        over = drafted if self.finish else n  # past the end nothing is counted
        exact = next((i for i in range(over) if not verdict.exact[i]), over)
        reads = int(verdict.token is not None)
        return Step(
            trace, n, exact, drafted - exact, draft_passes, text, self.finish, reads, draft_tokens, target_tokens
        )  # fmt: skip


class TextStream:
    """Turns tokens into text as they come: holds back incomplete characters and what may begin a stop string."""

    def __init__(self, lm: LM, stop_strings: Sequence[str] = ()):
        self.lm, self.stop_strings, self.stopped = lm, stop_strings, False
        self._ids: list[int] = []
        self._start = 0  # ids before this one are decided; those from it on are decoded together, for spaces between
        self._done = ""  # what the ids from _start on have given so far
        self._held = ""

    def push(self, token: int) -> str:
        """The text that is decided by one more token."""
        if token in self.lm.eos_ids:
            return ""
        self._ids.append(token)
        whole = self.lm.decode(self._ids[self._start :])
        if whole.endswith("�"):
            return ""
        new, self._done = whole[len(self._done) :], whole
        if len(self._ids) - self._start > 32:  # keep the tail that is decoded again short
            self._start = len(self._ids) - 4
            self._done = self.lm.decode(self._ids[self._start :])
        return self._release(new)

    def flush(self) -> str:
        """What is still held back when the response ends."""
        whole = self.lm.decode(self._ids[self._start :])
        rest = "" if self.stopped else self._held + whole[len(self._done) :]
        self._held, self._done = "", whole
        return rest

    def _release(self, new: str) -> str:
        text = self._held + new
        found = [at for at in (text.find(stop) for stop in self.stop_strings) if at >= 0]
        if found:
            self.stopped, self._held = True, ""
            return text[: min(found)]
        longest = max((_overlap(text, stop) for stop in self.stop_strings), default=0)
        self._held = text[len(text) - longest :]
        return text[: len(text) - longest]


def _overlap(text: str, stop: str) -> int:
    """The length of the longest end of `text` that `stop` begins with."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)


def pieces(lm: LM, tokens: Sequence[int]) -> list[str]:
    """Each token's part of the text, in which an incomplete character belongs to the token that completes it."""
    stream = TextStream(lm)
    parts = [stream.push(token) for token in tokens]
    if parts:
        parts[-1] += stream.flush()
    return parts
