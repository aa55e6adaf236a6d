"""Look-ahead features of mined mismatches, from windows drafted as in decoding."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from lenience.core.context import Context, Row
from lenience.core.noise import Noise
from lenience.core.protocols import Rule
from lenience.core.types import Draft, Reading, Verdict
from lenience.decoding.decoder import Decoder
from lenience.decoding.loop import cycle
from lenience.decoding.pair import Pair
from lenience.heads import lookahead
from lenience.heads.head import Inputs
from lenience.models.generation_config import processors_of
from lenience.runs.record import MinedSample, Mismatch

TOGETHER = 16
"""Number of samples per batch; each contributes one mismatch at a time."""
SHARE_WHOLE = 0.4
"""Share of the mismatches with all look-ahead tokens. The other mismatches have fewer, as at the
end of a window, so that one head serves every position."""


class _Recorder(Rule):
    """A rule that accepts nothing and records the look-ahead values of each window."""

    def __init__(self, with_draft: bool, kinds: Tensor):
        self.with_draft = with_draft
        self.kinds = kinds
        self.values = torch.empty(0)
        self.lengths = torch.empty(0)

    def __call__(self, draft: Draft, reading: Reading, ctx: Context) -> list[Verdict]:
        logits = draft.logits if self.with_draft else None
        values = lookahead.token_values(
            reading.logits[:, :-1], logits, draft.tokens, self.kinds
        )
        self.values = values.cpu()
        self.lengths = draft.lengths.cpu()
        return []


def values_drafted_on(
    pair: Pair,
    samples: Sequence[MinedSample],
    labelled: Sequence[Sequence[Mismatch]],
    inputs: Inputs,
) -> list[Tensor]:
    """Return values [m, (1 + n) · S + 1] for each sample's labelled mismatches: the numbers of the
    drafted token and of up to n tokens that the draft adds (`lookahead.token_values`), zeros after
    an EOS, and last the number of added tokens."""
    found: list[list[Tensor]] = [[] for _ in samples]
    asked = [i for i, of_sample in enumerate(labelled) if of_sample]
    for begin in range(0, len(asked), TOGETHER):
        part = asked[begin : begin + TOGETHER]
        rows = _read_together(
            pair, [samples[i] for i in part], [labelled[i] for i in part], inputs
        )
        for i, read in zip(part, rows):
            found[i] = read
    width = columns(inputs)
    return [torch.stack(rows) if rows else torch.empty(0, width) for rows in found]


def columns(inputs: Inputs) -> int:
    """Return the number of look-ahead values kept per mismatch."""
    assert inputs.ahead is not None
    return (1 + inputs.ahead) * lookahead.numbers("draft" in inputs.models) + 1


def _read_together(
    pair: Pair,
    samples: Sequence[MinedSample],
    labelled: Sequence[Sequence[Mismatch]],
    inputs: Inputs,
) -> list[list[Tensor]]:
    assert inputs.ahead is not None
    kinds = lookahead.kinds_of(pair.target.token_mask).to(pair.target.device)
    window = 1 + inputs.ahead
    reader = _Recorder("draft" in inputs.models, kinds)
    decoder = Decoder(rule=reader, window=window)
    pair.check(decoder)
    longest = (
        max(len(sample.prompt_ids) + len(sample.final_ids) for sample in samples)
        + 1
        + window
    )
    session, drafter = pair.engine(decoder, len(samples), longest)
    ctx = Context(
        window=window,
        processors=processors_of(pair.target, sampling=False) or None,
        token_mask=pair.target.token_mask,
    )
    found: list[list[Tensor]] = [[] for _ in samples]
    for prefixes in _prefixes(samples, labelled):
        ctx.rows = [Row(Noise.for_prompt(0, []), prefix) for prefix in prefixes]
        cycle(session, drafter, reader, ctx, [window + 1] * len(prefixes))
        for i, (values, length) in enumerate(
            zip(reader.values, reader.lengths.tolist())
        ):
            if len(found[i]) < len(labelled[i]):
                found[i].append(_flat(values, length, window))
    return found


def _prefixes(
    samples: Sequence[MinedSample], labelled: Sequence[Sequence[Mismatch]]
) -> Iterator[list[list[int]]]:
    """Yield the texts before the samples' first mismatches, then before their second mismatches,
    and so on. A sample without further mismatches repeats its last."""
    for k in range(max(map(len, labelled))):
        places = []
        for of_sample in labelled:
            places.append(of_sample[min(k, len(of_sample) - 1)].position)
        yield [
            sample.prompt_ids + sample.final_ids[:at]
            for sample, at in zip(samples, places)
        ]


def _flat(values: Tensor, length: int, window: int) -> Tensor:
    """Return [window · S + 1]: the numbers [W, S] of a window's positions, of which the first
    `length` are proposed, and the number of tokens after the first."""
    kept = values.new_zeros(window, values.shape[1])
    kept[:length] = values[:length]
    return torch.cat([kept.flatten(), values.new_tensor([max(0, length - 1)])])


def as_in_windows(x: np.ndarray, inputs: Inputs, seed: int) -> np.ndarray:
    """Return head inputs [m, F] from states followed by the values of `values_drafted_on`. Some of
    the later tokens are cut off at random, as at the ends of windows."""
    assert inputs.ahead is not None
    n = inputs.ahead
    rng = np.random.default_rng(seed)
    states, raw, counts = np.split(
        x, [x.shape[1] - columns(inputs), x.shape[1] - 1], axis=1
    )
    values = torch.from_numpy(raw).view(len(x), 1 + n, -1)
    limits = np.where(
        rng.random(len(x)) < SHARE_WHOLE, n, rng.integers(0, n + 1, len(x))
    )
    known = np.arange(n) < np.minimum(counts[:, 0], limits)[:, None]
    read = lookahead.with_later(values[:, 0], values[:, 1:], torch.from_numpy(known))
    return np.concatenate([states, read.numpy()], 1)
