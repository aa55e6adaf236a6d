"""The decoding loop: propose, read, judge, keep. Everything that generates text goes through it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from lenience.core.context import Context, Row
from lenience.core.protocols import Drafter, Rule
from lenience.core.transfer import to_host_async
from lenience.core.types import Draft, Reading, Step, Verdict
from lenience.decoding.response import Response
from lenience.decoding.soundness import (
    check_target,
    cut_non_finite,
    have_finite_max,
    warn_of_non_finite,
)
from lenience.drafting.trees.judging import judge_trees
from lenience.models.session import Session
from lenience.models.threads import torch_threads


@dataclass
class Request:
    """A prompt that is being answered."""

    row: Row
    response: Response
    number: int = 0
    began: float = field(default_factory=time.perf_counter)


class NoDrafter(Drafter):
    """Proposes nothing, so that each cycle is a plain step of the model that reads."""

    def __init__(self, device: torch.device):
        self.device = device

    def propose(self, ctx: Context, room: Sequence[int]) -> Draft:
        rows = len(ctx.rows)
        tokens = torch.empty(rows, 0, dtype=torch.long, device=self.device)
        return Draft(tokens, torch.zeros(rows, dtype=torch.long, device=self.device))


def decode(
    session: Session,
    drafter: Drafter,
    rule: Rule,
    ctx: Context,
    next_request: Callable[[Request | None], Request | None],
    size: int = 1,
) -> Iterator[tuple[Request, Step]]:
    """Answer requests, `size` of them together, one cycle at a time. `next_request` gives the
    request that takes the row of one that has reached a limit, so that what they have in common
    need not be read again, or of none; it gives None when there are no more."""
    active, profile = list[Request](), session.profile
    while True:
        profile.start()
        while len(active) < size and (request := next_request(None)):
            active.append(request)
        if not active:
            return
        rows = [request.row for request in active]
        if len(rows) != len(ctx.rows) or any(a is not b for a, b in zip(rows, ctx.rows)):
            ctx = replace(ctx, rows=rows)
        room = [request.response.room for request in active]
        draft, target_tokens, verdicts = cycle(session, drafter, rule, ctx, room)
        draft_tokens = draft.tokens_read or [0] * len(active)
        for b, (request, verdict) in enumerate(zip(active, verdicts)):
            step = request.response.clip(verdict)
            step = replace(
                step,
                target_tokens=target_tokens[b],
                draft_passes=draft.passes,
                draft_tokens=draft_tokens[b],
            )
            request.row.keep(step)
            profile.add("rest")
            yield request, step
            profile.start()
        with torch_threads(session.torch_threads):
            active = _replace_finished(active, next_request, session, drafter)
        profile.add("cache")


def _replace_finished(
    active: list[Request],
    next_request: Callable[[Request | None], Request | None],
    session: Session,
    drafter: Drafter,
) -> list[Request]:
    """Give the rows of finished requests to others; where there are none, the last row fills the
    gap."""
    rows: list[Request | None] = []
    for request in active:
        rows.append(next_request(request) if request.response.finish else request)
    for i in reversed([i for i, row in enumerate(rows) if row is None]):
        last = rows.pop()
        if i < len(rows):
            rows[i] = last
            session.move(len(rows), i)
            drafter.move(len(rows), i)
    return [row for row in rows if row]


@torch.inference_mode()
def cycle(
    session: Session, drafter: Drafter, rule: Rule, ctx: Context, room: Sequence[int]
) -> tuple[Draft, Sequence[int], list[Verdict]]:
    """Propose windows for the rows of `ctx`, which may have `room` new tokens more, read them, and
    judge them: the windows, how many tokens the target read for each row, and the verdicts."""
    room = [min(n, session.room_before_switch(row.prefix)) for n, row in zip(room, ctx.rows)]
    with torch_threads(session.torch_threads):
        return _cycle(session, drafter, rule, ctx, room)


def _cycle(
    session: Session, drafter: Drafter, rule: Rule, ctx: Context, room: Sequence[int]
) -> tuple[Draft, Sequence[int], list[Verdict]]:
    session.profile.add("rest")
    draft, cut = cut_non_finite(drafter.propose(ctx, room))
    # passes of a model are counted by their session
    is_drafting = not draft.passes and not isinstance(drafter, NoDrafter)
    session.profile.add("draft" if is_drafting else "rest")
    session.profile.count_cycle()
    if draft.trusted is None:
        judged = _judge(session, drafter, rule, ctx, draft)
        warn_of_non_finite(cut, session.lm)
        return draft, *judged
    warn_of_non_finite(cut, session.lm)
    # a window that is trusted whole is not read
    lengths, trusted = draft.lengths.tolist(), draft.trusted.tolist()
    asked = [b for b, (n, kept) in enumerate(zip(lengths, trusted)) if kept < n or not n]
    tokens_read = [0] * len(lengths)
    verdicts = [_unread(row[:n]) for row, n in zip(draft.tokens.tolist(), lengths)]
    if asked:
        part = replace(ctx, rows=[ctx.rows[b] for b in asked])
        judged = _judge(session, drafter, rule, part, draft.rows(asked), rows=asked)
        for b, read, verdict in zip(asked, *judged):
            tokens_read[b], verdicts[b] = read, verdict
    return draft, tokens_read, verdicts


def _unread(drafted: list[int]) -> Verdict:
    """Keep a whole window that the target did not read."""
    n = len(drafted)
    exact, scores = [False] * n, [None] * n
    return Verdict(drafted, list(range(n)), None, exact, list(scores), read=False)


def _without_bonus(verdict: Verdict) -> Verdict:
    """A verdict after whose window, where it is kept whole, nothing follows."""
    kept_whole = verdict.drafted and verdict.rejected is None
    return replace(verdict, next_token=None) if kept_whole else verdict


def _with_logprobs(verdict: Verdict, logits: Tensor) -> Verdict:
    """A verdict with how probable the target found what it keeps, by its `logits` [W + 1, V] before
    temperature and processors."""
    if verdict.next_token is None:
        return verdict
    # each token is predicted by the state after the one before it, and state 0 by the prefix
    states = [0, *(i + 1 for i in verdict.path)]
    tokens = [*(verdict.drafted[i] for i in verdict.path), verdict.next_token]
    logprobs = torch.log_softmax(logits[states].float(), -1)  # [k + 1, V]
    chosen = logprobs[torch.arange(len(tokens)), torch.tensor(tokens)]
    return replace(verdict, logprobs=chosen.tolist())


def _read(
    session: Session, prefixes: Sequence[list[int]], draft: Draft, rows: Sequence[int] | None
) -> tuple[Reading, Sequence[int]]:
    """Run the target over the windows: what it gives, and how many tokens it read for each row."""
    n = draft.width + 1
    if draft.parents is None:
        reading = session.read(prefixes, n, device_tokens=draft.tokens, rows=rows)
        return reading, reading.tokens_read
    before = [0] * len(prefixes)
    if draft.width:
        before = session.catch_up(prefixes, rows or range(len(prefixes)))
    sequences = [prefix + more for prefix, more in zip(prefixes, draft.tokens.tolist())]
    reading = session.read(sequences, n, rows=rows, parents=draft.parents)
    return reading, [a + b for a, b in zip(before, reading.tokens_read)]


def _judge(
    session: Session,
    drafter: Drafter,
    rule: Rule,
    ctx: Context,
    draft: Draft,
    rows: Sequence[int] | None = None,
) -> tuple[Sequence[int], list[Verdict]]:
    """How many tokens the target reads for each row, and the rule's verdicts; `rows` are the
    session's, where not its first."""
    prefixes = [row.prefix for row in ctx.rows]
    reading, tokens_read = _read(session, prefixes, draft, rows)
    told, sound = reading.logits, to_host_async(have_finite_max(reading.logits))
    if ctx.processors and draft.parents is None:
        reading = replace(reading, logits=ctx.process(reading.logits, draft.tokens))
    session.profile.add("rest")
    decide = rule if draft.parents is None else partial(judge_trees, rule)
    verdicts = decide(draft, reading, ctx)
    check_target(sound, verdicts, prefixes, session.lm)
    if ctx.logprobs:
        verdicts = [_with_logprobs(one, row) for one, row in zip(verdicts, told)]
    if not draft.bonus:
        verdicts = [_without_bonus(one) for one in verdicts]
    session.profile.add("rule")
    drafter.observe(ctx, reading, verdicts)
    return tokens_read, verdicts
