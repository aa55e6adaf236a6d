"""Mining on a rule's own answers: which leniently accepted tokens changed the answer."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from lenience.certification.certificate import refuse_certified
from lenience.core.context import Context, Row
from lenience.core.errors import InputError
from lenience.core.noise import Noise
from lenience.decoding.decoder import Decoder
from lenience.decoding.generation import Generation
from lenience.decoding.pair import Pair
from lenience.decoding.response import until_stop
from lenience.drafting.stops import Fixed
from lenience.models.generation_config import processors_of
from lenience.models.session import Session
from lenience.runs.answers import BY_LENIENCE
from lenience.runs.record import MinedAnswers, MinedSample, MiningCost, Mismatch
from lenience.tasks import Sample, Task


def check_policy(policy: Decoder) -> None:
    """Raise InputError for a decoder whose answers cannot be mined. A change can be traced to an
    accepted token only if the decoder continues as the target does."""
    if policy.bound_to:
        refuse_certified([policy.bound_to.source])
    if policy.alone or not policy.rule.goes_on_as_target or policy.temperature > 0:
        what = "decodes greedily and continues as the target does after a rejection"
        raise InputError(
            f"--policy {policy}: name a rule that {what}, such as judge:RUN/judge@T"
        )


@dataclass
class _Answered:
    """A rule's answer to a sample, with the target's own answer."""

    sample: Sample
    lenient: Generation
    own: Generation
    kept: list[Mismatch]
    """Leniently accepted tokens that differ from the target's own, without labels."""
    answer: str | None
    """Final answer in the target's own response."""
    same: bool | None
    """True if the rule's answer is the same; None if there is nothing to compare."""
    continued: list[Generation] = field(default_factory=list)
    """Target's continuations after each token in `kept`, for an answer that is lost."""

    @property
    def lost(self) -> bool:
        return self.answer is not None and not self.same


def search_on_policy(
    pair: Pair, task: Task, samples: Sequence[Sample], policy: Decoder, batch_size: int
) -> Iterator[MinedSample]:
    """Yield the record of each of `samples`, decoded `batch_size` at a time.

    If the answer equals the target's, all leniently accepted tokens are harmless. Otherwise the
    target continues after each of them. The first token after which the target's answer differs is
    important, earlier tokens are harmless, and later tokens get no label.
    """
    strict = policy.for_strict().with_parts(stop=Fixed())
    for start in range(0, len(samples), batch_size):
        began = time.perf_counter()
        part = samples[start : start + batch_size]
        answered = _answer(pair, task, part, policy, strict)
        lost = [answer for answer in answered if answer.lost]
        asked = []
        for answer in lost:
            for mismatch in answer.kept:
                asked.append(
                    answer.lenient.prompt_tokens
                    + answer.lenient.tokens[: mismatch.position + 1]
                )
        outs = iter(pair.generate_batch(asked, strict, batch_size=batch_size))
        for answer in lost:
            answer.continued = [next(outs) for _ in answer.kept]
        seconds = (time.perf_counter() - began) / len(part)
        yield from (_record(pair, task, answer, policy, seconds) for answer in answered)


def _answer(
    pair: Pair, task: Task, samples: Sequence[Sample], policy: Decoder, strict: Decoder
) -> list[_Answered]:
    """Return both answers to each sample. The target decodes only the samples with leniently
    accepted tokens; for the others its answer is the same."""
    size = max(1, len(samples))
    outs = pair.generate_batch(
        [sample.prompt for sample in samples], policy, batch_size=size
    )
    kept = [_kept(pair, out) for out in outs]
    asked = [out.prompt_tokens for out, some in zip(outs, kept) if some]
    alone = iter(pair.generate_batch(asked, strict, batch_size=size))
    answered = []
    for sample, out, some in zip(samples, outs, kept):
        own = next(alone) if some else out
        answer = task.answer(own.text, sample)
        same = task.same(task.answer(out.text, sample), answer, sample)
        answered.append(_Answered(sample, out, own, some, answer=answer, same=same))
    return answered


def _kept(pair: Pair, out: Generation) -> list[Mismatch]:
    """Return the leniently accepted tokens with the target's own tokens at their positions."""
    at = [i for i, entry in enumerate(out.trace) if entry.origin in BY_LENIENCE]
    if not at:
        return []
    response = out.tokens
    session = Session(pair.target)
    reading = session.read([out.prompt_tokens + response[:-1]], len(response))
    processors = processors_of(pair.target, sampling=False) or None
    ctx = Context([Row(Noise(0, b""), out.prompt_tokens)], processors=processors)
    logits = ctx.process(reading.logits, torch.tensor([response[:-1]]))
    greedy = logits[0, :, : pair.target.vocab_size].argmax(-1).tolist()
    found = list[Mismatch]()
    for i in at:
        if greedy[i] != response[i]:
            found.append(
                Mismatch(
                    position=i,
                    target_token=greedy[i],
                    draft_token=response[i],
                    important=None,
                )
            )
    return found


def _record(
    pair: Pair, task: Task, answered: _Answered, policy: Decoder, seconds: float
) -> MinedSample:
    """Return the journal record of an answer."""
    final, mismatches = _labelled(pair, task, answered, policy)
    _, text = until_stop(pair.target, final, policy.stop_strings)
    outs = [
        answered.lenient,
        *answered.continued,
        *([] if answered.own is answered.lenient else [answered.own]),
    ]
    return MinedSample(
        id=answered.sample.id,
        prompt_ids=answered.lenient.prompt_tokens,
        response_ids=answered.own.tokens,
        final_ids=final,
        mismatches=mismatches,
        answers=MinedAnswers(
            target=answered.answer,
            final=task.answer(text, answered.sample),
            reference=answered.sample.reference,
        ),
        cost=MiningCost(
            target_passes=sum(out.target_passes for out in outs),
            target_tokens=sum(out.target_tokens for out in outs),
            draft_tokens=sum(out.draft_tokens for out in outs),
            seconds=round(seconds, 3),
        ),
    )


def _labelled(
    pair: Pair, task: Task, answered: _Answered, policy: Decoder
) -> tuple[list[int], list[Mismatch]]:
    """Return the response that keeps the harmless tokens, and the labels. Labelling stops at the
    first important token."""
    if not answered.lost:
        label = {"important": None if answered.same is None else False}
        return answered.lenient.tokens, [
            mismatch.model_copy(update=label) for mismatch in answered.kept
        ]
    final = answered.own.tokens
    labelled = []
    for mismatch, out in zip(answered.kept, answered.continued):
        settled = answered.lenient.tokens[: mismatch.position + 1]
        if final[: mismatch.position] != settled[:-1]:
            break  # the target's top tokens tie, and another batch rounds otherwise
        whole = (settled + out.tokens)[: policy.max_new_tokens]
        response, text = until_stop(pair.target, whole, policy.stop_strings)
        found = task.answer(text, answered.sample)
        same = task.same(found, answered.answer, answered.sample)
        labelled.append(mismatch.model_copy(update={"important": not same}))
        if not same:
            break
        final = response
    return final, labelled
