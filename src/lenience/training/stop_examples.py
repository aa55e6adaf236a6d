"""Training data of stop heads and gates: states of drafted tokens with their outcomes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from lenience.core.context import Context, Row
from lenience.core.errors import InputError
from lenience.core.noise import Noise, gumbel_argmax
from lenience.core.protocols import Rule
from lenience.decoding.decoder import Decoder
from lenience.decoding.pair import Pair
from lenience.heads.head import Inputs
from lenience.models.generation_config import processors_of
from lenience.models.session import Session
from lenience.rules.baselines import Baseline
from lenience.rules.combine import as_rule
from lenience.rules.lenient import Random
from lenience.runs.record import MinedSample

STOP_TOKENS = 64
"""Maximum number of tokens per answer in a stop's training data."""
STOP_WINDOW = 32
"""Window of the decoding that a stop learns from. It is wide, since the bonus after a fully
accepted window is not a drafted token."""
INTERLEAVED = 8
"""Window for interleaving both models' tokens. The target also writes the token after a full
window. A coin per token fills a window with probability 2^-8."""
GATE_PREFIXES = 12
"""Number of a gate's training rows per sample and kind of prefix."""

Labelled = tuple[Tensor, Tensor]
"""States [m, F] of a sample, and their labels [m]."""


def stop_states(
    pair: Pair, sample: MinedSample, inputs: Inputs, sampling: Decoder | None = None
) -> Labelled:
    """Return a stop's training rows for tokens spread evenly over the target's own answer: the
    draft's states [m, H] before the token that it would draft, or after it, and whether the answer
    has another token there [m]. `sampling` holds the options by which the answer was drawn,
    greedily by default; the draft's tokens are drawn with the same noise, as in decoding."""
    response = torch.tensor(sample.response_ids)
    places = torch.arange(0, len(response), max(1, -(-len(response) // STOP_TOKENS)))
    read = _ReadAnswer(pair, sample.prompt_ids, sample.response_ids)
    drafted = read.drafted_tokens(sampling or Decoder())[places]
    rejected = drafted != response[places]
    return read.states(places, drafted, inputs), rejected.to(torch.uint8)


def decided_states(
    pair: Pair, samples: Sequence[MinedSample], inputs: Inputs, of: Rule
) -> list[Labelled]:
    """Return training rows for the tokens that the draft proposes while each sample is answered
    with the rule `of`: the draft's states [m, H] before or after each token, and whether the rule
    rejects the token [m]. Raises InputError if the states after drawn tokens are requested, because
    answers do not keep these tokens."""
    sampling = of.needs.sampling
    if sampling and inputs.tokens == ("draft",):
        raise InputError(
            f"--tokens draft: {of} rejects drawn tokens, which answers do not keep; "
            "leave it out, or name a rule that decodes greedily"
        )
    decoder = Decoder(
        rule=of,
        window=STOP_WINDOW,
        max_new_tokens=max(len(sample.response_ids) for sample in samples),
        temperature=float(sampling),
    )
    prompts = [sample.prompt_ids for sample in samples]
    outs = pair.generate_batch(prompts, decoder, batch_size=32)
    labelled = []
    for out in outs:
        origins = [entry.origin for entry in out.trace]
        places = [i for i, origin in enumerate(origins) if origin != "bonus"]
        places = places[:: max(1, -(-len(places) // STOP_TOKENS))]
        rejected = torch.tensor(
            [origins[i] == "correction" for i in places], dtype=torch.bool
        )
        at = torch.tensor(places, dtype=torch.long)
        read = _ReadAnswer(pair, out.prompt_tokens, out.tokens)
        kept = torch.tensor(out.tokens)[at]
        drafted = torch.where(rejected, read.drafted_tokens(Decoder())[at], kept)
        labelled.append((read.states(at, drafted, inputs), rejected.to(torch.uint8)))
    return labelled


class _ReadAnswer:
    """An answer with the draft's states along it."""

    def __init__(self, pair: Pair, prompt: list[int], response: list[int]):
        self.pair = pair
        self.prompt = prompt
        self.response = response
        self.session = Session(pair.require_draft("a stop head"))
        self.reading = self.session.read([prompt + response], len(response) + 1)

    def drafted_tokens(self, sampling: Decoder) -> Tensor:
        """Return the tokens [n + 1] that the draft would propose before each of the answer's n
        tokens, and after the last."""
        decoder = replace(sampling, window=1)
        self.pair.check(decoder)
        ctx = self.pair.context(decoder)
        ctx.rows = [Row(Noise.for_prompt(decoder.seed_of(0), self.prompt), self.prompt)]
        logits = ctx.process(self.reading.logits, torch.tensor([self.response]))
        return ctx.drafting().draw(logits[..., : self.pair.target.vocab_size])[0].cpu()

    def states(self, places: Tensor, drafted: Tensor, inputs: Inputs) -> Tensor:
        """Return the draft's states [m, H] at `places` [m] of the answer, before the tokens
        `drafted` [m] or, depending on `inputs`, after them."""
        along = self.reading.hidden[0].cpu()
        if "draft" not in inputs.tokens:
            return along[places].contiguous()
        whole = self.prompt + self.response
        states = list[Tensor]()
        # from right to left each is a roll-back
        for place, token in zip(places.flip(0).tolist(), drafted.flip(0).tolist()):
            if place < len(self.response) and self.response[place] == token:
                states.append(along[place + 1])
                continue
            before = whole[: len(self.prompt) + place]
            states.append(self.session.read([[*before, token]]).hidden[0, 0].cpu())
        return torch.stack(states[::-1]) if states else along[:0]


def gate_states(
    pair: Pair, samples: Sequence[MinedSample], inputs: Inputs
) -> list[Labelled]:
    """Return a gate's training rows for each sample: the draft's states [m, F], and the ratios
    draft(x) / target(x) [m] of tokens x that the draft draws at temperature 1.

    The tokens follow four kinds of prefixes in equal numbers (SPRINTER, Zhong 2025): the prompt
    itself, and prefixes of answers by the draft, by the target, and by both, where a coin decides
    which model writes each token. Several tokens are drawn after the prompt, since it is a single
    prefix.
    """
    longest = max(len(sample.response_ids) for sample in samples)

    def continued(starts: list[list[int]], rule: Rule) -> list[list[int]]:
        decoder = Decoder(
            rule=rule,
            window=INTERLEAVED,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            max_new_tokens=longest,
        )
        outs = pair.generate_batch(starts, decoder, batch_size=32)
        return [start + out.tokens for start, out in zip(starts, outs)]

    prompts = [sample.prompt_ids for sample in samples]
    by_draft = continued(prompts, Baseline("draft"))
    by_target = continued(prompts, Baseline("target"))
    mixed = continued(prompts, as_rule(Random(0.5)))
    labelled = []
    for prompt, *continuations in zip(prompts, by_draft, by_target, mixed):
        parts = [_ratios(pair, prompt, len(prompt), inputs)]
        parts += [_ratios(pair, whole, len(prompt), inputs) for whole in continuations]
        labelled.append(
            (torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts]))
        )
    return labelled


def _ratios(pair: Pair, ids: list[int], first: int, inputs: Inputs) -> Labelled:
    """Return the states and ratios after prefixes of `ids`, evenly spread from the first `first`
    tokens to the whole text."""
    draft = pair.require_draft("a gate")
    end = len(ids) - (ids[-1] in pair.target.eos_ids)
    # [m]: number of tokens in each prefix
    lengths = torch.linspace(first, max(first, end), GATE_PREFIXES).long()
    session = Session(draft)
    reading = session.read([ids], len(ids))
    by_target = Session(pair.target).read([ids], len(ids))
    drawn, ratio = _drawn(pair, ids, lengths, (reading.logits, by_target.logits))
    if "draft" not in inputs.tokens:
        return reading.hidden[0].cpu()[lengths - 1].contiguous(), ratio
    after = []  # the states after the token; from right to left each is a roll-back
    for n, token in zip(lengths.flip(0).tolist(), drawn.flip(0).tolist()):
        after.append(session.read([[*ids[:n], token]]).hidden[0, 0].cpu())
    return torch.stack(after[::-1]).contiguous(), ratio


def _drawn(
    pair: Pair, ids: list[int], lengths: Tensor, logits: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor]:
    """Return the tokens [m] that the draft draws at temperature 1 after prefixes of `ids`, and
    their ratios draft(x) / target(x) [m]. `logits` are the draft's and the target's [1, T, V]. Each
    draw has its own randomness, even after equal prefixes."""
    noise = Noise.for_prompt(0, ids)
    processors = processors_of(pair.target, sampling=True) or None
    ctx = Context([Row(noise, ids[:1])], temperature=1.0, processors=processors)
    vocabulary = min(len(logits[0][0, 0]), len(logits[1][0, 0]))
    after = torch.tensor([ids[1:]])
    drafted, target = (
        ctx.probs(ctx.process(every, after)[0].cpu()[lengths - 1][:, :vocabulary])
        for every in logits
    )
    keys = torch.tensor(
        [noise.key(n, f"gate {i}") for i, n in enumerate(lengths.tolist())]
    )
    drawn = gumbel_argmax(drafted, keys)
    return drawn, (drafted / target).gather(1, drawn[:, None])[:, 0]
