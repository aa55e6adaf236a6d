"""The target's session and the drafter of a decoder, with caches that fit into memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from lenience.core.needs import Parts
from lenience.core.profile import Profile
from lenience.core.protocols import Drafter
from lenience.decoding.decoder import Decoder
from lenience.decoding.loop import NoDrafter
from lenience.drafting.base import DrafterSetup, DrafterSpec
from lenience.models.lm import LM
from lenience.models.memory import check_memory
from lenience.models.pass_cache import LAST, States
from lenience.models.session import Session, tree_cache
from lenience.models.threads import torch_threads


class HasModels(Protocol):
    """A pair's models, and its number of PyTorch threads."""

    draft: LM | None

    @property
    def torch_threads(self) -> int | None: ...

    def reader(self, decoder: Decoder) -> LM: ...


def build_engine(
    pair: HasModels,
    decoder: Decoder,
    rows: int,
    capacity: int,
    *,
    beside: Sequence[LM] = (),
    profile: Profile | None = None,
) -> tuple[Session, Drafter]:
    """Return the target's session and the drafter of a decoder whose window is a number. See
    `Pair.engine`."""
    reader = pair.reader(decoder)
    profile = profile or Profile()
    window = int(decoder.window)
    spec = decoder.proposer if window else None
    setup = DrafterSetup(
        target=reader,
        draft=pair.draft,
        rows=rows,
        capacity=capacity,
        stop=decoder.stop,
        tree=decoder.tree,
        keep_states=Parts.STATES in decoder.rule.needs.window,
        keeps_last=decoder.keeps_last,
        profile=profile,
    )
    states = _states(decoder, spec, reader)
    others = [*(spec.models(setup) if spec else []), *beside]
    cached = [(reader, states), *((lm, LAST) for lm in others)]
    # a tree may have more tokens than are left in the context
    beyond = decoder.columns(window) if decoder.branches else 0
    lengths = [_cache_length(lm, capacity, beyond) for lm, _ in cached]
    with torch_threads(pair.torch_threads):
        check_memory([(*held, n) for held, n in zip(cached, lengths)], rows, beyond)
        cache = None
        if decoder.branches:
            cache = tree_cache(reader, rows, lengths[0], states)
        session = Session(reader, rows, lengths[0], cache, profile, states=states)
        session.torch_threads = pair.torch_threads
        if spec is None:
            return session, NoDrafter(reader.device)
        return session, spec.build(replace(setup, session=session))


def _states(decoder: Decoder, spec: DrafterSpec | None, reader: LM) -> States:
    """Return the layers whose states a pass of the target gives: to the rule at judged tokens, to
    the drafter at all tokens."""
    if decoder.keeps_last:
        return States(decoder.layers, (None,))
    return States(decoder.layers, spec.features(reader) if spec else ())


def _cache_length(lm: LM, capacity: int, beyond: int) -> int:
    """Return the number of tokens that a model's cache needs."""
    return min(capacity, (lm.context_length or capacity) + beyond)
