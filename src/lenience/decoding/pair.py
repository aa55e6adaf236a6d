"""Pair: a target and a draft that share a vocabulary, and what a user does with them."""

from __future__ import annotations

import hashlib
import statistics
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, Literal, Unpack, cast

import torch

from lenience.core.context import Context, Row
from lenience.core.errors import InputError
from lenience.core.noise import Noise
from lenience.core.profile import Profile
from lenience.core.protocols import Rule
from lenience.core.types import Step
from lenience.decoding.certified import check_binding, is_certified, resolve
from lenience.decoding.generation import Generation
from lenience.decoding.loop import Request, cycle, decode
from lenience.decoding.options import Options, check_options, learned
from lenience.decoding.response import Limits
from lenience.drafting.draft_model import ModelDrafter
from lenience.drafting.stops import Fixed, Stop, parse_stop
from lenience.models.compile import compile_model
from lenience.models.lm import LM, Prompt
from lenience.models.memory import check_memory
from lenience.models.session import Session
from lenience.rules.base import Term
from lenience.rules.combine import AnyOf
from lenience.rules.registry import ALONE, parse_rule
from lenience.rules.strict import Exact

WINDOWS = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
"""What an automatic window is picked from."""


class Pair:
    """A target and a draft. Raises InputError where their vocabularies differ."""

    def __init__(self, target: LM, draft: LM, name: str):
        self.target, self.draft, self.name = target, draft, name
        self._picked: dict[tuple[Any, ...], int] = {}
        _refuse_different_vocabularies(target, draft)

    @cached_property
    def fingerprints(self) -> dict[str, str]:
        return {
            "target": self.target.fingerprint,
            "draft": self.draft.fingerprint,
            "tokenizer": self.target.tokenizer_fingerprint,
        }

    def compile(self, *, export: bool = True) -> bool:
        """Read both models through exported graphs on a CPU, in float32, or recorded passes on a GPU, see
        `lenience.compiled.compile_model`; says whether both are. With graphs little is left to torch:
        torch.set_num_threads(1) leaves the cores to them."""
        return all([compile_model(lm, export=export) for lm in (self.target, self.draft)])

    @property
    def compiled(self) -> bool:
        return None not in (self.target.graph, self.draft.graph)

    def generate(self, prompt: Prompt, **options: Unpack[Options]) -> Generation:
        """Answer one prompt: text, chat messages or a list of ids. The options are those of `stream`."""
        return self.generate_batch([prompt], batch_size=1, **options)[0]

    def generate_batch(
        self, prompts: Sequence[Prompt], *, batch_size: int = 16, **options: Unpack[Options]
    ) -> list[Generation]:
        """Answer many prompts, `batch_size` of them together: the answers that `generate` gives one by one, in the order of
        the prompts. A finished answer's place is taken by the next prompt at once. An answer's `seconds` run from its own
        start to its end, others being decoded beside it.

        Raises InputError, before any work, for an unusable prompt, wrong options or a cache that memory has no room for.
        """
        answers = dict(self.as_completed(prompts, batch_size=batch_size, **options))
        return [answers[i] for i in range(len(prompts))]

    def as_completed(
        self, prompts: Sequence[Prompt], *, batch_size: int = 16, **options: Unpack[Options]
    ) -> Iterator[tuple[int, Generation]]:
        """As `generate_batch`, but gives each answer, with its prompt's number, as soon as it is finished."""
        return self._finished(*self._decode(prompts, batch_size, text=False, **options), options)

    def _finished(
        self, outs: list[Generation], steps: Iterator[tuple[Request, Step]], options: Options
    ) -> Iterator[tuple[int, Generation]]:
        for request, step in steps:
            out = outs[request.number]
            out.add(step)
            if not step.finish:
                continue
            out.seconds = time.perf_counter() - request.began
            if options.get("rule") == "draft":
                out.target_passes, out.draft_passes = 0, out.target_passes
                out.target_tokens, out.draft_tokens = 0, out.target_tokens
            if not options.get("stop_strings"):
                out.text = self.target.decode(out.tokens)
            yield request.number, out

    def stream(self, prompt: Prompt, **options: Unpack[Options]) -> Iterator[Step]:
        """Answer one prompt step by step; `step.text` is what each cycle adds.

        `rule` is a spec or a Rule, or "target" or "draft" for plain decoding with that model alone, by default "exact";
        "certified:RUN" is the rule of that run's certificate, with the window and the length limit that go with it;
        `window` (8) is how many tokens are drafted at most in a cycle, "auto" for what `pick_window` picks on the prompts;
        `stop`, a spec or a Stop, by default "fixed", may end drafting earlier (lenience.drafting.stops); `max_new_tokens` (256) and
        `stop_strings` end the answer; `temperature` 0, the default, is greedy; `top_k` and `top_p` left out are those of the
        target's generation_config; draws are keyed by `seed` (0); a `profile` is told where the time goes. Raises
        InputError for wrong options, an unusable prompt, or a head of other models.
        """
        _, steps = self._decode([prompt], 1, text=True, **options)
        return (step for _, step in steps)

    def _decode(
        self, prompts: Sequence[Prompt], batch_size: int, *, text: bool, **options: Unpack[Options]
    ) -> tuple[list[Generation], Iterator[tuple[Request, Step]]]:
        """The answers to be filled, and their steps as they are decoded; everything that can be wrong is told before the
        first."""
        settled = self.certified(options) if is_certified(options.get("rule")) else options
        return self._begin(prompts, batch_size, text=text, **settled)

    def _begin(
        self,
        prompts: Sequence[Prompt],
        batch_size: int,
        *,
        text: bool,
        rule: str | Rule = "exact",
        window: int | Literal["auto"] = 8,
        stop: str | Stop = "fixed",
        max_new_tokens: int = 256,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float | None = None,
        seed: int = 0,
        stop_strings: str | Sequence[str] = (),
        profile: Profile | None = None,
    ) -> tuple[list[Generation], Iterator[tuple[Request, Step]]]:
        rule, drafts, main = self._roles(rule)
        stop = parse_stop(stop)
        stops = (stop_strings,) if isinstance(stop_strings, str) else tuple(stop_strings)
        check_options(window, max_new_tokens, temperature, top_k, top_p, seed, stops)
        if batch_size < 1:
            raise InputError(f"batch_size {batch_size}: must be 1 or more")
        self.check(rule, stop, temperature)
        ids = [main.encode(prompt) for prompt in prompts]
        config = main.model.generation_config
        ctx = Context(
            [],
            temperature,
            getattr(config, "top_k", None) if top_k is None else top_k,
            getattr(config, "top_p", None) if top_p is None else top_p,
            main.processors(sampling=temperature > 0) or None,
            main.spell,
            getattr(rule, "looks_ahead", False),
        )
        size = min(batch_size, len(ids))
        if not drafts or not ids:
            window = 0
        elif window == "auto":
            window = self._pick_window(ids, size, rule, stop, ctx, seed)
        if profile:
            profile.wait = _waiting({main.device, self.draft.device})
        longest = max(map(len, ids), default=0) + max_new_tokens
        session, drafter = self.engine(size, longest, window, main, rule, stop=stop, profile=profile)
        requests = (
            Request(
                Row(Noise.for_prompt(seed, prompt), list(prompt)), Limits(main, max_new_tokens, len(prompt), stops, text), i
            )
            for i, prompt in enumerate(ids)
        )
        outs = [Generation(prompt, window) for prompt in ids]
        return outs, decode(session, drafter, rule, ctx, lambda _: next(requests, None), size)

    def engine(
        self,
        size: int,
        longest: int,
        window: int,
        main: LM | None = None,
        rule: Rule | None = None,
        beside: Sequence[LM] = (),
        stop: Stop | None = None,
        profile: Profile | None = None,
    ) -> tuple[Session, ModelDrafter]:
        """What reads and what drafts `size` sequences of at most `longest` tokens together, in caches of their own; `main`
        reads, by default the target, what `rule` needs. Raises InputError where memory has no room for the caches and for
        as many of the models `beside`, which the caller makes."""
        main, longest = main or self.target, longest + window
        capacity = {lm: min(longest, lm.context or longest) for lm in (main, self.draft)}
        check_memory([(lm, capacity[lm]) for lm in (main, *([self.draft] if window else []), *beside)], size)
        profile = profile or Profile()
        draft = Session(self.draft, size, capacity[self.draft], profile=profile)
        keep_states, layer = (rule.reads_draft, rule.layer) if isinstance(rule, Term | AnyOf) else (False, None)
        session = Session(main, size, capacity[main], profile=profile, layer=layer)
        return session, ModelDrafter(draft, window, main, keep_states, stop)

    def check(self, rule: str | Rule, stop: str | Stop = "fixed", temperature: float = 0.0) -> None:
        """Raise InputError where a rule's or a stop condition's spec is wrong, its head is not for these models, or a rule has
        no meaning at this temperature."""
        rule, stop = self._roles(rule)[0], parse_stop(stop)
        if temperature == 0 and isinstance(rule, Term | AnyOf) and rule.samples:
            raise InputError(f"rule {rule}: has no greedy form; give a temperature above 0")
        for part in (rule, stop):
            if isinstance(part, Term | AnyOf | Stop):
                part.check(lambda: self.fingerprints, {"target": self.target.hidden_size, "draft": self.draft.hidden_size})

    def certified(self, options: Options) -> Options:
        """What options with the rule "certified:RUN" come to: the rule, the window and the length limit that the run's
        certificate binds. Raises InputError, by name, for another option, or other models or heads, than were certified."""
        rule = str(options["rule"])
        settled, binds = resolve(rule, options)
        stop = settled.get("stop", "fixed")
        check_binding(rule, binds, self.binding(settled["rule"], stop) if binds else {})
        return cast(Options, settled)

    def binding(self, rule: str | Rule, stop: str | Stop = "fixed") -> dict[str, Any]:
        """What lenient answers depend on besides the options: the models with their dtypes, the tokenizer, its chat template,
        the target's generation_config, and the heads of the rule and of the stop condition."""
        template = getattr(self.target.tokenizer, "chat_template", None)
        config = self.target.model.generation_config
        settings = {} if config is None else {k: v for k, v in config.to_diff_dict().items() if k != "transformers_version"}
        settings = {k: v if isinstance(v, int | float | str | None) else repr(v) for k, v in settings.items()}
        return {
            "models": {
                role: {"fingerprint": lm.fingerprint, "dtype": str(lm.model.dtype).removeprefix("torch.")}
                for role, lm in (("target", self.target), ("draft", self.draft))
            },
            "tokenizer": self.target.tokenizer_fingerprint,
            "template": hashlib.blake2b(str(template).encode(), digest_size=8).hexdigest() if template else None,
            "generation_config": settings,
            "heads": [one.head.fingerprint for one in learned(rule, stop)],
            "drafter": "model",
        }

    def _roles(self, rule: str | Rule) -> tuple[Rule, bool, LM]:
        """The rule, whether it drafts, and the model that reads; "target" and "draft" stand for that model without a
        drafter."""
        if rule in ALONE:
            return Exact(), False, self.target if rule == "target" else self.draft
        return parse_rule(rule), True, self.target

    def pick_window(self, prompts: Sequence[Prompt], *, batch_size: int = 1, **options: Unpack[Options]) -> int:
        """The window of WINDOWS at which these prompts should be answered fastest: how many tokens the rule keeps of a wide
        window is counted on a few of them, and what a cycle takes at each window is measured. It is picked once for a rule,
        a stop condition, a temperature and a batch size, and then stays."""
        options["window"] = "auto"
        outs, _ = self._decode(prompts, batch_size, text=False, **options)
        return outs[0].window if outs else 0

    def _pick_window(self, ids: list[list[int]], size: int, rule: Rule, stop: Stop, ctx: Context, seed: int) -> int:
        of = rule if isinstance(rule, Hashable) else str(rule)
        key = (of, stop, ctx.temperature, ctx.top_k, ctx.top_p, bool(ctx.processors), size, self.compiled)
        if key not in self._picked:
            pilot: Options = {
                "rule": rule, "stop": stop, "window": max(WINDOWS), "max_new_tokens": 64, "seed": seed,
                "temperature": ctx.temperature, "top_k": ctx.top_k, "top_p": ctx.top_p,
            }  # fmt: skip
            outs = self.generate_batch(ids[:8], batch_size=size, **pilot)
            kept = [n for out in outs for n in out.kept]
            costs = self._costs([ids[i % len(ids)] for i in range(size)], rule, stop, ctx, seed)
            self._picked[key] = max(WINDOWS, key=lambda w: (1 + sum(min(n, w) for n in kept) / len(kept)) / costs[w])
        return self._picked[key]

    def _costs(self, ids: list[list[int]], rule: Rule, stop: Stop, ctx: Context, seed: int) -> dict[int, float]:
        """The seconds of a cycle after the prompts at each window: medians of up to 20 rounds over all windows, fewer where
        they take more than a second."""
        stop = stop if stop.asks else Fixed()
        session, drafter = self.engine(len(ids), max(map(len, ids)), max(WINDOWS), rule=rule, stop=stop)
        seconds: dict[int, list[float]] = {window: [] for window in WINDOWS}
        rows = [Row(Noise.for_prompt(seed, prompt), list(prompt)) for prompt in ids]
        end = time.perf_counter() + 1
        while len(seconds[0]) < 2 or (time.perf_counter() < end and len(seconds[0]) < 21):  # the first is a warm-up
            for drafter.window in WINDOWS:
                began = time.perf_counter()
                cycle(session, drafter, rule, replace(ctx, rows=rows), [drafter.window + 1] * len(ids))
                seconds[drafter.window].append(time.perf_counter() - began)
        return {window: statistics.median(taken[1:]) for window, taken in seconds.items()}


def _waiting(devices: set[torch.device]) -> Callable[[], None] | None:
    """What waits for the GPUs among the devices; None where there is none."""
    gpus = [device for device in devices if device.type == "cuda"]

    def wait() -> None:
        for gpu in gpus:
            torch.cuda.synchronize(gpu)

    return wait if gpus else None


def _refuse_different_vocabularies(target: LM, draft: LM) -> None:
    a, b = target.tokenizer.get_vocab(), draft.tokenizer.get_vocab()
    if a == b:
        return
    missing, extra = a.keys() - b.keys(), b.keys() - a.keys()
    moved = [token for token in a.keys() & b.keys() if a[token] != b[token]]
    parts = [f"{len(found)} {what}, such as {min(found)!r}" for found, what in (
        (missing, "tokens of the target that the draft lacks"),
        (extra, "tokens of the draft that the target lacks"),
        (moved, "tokens with another id"),
    ) if found]  # fmt: skip
    raise InputError(
        f"the vocabularies of {target.name!r} and {draft.name!r} differ: {'; '.join(parts)}; take a draft of "
        "the target's family"
    )
