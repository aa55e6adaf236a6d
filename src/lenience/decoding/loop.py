"""The decoding loop: propose, read, judge, keep. Everything that generates text goes through it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch

from lenience.core.context import Context, Row
from lenience.core.protocols import Drafter, Rule
from lenience.core.types import Draft, Step, Verdict
from lenience.decoding.response import Limits
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
