"""What heads that look ahead read of mined mismatches: the draft is run on after each, as it would
be in a window."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from lenience.core.context import Context, Row
from lenience.core.noise import Noise
from lenience.decoding.options import Decoding
from lenience.decoding.pair import Pair
from lenience.heads import lookahead
from lenience.heads.head import Inputs
from lenience.models.session import Session
from lenience.runs.record import MinedSample, Mismatch

SHARE_WHOLE = 0.4
"""Of the mismatches that are learned from with all tokens that can be looked ahead to; the others
with fewer, as many as a window's end might leave: one head serves every place of a window."""


def values_drafted_on(
    pair: Pair, sample: MinedSample, labelled: Sequence[Mismatch], inputs: Inputs
) -> Tensor:
    """[m, (1 + n) · S + 1]: of each of a sample's labelled mismatches the numbers of its drafted
    token and of up to n tokens that the draft puts after it (`lookahead.token_values`), zeros where
    an EOS ends them, and at last how many there are."""
    assert inputs.ahead is not None
    windows = _windows(pair, sample, labelled, inputs.ahead)
    logits = {model: _logits(pair, sample, windows, model) for model in inputs.models}
    if "target" not in logits:
        logits["target"] = _logits(pair, sample, windows, "target")
    vocabulary = pair.target.vocab_size
    rows = []
    for i, (_, tokens) in enumerate(windows):
        of_draft = logits["draft"][i][:, :vocabulary] if "draft" in logits else None
        values = lookahead.token_values(
            logits["target"][i][:, :vocabulary], of_draft, torch.tensor(tokens), _finder(pair)
        )
        zeros = values.new_zeros(1 + inputs.ahead - len(tokens), values.shape[1])
        count = values.new_tensor([len(tokens) - 1])
        rows.append(torch.cat([values.flatten(), zeros.flatten(), count]))
    return torch.stack(rows)


def _finder(pair: Pair) -> lookahead.Find:
    return lambda pattern, tokens: pair.target.token_mask(pattern)[tokens]


def _windows(
    pair: Pair, sample: MinedSample, labelled: Sequence[Mismatch], n: int
) -> list[tuple[list[int], list[int]]]:
    """Of each mismatch what stands before it, and its drafted token with up to n after it."""
    starts = []
    for mismatch in labelled:
        before = sample.prompt_ids + sample.final_ids[: mismatch.position]
        starts.append((before, [mismatch.draft_token]))
    going = [
        i
        for i, mismatch in enumerate(labelled)
        if n and mismatch.draft_token not in pair.target.eos_ids
    ]
    prompts = [[*starts[i][0], *starts[i][1]] for i in going]
    decoding = Decoding(rule="draft", max_new_tokens=max(1, n))
    outs = pair.generate_batch(prompts, batch_size=32, **vars(decoding)) if going else []
    for i, out in zip(going, outs):
        starts[i][1].extend(out.tokens)
    return starts


def _logits(
    pair: Pair, sample: MinedSample, windows: Sequence[tuple[list[int], list[int]]], model: str
) -> list[Tensor]:
    """A model's logits [1 + n, V] from which it would take each token of the windows; read from
    right to left, so that each read is a roll-back."""
    session = Session(pair.models[model])
    session.read([sample.prompt_ids + sample.final_ids])
    processors, found = pair.target.processors(sampling=False) or None, list[Tensor]()
    for before, tokens in reversed(windows):
        reading = session.read([[*before, *tokens[:-1]]], len(tokens))
        ctx = Context([Row(Noise.for_prompt(0, []), before)], processors=processors)
        logits = ctx.process(reading.logits, torch.tensor([tokens[:-1]], dtype=torch.long))
        found.append(logits[0].cpu())
    return found[::-1]


def as_in_windows(x: np.ndarray, inputs: Inputs, seed: int) -> np.ndarray:
    """[m, F]: states with the numbers of `values_drafted_on` after them → what a head reads, the
    later tokens cut as the ends of windows would cut them."""
    assert inputs.ahead is not None
    n, rng = inputs.ahead, np.random.default_rng(seed)
    size = lookahead.numbers("draft" in inputs.models)
    states, raw, counts = np.split(x, [x.shape[1] - (1 + n) * size - 1, x.shape[1] - 1], axis=1)
    values = torch.from_numpy(raw).view(-1, 1 + n, size)
    limits = np.where(rng.random(len(x)) < SHARE_WHOLE, n, rng.integers(0, n + 1, len(x)))
    known = np.arange(n) < np.minimum(counts[:, 0], limits)[:, None]
    read = lookahead.with_later(values[:, 0], values[:, 1:], torch.from_numpy(known))
    return np.concatenate([states, read.numpy()], 1)
