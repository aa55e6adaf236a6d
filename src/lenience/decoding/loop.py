"""The decoding loop: propose, read, judge, clip, keep. All generation goes through it."""

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
    warn_of_non_finite,
)
from lenience.drafting.trees.judging import judge_trees
from lenience.models.session import Session
from lenience.models.threads import torch_threads


@dataclass
class Request:
    """A prompt whose answer is in progress."""

    row: Row
    response: Response
    number: int = 0
    began: float = field(default_factory=time.perf_counter)


@dataclass(frozen=True)
class Read:
    """The target's output for the windows that it verified."""

    ctx: Context
    draft: Draft
    reading: Reading | None
    """Reading of the target; None if it read no window."""
    rows: Sequence[int] | None
    """Rows of the cycle whose windows were verified; None for all rows."""
    tokens_read: Sequence[int]
    """[B]: number of tokens that the target read for each row of the cycle."""


class NoDrafter(Drafter):
    """A drafter that proposes nothing: each cycle is a plain decoding step."""

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
    """Decode requests in batches of at most `size`, one cycle at a time, and yield each row's step.

    `next_request` is called with a finished request, whose row and common prefix the next one
    reuses, or with None for a free row. It returns None when no requests are left.
    """
    active = list[Request]()
    profile = session.profile
    while True:
        profile.start()
        if not _admit(active, next_request, size):
            return
        ctx = _with_rows(ctx, active)
        room = [request.response.room for request in active]
        with torch_threads(session.torch_threads), torch.inference_mode():
            draft = propose(session, drafter, ctx, room)
            read = read_windows(session, ctx, draft)
            verdicts = judge(session, drafter, rule, draft, read)
        for b, (request, verdict) in enumerate(zip(active, verdicts)):
            step = counted(request.response.clip(verdict), draft, read.tokens_read, b)
            request.row.keep(step)
            profile.add("rest")
            yield request, step
            profile.start()
        active = _replace_finished(session, active, next_request, drafter)
        profile.add("cache")


def cycle(
    session: Session, drafter: Drafter, rule: Rule, ctx: Context, room: Sequence[int]
) -> tuple[Draft, Sequence[int], list[Verdict]]:
    """Propose, read and judge windows for the rows of `ctx`, whose remaining token budgets are
    `room`. Return the windows, the number of tokens that the target read for each row, and the
    verdicts. The caller records the accepted tokens."""
    with torch_threads(session.torch_threads), torch.inference_mode():
        draft = propose(session, drafter, ctx, room)
        read = read_windows(session, ctx, draft)
        verdicts = judge(session, drafter, rule, draft, read)
    return draft, read.tokens_read, verdicts


def propose(
    session: Session, drafter: Drafter, ctx: Context, room: Sequence[int]
) -> Draft:
    """Return a window for each row, cut before the first token with non-finite logits. The caller
    sets inference mode and the number of PyTorch threads, as `cycle` does."""
    room = [
        min(n, session.room_before_switch(row.prefix)) for n, row in zip(room, ctx.rows)
    ]
    session.profile.add("rest")
    draft = cut_non_finite(drafter.propose(ctx, room))
    # a model's session measures the time of its own passes
    is_drafting = not draft.passes and not isinstance(drafter, NoDrafter)
    session.profile.add("draft" if is_drafting else "rest")
    session.profile.count_cycle()
    return draft


def read_windows(session: Session, ctx: Context, draft: Draft) -> Read:
    """Run the target over the windows, except those whose tokens are all trusted."""
    rows = _untrusted(draft)
    tokens_read = [0] * len(ctx.rows)
    if rows is not None:
        ctx = replace(ctx, rows=[ctx.rows[b] for b in rows])
        if not rows:
            return Read(ctx, draft, None, rows, tokens_read)
        draft = draft.rows(rows)
    reading, counts = _run_target(session, ctx, draft, rows)
    for b, count in zip(range(len(tokens_read)) if rows is None else rows, counts):
        tokens_read[b] = count
    return Read(ctx, draft, reading, rows, tokens_read)


def judge(
    session: Session, drafter: Drafter, rule: Rule, draft: Draft, read: Read
) -> list[Verdict]:
    """Return the verdict on each window. A window that the target did not read is accepted
    whole."""
    verdicts = _decide(session, rule, read) if read.reading else []
    warn_of_non_finite(draft.cut, session.lm)
    if read.reading:
        drafter.observe(read.ctx, read.reading, verdicts)
    if read.rows is None:
        return verdicts
    tokens = draft.tokens.tolist()
    lengths = draft.lengths.tolist()
    whole = [_unread(row[:n]) for row, n in zip(tokens, lengths)]
    for b, verdict in zip(read.rows, verdicts):
        whole[b] = verdict
    return whole


def _decide(session: Session, rule: Rule, read: Read) -> list[Verdict]:
    """Return the rule's verdicts on the windows that the target read. Raises RunError if a verdict
    depends on non-finite logits."""
    ctx = read.ctx
    draft = read.draft
    reading = read.reading
    assert reading is not None
    raw = reading.logits
    best = to_host_async(reading.logits.amax(-1))
    if ctx.processes and draft.parents is None:
        reading = replace(reading, logits=ctx.process(raw, draft.tokens))
    session.profile.add("rest")
    decide = rule if draft.parents is None else partial(judge_trees, rule)
    verdicts = decide(draft, reading, ctx)
    check_target(best, verdicts, [row.prefix for row in ctx.rows], session.lm)
    if ctx.logprobs:
        verdicts = [
            _with_logprobs(verdict, row, ctx.alternatives)
            for verdict, row in zip(verdicts, raw)
        ]
    if not draft.bonus:
        verdicts = list(map(_without_bonus, verdicts))
    session.profile.add("rule")
    return verdicts


def _run_target(
    session: Session, ctx: Context, draft: Draft, rows: Sequence[int] | None
) -> tuple[Reading, Sequence[int]]:
    """Run the target over the windows of `rows`. Return the reading, and the number of tokens read
    for each row."""
    prefixes = [row.prefix for row in ctx.rows]
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


def _untrusted(draft: Draft) -> list[int] | None:
    """Return the rows whose windows the target must verify; None if the drafter trusts no
    tokens."""
    if draft.trusted is None:
        return None
    lengths = draft.lengths.tolist()
    trusted = draft.trusted.tolist()
    return [b for b, (n, kept) in enumerate(zip(lengths, trusted)) if kept < n or not n]


def _unread(drafted: list[int]) -> Verdict:
    """Return the verdict that accepts a whole window without verification."""
    n = len(drafted)
    exact = [False] * n
    scores = [None] * n
    return Verdict(drafted, list(range(n)), None, exact, list(scores), read=False)


def _without_bonus(verdict: Verdict) -> Verdict:
    """Return the verdict without its bonus token, if the window was accepted whole."""
    kept_whole = verdict.drafted and verdict.rejected is None
    return replace(verdict, next_token=None) if kept_whole else verdict


def _with_logprobs(verdict: Verdict, logits: Tensor, alternatives: int) -> Verdict:
    """Return the verdict with the log-probabilities of its tokens, from `logits` [W + 1, V] before
    temperature and processors, and with the most probable tokens at the same positions."""
    if verdict.next_token is None:
        return verdict
    # state 0 predicts the first token, and the state after a token predicts the next one
    states = [0, *(i + 1 for i in verdict.path)]
    tokens = [*(verdict.drafted[i] for i in verdict.path), verdict.next_token]
    logprobs = torch.log_softmax(logits[states].float(), -1)  # [k + 1, V]
    chosen = logprobs[torch.arange(len(tokens)), torch.tensor(tokens)]
    verdict = replace(verdict, logprobs=chosen.tolist())
    if not alternatives:
        return verdict
    best = logprobs.topk(min(alternatives, logprobs.shape[-1]))
    ranked = zip(best.indices.tolist(), best.values.tolist())
    return replace(verdict, alternatives=[list(zip(*pair)) for pair in ranked])


def counted(step: Step, draft: Draft, tokens_read: Sequence[int], b: int) -> Step:
    """Return the step with the numbers of tokens and passes that row b took. `tokens_read` [B] are
    the numbers of tokens that the target read."""
    return replace(
        step,
        target_tokens=tokens_read[b],
        draft_passes=draft.passes,
        draft_tokens=draft.tokens_read[b] if draft.tokens_read else 0,
    )


def _with_rows(ctx: Context, active: list[Request]) -> Context:
    """Return the context for the active rows; the same object while the rows do not change."""
    rows = [request.row for request in active]
    same = len(rows) == len(ctx.rows) and all(a is b for a, b in zip(rows, ctx.rows))
    return ctx if same else replace(ctx, rows=rows)


def _admit(
    active: list[Request],
    next_request: Callable[[Request | None], Request | None],
    size: int,
) -> list[Request]:
    """Add new requests until `size` are active."""
    while len(active) < size and (request := next_request(None)):
        active.append(request)
    return active


def _replace_finished(
    session: Session,
    active: list[Request],
    next_request: Callable[[Request | None], Request | None],
    drafter: Drafter,
) -> list[Request]:
    """Give the rows of finished requests to new ones. If none are left, the last row moves into the
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
