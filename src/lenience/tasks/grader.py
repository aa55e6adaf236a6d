"""Graders: language models that compare two answers, for tasks without a right answer."""

from __future__ import annotations

import json
import os
import re
import time
import urllib.error
import urllib.request
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from http.client import HTTPException, InvalidURL
from threading import Lock
from typing import Any, Protocol

from lenience.core.errors import InputError, RunError, first_line
from lenience.core.files import cache_folder, digest
from lenience.core.text_store import TextStore
from lenience.core.workers import each
from lenience.tasks.base import Messages, Sample, Score, Task

REQUESTS_AT_ONCE = 8
"""Number of requests in flight."""
ATTEMPTS = 5
REQUEST_SECONDS = 120.0
"""Time limit of a request, in seconds."""
CHECKED_AFTER = 10
"""Number of pairs after which a grader's judgements are checked."""
KEYS = ("LENIENCE_GRADER_KEY", "OPENAI_API_KEY")
INSTRUCTION = (
    "You compare two answers of assistants to the last question of a user. Judge which "
    "one serves "
    "the user better: is it right, does it do what was asked, is it complete and "
    "clear. Length, "
    "order and names do not count. Explain in a few sentences, then end with a line "
    "that holds "
    "[[A]] if answer A is better, [[B]] if answer B is better, or [[C]] if they are "
    "equally good."
)


class Grader(Protocol):
    """A language model that compares answers."""

    name: str
    """Name in tasks and certificates."""
    source: str
    """Identity under which the replies are cached."""

    def ask(self, prompts: Sequence[Messages]) -> list[str]:
        """Return the replies to prompts, in order; "" for an empty reply."""
        ...


MAX_TOKENS = 1024
"""Length limit of a reply, its thought included."""
THOUGHTS = ("reasoning_content", "reasoning")
"""Fields in which servers return a model's reasoning."""


def _text_of(content: Any) -> str:
    """Return the text of a message, which may be a list of parts."""
    if isinstance(content, list):
        return "".join(
            str(part.get("text", "")) for part in content if isinstance(part, dict)
        )
    return str(content or "")


class GraderServer:
    """A server with OpenAI's API: `URL[,model=NAME]`, by default its first model. The key comes
    from LENIENCE_GRADER_KEY or OPENAI_API_KEY. Requests are greedy. A request that fails
    temporarily is sent ATTEMPTS times in all, and then raises RunError."""

    def __init__(self, spec: str, wait: float = 1.0):
        url, _, rest = spec.partition(",")
        name, _, model = rest.partition("=")
        if rest and (name != "model" or not model):
            raise InputError(f"--grader {spec}: write URL or URL,model=NAME")
        if not is_address(url):
            raise InputError(
                f"--grader {spec}: is not an address; write http://HOST:PORT/v1"
            )
        self.url = url.rstrip("/")
        self._wait = wait
        """Seconds before the second attempt, doubled before each further attempt."""
        self.model = model or self._first_model()
        self.name = self.model
        self.source = f"{self.model} at {self.url}"

    def ask(self, prompts: Sequence[Messages]) -> list[str]:
        return each(self._ask, prompts, REQUESTS_AT_ONCE)

    def _first_model(self) -> str:
        try:
            listed = self._request("models", None)["data"]
            return str(listed[0]["id"])
        except RunError as error:
            why = first_line(error)
            lists = " 404 " in str(error)
            fix = "check that the server runs"
            if lists:
                fix = "give the address that ends in /v1, or model=NAME"
            raise InputError(f"--grader {self.url}: {why}; {fix}") from None
        except (LookupError, TypeError):
            raise InputError(
                f"--grader {self.url}: lists no models; give model=NAME"
            ) from None

    def _ask(self, messages: Messages) -> str:
        body = {"model": self.model, "messages": messages, "temperature": 0}
        body["max_tokens"] = MAX_TOKENS
        try:
            choice = self._request("chat/completions", body)["choices"][0]
            message = choice["message"]
            text = _text_of(message["content"])
        except (LookupError, TypeError) as error:
            raise RunError(
                f"grader {self.source}: its response has no reply ({error!r})"
            ) from None
        if text.strip():
            return text
        thought = next((name for name in THOUGHTS if message.get(name)), None)
        if choice.get("finish_reason") == "length":
            what = "its thought" if thought else "an empty reply"
            raise RunError(
                f"grader {self.source}: {what} used up all {MAX_TOKENS} tokens; turn "
                "reasoning off "
                "on the server, or name a model that does not think"
            )
        if thought:
            raise RunError(
                f"grader {self.source}: its reply is empty, and all of it is in "
                f"{thought}; turn "
                "reasoning off on the server, or start it without a reasoning parser"
            )
        return ""

    def _request(self, path: str, body: dict[str, Any] | None) -> Any:
        headers = {"Content-Type": "application/json"}
        key = next((os.environ[name] for name in KEYS if os.environ.get(name)), None)
        if key:
            headers["Authorization"] = f"Bearer {key}"
        data = None if body is None else json.dumps(body).encode()
        for attempt in range(ATTEMPTS):
            request = urllib.request.Request(f"{self.url}/{path}", data, headers)
            try:
                with urllib.request.urlopen(
                    request, timeout=REQUEST_SECONDS
                ) as response:
                    return json.load(response)
            except urllib.error.HTTPError as error:
                why = f"{error.code} {error.reason}: {_said(error)}"
                if error.code != 429 and error.code < 500:
                    break
            except InvalidURL as error:
                raise InputError(
                    f"--grader {self.url}: is no address ({error})"
                ) from None
            except (OSError, ValueError, HTTPException) as error:
                why = first_line(error)
            if attempt < ATTEMPTS - 1:
                warnings.warn(f"grader {self.url}: {why}; retrying", stacklevel=2)
                time.sleep(self._wait * 2**attempt)
        raise RunError(f"grader {self.url}: {path} failed ({why})")


PROBE = Sample("probe", "What is the capital of France?", None)
RIGHT = "The capital of France is Paris."
WRONG = "Banana 1."
"""Nonsense answer to the probe; every grader must prefer RIGHT."""


def is_address(text: str) -> bool:
    """Return True if a grader's spec is a server's address."""
    return re.match(r"https?://[^/]", text) is not None


def _said(error: urllib.error.HTTPError) -> str:
    """Return a server's error message in one line."""
    try:
        return " ".join(error.read(2000).decode("utf-8", "replace").split())[:300]
    except (OSError, HTTPException):
        return ""


@dataclass
class GradingCounts:
    """Counts of a grader's judgements so far, over pairs of answers that differ."""

    pairs: int = 0
    decided: int = 0
    """Number of pairs whose both orders gave the same preference."""
    inconsistent: int = 0
    """Number of pairs whose two orders disagreed; these pairs count as ties."""
    unread: int = 0
    """Number of replies without a verdict; their pairs count as ties."""

    @property
    def fault(self) -> str | None:
        """Return the reason to distrust the judgements; None if there is none, or before
        CHECKED_AFTER pairs."""
        if self.pairs < CHECKED_AFTER:
            return None
        if self.unread > self.pairs:
            return f"{self.unread} of {2 * self.pairs} replies hold no verdict"
        if not self.decided and 2 * self.inconsistent > self.pairs:
            return (
                f"it prefers an answer by its place in {self.inconsistent} of "
                f"{self.pairs} pairs, "
                "and has decided none"
            )
        return None


class Graded(Task):
    """A task whose answers a grader compares with the target's own, in both orders.

    An answer is better or worse if both orders agree; otherwise it is a tie. An answer agrees with
    the target's own if it is not worse. The mean of its points, 1 for a win, 0.5 for a tie and 0
    for a loss, is the win rate (Zheng 2023). Replies with a verdict are cached by content, so none
    is requested twice. Raises InputError for untrustworthy judgements, see `GradingCounts.fault`,
    and before a run if the grader does not prefer the right answer to a simple question.
    """

    compares_slowly = True
    measure = "win rate"
    beside_target = True
    at_par = 0.5
    loss_is = "the share of prompts on which the grader prefers the target's answer"
    disagreement_is = loss_is

    def __init__(self, task: Task, grader: Grader):
        self.task = task
        self.grader = grader
        self.max_new_tokens = task.max_new_tokens
        self.stop_strings = task.stop_strings
        self.version = task.version
        self.name = f"{task.name} graded by {grader.name}"
        self.counts = GradingCounts()
        self._counted = set[str]()
        self._kept = TextStore(
            cache_folder() / "graders" / f"{digest(grader.source, 6)}.jsonl"
        )
        self._unread = dict[str, str]()
        """Replies without a verdict, by the question's digest."""
        self._lock = Lock()

    @property
    def reads(self) -> str:
        return f"{self.task.reads} graded by {self.grader.name}"

    @property
    def label(self) -> str:
        return self.task.label

    @property
    def grading(self) -> dict[str, int]:
        return asdict(self.counts)

    def attach(self, own_answers: Callable[[Sequence[Messages]], list[str]]) -> None:
        self._probe()
        self.task.attach(own_answers)

    def _probe(self) -> None:
        """Raise InputError for a grader that does not prefer a right answer to nonsense."""
        orders = _question(PROBE, RIGHT, WRONG), _question(PROBE, WRONG, RIGHT)
        keys = [digest(order, 16) for order in orders]
        self._ask(
            {key: order for key, order in zip(keys, orders) if key not in self._kept}
        )
        verdicts = list(map(self._verdict, keys))
        if verdicts != ["A", "B"]:
            said = " and ".join(
                f"[[{verdict}]]" if verdict else "no verdict" for verdict in verdicts
            )
            raise InputError(
                f"grader {self.grader.name}: does not tell {RIGHT!r} from {WRONG!r} as "
                "an answer "
                f"to {PROBE.prompt!r} (it gives {said}, for [[A]] and [[B]]); name "
                "another model"
            )

    def _verdict(self, key: str) -> str | None:
        return _verdict(self._kept[key]) if key in self._kept else None

    def samples(self, split: str) -> Iterable[Sample]:
        return self.task.samples(split)

    def answer(self, text: str, sample: Sample | None = None) -> str | None:
        return text.strip() or None

    def same(
        self, a: str | None, b: str | None, sample: Sample | None = None
    ) -> bool | None:
        if a is None or b is None or sample is None:
            return None
        return self.points([(a, b, sample)])[0] >= 0.5

    def score(self, pairs: Sequence[tuple[str, Sample]]) -> list[Score]:
        return [Score(correct=False, loss=0.0) for _ in pairs]  # has no score alone

    def loss(self, text: str, target_text: str, sample: Sample) -> float:
        return float(self.points([(text, target_text, sample)])[0] < 0.5)

    def points(self, triples: Sequence[tuple[str, str, Sample]]) -> list[float]:
        asked: dict[str, Messages] = {}
        pairs: list[tuple[str, str] | None] = []
        for text, other, sample in triples:
            if text.strip() == other.strip():
                pairs.append(None)
                continue
            orders = (_question(sample, text, other), _question(sample, other, text))
            first, second = (digest(order, 16) for order in orders)
            for key, question in zip((first, second), orders):
                if key not in self._kept and key not in self._unread:
                    asked[key] = question
            pairs.append((first, second))
        self._ask(asked)
        return [0.5 if keys is None else self._points(*keys) for keys in pairs]

    def _ask(self, asked: dict[str, Messages]) -> None:
        """Send questions to the grader, and cache each reply that has a verdict."""
        keys = list(asked)
        for start in range(0, len(keys), REQUESTS_AT_ONCE):
            some = keys[start : start + REQUESTS_AT_ONCE]
            for key, reply in zip(some, self.grader.ask([asked[key] for key in some])):
                if _verdict(reply):
                    self._kept.add(key, reply)
                else:
                    self._unread[key] = reply

    def _points(self, first: str, second: str) -> float:
        """Return the points of the answer that is A in the first question and B in the second."""
        verdicts = list(map(self._verdict, (first, second)))
        with self._lock:
            if first not in self._counted:
                self._counted.add(first)
                self.counts.pairs += 1
                self.counts.decided += verdicts in (["A", "B"], ["B", "A"])
                self.counts.unread += verdicts.count(None)
                self.counts.inconsistent += verdicts in (["A", "A"], ["B", "B"])
            fault = self.counts.fault
        if fault:
            reply = next(iter(self._unread.values()), "")
            such = (
                f", such as {' '.join(reply.split())[:80]!r}"
                if "verdict" in fault
                else ""
            )
            raise InputError(
                f"grader {self.grader.name}: {fault}{such}; name another model"
            )
        if verdicts == ["A", "B"]:
            return 1.0
        return 0.0 if verdicts == ["B", "A"] else 0.5


def _question(sample: Sample, a: str, b: str) -> Messages:
    prompt = sample.prompt
    if not isinstance(prompt, str):
        prompt = "\n\n".join(
            f"{message['role'].capitalize()}: {message['content']}"
            for message in prompt
        )
    reference = sample.reference or sample.metadata.get("reference")
    shown = f"[Reference answer]\n{reference}\n\n" if reference else ""
    asked = (
        f"[Conversation]\n{prompt}\n\n{shown}[Answer A]\n{a.strip()}\n[End of answer "
        "A]\n\n"
        f"[Answer B]\n{b.strip()}\n[End of answer B]"
    )
    return [
        {"role": "system", "content": INSTRUCTION},
        {"role": "user", "content": asked},
    ]


def _verdict(reply: str) -> str | None:
    """Return the last verdict in a reply, A, B or C; None without any."""
    found = re.findall(r"\[\[([ABC])\]\]", reply)
    return found[-1] if found else None
