"""Prompts in every accepted form, and their conversion to token ids."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from transformers import PreTrainedTokenizerBase

from lenience.core.errors import InputError, first_line

Prompt = str | Sequence[int] | list[dict[str, str]]
"""Text, token ids, or chat messages."""


@dataclass(frozen=True)
class Chat:
    """Settings of the chat template that turns text and messages into a prompt."""

    use: bool | None = None
    """True to apply the tokenizer's chat template, False for no template; None to apply it if the
    tokenizer has one."""
    system: str | None = None
    """System message, used if the messages do not begin with one."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of the template, such as enable_thinking."""

    @property
    def spec(self) -> dict[str, Any] | None:
        """Return the settings that are not defaults, as JSON; None if there are none."""
        spec: dict[str, Any] = {} if self.use is None else {"use": self.use}
        if self.system is not None:
            spec["system"] = self.system
        return (
            spec | ({"options": dict(self.options)} if self.options else {})
        ) or None

    def template_of(self, tokenizer: PreTrainedTokenizerBase) -> str | None:
        """Return the chat template that applies to prompts; None if none applies."""
        template = getattr(tokenizer, "chat_template", None)
        return None if self.use is False or not template else str(template)

    def identity(
        self, tokenizer: PreTrainedTokenizerBase
    ) -> str | dict[str, Any] | None:
        """Return the digest of the template that applies, with the settings that are not defaults;
        None if none applies."""
        template = self.template_of(tokenizer)
        spec = self.spec
        if template is None:
            return None
        content = hashlib.blake2b(template.encode(), digest_size=8).hexdigest()
        return content if spec is None else {"content": content, **spec}

    def end_of_turn(self, tokenizer: PreTrainedTokenizerBase) -> int | None:
        """Return the special token that the template puts after an assistant's turn; None if there
        is none."""
        if self.template_of(tokenizer) is None:
            return None
        said = "lenience"
        turns = [
            {"role": "user", "content": "?"},
            {"role": "assistant", "content": said},
        ]
        apply: Any = tokenizer.apply_chat_template
        try:
            text = str(apply(turns, tokenize=False, **self.options))
        except Exception:  # whatever a template raises; it may allow no assistant
            return None
        rest = text.rpartition(said)[2].lstrip() if said in text else ""
        special = []
        for token in special_tokens(tokenizer):
            if rest.startswith(token):
                special.append(token)
        return special_tokens(tokenizer)[max(special, key=len)] if special else None

    def check(self, tokenizer: PreTrainedTokenizerBase, model: str) -> None:
        """Raise InputError for settings that the chat template of `model` cannot apply."""
        template = self.template_of(tokenizer)
        asked = {
            "chat": self.use,
            "system": self.system is not None,
            "template option": self.options,
        }
        if template is None and (
            what := next((name for name in asked if asked[name]), None)
        ):
            why = "is set to use no" if self.use is False else "has no"
            raise InputError(f"{what}: {model} {why} chat template; leave it out")
        for name in self.options:
            if not re.search(rf"\b{re.escape(name)}\b", template or ""):
                raise InputError(
                    f"template option {name}: the chat template of {model} has none"
                )
        try:
            json.dumps(self.spec)
        except TypeError as error:
            raise InputError(f"template options: {error}; give JSON values") from None

    def ids(
        self,
        prompt: str | list[dict[str, str]],
        tokenizer: PreTrainedTokenizerBase,
        model: str,
    ) -> list[int]:
        """Return the token ids of text or messages rendered by the template. Raises InputError if
        the template fails."""
        messages = (
            [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        )
        if self.system is not None and messages and messages[0].get("role") != "system":
            messages = [{"role": "system", "content": self.system}, *messages]
        apply: Any = tokenizer.apply_chat_template
        try:
            return list(
                apply(
                    messages,
                    add_generation_prompt=True,
                    tokenize=True,
                    return_dict=False,
                    **self.options,
                )
            )
        except Exception as error:
            raise InputError(
                f"{model}: its chat template fails ({first_line(error)})"
            ) from error


def special_tokens(tokenizer: PreTrainedTokenizerBase) -> dict[str, int]:
    """Return the ids of the special tokens, which are left out of decoded answers, keyed by the
    tokens' text."""
    known = {}
    for token in tokenizer.all_special_tokens:
        known[str(token)] = tokenizer.convert_tokens_to_ids(str(token))
    for token_id, token in getattr(tokenizer, "added_tokens_decoder", {}).items():
        if token.special:
            known[str(token)] = token_id
    return cast(dict[str, int], known)


def several(prompts: Any, pad: int | None = None) -> list[Prompt]:
    """Return a batch of prompts as a list. A batch is a list of prompts, a tensor or array of ids
    [m, T], or a tokenizer's output for several texts, whose padding is removed. Raises InputError
    for a single prompt, and for a batch without a mask whose rows begin or end with the token
    `pad`."""
    if isinstance(prompts, str):
        raise InputError("prompts: is one text; give a list, or call generate")
    if isinstance(prompts, Mapping) and "input_ids" in prompts:
        rows = prompts["input_ids"]
        masks = prompts.get("attention_mask")
        if len(rows) and isinstance(rows[0], int):
            raise InputError(
                "prompts: are the ids of one prompt; give a list of prompts, or call "
                "generate"
            )
        given = [rows] if masks is None else [rows, masks]
        if masks is None:
            _refuse_padding(rows, pad)
        found = list[Prompt]()
        for row in zip(*given):
            found.append(plain(dict(zip(("input_ids", "attention_mask"), row))))
        return found
    _refuse_padding(prompts, pad)
    try:
        return list(prompts)
    except TypeError:
        raise InputError(f"prompts: give a list of them, not {prompts!r:.60}") from None


def _refuse_padding(rows: Any, pad: int | None) -> None:
    rows = rows.tolist() if hasattr(rows, "tolist") else ()
    if any(isinstance(row, list) and pad in (row[:1] + row[-1:]) for row in rows):
        raise InputError(
            f"prompts: a row begins or ends with the padding token {pad}; give the "
            "tokenizer's output with its attention_mask, or lists without padding"
        )


def plain(prompt: Any) -> Any:
    """Return token ids as a list, from a tensor or an array, alone or as a batch of one, or from a
    tokenizer's output, whose padding is removed. Other values are returned unchanged."""
    if isinstance(prompt, Mapping) and "input_ids" in prompt:
        ids = _row(prompt.get("input_ids"))
        mask = _row(prompt.get("attention_mask"))
        return (
            ids if mask is None else [token for token, seen in zip(ids, mask) if seen]
        )
    return _row(prompt)


def is_ids(prompt: Any) -> bool:
    return _is_list(prompt, int)


def is_messages(prompt: Any) -> bool:
    return _is_list(prompt, dict)


def refuse_unusable(prompt: Any) -> None:
    """Raise InputError for a value that is not a prompt."""
    if isinstance(prompt, str) or is_ids(prompt) or is_messages(prompt):
        return
    many = (
        isinstance(prompt, list) and len(prompt) and isinstance(prompt[0], str | list)
    )
    fix = "; generate_batch takes several prompts" if many else ""
    raise InputError(
        "a prompt is text, chat messages or a list of token ids, not "
        f"{prompt!r:.60}{fix}"
    )


def _row(ids: Any) -> Any:
    if hasattr(ids, "tolist"):
        ids = ids.tolist()
    is_batch_of_one = (
        isinstance(ids, list) and len(ids) == 1 and isinstance(ids[0], list)
    )
    return ids[0] if is_batch_of_one else ids


def _is_list(prompt: object, of: type) -> bool:
    if isinstance(prompt, str) or not isinstance(prompt, Sequence):
        return False
    return all(
        isinstance(item, of) and not isinstance(item, bool)
        for item in cast(Sequence[object], prompt)
    )
