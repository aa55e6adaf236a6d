"""The nouns of a decoding cycle, and the protocols Drafter and Rule.

Everything is batched: B rows are decoded together, each with its own history and its own acceptance. Of a window of W
drafted tokens, state 0 of logits and hidden states is the one after the prefix, which predicts the first drafted
token, and state i + 1 the one after the i-th drafted token was read.
"""

from __future__ import annotations

import hashlib
import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, Protocol, cast

import torch
from torch import Tensor

if TYPE_CHECKING:
    from transformers import LogitsProcessorList

Finish = Literal["eos", "stop", "length", "context"]
Origin = Literal["draft", "draft-lenient", "draft-trusted", "correction", "bonus"]


@dataclass(frozen=True)
class Draft:
    """A proposed window for each row: a chain of at most W tokens, perhaps empty."""

    tokens: Tensor
    """[B, W]; what stands from a row's length on is not proposed."""
    lengths: Tensor
    """[B]: how many tokens are proposed for each row."""
    logits: Tensor | None = None
    """[B, W, V]: what each token was picked from, after the logits processors; None where nothing was drafted."""
    hidden: Tensor | None = None
    """[B, W + 1, H]: the draft's states, see the module; None unless a rule asked for them."""
    passes: int = 0
    """How many passes of a model proposing took."""
    read: Sequence[int] = ()
    """[B]: how many tokens these passes read for each row."""
    trusted: Tensor | None = None
    """[B]: how many of the first tokens are kept without asking the target, which does not read a window trusted whole."""

    @property
    def width(self) -> int:
        return self.tokens.shape[1]

    @cached_property
    def proposed(self) -> Tensor:
        """[B, W] bool: which places hold a proposed token."""
        return torch.arange(self.width, device=self.tokens.device) < self.lengths[:, None]

    @cached_property
    def kept_unasked(self) -> Tensor | None:
        """[B, W] bool: which places hold a trusted token; None where nothing is trusted."""
        if self.trusted is None:
            return None
        return torch.arange(self.width, device=self.tokens.device) < self.trusted[:, None]

    def rows(self, which: Sequence[int]) -> Draft:
        """The windows of some of the rows."""
        parts: dict[str, Any] = {item.name: getattr(self, item.name) for item in fields(self)}
        parts |= {name: value[list(which)] for name, value in parts.items() if isinstance(value, Tensor)}
        return Draft(**{**parts, "read": [self.read[b] for b in which] if self.read else ()})


@dataclass(frozen=True)
class Reading:
    """What one pass of a model over B prefixes and W tokens after each gave."""

    logits: Tensor
    """[B, W + 1, V]"""
    hidden: Tensor
    """[B, W + 1, H]: the states that the LM head reads, after the final norm."""
    read: Sequence[int] = ()
    """[B]: how many tokens the pass read for each row; the others were in the cache."""

    @cached_property
    def best(self) -> Tensor:
        """[B, W + 1]: the most probable tokens."""
        return self.logits.argmax(-1)


@dataclass(frozen=True)
class Verdict:
    """A rule's answer for one row's window."""

    drafted: list[int]
    accepted: int
    """How many drafted tokens are kept."""
    token: int | None
    """The correction or, where the window was accepted whole, the bonus token; None where the target did not read it."""
    exact: list[bool]
    """For each drafted position, whether the strict rule accepts it there; False where the target did not read."""
    scores: list[float | None]
    """For each drafted position, the judge's score where one was asked."""


@dataclass(frozen=True)
class Trace:
    """Where one new token came from; `score` is the judge's for the drafted token at this place, where it was asked."""

    token: int
    origin: Origin
    score: float | None = None


@dataclass(frozen=True)
class Step:
    """What one cycle kept."""

    trace: list[Trace]
    drafted: int
    accepted_exact: int
    """How many tokens the strict rule alone would have kept of the same window."""
    accepted_lenient: int
    """How many more drafted tokens were kept; below 0 for a rule that rejects what the strict one accepts."""
    draft_passes: int
    text: str
    """The text that this step adds, incomplete characters and possible stop strings held back until they are decided."""
    finish: Finish | None = None
    target_passes: int = 1
    """0 where the window was trusted."""
    draft_tokens: int = 0
    """How many tokens the draft read."""
    target_tokens: int = 0

    @property
    def tokens(self) -> list[int]:
        return [entry.token for entry in self.trace]


@dataclass(frozen=True)
class Noise:
    """Random draws keyed by (seed, request, position, purpose): a prompt gets the same ones alone or among others."""

    seed: int
    request: bytes

    @classmethod
    def for_prompt(cls, seed: int, prompt: Sequence[int]) -> Noise:
        return cls(seed, hashlib.blake2b(struct.pack(f"<{len(prompt)}q", *prompt), digest_size=16).digest())

    def key(self, position: int, purpose: str) -> int:
        """A signed 64-bit number."""
        message = struct.pack("<qq", self.seed, position) + self.request + purpose.encode()
        return int.from_bytes(hashlib.blake2b(message, digest_size=8).digest(), "little", signed=True)


@dataclass
class Row:
    """One of the sequences that are decoded together."""

    noise: Noise
    prefix: list[int] = field(default_factory=list)
    """All tokens so far, the prompt's included."""
    position: int = 0
    """How many new tokens there are so far."""
    last: Step | None = None
    """What its last cycle kept."""
    schedule: int = 0
    """How many tokens a stop condition's schedule has come to allow."""
    lenient: int = 0
    """How many tokens have been kept that the strict rule rejects at their own place."""
    spans: dict[tuple[str, str], tuple[int, bool]] = field(default_factory=dict)
    """By the texts that open and close a span: of how many tokens it is known, and whether one is open after these."""


@dataclass
class Context:
    """What a rule and a drafter need besides the models' readings: sampling parameters, and each row's history and
    randomness."""

    rows: list[Row] = field(default_factory=list)
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    processors: LogitsProcessorList | None = None
    decode: Callable[[Sequence[int]], str] | None = None
    """The text of tokens, special ones included."""
    anew: bool = False
    """Whether each window has draws of its own, as a lossless rule needs whose decision on a token depends on those after it:
    a draw that helped to decide must not come again."""

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    def process(self, logits: Tensor, ahead: Tensor) -> Tensor:
        """Apply the model's logits processors to `logits` [B, m, V], the last of which follow `ahead` [B, a] after the
        prefixes."""
        if not self.processors:
            return logits
        m, done = logits.shape[1], []
        for row, tokens, scores in zip(self.rows, ahead.tolist(), logits.float()):
            history = torch.tensor([[*row.prefix, *tokens]], device=logits.device)  # [1, T]
            for i in range(m):
                seen = history[:, : history.shape[1] - m + 1 + i]
                done.append(self.processors(cast(torch.LongTensor, seen), cast(torch.FloatTensor, scores[i : i + 1])))
        return torch.cat(done).view(logits.shape)

    def probs(self, logits: Tensor) -> Tensor:
        """[…, V] processed logits → the distributions that sampling really uses, in float32; one-hot when greedy.

        Temperature, then top-k, then top-p, as `transformers` defines them.
        """
        logits = logits.float()
        if self.greedy:
            return torch.nn.functional.one_hot(logits.argmax(-1), logits.shape[-1]).float()
        return torch.softmax(self._warp(logits), -1)

    def _warp(self, logits: Tensor) -> Tensor:
        from transformers import TopKLogitsWarper, TopPLogitsWarper

        flat = logits.reshape(-1, logits.shape[-1]) / self.temperature
        nothing: Any = torch.empty(0)
        if self.top_k:
            flat = TopKLogitsWarper(self.top_k)(nothing, cast(torch.FloatTensor, flat))
        if self.top_p is not None and self.top_p < 1:
            flat = TopPLogitsWarper(self.top_p)(nothing, cast(torch.FloatTensor, flat))
        return flat.view(logits.shape)

    def allows(self, logits: Tensor, tokens: Tensor) -> Tensor:
        """[B, W, V] processed logits and [B, W] tokens → whether neither a processor nor the truncation rules each out."""
        logits = logits if self.greedy else self._warp(logits.float())
        return logits.gather(2, tokens[..., None])[..., 0] > -torch.inf

    def logs(self, logits: Tensor) -> Tensor:
        """[…, V] processed logits → log-probabilities at the request's temperature (1 when greedy), before truncation, in
        float32."""
        return torch.log_softmax(logits.float() / (self.temperature or 1), -1)

    def used(self, device: torch.device) -> Tensor:
        """[B]: how many tokens each row's request has kept that the strict rule rejects."""
        return sent([row.lenient for row in self.rows], device)

    def inside(self, begin: str, end: str, tokens: Tensor) -> Tensor:
        """[B, W] bool: whether each of the drafted `tokens` stands in a span that the text `begin` opens and `end` closes."""
        if self.decode is None:
            raise RuntimeError("spans are marked by text, and the context has no tokenizer")
        reach = len(max(begin, end, key=len).encode()) + 1  # a token may be less than a character
        found = []
        for row, drafted in zip(self.rows, tokens.tolist()):
            known, open = row.spans.get((begin, end), (0, False))
            ids, states = [*row.prefix, *drafted], []
            # after the prompt, which is looked at whole, token by token: what one completes stands among the last few
            for n in range(known or len(row.prefix) - row.position, len(ids)):
                if n != known:
                    text = self.decode(ids[max(0, n - reach) if known else 0 : n])
                    opened, closed = (at + len(mark) if (at := text.rfind(mark)) >= 0 else 0 for mark in (begin, end))
                    open = opened > closed if opened or closed else open  # by where they end: one may contain the other
                    known = known or n
                if n == len(row.prefix):
                    row.spans[begin, end] = n, open
                if n >= len(row.prefix):
                    states.append(open)
            found.append(states)
        return sent(found, tokens.device).bool().view(tokens.shape)

    def keys(self, n: int, purpose: str, ahead: int = 0, device: torch.device | None = None) -> Tensor:
        """[B, n] int64: each row's keys for n positions, the first of them `ahead` of where it stands."""
        whose = [(row, f"{purpose}@{row.position}" if self.anew else purpose) for row in self.rows]
        keys = [[row.noise.key(row.position + ahead + i, purpose) for i in range(n)] for row, purpose in whose]
        return sent(keys, device or torch.device("cpu")).long().view(len(keys), n)

    def draw(self, logits: Tensor, ahead: int = 0) -> Tensor:
        """[B, m, V] processed logits → [B, m]: the tokens that plain decoding takes, the first of them `ahead` tokens after
        where the rows stand."""
        if self.greedy:
            return logits.argmax(-1)
        return race(self.probs(logits), self.keys(logits.shape[1], "token", ahead, logits.device))


def sent(numbers: Sequence[Any], device: torch.device) -> Tensor:
    """Numbers for a device; a GPU takes them when it comes to them, and is not waited for."""
    made = torch.tensor(numbers, device="cpu")
    return made.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else made.to(device)


def coming(numbers: Tensor) -> Callable[[], list[Any]]:
    """What gives the numbers of a device as a list; a GPU is not waited for before it is called."""
    if numbers.device.type != "cuda":
        return numbers.tolist
    host, there = numbers.to("cpu", non_blocking=True), torch.cuda.Event()
    there.record(torch.cuda.current_stream(numbers.device))

    def arrived() -> list[Any]:
        there.synchronize()
        return host.tolist()

    return arrived


def uniform(keys: Tensor) -> Tensor:
    """int64 keys → numbers in (0, 1), by the finaliser of SplitMix64 (Steele 2014), the same on every device."""
    bits = keys + _GOLDEN
    for shift, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15), (31, 1)):
        bits = (bits ^ ((bits >> shift) & ((1 << (64 - shift)) - 1))) * factor
    return (((bits >> 12) & ((1 << 52) - 1)).double() + 0.5) / 2**52


_GOLDEN = -0x61C8864680B583EB  # 2⁶⁴ divided by the golden ratio, as a signed number


def race(probs: Tensor, keys: Tensor) -> Tensor:
    """A token from each of `probs` […, V] (need not sum to 1) by an exponential race on `keys` […], the Gumbel trick: two
    distributions that are raced on the same key mostly give the same token."""
    lanes = torch.arange(1, probs.shape[-1] + 1, device=probs.device) * _GOLDEN
    return (probs.double() / -uniform(keys[..., None] + lanes).log()).argmax(-1)


class Profile:
    """Where the time of decoding goes: `seconds` in the passes of the draft and of the target, in the rule, in the caches (what
    is new in the rows, and writing their states) and in the rest; `cycles` in all. It may be given to several calls, one
    after the other. On a GPU each part is waited for, which takes time itself."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(("draft", "target", "rule", "cache", "rest"), 0.0)
        self.cycles = 0
        self.wait: Callable[[], None] | None = None
        """Waits for the device."""
        self._last = time.perf_counter()

    def start(self) -> None:
        """What came before belongs to no part."""
        self._last = time.perf_counter()

    def lap(self, part: str) -> None:
        """What has passed since the last call belongs to this part."""
        if self.wait:
            self.wait()
        now = time.perf_counter()
        self.seconds[part] += now - self._last
        self._last = now


class Drafter(Protocol):
    """Proposes windows."""

    def propose(self, ctx: Context, room: Sequence[int]) -> Draft:
        """A window for each row of `ctx`, which may have `room` new tokens more, of which one follows a window that is not
        trusted; it may be empty."""
        ...

    def move(self, source: int, to: int) -> None:
        """The row at `source` becomes the row at `to`."""
        ...


class Rule(Protocol):
    """Decides what of each row's window is kept. A rule is data: `str(rule)` is its spec."""

    def __call__(self, draft: Draft, reading: Reading, ctx: Context) -> list[Verdict]: ...
