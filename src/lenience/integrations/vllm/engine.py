"""vLLM as the engine of a pair, with the rules inside it."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, count
from typing import Any, Generic, TypeVar
from weakref import finalize

import torch

from lenience.core.errors import InputError, RunError, first_line
from lenience.core.needs import Parts
from lenience.core.types import Finish, Origin, Step, Trace
from lenience.decoding.decoder import Decoder
from lenience.decoding.dialogue import (
    WINDOW,
    ActiveDialogue,
    Compare,
    Comparisons,
    Continue,
    Dialogue,
    FinishedDialogue,
    Predict,
)
from lenience.decoding.generation import Generation, Reporting
from lenience.decoding.guesses import Guesses, guess, guesses_of
from lenience.decoding.pair import Pair
from lenience.decoding.soundness import CAUSES
from lenience.drafting.base import DrafterSpec
from lenience.drafting.model import DraftModel
from lenience.drafting.stops import Fixed
from lenience.integrations.engine_rules.inputs import compares_distributions
from lenience.integrations.vllm.checks import (
    check_reads,
    vllm_version,
)
from lenience.integrations.vllm.drafters import speculation
from lenience.models.generation_config import processors_of
from lenience.models.lm import LM
from lenience.models.memory import free_bytes
from lenience.models.prompts import Prompt
from lenience.rules.baselines import Baseline
from lenience.serving.dial import ANY, KEY

T = TypeVar("T")
OF_PAIR = (
    "model",
    "tokenizer",
    "dtype",
    "speculative_config",
    "additional_config",
    "quantization",
    "kv_cache_dtype",
    "hf_overrides",
    "enable_lora",
)
"""Arguments of vLLM that the pair sets, or that would change its models."""


@dataclass(frozen=True)
class EngineUse:
    """The purpose of one vLLM engine."""

    role: str
    """Model that answers."""
    window: int
    """Number of tokens drafted per window; 0 without a draft."""
    sampled: bool
    """True if the draft samples as the target does."""
    drafter: DrafterSpec = field(default_factory=DraftModel)
    share: float = 1.0
    """Share of the memory, for one of several concurrent engines."""


DIALOGUES = (
    EngineUse("draft", 0, False, share=0.25),
    EngineUse("target", WINDOW, False, share=0.75),
)
"""Engines that predict and continue in dialogues, the smaller first: each takes its share of the
free memory."""
MEMORY = "gpu_memory_utilization"
SPARE = 0.25
"""Share of the memory that must be free before another engine starts on a CPU."""
AHEAD = 256
"""Number of prompts that a certificate's setting answers at a time on a GPU, where each change
between settings may start an engine."""
ALL_MEMORY = 0.9
"""Default of the argument MEMORY: the share of a GPU's memory that one engine may take."""


class VllmPair(Pair):
    """A pair whose engine is vLLM. One engine per window, and one per model alone, starts on first
    use and ends with the pair or the process. `arguments` are passed to vLLM. Raises InputError for
    requests that vLLM cannot serve."""

    def __init__(self, pair: Pair, arguments: Mapping[str, Any]):
        super().__init__(pair.target, pair.draft, pair.name)
        taken = sorted(set(arguments) & set(OF_PAIR))
        if taken:
            raise InputError(
                f"engine argument {taken[0]}: is set by the pair; leave it out"
            )
        self.arguments = dict(arguments)
        self.engine_name = f"vllm {vllm_version()}"
        self._running: dict[EngineUse, Any] = {}
        self._numbers = count()

    @property
    def answers_at_a_time(self) -> int:  # type: ignore[override]
        """Return many prompts on a GPU, where one engine runs at a time."""
        return 1 if _on_cpu() else AHEAD

    @property
    def engine_setup(self) -> str:
        """Return vLLM's version with the arguments."""
        given = [f"{name}={self.arguments[name]}" for name in sorted(self.arguments)]
        return " ".join([self.engine_name, *given])

    def check(self, decoder: Decoder) -> None:
        super().check(decoder)
        rule = decoder.rule
        drafts = decoder.proposer is not None
        lacks_probs = compares_distributions(rule) and not decoder.temperature
        refused = {
            f"stop {decoder.stop}: vLLM drafts whole windows; leave it out": (
                drafts and not isinstance(decoder.stop, Fixed)
            ),
            f"tree {decoder.tree}: vLLM drafts chains; leave it out": (
                drafts and not decoder.tree.is_chain
            ),
            f"draft_temperature {decoder.draft_temperature}: vLLM's draft samples as "
            "the request "
            "does; leave it out": decoder.draft_temperature is not None,
            "window auto: each window is a vLLM of its own; name one": decoder.window
            == "auto",
            f"rule {rule}: compares the draft's distribution, which vLLM keeps for "
            "sampled answers "
            "alone; give a temperature above 0": lacks_probs,
        }
        for why, is_so in refused.items():
            if is_so:
                raise InputError(why)
        if drafts:
            speculation(decoder.drafter, self._draft_source())
        check_reads(rule)
        reader = self.reader(decoder)
        processors = processors_of(reader, sampling=decoder.temperature > 0)
        if processors:
            names = ", ".join(type(processor).__name__ for processor in processors)
            raise InputError(
                f"{reader.role} {reader.name!r}: its generation_config sets {names}, "
                "which is not passed to vLLM"
            )
        if reader.forced_eos is not None:
            raise InputError(
                f"{reader.role} {reader.name!r}: its generation_config sets "
                "forced_eos_token_id, which vLLM does not know; set it to None"
            )

    def by_engine(self, decoders: Sequence[Decoder]) -> list[list[Decoder]]:
        """Return the decoders of each engine: first the target alone, then the engines that serve
        the most decoders."""
        served = dict[EngineUse, list[Decoder]]()
        for decoder in decoders:
            served.setdefault(_engine_use(decoder), []).append(decoder)
        order = sorted(served, key=lambda use: (use.window > 0, -len(served[use])))
        return [served[use] for use in order]

    def reset_prefix_cache(self) -> None:
        """Empty the prefix caches, so that each answer reads its prompt."""
        for engine in self._running.values():
            if not engine.reset_prefix_cache():
                raise RunError(
                    "vLLM: its prefix cache is in use by other requests, so no answer can be timed"
                )

    def stream(
        self, prompt: Prompt, decoder: Decoder | None = None, **options: Any
    ) -> Iterator[Step]:
        """Raise InputError: vLLM returns whole answers here."""
        raise InputError("stream: needs lenience's own loop; use generate with vLLM")

    def _completed(
        self,
        prompts: Sequence[Prompt],
        decoder: Decoder,
        batch_size: int,
        telling: Reporting,
    ) -> Iterator[tuple[int, Generation]]:
        if telling.profile is not None:
            raise InputError(
                "profile: measures lenience's own loop; vLLM has its own profilers"
            )
        if telling.logprobs:
            raise InputError(
                "logprobs: need lenience's own loop; request them from vLLM itself"
            )
        ids = [self.encode(prompt, self.reader(decoder)) for prompt in prompts]
        return self._answers(decoder, ids, batch_size)

    def _answers(
        self, decoder: Decoder, prompts: list[list[int]], batch_size: int
    ) -> Iterator[tuple[int, Generation]]:
        """Answer prompts, at most `batch_size` at once."""
        use = _engine_use(decoder)
        window = use.window
        engine = self._engine(use)
        waiting = iter(enumerate(prompts))
        active: dict[str, _StreamedAnswer] = {}
        try:
            while True:
                while len(active) < batch_size and (next_one := next(waiting, None)):
                    number, prompt = next_one
                    name = f"{KEY}-{next(self._numbers)}"
                    out = decoder.answer(list(prompt), window, number)
                    active[name] = _StreamedAnswer(
                        number, out, decoder, self.reader(decoder)
                    )
                    params = self._params(decoder, window, number)
                    engine.add_request(name, {"prompt_token_ids": prompt}, params)
                if not active:
                    return
                for given in engine.step():
                    answer = active[given.request_id]
                    answer.add(given)
                    if given.finished:
                        del active[given.request_id]
                        yield answer.number, answer.out
        finally:
            if active:
                engine.abort_request(list(active))

    def _params(self, decoder: Decoder, window: int, number: int) -> Any:
        """Return vLLM's SamplingParams for the prompt with this index."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        config = self.reader(decoder).model.generation_config
        top_k, top_p = (
            getattr(config, name, None) if given is None else given
            for name, given in (("top_k", decoder.top_k), ("top_p", decoder.top_p))
        )
        dial = {KEY: str(decoder.rule)} if window else None
        return SamplingParams(
            temperature=decoder.temperature,
            top_k=top_k or 0,
            top_p=1.0 if top_p is None else top_p,
            seed=decoder.seed_of(number) if decoder.temperature else None,
            max_tokens=decoder.answer_tokens,
            stop=list(decoder.answer_stops),
            extra_args=dial,
            output_kind=RequestOutputKind.DELTA,
            skip_special_tokens=True,
        )

    def _engine(self, kind: EngineUse) -> Any:
        """Return the engine of a kind, and start it if it is not running. On a GPU, other engines
        end first. Raises InputError if vLLM rejects the models or the arguments."""
        if kind not in self._running:
            self._make_room(kind)
            os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
            from vllm import LLM

            lm = self.models[kind.role]
            options: dict[str, Any] = {"dtype": lm.dtype, "generation_config": "vllm"}
            if lm.context_length:
                options["max_model_len"] = lm.context_length
            if kind.window:
                options |= self._drafting(kind)
            options |= self.arguments
            if kind.share < 1:
                options[MEMORY] = kind.share * self.arguments.get(MEMORY, ALL_MEMORY)
            source = str(lm.model.name_or_path)
            try:
                llm = LLM(model=source, tokenizer=source, **options)
            except (ValueError, TypeError, RuntimeError) as error:
                raise InputError(
                    f"vLLM: cannot be started ({first_line(error)})"
                ) from error
            self._running[kind] = llm.llm_engine
            finalize(self, _end, llm.llm_engine)
        # the most recently used engine comes last
        self._running[kind] = self._running.pop(kind)
        return self._running[kind]

    def _make_room(self, kind: EngineUse) -> None:
        """End engines that leave no room for one of this kind, the least recently used first. On a
        GPU these are all, except those that share it with this kind, as each takes nearly all of
        its memory."""
        beside = DIALOGUES if kind in DIALOGUES else ()
        for other in [use for use in self._running if use not in beside]:
            if _on_cpu() and not _is_crowded():
                return
            _end(self._running.pop(other))

    def _drafting(self, kind: EngineUse) -> dict[str, Any]:
        """Return vLLM's arguments for the windows of a drafter, with any rule allowed per
        request."""
        return {
            "speculative_config": {
                **speculation(kind.drafter, self._draft_source()),
                "num_speculative_tokens": kind.window,
                "draft_sample_method": "probabilistic" if kind.sampled else "greedy",
            },
            "additional_config": {
                KEY: {"rule": "exact", "allow": [ANY], "steps": True}
            },
        }

    def _draft_source(self) -> str | None:
        """Return the folder or name of the draft model; None if the pair has none."""
        return None if self.draft is None else str(self.draft.model.name_or_path)

    def binding(self, decoder: Decoder) -> dict[str, Any]:
        """Return `Pair.binding` with vLLM's version."""
        return {**super().binding(decoder), "engine": self.engine_name}

    def converse(
        self,
        dialogues: Iterable[Dialogue[T]],
        *,
        size: int,
        capacity: int,
        sampling: Decoder | None = None,
        guesses: bool = True,
    ) -> Iterator[FinishedDialogue[T]]:
        """Run dialogues as `Pair.converse` does. One engine continues texts with the target, and
        its prefix cache holds earlier text. The draft model's tokens come from another engine, as
        log-probabilities along a text, and those of other drafters from lenience's own loop."""
        _refuse_sampling(sampling)
        drafter = sampling.drafter if sampling else DraftModel()
        if guesses and drafter.needs_draft:
            self.require_draft("mining")
        waiting: Iterator[tuple[int, Dialogue[T]]] = enumerate(dialogues)
        first = next(waiting, None)
        if first is None:
            return
        waiting = chain([first], waiting)
        by_model = guesses and drafter.proposes_as_draft
        asking: _OpenDialogues[T] = self._opened(
            drafter, None if by_model else capacity
        )
        held = asking.held
        comparisons = asking.comparisons
        try:
            while True:
                ended = list[FinishedDialogue[T]]()
                while compared := comparisons.next(wait=not held):
                    ended += self._ask(*compared, asking)
                while len(held) + len(comparisons) < size and (
                    next_one := next(waiting, None)
                ):
                    number, dialogue = next_one
                    ended += self._ask(
                        ActiveDialogue(number, dialogue, size), None, asking
                    )
                given = [out for engine in asking.engines for out in _stepped(engine)]
                for out in given:
                    ended += self._take(out, asking)
                yield from ended
                if not held and not len(comparisons):
                    return
        finally:
            comparisons.close()
            for engine in asking.engines:
                engine.abort_request(list(held))

    def _opened(
        self, drafter: DrafterSpec, capacity: int | None
    ) -> _OpenDialogues[Any]:
        """Start the engines that dialogues need. Continuations are exact, so any drafter serves
        for them: the draft model if there is one, else the drafter whose tokens are predicted, else
        none."""
        quickest = drafter if self.draft is None else DraftModel()
        if self.draft is None and quickest.needs_draft:
            decoder = Decoder(rule=Baseline("target"), window=0)
        else:
            decoder = Decoder(window=WINDOW, drafter=quickest)
        alone = [_use(decoder, int(decoder.window))]
        uses = DIALOGUES if capacity is None else alone
        return _OpenDialogues(
            decoder,
            engines=list(map(self._engine, uses)),
            continues=uses[-1],
            drafter=drafter,
            capacity=capacity,
        )

    def _take(self, out: Any, asking: _OpenDialogues[T]) -> list[FinishedDialogue[T]]:
        """Add an engine step's output to an answer, and resume its dialogue if the answer is
        finished."""
        asked = asking.held[out.request_id]
        asked.add(out, self.target.vocab_size)
        if not out.finished:
            return []
        del asking.held[out.request_id]
        return self._ask(asked.talk, asked.tokens, asking)

    def _ask(
        self, talk: ActiveDialogue[T], answer: Any, asking: _OpenDialogues[T]
    ) -> list[FinishedDialogue[T]]:
        """Send a dialogue's next request to its engine. Return the dialogue's result if it has
        ended."""
        question = talk.ask(answer)
        while asking.capacity is not None and isinstance(question, Predict):
            question = talk.ask(self._guess(talk, question, asking))
        if question is None:
            asking.guesses.pop(talk, None)
            return [talk.ended] if talk.ended else []
        if isinstance(question, Compare):
            asking.comparisons.begin(talk, question)
            return []
        name = f"{KEY}-{next(self._numbers)}"
        if isinstance(question, Predict):
            kind = DIALOGUES[0]
            params = _predicting()
            ids = question.ids[:-1]
        else:
            decoder = replace(
                asking.decoder,
                max_new_tokens=question.limit,
                stop_strings=question.stop_strings,
            )
            kind = asking.continues
            params = self._params(decoder, kind.window, 0)
            ids = question.ids
        asking.held[name] = _OpenRequest(talk, question, kind)
        self._running[kind].add_request(name, {"prompt_token_ids": list(ids)}, params)
        return []

    def _guess(
        self, talk: ActiveDialogue[T], question: Predict, asking: _OpenDialogues[T]
    ) -> list[int | None]:
        """Return the drafter's tokens along a text, by lenience's own loop."""
        assert asking.capacity is not None
        decoder = self.decoder({"drafter": asking.drafter})
        if talk not in asking.guesses:
            asking.guesses[talk] = guesses_of(self, decoder, asking.capacity)
        ctx = self.context(decoder)
        predicted, read = guess(
            asking.guesses[talk], question, ctx, seed=0, threads=self.torch_threads
        )
        talk.cost.draft_tokens += read
        return predicted


def _engine_use(decoder: Decoder) -> EngineUse:
    """Return the engine that answers with a decoder."""
    return _use(decoder, 0 if decoder.alone else int(decoder.window))


def _use(decoder: Decoder, window: int) -> EngineUse:
    """Return the engine that a decoder needs for windows of a length, 0 for none."""
    role = decoder.alone or "target"
    if not window:
        return EngineUse(role, 0, False)
    samples = bool(decoder.temperature) and Parts.PROBS in decoder.drafter.offers
    return EngineUse(role, window, samples, decoder.drafter)


def _refuse_sampling(sampling: Decoder | None) -> None:
    """Raise InputError for sampled mining."""
    if sampling and sampling.temperature:
        raise InputError(
            f"temperature {sampling.temperature:g}: sampled mining needs lenience's "
            "own loop; leave out --engine vllm"
        )


@dataclass(frozen=True)
class _OpenDialogues(Generic[T]):
    """The dialogues in flight: those with a request to vLLM, by its name, and those comparing."""

    decoder: Decoder
    engines: Sequence[Any]
    continues: EngineUse
    """Engine that continues texts."""
    drafter: DrafterSpec
    """Drafter whose tokens are predicted."""
    capacity: int | None
    """Maximum number of tokens of a text, if lenience's own loop predicts the drafter's tokens;
    None if an engine predicts the draft model's."""
    held: dict[str, _OpenRequest[T]] = field(default_factory=dict)
    comparisons: Comparisons[ActiveDialogue[T]] = field(default_factory=Comparisons)
    guesses: dict[ActiveDialogue[T], Guesses] = field(default_factory=dict)


@dataclass
class _OpenRequest(Generic[T]):
    """A request that a dialogue has sent to vLLM."""

    talk: ActiveDialogue[T]
    question: Continue | Predict
    use: EngineUse
    """Engine that answers."""
    tokens: list[int] = field(default_factory=list)
    """Tokens of the answer so far."""

    def add(self, given: Any, vocab_size: int) -> None:
        """Add the tokens of one engine step, and their cost."""
        (part,) = given.outputs
        cost = self.talk.cost
        ids = self.question.ids
        if isinstance(self.question, Predict):
            asked = given.prompt_logprobs[self.question.start :]
            if any(
                math.isnan(each.logprob) for some in asked for each in some.values()
            ):
                raise RunError(
                    f"the draft: its logits are NaN or infinite in vLLM; {CAUSES}"
                )
            likeliest = [
                max(
                    (id for id in some if id < vocab_size),
                    key=lambda id: some[id].logprob,
                )
                for some in asked
            ]
            self.tokens = [*likeliest, *part.token_ids]
            cost.draft_tokens += len(ids) - 1
        elif part.token_ids:
            unread = 1 if self.tokens else len(ids) - (given.num_cached_tokens or 0)
            drafted = self.use.window if self.tokens else 0  # lookups may draft fewer
            cost.target_passes += 1
            cost.target_tokens += unread + drafted
            if self.use.window and Parts.PROBS in self.use.drafter.offers:
                cost.draft_tokens += unread + max(0, drafted - 1)
            self.tokens += part.token_ids


def _on_cpu() -> bool:
    from vllm.platforms import current_platform

    return bool(current_platform.is_cpu())


def _is_crowded() -> bool:
    """Return True if less than the share SPARE of the memory is free."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    free = free_bytes(torch.device("cpu"))
    return free is not None and free < SPARE * total


def _end(engine: Any) -> None:
    """Shut down an engine and wait for the thread that receives its outputs. Tensors of the last
    output that are freed while Python exits would abort the process."""
    engine.engine_core.shutdown()
    thread = getattr(engine.engine_core, "output_queue_thread", None)
    if thread is not None:
        thread.join(timeout=10)


def _predicting() -> Any:
    """Return the sampling parameters of the draft's predictions: one new token, and the two highest
    log-probabilities along the prompt, as one of the two tokens may lie beyond the vocabulary."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        temperature=0,
        max_tokens=1,
        prompt_logprobs=2,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def _stepped(engine: Any) -> list[Any]:
    """Return the outputs of an engine's next step; none if it has no work."""
    return engine.step() if engine.has_unfinished_requests() else []


class _StreamedAnswer:
    """An answer that vLLM returns step by step."""

    def __init__(self, number: int, out: Generation, decoder: Decoder, reader: LM):
        self.number = number
        self.out = out
        self.decoder = decoder
        self.reader = reader
        self.began = time.perf_counter()
        self.parts: list[str] = []

    def add(self, given: Any) -> None:
        """Add the tokens of one engine step."""
        (part,) = given.outputs
        tokens = list(part.token_ids)
        self.parts.append(part.text)
        counted = (given.kv_transfer_params or {}).get(KEY, {}).get("step")
        finish = _finish(part, tokens, self.reader) if given.finished else None
        first = not self.out.tokens
        if tokens or finish:
            read = len(self.out.prompt_tokens) if first else 1
            counted = counted or {}
            passes = Parts.PROBS in self.decoder.drafter.offers
            step = _step(tokens, counted, read, passes)
            self.out.add(replace(step, finish=finish))
        if given.finished:
            text = "".join(self.parts)
            if not self.decoder.answer_stops:
                text = self.reader.decode(self.out.tokens)
            seconds = time.perf_counter() - self.began
            self.out.end(seconds, text, by_draft=self.decoder.alone == "draft")


def _finish(part: Any, tokens: Sequence[int], reader: LM) -> Finish:
    if part.finish_reason == "stop":
        return "eos" if tokens and tokens[-1] in reader.eos_ids else "stop"
    return "length"


def _step(
    tokens: list[int], counted: Mapping[str, Any], read: int, has_model: bool
) -> Step:
    """Return the Step of `tokens` after a window. `counted` holds the number of drafted tokens and
    the rule's decision; without a decision, vLLM itself decided and accepted all tokens but the
    last. The target ran on `read` tokens besides the window. `has_model` is True if a model
    drafts."""
    drafted = counted.get("drafted", 0)
    kept = counted.get("kept", min(drafted, max(0, len(tokens) - 1)))
    exact = counted.get("exact", [True] * kept)
    scores = [*counted.get("scores", [None] * kept), None]
    trace = []
    for i, token in enumerate(tokens):
        origin: Origin = "bonus" if kept == drafted else "correction"
        if i < kept:
            origin = "draft" if exact[i] else "draft-lenient"
        trace.append(Trace(token, origin, scores[i]))
    by_draft = sum(entry.origin.startswith("draft") for entry in trace)
    # an EOS or the token limit may end the answer within the accepted tokens
    exact = exact[:by_draft]
    strictly = next((i for i, accepted in enumerate(exact) if not accepted), len(exact))
    return Step(
        trace=trace,
        drafted=drafted,
        accepted_exact=strictly,
        accepted_lenient=by_draft - strictly,
        text="",
        target_tokens=read + drafted,
        draft_passes=drafted if has_model else 0,
        draft_tokens=drafted,
    )
