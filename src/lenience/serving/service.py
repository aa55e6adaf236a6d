"""A pair behind a server: what requests may ask for, and the batches that decode them."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from lenience.certification.certificate import narrowed
from lenience.core.context import Context
from lenience.core.errors import InputError
from lenience.decoding.decoder import Decoder
from lenience.decoding.pair import SEED_BITS, Pair
from lenience.rules.combine import AnyOf, as_rule
from lenience.rules.lossless import is_lossless
from lenience.rules.strict import Exact
from lenience.serving.batch import Job, RuleOfRow, RunningBatch
from lenience.serving.dial import Dial, certified_rule, holding_certificate, shown
from lenience.serving.worker import DecodingThread, Lane

MAIN = "main"
"""Lane of the API's requests."""
RACERS = ("target", "strict", "lenient")
"""Lanes of the live page's columns. Each has a batch of its own, so that the columns' speeds can be
compared."""
LEAST_CONTEXT = 256
"""Minimum number of tokens per request that memory must have room for."""


@dataclass(frozen=True)
class ServeConfig:
    """Settings of a server."""

    max_rows: int = 16
    """Maximum number of requests that are decoded at once."""
    max_queue: int = 256
    """Maximum number of waiting requests; further ones are refused."""
    context: int | None = None
    """Maximum number of tokens of a prompt with its answer. Default: the models' context, or what
    memory has room for."""
    name: str | None = None
    """Name of the model in the API. Default: the target's."""
    allow: tuple[AnyOf, ...] = ()
    """Rules that a request may choose although they are more lenient than the server's."""
    allow_any: bool = False
    strict: Decoder | None = None
    """Decoder of the live page's strict column. Default: the server's, with the rule exact."""

    def __post_init__(self) -> None:
        for name in ("max_rows", "max_queue"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} {getattr(self, name)}: must be 1 or more")
        if self.context is not None and self.context < 2:
            raise InputError(f"context {self.context}: must be 2 tokens or more")


@dataclass(frozen=True)
class Penalties:
    """Changes of the target's logits that a request asks for."""

    presence: float = 0.0
    frequency: float = 0.0
    repetition: float | None = None
    """Penalty in place of the model's own; None for the model's."""
    bias: Mapping[int, float] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return self != Penalties()

    def processors(self, prompt_length: int) -> list[Any]:
        """Return the logits processors, in vLLM's order."""
        found: list[Any] = []
        if self.bias:
            biases: Any = {(token,): bias for token, bias in self.bias.items()}
            found.append(SequenceBiasLogitsProcessor(biases))
        if self.repetition not in (None, 1.0):
            assert self.repetition is not None
            found.append(RepetitionPenaltyLogitsProcessor(self.repetition))
        if self.presence or self.frequency:
            found.append(CountPenalty(prompt_length, self.presence, self.frequency))
        return found


class CountPenalty(LogitsProcessor):
    """Lower the logits of tokens that the answer holds already: by `presence`, and by `frequency`
    for each time (OpenAI's API reference). Tokens of the prompt do not count."""

    def __init__(self, prompt_length: int, presence: float, frequency: float):
        self.prompt_length = prompt_length
        self.presence = presence
        self.frequency = frequency

    def __call__(
        self, input_ids: torch.LongTensor, scores: torch.FloatTensor
    ) -> torch.FloatTensor:
        """Return the scores [B, V] after the tokens [B, T]."""
        new = input_ids[:, self.prompt_length :]
        counts = torch.zeros_like(scores)
        counts.scatter_add_(1, new, torch.ones_like(new, dtype=scores.dtype))
        lowered = scores - self.presence * (counts > 0) - self.frequency * counts
        return lowered  # type: ignore[return-value]


class Service:
    """A pair with the settings of a server: it makes requests, and the worker that decodes them.

    A request may have another rule, as far as the dial allows, and other sampling parameters; the
    drafter, the tree, the stop condition and the window are the server's.
    """

    def __init__(self, pair: Pair, decoder: Decoder, config: ServeConfig):
        """Raises InputError for a decoder that cannot be served, and for caches that do not fit
        into memory."""
        self.pair = pair
        self.config = config
        self.decoder = decoder
        self.dial = _dial(decoder, config)
        _check(pair, decoder, self.dial)
        if config.strict is not None:
            _check_strict(pair, config.strict)
        self.rule = RuleOfRow(self.dial.rules)
        own = pair.name if pair.name == "built-in" else pair.target.name
        self.name = config.name or own
        self._base = pair.context(decoder)
        self._contexts: dict[tuple[Any, ...], Context] = {}
        self._checked = set[Decoder]()
        self.context, batch = self._batch_that_fits()
        self._batch: RunningBatch | None = batch

    @property
    def shown(self) -> str:
        """Return the server's rule, without the folders of heads and runs."""
        bound = self.decoder.bound_to
        return "certified" if bound else shown(self.dial.rule)

    @property
    def strict(self) -> Decoder:
        """Return the decoder of the live page's strict column."""
        exact = as_rule(Exact())
        return self.config.strict or replace(self.decoder, rule=exact, bound_to=None)

    @property
    def lenient(self) -> Decoder | None:
        """Return the decoder of the live page's lenient column; None if no rule is lenient."""
        rule = next((rule for rule in self.dial.rules if not is_lossless(rule)), None)
        if rule is None:
            return None
        if rule == self.decoder.rule:
            return self.decoder
        return replace(self.decoder, rule=rule, bound_to=None)

    def worker(self) -> DecodingThread:
        """Return a worker that decodes this service's requests."""
        lanes = {MAIN: Lane(self._main_batch, self.config.max_queue)}
        for name in RACERS:
            lanes[name] = Lane(partial(self._racer, name), self.config.max_queue)
        return DecodingThread(lanes)

    def job(
        self,
        prompt: list[int],
        options: Mapping[str, Any],
        dial: object = None,
        penalties: Penalties | None = None,
        *,
        streams: bool = True,
        ignore_eos: bool = False,
    ) -> Job:
        """Make a request from the ids of its prompt, its options of decoding, and its dial.
        Raises InputError for what the server does not allow."""
        penalties = penalties or Penalties()
        decoder = self._decoder(options, dial)
        if decoder.bound_to and (penalties or ignore_eos):
            raise InputError(
                f"penalties, logit_bias and ignore_eos: rule {decoder.bound_to.source} is not "
                "certified with them; leave them out, or send lenience exact"
            )
        self._check_length(len(prompt), decoder.answer_tokens)
        sampling = self._sampling(decoder, penalties, len(prompt))
        return Job.of(
            self.pair,
            decoder,
            prompt,
            sampling,
            streams=streams,
            ignore_eos=ignore_eos,
        )

    def racer(self, name: str, prompt: list[int], new: int, dial: object) -> Job:
        """Make the request of a column of the live page. Raises InputError for a dial that the
        server does not allow."""
        decoder = self.racing(name)
        if decoder.bound_to:
            new = min(new, decoder.max_new_tokens)
        if name == "lenient" and (decoder.bound_to or dial is not None):
            decoder = self._decoder({"max_new_tokens": new}, dial)
        else:
            decoder = replace(decoder, max_new_tokens=new)
        self._check_length(len(prompt), decoder.answer_tokens)
        sampling = self.pair.context(decoder)
        job = Job.of(self.pair, decoder, prompt, sampling)
        job.alternatives = 1
        return job

    def room(self, prompt: Sequence[int]) -> int:
        """Return the maximum number of new tokens after a prompt."""
        return self.context - len(prompt)

    def _decoder(self, options: Mapping[str, Any], dial: object) -> Decoder:
        """Return the checked decoder of a request."""
        rule = self.dial.rule_for(dial)
        if self.decoder.bound_to and rule == self.dial.rule:
            asked = narrowed(self.decoder, options)  # checked at the start
        else:
            asked = replace(self.decoder, rule=rule, bound_to=None, **options)
            self._check_asked(asked, dial)
        if asked.temperature and "seed" not in options:
            asked = replace(asked, seed=secrets.randbits(SEED_BITS))
        return asked

    def _check_asked(self, asked: Decoder, dial: object) -> None:
        """Raise InputError if the caches or the models do not fit a request's decoder."""
        if not self.rule.can_ask(asked.rule):
            raise InputError(
                f"lenience {dial!r}: reads states of a model that this server does not keep; "
                "start it with --allow and this rule"
            )
        kind = replace(asked, seed=0, max_new_tokens=1, stop_strings=())
        if kind not in self._checked:
            self.pair.check(asked)
            if len(self._checked) < 1000:
                self._checked.add(kind)

    def _check_length(self, prompt: int, new: int) -> None:
        if prompt + new > self.context:
            raise InputError(
                f"this server has room for {self.context} tokens, prompt and answer together; the "
                f"prompt has {prompt}, and {new} new ones are asked for: shorten one of them"
            )

    def _sampling(
        self, decoder: Decoder, penalties: Penalties, prompt_length: int
    ) -> Context | None:
        """Return the sampling parameters of a request; None if they are the batch's. Requests with
        equal parameters share one object, so that they are judged together."""
        key = _parameters(decoder)
        if not penalties and key == _parameters(self.decoder):
            return None
        if not penalties and key in self._contexts:
            return self._contexts[key]
        found = self.pair.context(decoder)
        if penalties:
            own = penalties.processors(prompt_length)
            chain = LogitsProcessorList([*self._own_processors(found, penalties), *own])
            return replace(found, processors=chain)
        if len(self._contexts) < 1000:
            self._contexts[key] = found
        return found

    def _own_processors(self, found: Context, penalties: Penalties) -> list[Any]:
        """Return the model's own logits processors, without those that a request replaces."""
        replaced = penalties.repetition is not None
        made = list[Any]()
        for each in found.processors or []:
            if not (replaced and isinstance(each, RepetitionPenaltyLogitsProcessor)):
                made.append(each)
        return made

    def _batch_that_fits(self) -> tuple[int, RunningBatch]:
        """Return the maximum number of tokens per request and a batch with caches for it. Without a
        given number it is the models' context, halved until memory has room for it."""
        known = [lm.context_length for lm in self.pair.models.values()]
        context = min((n for n in known if n), default=1 << 15)
        if self.config.context is not None:
            longest = self.pair.target.context_length or self.config.context
            if self.config.context > longest:
                raise InputError(
                    f"context {self.config.context}: {self.pair.target.name!r} has room for "
                    f"{longest} tokens"
                )
            context = self.config.context
        while True:
            try:
                return context, self._new_batch(self.decoder, context)
            except InputError:
                if self.config.context is not None or context < 2 * LEAST_CONTEXT:
                    raise
                context //= 2

    def _new_batch(
        self, decoder: Decoder, context: int, rows: int | None = None
    ) -> RunningBatch:
        rows = self.config.max_rows if rows is None else rows
        return RunningBatch(self.pair, decoder, self.rule, rows, context)

    def _main_batch(self) -> RunningBatch:
        batch = self._batch or self._new_batch(self.decoder, self.context)
        self._batch = None
        return batch

    def _racer(self, name: str) -> RunningBatch:
        return self._new_batch(self.racing(name), self.context, rows=1)

    def racing(self, name: str) -> Decoder:
        """Return the decoder of a column of the live page."""
        if name == "target":
            exact = as_rule(Exact())
            return replace(self.decoder, rule=exact, window=0, bound_to=None)
        return self.strict if name == "strict" else self.lenient or self.strict


def _parameters(decoder: Decoder) -> tuple[Any, ...]:
    """Return the options of a decoder that determine its sampling parameters."""
    return (
        decoder.temperature,
        decoder.draft_temperature,
        decoder.top_k,
        decoder.top_p,
        decoder.rule.needs.whole_window,
    )


def _check_strict(pair: Pair, strict: Decoder) -> None:
    """Raise InputError for a setting that cannot be the live page's strict column."""
    if not is_lossless(strict.rule):
        raise InputError(f"--strict {strict}: its rule is lenient; name exact")
    _check(pair, strict, _dial(strict, ServeConfig()))


def _dial(decoder: Decoder, config: ServeConfig) -> Dial:
    """Return the rules that requests may have."""
    if decoder.bound_to:
        if config.allow or config.allow_any:
            raise InputError(
                f"--allow: rule {decoder.bound_to.source} is certified at one setting; leave it out"
            )
        source = decoder.bound_to.source
        certificate = holding_certificate(source)
        return Dial(certified_rule(certificate, source), certificate=certificate)
    if not isinstance(decoder.rule, AnyOf):
        raise InputError(
            f"rule {decoder.rule}: decodes without a window; name exact, and --window 0 for the "
            "target alone"
        )
    return Dial(decoder.rule, config.allow, config.allow_any)


def _check(pair: Pair, decoder: Decoder, dial: Dial) -> None:
    """Raise InputError for a decoder that cannot be served with a rule for each request."""
    if decoder.window == "auto":
        raise InputError(
            "window auto: is measured on prompts, which a server does not have yet; lenience tune "
            "finds the fastest window"
        )
    if decoder.stop.skips_verification:
        raise InputError(
            f"stop {decoder.stop}: keeps tokens that the target does not read, so no request "
            "could be exact; take another stop condition"
        )
    if decoder.tree.draws:
        raise InputError(
            f"tree {decoder.tree}: draws its tokens, at one temperature for all requests; take a "
            "tree that chooses them, such as dynamic:8"
        )
    for rule in dial.rules:
        bound = decoder.bound_to if rule == decoder.rule else None
        pair.check(replace(decoder, rule=rule, bound_to=bound))
