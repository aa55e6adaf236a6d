"""Pair: a target and a draft that share a vocabulary, and what a user does with them."""

from __future__ import annotations

import hashlib
import secrets
import time
import warnings
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, TypeVar

import torch
from transformers import PreTrainedTokenizerBase

from lenience.core.context import Context, Row
from lenience.core.errors import InputError
from lenience.core.needs import Parts
from lenience.core.noise import Noise
from lenience.core.profile import Profile
from lenience.core.protocols import Drafter
from lenience.core.types import Step
from lenience.decoding.auto_window import (
    CANDIDATES,
    PILOT_PROMPTS,
    PILOT_TOKENS,
    Cycle,
    Drafting,
    cycle_seconds,
    fastest_window,
    learned_stops,
    stopped,
)
from lenience.decoding.branches import Conversing, converse
from lenience.decoding.certified import (
    Sooner,
    check_binding,
    drafter_without_paths,
    heads_in,
    is_certified,
    resolve,
    sooner,
)
from lenience.decoding.dialogue import Dialogue, Ended
from lenience.decoding.generation import Generation
from lenience.decoding.loop import NoDrafter, Request, decode
from lenience.decoding.options import OWN, Decoding, takes_options
from lenience.decoding.response import Response
from lenience.decoding.setup import Setup, check_fit, check_together, draft_of
from lenience.drafting.base import DrafterSetup
from lenience.drafting.parsing import parse_drafter
from lenience.drafting.stops import Fixed, Stop, parse_stop
from lenience.drafting.trees.shapes import Tree, parse_tree
from lenience.models.compile import compile_model
from lenience.models.generation_config import processors_of
from lenience.models.lm import LAST, LM, States
from lenience.models.memory import check_memory
from lenience.models.prompts import Prompt, several
from lenience.models.session import Session, tree_cache
from lenience.models.threads import torch_threads
from lenience.rules.combine import as_rule
from lenience.rules.parsing import parse_rule
from lenience.rules.registry import BASELINES
from lenience.rules.strict import Exact

T = TypeVar("T")
BATCH_SIZE = 16
"""Prompts that are answered together."""
SEED_BITS = 31
"""Of a seed that is drawn."""


@dataclass(frozen=True)
class Telling:
    """What is told of an answer beside its tokens."""

    profile: Profile | None = None
    """What is told where the time goes."""
    logprobs: bool = False
    """Whether it is told how probable the target found each token."""
    stream: bool = False
    """Whether each step has its text."""

    def __post_init__(self) -> None:
        if self.profile is not None and not isinstance(self.profile, Profile):
            raise InputError(f"profile {self.profile!r:.60}: give a Profile()")


class Pair:
    """A target, and a draft of the same vocabulary where there is one. Raises InputError where
    their vocabularies differ."""

    engine_name = OWN
    """What runs the models: our own loop, or another engine with its version."""

    def __init__(self, target: LM, draft: LM | None, name: str):
        self.target, self.draft, self.name = target, draft, name
        self._picked: dict[Hashable, Drafting] = {}
        if draft is not None:
            _refuse_different_vocabularies(target, draft)

    def __repr__(self) -> str:
        models = ", ".join(
            f"{role} {lm.model.num_parameters() / 1e6:,.1f} M {lm.dtype} on {lm.device}"
            for role, lm in self.models.items()
        )
        return f"<Pair {self.name}: {models}>"

    def require_draft(self, what: str) -> LM:
        """The draft model. Raises InputError, naming what needs it, where the pair has none."""
        return draft_of(self.models, what)

    @property
    def models(self) -> dict[str, LM]:
        """The models by their roles."""
        draft = {} if self.draft is None else {"draft": self.draft}
        return {"target": self.target, **draft}

    @cached_property
    def fingerprints(self) -> dict[str, str]:
        """What a head remembers of the models that it was fitted to."""
        models = {role: lm.fingerprint for role, lm in self.models.items()}
        return {**models, "tokenizer": self.target.tokenizer_fingerprint}

    def compile(self, *, export: bool = True) -> bool:
        """Read the models through exported graphs on a CPU, in float32, or recorded passes on a
        GPU, see `lenience.models.compile.compile_model`; says whether all are."""
        return all([compile_model(lm, export=export) for lm in self.models.values()])

    @property
    def torch_threads(self) -> int | None:
        """How many threads torch has beside the models: one where graphs, which wait by spinning,
        have the cores; None for its own."""
        on_cpu = all(lm.device.type == "cpu" for lm in self.models.values())
        return 1 if self.compiled and on_cpu else None

    @property
    def compiled(self) -> bool:
        return all(lm.backend is not None for lm in self.models.values())

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The target's, whose ids prompts and answers are."""
        return self.target.tokenizer

    def encode(self, prompt: Prompt, reader: LM) -> list[int]:
        """The ids of a prompt as the target has it, whichever of the models reads it. Raises
        InputError, see `LM.encode`."""
        own = reader is self.target
        ids = self.target.encode(prompt, any_length=not own)
        return ids if own else reader.encode(ids)

    @takes_options
    def generate(
        self,
        prompt: Prompt,
        *,
        profile: Profile | None = None,
        logprobs: bool = False,
        **options: Any,
    ) -> Generation:
        """Answer one prompt: text, chat messages, or token ids as a list, an array, a tensor or
        what a tokenizer gives. A `profile` is told where the time goes; with `logprobs` the answer
        says how probable the target found each of its tokens. Raises InputError for an unusable
        prompt or wrong options."""
        told: dict[str, Any] = {"profile": profile, "logprobs": logprobs}
        return self.generate_batch([prompt], batch_size=1, **told, **options)[0]

    @takes_options
    def generate_batch(
        self,
        prompts: Sequence[Prompt],
        *,
        batch_size: int | None = BATCH_SIZE,
        profile: Profile | None = None,
        logprobs: bool = False,
        **options: Any,
    ) -> list[Generation]:
        """Answer many prompts, `batch_size` of them together: the answers that `generate` gives one
        by one, in the order of the prompts, which may also be one padded batch of ids. A finished
        answer's place is taken by the next prompt at once. An answer's `seconds` run from its own
        start to its end, others being decoded beside it.

        Raises InputError, before any work, for an unusable prompt, wrong options or a cache that
        memory has no room for.
        """
        told: dict[str, Any] = {"profile": profile, "logprobs": logprobs}
        answers = dict(self.as_completed(prompts, batch_size=batch_size, **told, **options))
        return [answers[i] for i in range(len(answers))]

    @takes_options
    def as_completed(
        self,
        prompts: Sequence[Prompt],
        *,
        batch_size: int | None = BATCH_SIZE,
        profile: Profile | None = None,
        logprobs: bool = False,
        **options: Any,
    ) -> Iterator[tuple[int, Generation]]:
        """As `generate_batch`, but gives each answer, with its prompt's number, as soon as it is
        finished."""
        size = BATCH_SIZE if batch_size is None else batch_size
        if not isinstance(size, int) or size < 1:
            raise InputError(f"batch_size {batch_size!r}: must be a whole number, 1 or more")
        setup, telling = self._seeded(options), Telling(profile, logprobs)
        return self._completed(several(prompts, self.tokenizer.pad_token_id), setup, size, telling)

    def _seeded(self, options: Mapping[str, Any]) -> Setup:
        """What options come to, with a seed that is drawn where samples want one and none is given.
        That of a certified rule stays: an audit compares with the target's own sample by the same
        draws."""
        setup, given = self.setup(options), options.get("seed") is not None
        if not setup.decoding.temperature or given or is_certified(options.get("rule")):
            return setup
        drawn = setup.decoding.with_options({"seed": secrets.randbits(SEED_BITS)})
        return replace(setup, decoding=drawn, seeds_by_prompt=True)

    def _completed(
        self, prompts: Sequence[Prompt], setup: Setup, batch_size: int, telling: Telling
    ) -> Iterator[tuple[int, Generation]]:
        """Answer prompts; everything that can be wrong is told before the first."""
        outs, steps = self._decode(prompts, setup, batch_size, telling)
        return self._finished(outs, steps, setup)

    def _finished(
        self, outs: list[Generation], steps: Iterator[tuple[Request, Step]], setup: Setup
    ) -> Iterator[tuple[int, Generation]]:
        for request, step in steps:
            out = outs[request.number]
            out.add(step)
            if not step.finish:
                continue
            text = None if setup.stop_strings else self.target.decode(out.tokens)
            seconds = time.perf_counter() - request.began
            out.end(seconds, text, by_draft=setup.decoding.rule == "draft")
            yield request.number, out

    @takes_options
    def stream(
        self,
        prompt: Prompt,
        *,
        profile: Profile | None = None,
        logprobs: bool = False,
        **options: Any,
    ) -> Iterator[Step]:
        """Answer one prompt step by step; `step.text` is what each cycle adds."""
        telling = Telling(profile, logprobs, stream=True)
        _, steps = self._decode([prompt], self._seeded(options), 1, telling)
        return (step for _, step in steps)

    def setup(self, options: Mapping[str, Any] | Decoding) -> Setup:
        """What options come to on this pair. Raises InputError where a spec is wrong, a head is not
        for these models, a rule has no meaning at this temperature, or what was certified
        differs."""
        ends, is_bound = Sooner(), False
        if isinstance(options, Decoding) and is_certified(options.rule):
            options = options.changed()
        if isinstance(options, Decoding):
            decoding = options
        elif is_certified(options.get("rule")):
            decoding, is_bound = Decoding.of(self.certified(options)), True
            ends = sooner(options, decoding)
        else:
            decoding = Decoding.of(options)
        setup = self._parsed(decoding, ends)
        rule, drafter = setup.rule, setup.drafter
        if drafter and rule.heads and not (is_bound or drafter.proposes_as_draft):
            warnings.warn(
                f"rule {rule}, drafter {drafter}: a judge that was mined with the draft model "
                "may lose far more answers by what another drafter proposes; certify it",
                stacklevel=3,
            )
        check_fit(setup, self.models, lambda: self.fingerprints)
        return setup

    def _parsed(self, decoding: Decoding, ends: Sooner) -> Setup:
        """The parts that a decoding's specs name, which go together."""
        stop, drafter = parse_stop(decoding.stop), parse_drafter(decoding.drafter)
        tree = parse_tree(decoding.tree)
        if decoding.rule in BASELINES:
            is_draft = decoding.rule == "draft"
            reader = self.require_draft("rule draft") if is_draft else self.target
            return Setup(decoding, as_rule(Exact()), stop, None, reader, sooner=ends)
        rule = parse_rule(decoding.rule)
        setup = Setup(decoding, rule, stop, drafter, self.target, tree=tree, sooner=ends)
        check_together(setup, self.models, lambda: self.fingerprints)
        return setup

    def check(self, options: Mapping[str, Any] | Decoding) -> None:
        """Raise InputError where these options cannot be decoded with."""
        self.setup(options)

    def _decode(
        self,
        prompts: Sequence[Prompt],
        setup: Setup,
        batch_size: int,
        telling: Telling,
    ) -> tuple[list[Generation], Iterator[tuple[Request, Step]]]:
        """The answers to be filled, and their steps as they are decoded; everything that can be
        wrong is told before the first."""
        ids = [self.encode(prompt, setup.reader) for prompt in prompts]
        size = min(batch_size, len(ids))
        window, setup = self._settled(ids, size, setup)
        decoding, reader = setup.decoding, setup.reader
        ctx = replace(self.context(setup, window), logprobs=telling.logprobs)
        profile = telling.profile
        if profile:
            profile.wait_by(_waiting({lm.device for lm in self.models.values()}))
        longest = max(map(len, ids), default=0) + decoding.max_new_tokens + setup.columns(window)
        session, drafter = self.engine(setup, window, size, longest, profile=profile)

        def request(number: int, prompt: list[int]) -> Request:
            row = Row(Noise.for_prompt(setup.seed(number), prompt), list(prompt))
            response = Response(
                reader,
                decoding.max_new_tokens,
                len(prompt),
                setup.stop_strings,
                stream=telling.stream,
                shown=setup.max_new_tokens,
            )
            return Request(row, response, number)

        requests = (request(i, prompt) for i, prompt in enumerate(ids))
        outs = [setup.answer(prompt, window, number) for number, prompt in enumerate(ids)]
        steps = decode(session, drafter, setup.rule, ctx, lambda _: next(requests, None), size=size)
        return outs, steps

    def context(self, setup: Setup, window: int) -> Context:
        """The sampling parameters, what is left out being the model's own."""
        decoding, reader = setup.decoding, setup.reader
        config = reader.model.generation_config
        top_k, top_p = decoding.top_k, decoding.top_p
        return Context(
            window=window,
            temperature=decoding.temperature,
            draft_temperature=decoding.draft_temperature,
            top_k=getattr(config, "top_k", None) if top_k is None else top_k,
            top_p=getattr(config, "top_p", None) if top_p is None else top_p,
            processors=processors_of(reader, sampling=decoding.temperature > 0) or None,
            decode=partial(reader.decode, special=True),
            token_mask=reader.token_mask,
            fresh_noise_per_window=setup.rule.needs.whole_window or setup.verifies_draws,
        )

    def engine(
        self,
        setup: Setup,
        window: int,
        rows: int,
        capacity: int,
        *,
        beside: Sequence[LM] = (),
        profile: Profile | None = None,
    ) -> tuple[Session, Drafter]:
        """What reads and what drafts `rows` sequences of at most `capacity` tokens together, in
        caches of their own. Raises InputError where memory has no room for the caches and for as
        many of the models `beside`, which the caller makes."""
        reader, profile = setup.reader, profile or Profile()
        spec = setup.drafter if window else None
        needs = DrafterSetup(
            target=reader,
            draft=self.draft,
            rows=rows,
            capacity=capacity,
            stop=setup.stop,
            tree=setup.tree,
            keep_states=Parts.STATES in setup.rule.needs.window,
            keeps_last=setup.keeps_last,
            profile=profile,
        )
        features = (None,) if setup.keeps_last else spec.features(reader) if spec else ()
        states = States(setup.layers, features)
        others = [*(spec.models(needs) if spec else []), *beside]
        cached = [(reader, states), *((lm, LAST) for lm in others)]
        # a tree's tokens may be more than those that a context has left
        beyond = setup.columns(window) if setup.branches else 0
        lengths = [min(capacity, (lm.context_length or capacity) + beyond) for lm, _ in cached]
        with torch_threads(self.torch_threads):
            check_memory([(*one, n) for one, n in zip(cached, lengths)], rows, beyond)
            cache = tree_cache(reader, rows, lengths[0], states) if setup.branches else None
            session = Session(reader, rows, lengths[0], cache, profile, states=states)
            session.torch_threads = self.torch_threads
            if spec is None:
                return session, NoDrafter(reader.device)
            return session, spec.build(replace(needs, session=session))

    def converse(
        self,
        dialogues: Iterable[Dialogue[T]],
        *,
        size: int,
        capacity: int,
        sampling: Decoding | None = None,
    ) -> Iterator[Ended[T]]:
        """Hold dialogues, `size` of them together, and give each as it ends; no question has more
        than `capacity` tokens with its answer. The target goes on as `sampling` has it, or
        greedily. Raises InputError where memory has no room for the caches."""
        return converse(self, dialogues, Conversing(size, capacity, sampling or Decoding()))

    def certified(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """What options with the rule "certified:RUN" come to: the rule, the window and the length
        limit that the run's certificate binds. Raises InputError, by name, for another option, or
        other models or heads, than were certified."""
        rule = str(options["rule"])
        settled, binds = resolve(rule, options)
        if binds:
            binds = {**binds, "drafter": drafter_without_paths(binds["drafter"])}
            check_binding(rule, binds, self.binding(Decoding.of(settled)))
        return settled

    def binding(self, decoding: Decoding) -> dict[str, Any]:
        """What lenient answers depend on besides the options: the models with their dtypes, the
        tokenizer, its chat template, the target's generation_config, and the heads of the rule, of
        the stop condition and of the drafter."""
        heads = heads_in(decoding)
        return {
            "models": {
                role: {"fingerprint": lm.fingerprint, "dtype": lm.dtype}
                for role, lm in self.models.items()
            },
            "tokenizer": self.target.tokenizer_fingerprint,
            "template": self._template(),
            "generation_config": self.target.generation_settings(),
            "heads": [head.head.fingerprint for head in heads],
            "drafter": drafter_without_paths(decoding.drafter),
        }

    def _template(self) -> str | dict[str, Any] | None:
        """The chat template that prompts go through, by its digest, with what is not usual."""
        lm = self.target
        template, spec = lm.chat.template_of(lm.tokenizer), lm.chat.spec
        if template is None:
            return None
        content = hashlib.blake2b(template.encode(), digest_size=8).hexdigest()
        return content if spec is None else {"content": content, **spec}

    @takes_options
    def settle(self, prompts: Sequence[Prompt], *, batch_size: int = 1, **options: Any) -> Decoding:
        """The options with what the window "auto" comes to for these prompts, and the tree "auto":
        the window of CANDIDATES at which they should be answered fastest or, where no stop
        condition is named and beside a judge lies one that has learned what it rejects, the widest
        with that, if this should be faster; and the shape. How many tokens the rule keeps is
        counted on a few prompts, and what a cycle takes at each window is measured, for each shape.
        It is picked once for a rule, a drafter, a stop condition, the sampling and a batch size,
        and then stays."""
        setup = self.setup(options)
        ids = [self.encode(prompt, setup.reader) for prompt in prompts]
        window, setup = self._settled(ids, min(batch_size, len(ids)), setup)
        return replace(setup.decoding, window=window)

    def _settled(self, ids: list[list[int]], size: int, setup: Setup) -> tuple[int, Setup]:
        """The window that was given or, for "auto", is the fastest, and how drafting ends."""
        window = setup.decoding.window
        if setup.drafter is None or not ids:
            return 0, setup
        if window != "auto":
            return window, setup
        free = {"window": "auto", "seed": 0, "stop_strings": (), "max_new_tokens": PILOT_TOKENS}
        key = (str(setup.decoding.with_options(free)), size, self.compiled)
        if key not in self._picked:
            self._picked[key] = self._pick(ids, size, setup)
        picked = self._picked[key]
        return picked.window, _shaped(_ending(setup, picked.stop), picked.tree)

    def _pick(self, ids: list[list[int]], size: int, setup: Setup) -> Drafting:
        trees = setup.tree.choices() or [setup.tree]
        picked = [
            replace(self._pick_ending(ids, size, _shaped(setup, tree)), tree=tree) for tree in trees
        ]
        return max(picked, key=lambda one: one.tokens_per_second)

    def _pick_ending(self, ids: list[list[int]], size: int, setup: Setup) -> Drafting:
        seconds = self._cycle_seconds(ids, size, setup)
        tried = [fastest_window(self._pilot(ids, size, setup), seconds, setup.stop)]
        asks = bool(setup.drafter and Parts.STATES in setup.drafter.offers and not setup.branches)
        stops = learned_stops(setup.rule) if asks and isinstance(setup.stop, Fixed) else []
        if stops and self._can_ask(stops[0], setup):
            asked = _ending(setup, replace(stops[0], threshold=1.0))  # which never ends a window
            seconds = self._cycle_seconds(ids, size, asked)
            tried += [
                stopped(self._pilot(ids, size, _ending(setup, stop)), seconds, stop)
                for stop in stops
            ]
        return max(tried, key=lambda one: one.tokens_per_second)

    def _can_ask(self, stop: Stop, setup: Setup) -> bool:
        """Whether a stop condition was fitted to this draft, as the rule's judge need not have
        been."""
        try:
            self.check(_ending(setup, stop).decoding)
        except InputError:
            return False
        return True

    def _pilot(self, ids: list[list[int]], size: int, setup: Setup) -> list[Cycle]:
        """What cycles with the widest window do on some prompts."""
        widest = replace(setup.decoding, window=max(CANDIDATES), max_new_tokens=PILOT_TOKENS)
        decoding = replace(widest, stop_strings=())
        some = ids[:PILOT_PROMPTS]
        _, steps = self._decode(some, replace(setup, decoding=decoding), size, Telling())
        return [(step.drafted, step.kept) for _, step in steps]

    def _cycle_seconds(self, ids: list[list[int]], size: int, setup: Setup) -> dict[int, float]:
        """What a cycle takes at each window."""
        if not setup.stop.per_token:
            # a schedule that counts what was kept would narrow the windows that are to be timed
            setup = _ending(setup, Fixed())
        widest = max(CANDIDATES)
        prompts = [ids[i % len(ids)] for i in range(size)]
        capacity = max(map(len, prompts)) + widest
        session, drafter = self.engine(setup, widest, size, capacity)
        seed = setup.decoding.seed
        # within an answer, as some drafters propose nothing in its first cycle
        rows = [Row(Noise.for_prompt(seed, prompt), list(prompt), position=1) for prompt in prompts]
        ctx = self.context(setup, widest)
        return cycle_seconds(session, drafter, setup.rule, ctx, rows)


def _ending(setup: Setup, stop: Stop) -> Setup:
    """The same with another stop condition."""
    return replace(setup, stop=stop, decoding=replace(setup.decoding, stop=str(stop)))


def _shaped(setup: Setup, tree: Tree) -> Setup:
    """The same with another shape of what is drafted."""
    return replace(setup, tree=tree, decoding=replace(setup.decoding, tree=str(tree)))


def _waiting(devices: set[torch.device]) -> Callable[[], None] | None:
    """What waits for the GPUs among the devices; None where there is none."""
    gpus = [device for device in devices if device.type == "cuda"]

    def wait() -> None:
        for gpu in gpus:
            torch.cuda.synchronize(gpu)

    return wait if gpus else None


def _refuse_different_vocabularies(target: LM, draft: LM) -> None:
    ours, theirs = target.tokenizer.get_vocab(), draft.tokenizer.get_vocab()
    if ours == theirs:
        return
    both = ours.keys() & theirs.keys()
    differences = {
        "tokens of the target that the draft lacks": ours.keys() - theirs.keys(),
        "tokens of the draft that the target lacks": theirs.keys() - ours.keys(),
        "tokens with another id": {token for token in both if ours[token] != theirs[token]},
    }
    parts = [
        f"{len(tokens)} {what}, such as {min(tokens)!r}"
        for what, tokens in differences.items()
        if tokens
    ]
    raise InputError(
        f"the vocabularies of {target.name!r} and {draft.name!r} differ: {'; '.join(parts)}; take "
        "a draft of the target's family"
    )
