"""The rules' decisions on the windows of an engine's step."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache, partial
from hashlib import blake2b
from itertools import accumulate
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from lenience.core.context import Context, Row
from lenience.core.errors import InputError
from lenience.core.identity import tokens_with
from lenience.core.noise import Noise
from lenience.core.types import Draft, Reading, Verdict
from lenience.decoding.soundness import CAUSES, cut_non_finite, have_finite_max
from lenience.integrations.engine_rules.counts import Counts
from lenience.integrations.engine_rules.inputs import (
    check_request,
    compares_distributions,
)
from lenience.integrations.engine_rules.rule import ServedRule, dial_of, is_engines
from lenience.rules.combine import AnyOf
from lenience.serving.dial import KEY

LOGGER = logging.getLogger("lenience")
WINDOWS_BEFORE_CHECK = 200
"""Number of windows from which the share of unjudged windows is checked against its limit."""


class RequestSettings(NamedTuple):
    """The settings shared by requests that are judged in one batch."""

    rule: AnyOf
    temperature: float
    top_k: int | None
    top_p: float | None


@dataclass(frozen=True)
class Windows:
    """The target's outputs for the windows of a step, concatenated over requests: N drafted tokens
    in all."""

    ids: Sequence[str]
    """Request ids, [requests]."""
    tokens: Tensor
    """Drafted tokens, [N]."""
    lengths: Sequence[int]
    """Number of drafted tokens of each request, [requests]; may be 0."""
    logits: Tensor
    """Target logits, [N, V], after penalties and masks, before temperature and truncation."""
    hidden: Tensor | None
    """Target states, [N + requests, H]: one more per request than drafted tokens. None if the
    engine keeps none."""
    probs: Tensor | None
    """Distributions from which the draft drew the tokens, [N, V]."""

    def drafted(self) -> tuple[Windows, Tensor]:
        """Return the windows up to the first token of each marked -1, which the engine scheduled
        but did not draft, and the indices [n] of the remaining tokens among the N."""
        device = self.tokens.device
        if not bool((self.tokens < 0).any()):
            return self, torch.arange(len(self.tokens), device=device)
        tokens = self.tokens.tolist()
        lengths = list[int]()
        kept = list[int]()
        with_bonus = list[int]()
        start = 0
        for number, scheduled in enumerate(self.lengths):
            n = num_drafted(tokens[start : start + scheduled])
            lengths.append(n)
            kept += range(start, start + n)
            with_bonus += range(start + number, start + number + n + 1)
            start += scheduled
        rows = torch.tensor(kept, dtype=torch.long, device=device)
        windows = Windows(
            ids=self.ids,
            tokens=self.tokens[rows],
            lengths=lengths,
            logits=self.logits[rows],
            hidden=None
            if self.hidden is None
            else self.hidden[torch.tensor(with_bonus, device=device)],
            probs=None if self.probs is None else self.probs[rows],
        )
        return windows, rows

    @cached_property
    def starts(self) -> list[int]:
        """Return the index of each request's first token, [requests + 1]."""
        return list(accumulate(self.lengths, initial=0))

    def places(self, which: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return the indices of some requests' tokens, and those of their states, [B, W + 1] each.
        Rows of windows shorter than the widest are padded with their last index."""
        width = max(self.lengths[b] for b in which)
        starts = self.starts
        ends = [max(self.lengths[b] - 1, 0) for b in which]
        tokens = []
        for b, e in zip(which, ends):
            tokens.append([starts[b] + min(i, e) for i in range(width + 1)])
        states = []
        for b in which:
            states.append(
                [starts[b] + b + min(i, self.lengths[b]) for i in range(width + 1)]
            )
        device = self.logits.device
        return torch.tensor(tokens, device=device), torch.tensor(states, device=device)


def num_drafted(window: list[int]) -> int:
    """Return the number of tokens before the first token marked -1."""
    return window.index(-1) if -1 in window else len(window)


@dataclass
class KernelEdits:
    """Changes to the inputs of the engine's kernel that lead it to the rules' verdicts."""

    tokens: dict[int, int] = field(default_factory=dict)
    """Forced tokens, by row of a step's windows."""
    ends: list[int] = field(default_factory=list)
    """Forced rows at which a window ends. The token there follows a rejection, and may equal the
    drafted token."""

    def add(self, start: int, verdict: Verdict, greedy: bool, as_target: bool) -> None:
        """Add the changes for a window that begins at row `start`. In a `greedy` step the engine
        picks the target's token; `as_target` is True if the rule's next token is the same. The
        engine itself picks the bonus token, and a token that the rule leaves open."""
        kept = verdict.num_accepted
        for i in verdict.path:
            if not (greedy and verdict.exact[i]):
                self.tokens[start + i] = verdict.drafted[i]
        if kept == len(verdict.drafted) or verdict.next_token is None:
            return
        if not as_target or verdict.next_token == verdict.drafted[kept]:
            self.tokens[start + kept] = verdict.next_token
            self.ends.append(start + kept)


def forced(logits: Tensor, orders: KernelEdits, rows: Tensor) -> Tensor:
    """Return a copy of `logits` that allows only the forced tokens; `rows` [N] are the windows'
    rows in `logits`."""
    logits = logits.clone()
    at = rows[torch.tensor(list(orders.tokens), device=rows.device)]
    tokens = torch.tensor(list(orders.tokens.values()), device=logits.device)
    logits[at] = -torch.inf
    logits[at, tokens] = 0
    return logits


class KnownRequests(Protocol):
    """The requests that a runner knows, by id."""

    def __contains__(self, id: str) -> bool: ...

    def params(self, id: str) -> Any:
        """Return the sampling parameters, named as in vLLM."""

    def prompt(self, id: str) -> list[int]: ...

    def length(self, id: str) -> int:
        """Return the number of output tokens so far."""

    def tokens(self, id: str, start: int) -> list[int]:
        """Return the output tokens from `start` on."""


@dataclass
class WindowDecider:
    """The decider of one runner's windows."""

    requests: KnownRequests
    server: ServedRule
    model_config: Any
    logger: logging.Logger = LOGGER
    rows: dict[str, Row] = field(default_factory=dict)
    counts: dict[str, Counts] = field(default_factory=dict)
    steps: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Records of requests' windows in this step, if the server asks for them."""
    masks: dict[str, Tensor] = field(default_factory=dict)
    """Masks of the tokens whose texts match a regular expression, by expression."""
    judged: int = 0
    unjudged: int = 0

    @cached_property
    def tokenizer(self) -> Any:
        from transformers import AutoTokenizer

        config = self.model_config
        return AutoTokenizer.from_pretrained(
            config.tokenizer,
            revision=config.tokenizer_revision,
            trust_remote_code=config.trust_remote_code,
        )

    @cached_property
    def _rule_for(self) -> Callable[[object], AnyOf]:
        """Return a cached function from a request's dial to its rule, called at every step."""
        return lru_cache(maxsize=256)(self.server.rule_for)

    @property
    def may_need_probs(self) -> bool:
        """Return True if any request may have a rule that needs the draft's distribution."""
        return self.server.allow_any or any(
            map(compares_distributions, self.server.rules)
        )

    def token_mask(self, vocabulary: int, pattern: str) -> Tensor:
        if pattern not in self.masks:
            self.masks[pattern] = tokens_with(self.tokenizer, pattern, vocabulary)
        return self.masks[pattern]

    def decode(self, ids: Sequence[int]) -> str:
        text: str = self.tokenizer.decode(list(ids))
        return text

    def take_steps(self) -> dict[str, dict[str, Any]]:
        """Return the records of this step's windows, and forget them."""
        steps = self.steps
        self.steps = {}
        return steps

    def orders(self, windows: Windows, greedy: bool) -> KernelEdits:
        """Return the edits that make the engine's kernel reach the rules' verdicts. `greedy` is
        True if the whole step is greedy; the kernel then picks the target's token."""
        self.forget_finished()
        orders = KernelEdits()
        for setting, which in self._settings(windows).items():
            ids = [windows.ids[b] for b in which]
            if compares_distributions(setting.rule) and windows.probs is None:
                self._leave_unjudged(setting, ids)
                continue
            as_target = greedy and setting.rule.goes_on_as_target
            verdicts = self._verdicts(setting, which, windows)
            for b, verdict in zip(which, verdicts):
                self._count(windows.ids[b], verdict)
                orders.add(windows.starts[b], verdict, greedy, as_target)
        return orders

    def _settings(self, windows: Windows) -> dict[RequestSettings, list[int]]:
        """Return the requests with a window and a rule other than the engine's own, grouped by
        settings."""
        found: dict[RequestSettings, list[int]] = defaultdict(list)
        for b, (id, n) in enumerate(zip(windows.ids, windows.lengths)):
            if not n:
                continue
            params = self.requests.params(id)
            rule = self._rule_for(dial_of(params.extra_args))
            if self.server.steps:
                self.steps[id] = {"drafted": n}
            if not is_engines(rule):
                top_k = params.top_k if params.top_k > 0 else None
                found[
                    RequestSettings(rule, params.temperature, top_k, params.top_p)
                ].append(b)
        return found

    def _verdicts(
        self, setting: RequestSettings, which: Sequence[int], windows: Windows
    ) -> list[Verdict]:
        """Return the rule's verdicts on some requests' windows, up to logits that are not
        finite."""
        places, states = windows.places(which)
        tokens = windows.tokens[places].long()[:, :-1]
        lengths = torch.tensor(
            [windows.lengths[b] for b in which], device=tokens.device
        )
        logits = probs = None
        if windows.probs is not None:
            probs = windows.probs[places[:, :-1]]
            # rules divide logits by the temperature, and these probabilities are after it
            logits = probs.log() * (setting.temperature or 1)
        draft = cut_non_finite(Draft(tokens, lengths, logits=logits, probs=probs))
        logits_read = windows.logits[places]
        no_states = logits_read.new_zeros(*states.shape, 0)
        hidden = no_states if windows.hidden is None else windows.hidden[states]
        reading = Reading(logits_read, hidden)
        ctx = Context(
            rows=[self._row(windows.ids[b]) for b in which],
            temperature=setting.temperature,
            top_k=setting.top_k,
            top_p=setting.top_p,
            decode=self.decode,
            token_mask=partial(self.token_mask, windows.logits.shape[-1]),
            fresh_noise_per_window=setting.rule.needs.whole_window,
            window=draft.width,
        )
        if compares_distributions(setting.rule):
            self.judged += len(which)
        verdicts = setting.rule(draft, reading, ctx)
        sound = have_finite_max(reading.logits).tolist()
        return self._up_to_non_finite(verdicts, [windows.ids[b] for b in which], sound)

    def _up_to_non_finite(
        self, verdicts: list[Verdict], ids: Sequence[str], sound: list[list[bool]]
    ) -> list[Verdict]:
        """End each verdict before the first token that depends on NaN or infinite target logits,
        and log the first such window of a request. The token there is left to the engine, which
        does not end a request for such logits. `sound` [B][W + 1] is True where they are
        finite."""
        ended = []
        for id, verdict, states in zip(ids, verdicts, sound):
            first = next(
                (i for i in range(len(verdict.path) + 1) if not states[i]), None
            )
            # the engine itself picks the token after a window that is kept whole
            if first is not None and first < len(verdict.drafted):
                self._warn_of_non_finite(id, first)
                verdict = replace(verdict, path=verdict.path[:first], next_token=None)
            ended.append(verdict)
        return ended

    def _warn_of_non_finite(self, id: str, ahead: int) -> None:
        counts = self._counts(id)
        counts.non_finite += 1
        if counts.non_finite == 1:
            position = len(self.rows[id].prefix) + ahead
            self.logger.error(
                f"lenience: request {id}: the logits of {self.model_config.model} are NaN or "
                f"infinite at position {position}; no drafted token is kept there, and the engine "
                f"samples by itself ({CAUSES})"
            )

    def _row(self, id: str) -> Row:
        """Return a request's row for the rules, with its history so far."""
        length = self.requests.length(id)
        row = self.rows.get(id)
        if row is not None and length < row.position:
            self.resume([id])  # a session whose prompt now holds its earlier answers
        if row is None:
            seed = self.requests.params(id).seed
            # without a seed the noise is keyed by the id, which all workers know
            name = blake2b(id.encode(), digest_size=16).digest()
            prompt = self.requests.prompt(id)
            noise = Noise(0, name) if seed is None else Noise.for_prompt(seed, prompt)
            row = self.rows[id] = Row(noise, prompt)
        elif not row.position:
            row.prefix = self.requests.prompt(id)
        row.prefix += self.requests.tokens(id, row.position)
        row.position = length
        return row

    def _count(self, id: str, verdict: Verdict) -> None:
        """Count the accepted tokens of a window, up to the end of the request."""
        params = self.requests.params(id)
        counts = self._counts(id)
        room = (params.max_tokens or 2**31) - self.rows[id].position
        ends = set() if params.ignore_eos else params.all_stop_token_ids
        counts.passes += 1
        if self.server.steps:
            exact = verdict.exact
            scores = verdict.scores
            self.steps[id] = {
                "drafted": len(verdict.drafted),
                "exact": exact,
                "scores": scores,
                "kept": verdict.num_accepted,
            }
        for i in verdict.path[: max(0, room)]:
            if verdict.exact[i]:
                counts.kept_strictly += 1
            else:
                counts.kept_leniently += 1
                self.rows[id].lenient += 1
            if verdict.drafted[i] in ends:
                return

    def _counts(self, id: str) -> Counts:
        return self.counts.setdefault(id, Counts())

    def _leave_unjudged(self, setting: RequestSettings, ids: Sequence[str]) -> None:
        """Count windows that the engine gave no draft distribution for, so that the rule cannot
        decide. Raises RuntimeError if their share exceeds the server's limit."""
        self.unjudged += len(ids)
        for id in ids:
            self._counts(id).unjudged += 1
        windows = self.judged + self.unjudged
        share = self.unjudged / windows
        if windows >= WINDOWS_BEFORE_CHECK and share > self.server.max_unjudged:
            raise RuntimeError(
                f"rule {setting.rule}: {share:.0%} of {windows} windows could not be judged, as "
                f"the engine gave no draft distribution for them; max_unjudged is "
                f"{self.server.max_unjudged:.0%}"
            )

    def resume(self, ids: Iterable[str]) -> None:
        """Read the tokens of resumed requests again: the engine may have dropped those of the steps
        that were in flight at the preemption."""
        for id in ids:
            if row := self.rows.get(id):
                row.position = 0
                row.memory.clear()

    def check(self, id: str) -> None:
        """Raise InputError if a request's dial or parameters do not fit the server's rule."""
        params = self.requests.params(id)
        dial = dial_of(params.extra_args)
        if not isinstance(dial, str | float | int | None):
            raise InputError(f"{KEY} {dial!r}: must be a text or a number")
        check_request(self._rule_for(dial), params)

    def forget(self, ids: Iterable[str]) -> list[Counts]:
        """Drop the state of requests, and return their counts."""
        for id in ids:
            self.rows.pop(id, None)
        return [self.counts.pop(id) for id in ids if id in self.counts]

    def forget_finished(self) -> None:
        """Drop the state of finished requests."""
        for known in (self.rows, self.counts):
            for id in [id for id in known if id not in self.requests]:
                del known[id]
