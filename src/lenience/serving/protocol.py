"""Requests of OpenAI's API: their fields, and what they ask of the decoder. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, StrictBool, model_validator
from pydantic_core import PydanticCustomError

MOST_CHOICES = 16
"""Maximum of n."""
MOST_STOPS = 64
"""Maximum number of stop strings."""
MOST_ALTERNATIVES = 20
"""Maximum of top_logprobs."""
WITHOUT_EFFECT = (
    "metadata", "priority", "prompt_cache_key", "request_id", "safety_identifier", "service_tier",
    "store", "user",
)  # fmt: skip
"""Fields that do not change an answer; they are accepted and not read."""
UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {
    "tools": (None, []),
    "tool_choice": (None, "none", "auto"),
    "parallel_tool_calls": (None, True, False),
    "functions": (None, []),
    "function_call": (None, "none", "auto"),
    "response_format": (None, {"type": "text"}),
    "structured_outputs": (None,),
    "guided_json": (None,),
    "guided_regex": (None,),
    "guided_choice": (None,),
    "modalities": (None, ["text"]),
    "audio": (None,),
    "prediction": (None,),
    "reasoning_effort": (None,),
    "web_search_options": (None,),
    "best_of": (None, 1),
    "suffix": (None, ""),
    "echo": (None, False),
    "use_beam_search": (None, False),
    "length_penalty": (None, 1.0),
    "min_p": (None, 0),
    "min_tokens": (None, 0),
    "stop_token_ids": (None, []),
    "include_stop_str_in_output": (None, False),
    "skip_special_tokens": (None, True),
    "spaces_between_special_tokens": (None, True),
    "prompt_logprobs": (None,),
    "add_generation_prompt": (None, True),
    "continue_final_message": (None, False),
    "chat_template": (None,),
    "chat_template_kwargs": (None, {}),
}
"""Fields that other servers have, with the values that ask for nothing. Other values are errors."""
Seed = Annotated[int, Field(ge=-(2**63), lt=2**63)]
Number = Annotated[float, Field(allow_inf_nan=False)]


class StreamOptions(BaseModel):
    """Options of a stream."""

    model_config = ConfigDict(extra="forbid")

    include_usage: StrictBool = False
    continuous_usage_stats: StrictBool = False
    """True if each chunk carries the usage so far."""


class _Request(BaseModel):
    """The fields that both kinds of requests have."""

    model_config = ConfigDict(extra="forbid")

    model: str | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[Number, Field(ge=0)] | None = None
    top_p: Annotated[Number, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    seed: Seed | None = None
    n: Annotated[int, Field(ge=1, le=MOST_CHOICES)] | None = None
    stop: str | Annotated[list[str], Field(max_length=MOST_STOPS)] | None = None
    stream: StrictBool | None = None
    stream_options: StreamOptions | None = None
    presence_penalty: Annotated[Number, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[Number, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[Number, Field(gt=0)] | None = None
    logit_bias: dict[str, Annotated[Number, Field(ge=-100, le=100)]] | None = None
    ignore_eos: StrictBool | None = None
    return_token_ids: StrictBool | None = None
    lenience: str | float | None = None
    """The dial: "exact", a stricter threshold of the server's rule, or a rule that it allows."""
    vllm_xargs: dict[str, Any] | None = None
    """Further arguments as vLLM takes them; "lenience" is the dial."""

    @model_validator(mode="before")
    @classmethod
    def _refuse_unsupported(cls, fields: Any) -> Any:
        """Drop fields without effect. Raises an error that names a field that the server does not
        support."""
        if not isinstance(fields, dict):
            return fields
        known = dict(fields)
        for name, neutral in UNSUPPORTED.items():
            if known.pop(name, None) not in neutral:
                raise PydanticCustomError(
                    "unsupported",
                    "{field}: is not supported by this server; leave it out",
                    {"field": name},
                )
        for name in WITHOUT_EFFECT:
            known.pop(name, None)
        return known

    @model_validator(mode="after")
    def _check_dial(self) -> Self:
        extra = self.vllm_xargs or {}
        if extra.keys() - {"lenience"}:
            other = min(extra.keys() - {"lenience"})
            raise PydanticCustomError(
                "unsupported",
                "vllm_xargs: {other} is unknown here; there is lenience",
                {"field": "vllm_xargs", "other": other},
            )
        if self.lenience is not None and extra.get("lenience") is not None:
            raise PydanticCustomError(
                "twice",
                "lenience: is given twice, also in vllm_xargs; give one",
                {"field": "lenience"},
            )
        return self

    @property
    def dial(self) -> object:
        """Return the dial; None for the server's rule."""
        if self.lenience is not None:
            return self.lenience
        return (self.vllm_xargs or {}).get("lenience")

    @property
    def new_tokens(self) -> int | None:
        """Return the maximum number of new tokens; None if none is given."""
        return self.max_tokens

    @property
    def stops(self) -> tuple[str, ...]:
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    def options(self) -> dict[str, Any]:
        """Return the options of decoding that the request gives, except the number of tokens."""
        given = {
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k if self.top_k != -1 else 0,
            "seed": self.seed,
            "stop_strings": self.stops or None,
        }
        return {name: value for name, value in given.items() if value is not None}


class Completion(_Request):
    """A request to /v1/completions."""

    prompt: str | list[str] | list[int] | list[list[int]]
    logprobs: Annotated[int, Field(ge=0, le=MOST_ALTERNATIVES)] | None = None

    def prompts(self) -> list[str | list[int]]:
        """Return the prompts, each as text or token ids."""
        given: Any = self.prompt
        if isinstance(given, str) or (given and isinstance(given[0], int)):
            return [given]
        return list(given)

    @property
    def alternatives(self) -> int | None:
        return self.logprobs


class ContentPart(BaseModel):
    """A part of a message's content."""

    model_config = ConfigDict(extra="forbid")

    type: Literal["text"]
    text: str


class Message(BaseModel):
    """A chat message."""

    model_config = ConfigDict(extra="forbid")

    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None

    def plain(self) -> dict[str, str]:
        """Return the message with its content as one text."""
        content = self.content or ""
        if not isinstance(content, str):
            content = "\n".join(part.text for part in content)
        return {"role": self.role, "content": content}


class ChatCompletion(_Request):
    """A request to /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: StrictBool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MOST_ALTERNATIVES)] | None = None

    @property
    def new_tokens(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def alternatives(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @model_validator(mode="after")
    def _check_logprobs(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise PydanticCustomError(
                "logprobs",
                "top_logprobs: needs logprobs true",
                {"field": "top_logprobs"},
            )
        return self


class Tokenize(BaseModel):
    """A request to /tokenize: a prompt, or messages."""

    model_config = ConfigDict(extra="forbid")

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    add_special_tokens: StrictBool = True

    @model_validator(mode="after")
    def _check_one(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise PydanticCustomError(
                "one", "prompt: give it, or messages", {"field": "prompt"}
            )
        return self


class Detokenize(BaseModel):
    """A request to /detokenize."""

    model_config = ConfigDict(extra="forbid")

    model: str | None = None
    tokens: list[int]


class RaceRequest(BaseModel):
    """A request of the live page."""

    model_config = ConfigDict(extra="forbid")

    prompt: Annotated[str, Field(min_length=1, max_length=20_000)]
    max_tokens: Annotated[int, Field(ge=1, le=2048)] = 160
    columns: list[Literal["target", "strict", "lenient"]] = [
        "target",
        "strict",
        "lenient",
    ]
    lenience: str | float | None = None
