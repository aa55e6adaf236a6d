"""Answers in the form of OpenAI's API, whole and as chunks of a stream."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

from lenience.core.types import Step, Trace
from lenience.models.lm import LM
from lenience.serving.batch import Job
from lenience.serving.metrics import RequestCounts

REASONS = {"eos": "stop", "stop": "stop", "length": "length", "context": "length"}
"""OpenAI's reasons for the end of an answer by ours."""


@dataclass
class Choice:
    """One answer of a request, which grows step by step."""

    index: int
    job: Job
    counts: RequestCounts
    text: str = ""
    trace: list[Trace] = field(default_factory=list)

    def add(self, step: Step, lm: LM) -> None:
        """Add a step. If steps carry no text, the text is decoded at the end."""
        self.text += step.text
        self.trace += step.trace
        self.counts.add(step)
        response = self.job.response
        if step.finish and not (response.stream or response.stop_strings):
            tokens = [entry.token for entry in self.trace]
            self.text = lm.decode([each for each in tokens if each not in lm.eos_ids])

    @property
    def reason(self) -> str | None:
        """Return OpenAI's reason for the end; None before the end."""
        finish = self.job.response.finish
        return REASONS[finish] if finish else None


@dataclass
class ServedAnswer:
    """The answer to a request: its choices, in one of the API's two forms."""

    lm: LM
    model: str
    chat: bool
    choices: list[Choice]
    id: str = ""
    created: int = field(default_factory=lambda: int(time.time()))
    return_token_ids: bool = False

    def __post_init__(self) -> None:
        self.id = f"{'chatcmpl' if self.chat else 'cmpl'}-{uuid4().hex}"

    def whole(self) -> dict[str, Any]:
        """Return the whole answer."""
        return self._envelope(
            "chat.completion" if self.chat else "text_completion",
            [self._choice(choice) for choice in self.choices],
        ) | {"usage": self.usage(), **self._counts()}

    def first_chunks(self) -> list[dict[str, Any]]:
        """Return the chunks before any text: in a chat, the role of each answer."""
        if not self.chat:
            return []
        delta = {"role": "assistant", "content": ""}
        found = list[dict[str, Any]]()
        for choice in self.choices:
            found.append(
                self._chunk(
                    {"index": choice.index, "delta": delta, "finish_reason": None}
                )
            )
        return found

    def chunk(self, choice: Choice, step: Step, usage: bool) -> dict[str, Any]:
        """Return the chunk of a step, which `choice` has added already."""
        body: dict[str, Any] = {
            "index": choice.index,
            "finish_reason": choice.reason if step.finish else None,
            "logprobs": self._logprobs(
                choice, step.trace, len(choice.text) - len(step.text)
            ),
        }
        if self.chat:
            body["delta"] = {"content": step.text}
        else:
            body["text"] = step.text
        if self.return_token_ids:
            body["token_ids"] = step.tokens
        chunk = self._chunk(body)
        if step.finish:
            chunk |= self._counts()
        return chunk | ({"usage": self.usage()} if usage else {})

    def last_chunk(self) -> dict[str, Any]:
        """Return the chunk after the last one, with the usage alone."""
        chunk = self._envelope(
            "chat.completion.chunk" if self.chat else "text_completion", []
        )
        return chunk | {"usage": self.usage(), **self._counts()}

    def usage(self) -> dict[str, Any]:
        prompts = {id(choice.job.prompt): choice.job for choice in self.choices}
        read = sum(len(job.prompt) for job in prompts.values())
        new = sum(len(choice.trace) for choice in self.choices)
        cached = sum(job.reused for job in prompts.values())
        return {
            "prompt_tokens": read,
            "completion_tokens": new,
            "total_tokens": read + new,
            "prompt_tokens_details": {"cached_tokens": cached},
        }

    def _counts(self) -> dict[str, Any]:
        """Return the counts of a single answer, as vLLM does, in the field metrics."""
        if len(self.choices) != 1:
            return {}
        (choice,) = self.choices
        return {
            "metrics": choice.counts.to_json(
                str(choice.job.decoder.without_paths().rule)
            )
        }

    def _envelope(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }

    def _chunk(self, choice: dict[str, Any]) -> dict[str, Any]:
        kind = "chat.completion.chunk" if self.chat else "text_completion"
        return self._envelope(kind, [choice])

    def _choice(self, choice: Choice) -> dict[str, Any]:
        body: dict[str, Any] = {
            "index": choice.index,
            "finish_reason": choice.reason,
            "logprobs": self._logprobs(choice, choice.trace, 0),
        }
        if self.chat:
            body["message"] = {"role": "assistant", "content": choice.text}
        else:
            body["text"] = choice.text
        if self.return_token_ids:
            body["token_ids"] = [entry.token for entry in choice.trace]
            body["prompt_token_ids"] = choice.job.prompt
        return body

    def _logprobs(
        self, choice: Choice, trace: Sequence[Trace], offset: int
    ) -> dict[str, Any] | None:
        if choice.job.alternatives is None:
            return None
        most = choice.job.alternatives
        if self.chat:
            return {"content": [self._token(entry, most) for entry in trace]}
        tokens = [self._text(entry.token) for entry in trace]
        offsets = []
        for token in tokens:
            offsets.append(offset)
            offset += len(token)
        return {
            "tokens": tokens,
            "token_logprobs": [entry.logprob for entry in trace],
            "top_logprobs": [
                {
                    self._text(token): logprob
                    for token, logprob in (entry.alternatives or [])[:most]
                }
                for entry in trace
            ],
            "text_offset": offsets,
        }

    def _token(self, entry: Trace, most: int) -> dict[str, Any]:
        """Return a token with its log-probability, in the form of a chat."""
        others = (entry.alternatives or [])[:most]
        return {
            **self._one(entry.token, entry.logprob),
            "top_logprobs": [self._one(token, logprob) for token, logprob in others],
        }

    def _one(self, token: int, logprob: float | None) -> dict[str, Any]:
        text = self._text(token)
        return {"token": text, "logprob": logprob, "bytes": list(text.encode())}

    def _text(self, token: int) -> str:
        return self.lm.decode([token], special=True)
