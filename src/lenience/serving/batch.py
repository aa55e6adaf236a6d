"""Continuous batching: requests enter and leave a batch between cycles."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from operator import or_

import torch

from lenience.core.context import Context, Row
from lenience.core.needs import Needs, Parts
from lenience.core.noise import Noise
from lenience.core.protocols import Drafter, Rule
from lenience.core.types import Draft, Reading, Step, Verdict
from lenience.decoding.decoder import Decoder
from lenience.decoding.loop import counted, cycle
from lenience.decoding.pair import Pair
from lenience.decoding.response import Response
from lenience.models.session import Session, common
from lenience.models.threads import torch_threads

PART = 2048
PART_ON_CPU = 256
"""Maximum number of prompt tokens read between two cycles, on a GPU and on a CPU. Longer prompts
are read in parts, so that running answers do not wait for them."""
LEAST_COPIED = 32
"""Number of tokens from which a prefix is copied from another row."""
_RULE = "rule of the request"
"""Key of a row's rule in its memory."""


class RuleOfRow(Rule):
    """The rule of each row's own request, one of several or a rule that needs no more than they
    do."""

    def __init__(self, rules: Sequence[Rule]):
        """Raises InputError for rules that read states of different layers."""
        self._needs = reduce(or_, (rule.needs for rule in rules))

    @property
    def needs(self) -> Needs:
        return self._needs

    def can_ask(self, rule: Rule) -> bool:
        """Return True if the caches keep the states that a rule reads."""
        layers = rule.needs.layers or self._needs.layers
        states = rule.needs.window & Parts.STATES
        return layers == self._needs.layers and not states & ~self._needs.window

    def __call__(self, draft: Draft, reading: Reading, ctx: Context) -> list[Verdict]:
        groups: dict[tuple[Rule, int], list[int]] = {}
        for b, row in enumerate(ctx.rows):
            key = row.memory[_RULE], id(row.sampling)
            groups.setdefault(key, []).append(b)
        if len(groups) == 1:
            ((rule, _),) = groups
            alike = ctx.group([*range(len(ctx.rows))]) if ctx.is_mixed else ctx
            return rule(draft, reading, alike)
        verdicts: dict[int, Verdict] = {}
        for (rule, _), rows in groups.items():
            found = rule(draft.rows(rows), reading.rows(rows), ctx.group(rows))
            verdicts.update(zip(rows, found))
        return [verdicts[b] for b in range(len(ctx.rows))]


@dataclass(eq=False)
class Job:
    """A request with its answer so far."""

    decoder: Decoder
    prompt: list[int]
    row: Row
    response: Response
    alternatives: int | None = None
    """Number of most probable tokens reported with each token; None for no log-probabilities."""
    arrived: float = field(default_factory=time.perf_counter)
    started: float = 0.0
    """Time at which the request took a row; 0 while it waits."""
    first_token: float = 0.0
    decoding: float = 0.0
    """Seconds of the cycles in which the request had a row."""
    reused: int = 0
    """Number of prompt tokens that were already in a cache."""
    cancelled: bool = False

    @classmethod
    def of(
        cls,
        pair: Pair,
        decoder: Decoder,
        prompt: list[int],
        sampling: Context | None = None,
        *,
        streams: bool = True,
        ignore_eos: bool = False,
    ) -> Job:
        """Make a request from a checked decoder. `sampling` holds its sampling parameters; None for
        those of the batch. Steps carry their text if it `streams`. Raises InputError for stop
        strings that cannot be found."""
        row = Row(Noise.for_prompt(decoder.seed_of(0), prompt), list(prompt))
        row.memory[_RULE] = decoder.rule
        row.sampling = sampling
        response = Response(
            pair.target,
            decoder.max_new_tokens,
            len(prompt),
            decoder.answer_stops,
            stream=streams,
            shown=decoder.answer_tokens,
            ignore_eos=ignore_eos,
        )
        return cls(decoder, prompt, row, response)

    @property
    def tokens(self) -> list[int]:
        """Return the new tokens so far."""
        return self.row.prefix[len(self.prompt) :]

    @property
    def room(self) -> int:
        """Return the token budget of the next cycle: the rest of the answer, or a window and the
        token after it."""
        return min(self.response.room, int(self.decoder.window) + 1)

    @property
    def is_over(self) -> bool:
        return self.cancelled or self.response.finish is not None


class RunningBatch:
    """A batch of running requests. Only one thread may use it.

    The running requests have the first rows of the caches, and the request whose prompt is being
    read has the next row. The other rows keep the tokens of finished requests, whose prefixes later
    requests reuse.
    """

    def __init__(
        self, pair: Pair, decoder: Decoder, rule: RuleOfRow, size: int, context: int
    ):
        """Make caches for `size` requests of at most `context` tokens, prompt and answer together.
        Raises InputError if they do not fit into memory."""
        self.size = size
        decoder = replace(decoder, rule=rule)
        capacity = context + decoder.columns(int(decoder.window))
        self.running = list[Job]()
        self._reading: Job | None = None
        self._ctx = pair.context(decoder)
        session, drafter = pair.engine(decoder, size + 1, capacity)
        self._session: Session = session
        self._drafter: Drafter = drafter
        self._rule = rule
        self._used = [0] * (size + 1)
        """Time at which each row was last used, counted in uses."""
        lm = pair.target
        self._reuses = not (lm.has_states or lm.copies_cache or lm.rope_switch)
        """True if a row can continue after any of its tokens, so that prefixes are reused."""
        on_cpu = pair.target.device.type == "cpu"
        self._part = PART_ON_CPU if on_cpu else PART

    @property
    def jobs(self) -> list[Job]:
        """Return the requests that have rows."""
        return [*self.running, *([self._reading] if self._reading else [])]

    def cycle(self, next_job: Callable[[], Job | None]) -> list[tuple[Job, Step]]:
        """Admit requests, which `next_job` returns in order, and run one cycle. Return the steps of
        the running requests."""
        began = time.perf_counter()
        with torch_threads(self._session.torch_threads), torch.inference_mode():
            self._drop_cancelled(next_job)
            self._admit(next_job)
            steps = self._steps() if self.running else []
        seconds = time.perf_counter() - began
        for job in self.jobs:
            job.decoding += seconds
        now = time.perf_counter()
        for job, _ in steps:
            job.first_token = job.first_token or now
        with torch_threads(self._session.torch_threads), torch.inference_mode():
            self._replace_finished(next_job)
        return steps

    def _steps(self) -> list[tuple[Job, Step]]:
        """Run one cycle of the running requests."""
        jobs = list(self.running)
        room = [job.room for job in jobs]
        draft, read, verdicts = cycle(
            self._session, self._drafter, self._rule, self._context(jobs), room
        )
        steps = []
        for b, (job, verdict) in enumerate(zip(jobs, verdicts)):
            step = counted(job.response.clip(verdict), draft, read, b)
            job.row.keep(step)
            steps.append((job, step))
        return steps

    def _context(self, jobs: Sequence[Job]) -> Context:
        """Return the context of the running requests; the same object while they stay the same."""
        rows = [job.row for job in jobs]
        last = self._ctx.rows
        if len(rows) == len(last) and all(a is b for a, b in zip(rows, last)):
            return self._ctx
        asked = [job.alternatives for job in jobs if job.alternatives is not None]
        self._ctx = replace(
            self._ctx,
            rows=rows,
            logprobs=bool(asked),
            alternatives=max(asked, default=0),
        )
        return self._ctx

    def _admit(self, next_job: Callable[[], Job | None]) -> None:
        """Give free rows to new requests, in order, and read at most a part's tokens of their
        prompts beforehand. What is left of a prompt is read with the request's first window."""
        left = self._part
        admitted = list[Job]()
        while left and len(self.running) < self.size:
            self._reading = job = self._reading or next_job()
            if job is None:
                return
            at = len(self.running)
            if not job.started:
                if self._should_wait(job, admitted):
                    return
                self._begin(job, at)
            held = self._session.held(at, job.prompt)
            unread = len(job.prompt) - held
            if unread > left:
                if left == self._part:
                    self._session.read([job.prompt[: held + left]], rows=[at])
                return
            left -= unread
            self._reading = None
            self.running.append(job)
            admitted.append(job)

    def _should_wait(self, job: Job, admitted: list[Job]) -> bool:
        """Return True if a request shares more tokens with one that was just admitted, and not yet
        read, than with any row: after the next cycle it can reuse them."""
        if not self._reuses:
            return False
        coming = [common(other.prompt, job.prompt) for other in admitted]
        return max(coming, default=0) >= self._shared(job)[0] + LEAST_COPIED

    def _shared(self, job: Job) -> tuple[int, int]:
        """Return the length of the longest prefix of a request that a row holds, and the row."""
        if not self._reuses:
            return 0, 0
        shared = [common(tokens, job.prompt) for tokens in self._session.tokens()]
        best = max(range(len(shared)), key=shared.__getitem__)
        return shared[best], best

    def _begin(self, job: Job, at: int) -> None:
        """Give row `at` to a request, with the longest prefix that any row holds."""
        job.started = time.perf_counter()
        if not self._reuses:
            self._session.cut(at, 0)
            return
        longest, best = self._shared(job)
        if longest < common(self._session.tokens()[at], job.prompt) + LEAST_COPIED:
            best = at
        if at >= len(self.running):
            self._keep_elsewhere(at, best)
        if best != at:
            self._copy(best, at)
        job.reused = min(self._session.held(at, job.prompt), len(job.prompt) - 1)
        self._touch(at)

    def _keep_elsewhere(self, at: int, best: int) -> None:
        """Copy the tokens of the free row `at` to the free row that was used longest ago, unless it
        is `at` itself or the row `best`, whose prefix is to be reused."""
        free = [row for row in range(at, self.size + 1) if row != best]
        oldest = min(free, key=self._used.__getitem__, default=at)
        tokens = self._session.tokens()
        if oldest != at and len(tokens[at]) >= LEAST_COPIED:
            self._copy(at, oldest)
            self._used[oldest] = self._used[at]

    def _drop_cancelled(self, next_job: Callable[[], Job | None]) -> None:
        if self._reading and self._reading.cancelled:
            self._reading = None
        self._replace_finished(next_job)

    def _replace_finished(self, next_job: Callable[[], Job | None]) -> None:
        """Give the rows of finished and cancelled requests to waiting ones, without moving other
        rows, or else close the gaps. A long prompt is read between cycles of running requests."""
        left = self._part
        for b in reversed(range(len(self.running))):
            if not self.running[b].is_over:
                continue
            job = None if self._reading else next_job()
            if job is not None and len(job.prompt) <= left:
                left -= len(job.prompt)
                self._begin(job, b)
                self.running[b] = job
                continue
            self._release(b)
            self._reading = self._reading or job

    def _release(self, b: int) -> None:
        """Free the row of a finished request, and close the gap. Its tokens are kept in another
        free row, unless its own stays free."""
        last = len(self.running) - 1
        self._touch(b)
        first_free = len(self.running) + (self._reading is not None)
        free = range(first_free, self.size + 1)
        if self._reuses and free and (b != last or self._reading):
            kept = min(free, key=self._used.__getitem__)
            self._copy(b, kept)
            self._used[kept] = self._used[b]
        if b != last:
            self._move(last, b)
            self.running[b] = self.running[last]
        self.running.pop()
        if self._reading:
            self._move(last + 1, last)

    def _copy(self, source: int, to: int) -> None:
        self._session.copy(source, to)
        self._drafter.copy(source, to)

    def _move(self, source: int, to: int) -> None:
        self._session.move(source, to)
        self._drafter.move(source, to)
        self._used[to] = self._used[source]
        self._used[source] = 0

    def _touch(self, row: int) -> None:
        self._used[row] = max(self._used) + 1
