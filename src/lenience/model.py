"""LM: a Hugging Face causal language model with its tokenizer. Session: its tokens and KV cache, read and rolled back."""

from __future__ import annotations

import hashlib
import inspect
import json
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Cache,
    DynamicCache,
    LogitsProcessorList,
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensLogitsProcessor,
)
from transformers.cache_utils import CacheLayerMixin, DynamicLayer, DynamicSlidingWindowLayer

from lenience.core import Reading
from lenience.errors import InputError, first_line

Prompt = str | Sequence[int] | list[dict[str, str]]

REFUSED: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("forced_bos_token_id", "forced_eos_token_id", "watermarking_config", "constraints"), (None,)),
    **dict.fromkeys(("begin_suppress_tokens", "force_words_ids", "dola_layers"), (None, [])),
    **dict.fromkeys(("encoder_repetition_penalty", "exponential_decay_length_penalty"), (None, 1.0)),
    **dict.fromkeys(("guidance_scale", "num_beams"), (None, 1)),
    **dict.fromkeys(("encoder_no_repeat_ngram_size", "min_length", "min_new_tokens", "penalty_alpha"), (None, 0)),
    **dict.fromkeys(("remove_invalid_values", "token_healing"), (None, False)),
}
"""Settings of a generation_config that change the output and are not supported, each with the values that do nothing."""
REFUSED_WHEN_SAMPLING: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("min_p", "epsilon_cutoff", "eta_cutoff", "top_h"), (None, 0.0)),
    "typical_p": (None, 1.0),
}


LARGEST_MASK = 1 << 26
"""How many entries the attention mask of rows that are read together may have."""


class LM:
    """A causal language model and its tokenizer, ready for inference."""

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, name: str, role: str = "target"):
        self.model, self.tokenizer, self.name, self.role = model.eval(), tokenizer, name, role
        self.embedding = cast(torch.nn.Embedding, model.get_input_embeddings())
        _refuse_unless_rollable(model, f"{role} {name!r}")
        self._state: Tensor | None = None
        head = cast(torch.nn.Linear | None, model.get_output_embeddings())
        if head is None:
            raise InputError(f"{role} {name!r}: {type(model).__name__} has no LM head; name a causal language model")
        self.hidden_size = head.weight.shape[1]
        head.register_forward_pre_hook(self._catch_state)

    @classmethod
    def load(cls, name: str, role: str, *, dtype: str, device: str, kwargs: dict[str, Any]) -> LM:
        """Load a Hub name or local folder; `kwargs` reach the model's from_pretrained. Raises InputError where it can't
        be loaded."""
        if dtype != "auto" and not isinstance(getattr(torch, dtype, None), torch.dtype):
            raise InputError(f"dtype {dtype!r}: there is none; name float32, bfloat16, float16 or auto")
        try:
            torch.empty(0, device=device)
        except (RuntimeError, AssertionError) as error:
            raise InputError(f"device {device!r}: cannot be used ({first_line(error)}); name cpu, cuda or auto") from None
        shared = {key: kwargs[key] for key in ("revision", "trust_remote_code", "token", "cache_dir") if key in kwargs}
        try:
            tokenizer = AutoTokenizer.from_pretrained(name, **shared)
            model = AutoModelForCausalLM.from_pretrained(name, dtype=dtype, **kwargs)
        except SafetensorError as error:
            raise InputError(
                f"{role} {name!r}: its safetensors file is corrupt ({first_line(error)}); fetch it again"
            ) from error
        except (OSError, ValueError, KeyError, TypeError, ImportError) as error:
            hint = "" if Path(name).is_dir() else "; give a Hub name or a folder that holds config.json"
            raise InputError(f"{role} {name!r}: cannot be loaded ({first_line(error)}){hint}") from error
        if "device_map" not in kwargs and not getattr(model, "is_quantized", False):
            model.to(torch.device(device))  # type: ignore[arg-type]
        return cls(model, tokenizer, name, role)

    def _catch_state(self, _module: torch.nn.Module, args: tuple[Tensor, ...]) -> None:
        self._state = args[0]

    @property
    def device(self) -> torch.device:
        return self.embedding.weight.device

    @cached_property
    def context(self) -> int | None:
        """How many tokens the model can hold; None where its configuration sets no limit."""
        config = self.model.config.get_text_config()
        return getattr(config, "max_position_embeddings", None) or getattr(config, "n_positions", None)

    @cached_property
    def width(self) -> int:
        """The number of rows of the input embedding: ids from here on cannot be read."""
        return self.embedding.weight.shape[0]

    @cached_property
    def state_bytes(self) -> dict[torch.device, int]:
        """What one token takes in the KV cache, on each device; found by reading one."""
        session, taken = Session(self, capacity=1), dict[torch.device, int]()
        session.read([[0]])
        for layer in cast(list[_Layer], session._cache.layers):
            for kept in (layer.keys, layer.values):
                assert kept is not None
                taken[kept.device] = taken.get(kept.device, 0) + kept[0, :, 0].nbytes
        return taken

    @cached_property
    def eos_ids(self) -> frozenset[int]:
        """The tokens that end a response: those of generation_config, else the tokenizer's."""
        given = self.model.generation_config.eos_token_id if self.model.generation_config else None
        given = self.tokenizer.eos_token_id if given is None else given
        return frozenset([] if given is None else [given] if isinstance(given, int) else given)

    @cached_property
    def fingerprint(self) -> str:
        """Identifies the weights, whatever dtype they are loaded in: a hash of every parameter's name, shape and some of
        its numbers, rounded to bfloat16."""
        digest = hashlib.blake2b(digest_size=8)
        for name, value in sorted(self.model.state_dict().items()):
            flat = value.detach().flatten()
            some = flat[:: max(1, flat.numel() // 64)].to(torch.float32).to(torch.bfloat16).view(torch.int16)
            digest.update(f"{name}{tuple(value.shape)}".encode() + some.cpu().numpy().tobytes())
        return digest.hexdigest()

    @cached_property
    def tokenizer_fingerprint(self) -> str:
        vocabulary = json.dumps(sorted(self.tokenizer.get_vocab().items()))
        template = getattr(self.tokenizer, "chat_template", None) or ""
        return hashlib.blake2b((vocabulary + str(template)).encode(), digest_size=8).hexdigest()

    def masks(self, at: Tensor, extent: int) -> Any:
        """What of `extent` keys each query at the positions `at` [m, T] sees, as the model's attention wants it told."""
        config: Any = self.model.config.get_text_config()
        keys = torch.arange(extent, device=at.device)
        full = (keys <= at[..., None])[:, None]  # [m, 1, T, extent]
        kinds = set(getattr(config, "layer_types", None) or ())
        window = getattr(config, "sliding_window", None)
        sliding = full & (keys > at[..., None] - window)[:, None] if window else full
        if config._attn_implementation == "eager":
            least = torch.finfo(self.model.dtype).min
            full, sliding = (torch.zeros(mask.shape, dtype=self.model.dtype, device=at.device).masked_fill(~mask, least)
                             for mask in (full, sliding))  # fmt: skip
        if "sliding_attention" in kinds:
            return {"full_attention": full, "sliding_attention": sliding}
        return full if kinds else sliding

    @cached_property
    def takes_masks(self) -> bool:
        """Whether rows of different lengths can share a pass; where they cannot, a warning says so."""
        able = self._try_masks()
        if not able:
            warnings.warn(f"{self.role} {self.name!r}: takes no mask from outside; rows are read one by one", stacklevel=2)
        return able

    def _try_masks(self) -> bool:
        """Where the architecture does not rule masks from outside out they are tried, since models differ in how they place
        them."""
        config: Any = self.model.config.get_text_config()
        rope = str(getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None))
        if (
            config._attn_implementation not in ("eager", "sdpa")
            or config.model_type == "gpt_neo"  # its local layers place their window by the longest row
            or "longrope" in rope  # rescales positions by the longest row
            or "dynamic" in rope
            or {*(getattr(config, "layer_types", None) or ())} - {"full_attention", "sliding_attention"}
        ):
            return False
        generator = torch.Generator().manual_seed(0)
        lengths = [min(n, self.context or n) for n in (8, 40, 23)]
        rows = [torch.randint(self.width, (n,), generator=generator).tolist() for n in lengths]
        self.__dict__["takes_masks"] = True  # for the session that tries it
        try:
            together, alone = Session(self, 3), [Session(self).read([row], 2).hidden for row in rows]
            together.read([row[:-3] for row in rows])
            states, wanted = together.read(rows, 2).hidden.float(), torch.cat(alone).float()
        except Exception:
            return False
        finally:
            del self.__dict__["takes_masks"]
        error = (states - wanted).norm(dim=-1) / wanted.norm(dim=-1)
        return bool(error.max() < (0.1 if self.model.dtype.itemsize < 4 else 1e-3))

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt: ids as they are; text and messages through the chat template, where there is one.

        Raises InputError for an empty prompt, ids out of range, messages without a template, words that the
        vocabulary lacks and a prompt that leaves no room in the context.
        """
        if not isinstance(prompt, str) and all(isinstance(item, int) for item in prompt):
            ids = cast(list[int], list(prompt))
        elif getattr(self.tokenizer, "chat_template", None):
            messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
            apply: Any = self.tokenizer.apply_chat_template
            ids = list(apply(messages, add_generation_prompt=True, tokenize=True, return_dict=False))
        elif isinstance(prompt, str):
            ids = self._encode_text(prompt)
        else:
            raise InputError(f"{self.role} {self.name!r} has no chat template; give the prompt as text")
        if not ids:
            raise InputError("the prompt is empty; give some text or token ids")
        if not all(0 <= item < self.width for item in ids):
            raise InputError(f"the prompt holds token ids outside 0…{self.width - 1}, the vocabulary of {self.name!r}")
        if self.context and len(ids) >= self.context:
            raise InputError(
                f"the prompt has {len(ids)} tokens, {self.name!r} has room for {self.context - 1} and a new one; shorten it"
            )
        return ids

    def _encode_text(self, text: str) -> list[int]:
        try:
            return cast(list[int], self.tokenizer(text)["input_ids"])
        except Exception as error:
            # a WordLevel vocabulary without an unknown token says only that it has none
            known = self.tokenizer.get_vocab()
            backend = getattr(self.tokenizer, "backend_tokenizer", None)
            split = backend.pre_tokenizer.pre_tokenize_str(text) if backend is not None and backend.pre_tokenizer else []
            unknown = [piece.strip("▁") for piece, _ in split if piece not in known]
            if not unknown:
                raise
            words = ", ".join(repr(word) for word in dict.fromkeys(unknown[:5]))
            raise InputError(
                f"the prompt holds what the vocabulary of {self.name!r} lacks: {words}; it knows the words of its own task only"
            ) from error

    def decode(self, ids: Sequence[int]) -> str:
        return cast(str, self.tokenizer.decode(list(ids), skip_special_tokens=True))

    def processors(self, sampling: bool) -> LogitsProcessorList:
        """What the model's generation_config does to logits besides temperature, top-k and top-p.

        Raises InputError that names a setting which is not supported.
        """
        config = self.model.generation_config
        made = LogitsProcessorList()
        if config is None:
            return made
        for key, neutral in (REFUSED | (REFUSED_WHEN_SAMPLING if sampling else {})).items():
            value = getattr(config, key, None)
            if value not in neutral:
                raise InputError(
                    f"{self.role} {self.name!r}: {key}={value!r} of its generation_config is not supported; "
                    f"set pair.{self.role}.model.generation_config.{key} = {neutral[-1]}"
                )
        device = str(self.device)
        # in the order in which transformers applies them
        if config.sequence_bias:
            made.append(SequenceBiasLogitsProcessor(config.sequence_bias))
        if config.repetition_penalty not in (None, 1.0):
            made.append(RepetitionPenaltyLogitsProcessor(config.repetition_penalty))
        if config.no_repeat_ngram_size:
            made.append(NoRepeatNGramLogitsProcessor(config.no_repeat_ngram_size))
        if config.bad_words_ids:
            made.append(NoBadWordsLogitsProcessor(config.bad_words_ids, sorted(self.eos_ids) or None))
        if config.suppress_tokens:
            made.append(SuppressTokensLogitsProcessor(config.suppress_tokens, device=device))
        return made


def _refuse_unless_rollable(model: PreTrainedModel, what: str) -> None:
    """Raise InputError for architectures whose cache cannot be rolled back to an earlier token."""
    config, kind = model.config, type(model).__name__
    takes_cache = "past_key_values" in inspect.signature(model.forward).parameters
    try:
        layers = [] if not takes_cache else DynamicCache(config=config).layers
        rollable = all(type(layer) in (DynamicLayer, DynamicSlidingWindowLayer) for layer in layers)
    except Exception:
        rollable = False
    if config.is_encoder_decoder or not takes_cache or getattr(model, "_is_stateful", False) or not rollable:
        raise InputError(
            f"{what}: {kind} keeps a state that cannot be rolled back to an earlier token, which speculative "
            "decoding needs; use a decoder-only attention model"
        )


class _Layer(CacheLayerMixin):
    """One layer's keys and values [rows, H, capacity + 1, D], written and read where the session's `place` says. Layers
    with a sliding window keep every state too, so that rolling back is the same everywhere; the mask does the sliding."""

    is_sliding = False

    def __init__(self, place: _Place):
        super().__init__()
        self.place = place

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.keys, self.values = self._room(key_states), self._room(value_states)
        self.is_initialized = True

    def _room(self, states: Tensor, old: Tensor | None = None) -> Tensor:
        """Zeros, not anything: a masked key's weight is 0, and 0 times a NaN is none."""
        made = states.new_zeros(self.place.rows, states.shape[1], self.place.capacity + 1, states.shape[3])
        if old is not None:
            made[:, :, : old.shape[2] - 1] = old[:, :, :-1]
        return made

    def update(self, key_states: Tensor, value_states: Tensor, *_args: Any, **_kwargs: Any) -> tuple[Tensor, Tensor]:
        if self.keys is None or self.values is None:
            self.lazy_initialization(key_states, value_states)
        elif self.keys.shape[2] <= self.place.capacity:
            self.keys, self.values = self._room(key_states, self.keys), self._room(value_states, self.values)
        return self._write(self.keys, key_states), self._write(self.values, value_states)

    def _write(self, kept: Tensor | None, states: Tensor) -> Tensor:
        assert kept is not None
        place, visible = self.place, cast(Tensor, kept)[:, :, : self.place.extent]
        if place.columns is None:  # one row, and its new states stand side by side
            row = place.which[0]
            kept[row, :, place.start : place.extent] = states[0]
            return visible[row : row + 1]
        index, columns = place.index.to(kept.device), place.columns.to(kept.device)
        kept[index[:, None], :, columns] = states.transpose(1, 2)  # [m, T, H, D]
        return visible[: len(place.which)] if place.first else visible[index]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.place.start + query_length, 0

    def get_seq_length(self) -> int:
        return self.place.start

    def get_max_length(self) -> int:
        return -1


@dataclass
class _Place:
    """Where the states of a pass go: the one thing that the layers of a cache share."""

    rows: int
    capacity: int
    """How many tokens a row can hold; the column after them takes the states of padding."""
    which: Sequence[int] = ()
    """The rows that take part in the pass."""
    index: Tensor = field(default_factory=lambda: torch.empty(0))
    """[m]: the same as a tensor."""
    first: bool = True
    """Whether they are the first m rows, so that no copy is needed to read them."""
    start: int = 0
    """How many tokens the row holds before the pass, where it is one row."""
    extent: int = 0
    """How many columns the pass can see."""
    columns: Tensor | None = None
    """[m, T]: the column of each new state; None where one row takes part."""


class Session:
    """Sequences of tokens, each in a row of a preallocated KV cache that is addressed by position. A session is handed the
    whole sequences each time and works out what is new; rolling back is forgetting that a row was longer.

    Rows of different lengths share a pass where the model's attention takes a mask from outside (checked once, see
    `LM.takes_masks`), and are read one by one where it does not.
    """

    def __init__(self, lm: LM, rows: int = 1, capacity: int = 256):
        self.lm = lm
        self.tokens: list[list[int]] = [[] for _ in range(rows)]
        self._place = _Place(rows, capacity)
        self._cache = Cache(layer_class_to_replicate=cast(type[CacheLayerMixin], partial(_Layer, self._place)))

    def room(self, tokens: Sequence[int]) -> int:
        """How many more tokens the model's context can hold after these."""
        return 1 << 30 if self.lm.context is None else self.lm.context - len(tokens)

    @torch.inference_mode()
    def move(self, source: int, to: int) -> None:
        """The row at `source` becomes the row at `to`."""
        moved, self.tokens[to], self.tokens[source] = self.tokens[source], [], []
        for layer in cast(list[_Layer], self._cache.layers):
            assert layer.keys is not None and layer.values is not None
            layer.keys[to], layer.values[to] = layer.keys[source], layer.values[source]
        self.tokens[to] = moved

    @torch.inference_mode()
    def read(self, sequences: Sequence[list[int]], states: int = 1, ahead: Tensor | None = None) -> Reading:
        """Logits [B, states, V] and hidden states [B, states, H] after each of the last `states` tokens of each sequence,
        which may be followed by tokens `ahead` [B, a]; sequence b is row b's. What is past the end of the model's context
        is not read; its states are anything."""
        assert len(sequences) <= len(self.tokens)
        if ahead is not None:
            sequences = [sequence + tokens for sequence, tokens in zip(sequences, ahead.tolist())]
        over = [max(0, -self.room(new)) for new in sequences]
        sequences = [new[: len(new) - past] for new, past in zip(sequences, over)]
        keep = [min(_common(old, new), len(new) - states) for old, new in zip(self.tokens, sequences)]
        counts = [len(new) - kept for kept, new in zip(keep, sequences)]
        groups = self._groups(sequences, counts, states)
        for old, kept in zip(self.tokens, keep):
            del old[kept:]  # a pass that fails leaves nothing that is believed
        done = [self._pass(group, [sequences[b] for b in group], [keep[b] for b in group], states) for group in groups]
        for old, new in zip(self.tokens, sequences):
            old += new[len(old) :]
        logits, hidden = done[0]
        if len(done) > 1:
            order = torch.tensor([b for group in groups for b in group], device=logits.device).argsort()
            logits, hidden = (torch.cat(parts)[order] for parts in zip(*done))
        if any(over):  # the states of what was read belong further in front
            logits, hidden = (torch.stack([row.roll(-past, 0) for row, past in zip(rows, over)]) for rows in (logits, hidden))
        return Reading(logits, hidden, counts)

    def _groups(self, sequences: Sequence[list[int]], counts: list[int], states: int) -> list[list[int]]:
        """Which rows are read in one pass. Rows with much to read, such as new prompts, would make the others wait if they
        were read with them, and too many of them together would need a large mask."""
        if len(sequences) > 1 and not self.lm.takes_masks:
            return [[b] for b in range(len(sequences))]
        groups: list[list[int]] = []
        for b in (b for b, count in enumerate(counts) if count > states + 1):
            group = [*groups[-1], b] if groups else [b]
            mask = len(group) * max(counts[g] for g in group) * max(len(sequences[g]) for g in group)
            if groups and mask <= LARGEST_MASK:
                groups[-1] = group
            else:
                groups.append([b])
        short = [b for b, count in enumerate(counts) if count <= states + 1]
        return [short, *groups] if short else groups

    def _pass(self, which: list[int], sequences: list[list[int]], keep: list[int], states: int) -> tuple[Tensor, Tensor]:
        """One forward pass of the rows `which`, of whose sequences `keep` tokens are in the cache; gives logits and
        hidden states. Rows with fewer new tokens than others are padded in front, so that the last states are those asked
        for."""
        place, device = self._place, self.lm.device
        place.which, place.extent = which, max(map(len, sequences))
        if place.extent > place.capacity:
            place.capacity = max(place.extent, 2 * place.capacity)
        extra: dict[str, Any] = {}
        if len(which) == 1:
            place.start, place.columns = keep[0], None
            ids = torch.tensor([sequences[0][keep[0] :]], device=device)  # [1, T]
        else:
            most = max(len(new) - kept for new, kept in zip(sequences, keep))  # T
            pads = [most - len(new) + kept for new, kept in zip(sequences, keep)]
            ids = torch.tensor([[0] * pad + new[kept:] for pad, new, kept in zip(pads, sequences, keep)], device=device)
            steps, before = torch.arange(most, device=device), torch.tensor(pads, device=device)[:, None]
            padding = steps < before  # [m, T]
            at = steps - before + torch.tensor(keep, device=device)[:, None]
            place.start, place.index, place.first = 0, torch.tensor(which, device=device), which == list(range(len(which)))
            place.columns = at.masked_fill(padding, place.capacity)
            at = at.masked_fill(padding, 0)
            extra = {"position_ids": at, "attention_mask": self.lm.masks(at, place.extent)}
        ids = ids.clamp(max=self.lm.width - 1)  # an id that only the other model's embedding has is read as the last one
        out = self.lm.model(input_ids=ids, past_key_values=self._cache, use_cache=True, logits_to_keep=states, **extra)
        state, self.lm._state = self.lm._state, None
        assert state is not None
        logits = out.logits[:, -states:]
        return logits, state[:, -states:].to(logits.device)  # a model may lie on several devices


def check_memory(caches: Iterable[tuple[LM, int]], rows: int) -> None:
    """Raise InputError where the caches of `rows` rows would not fit into the free memory; `caches` says of each model how
    many tokens a row must hold."""
    need: dict[torch.device, int] = {}
    for lm, capacity in caches:
        for device, size in lm.state_bytes.items():
            need[device] = need.get(device, 0) + size * (capacity + 1)
    for device, size in need.items():
        free = free_bytes(device)
        if free is not None and size * rows > free:
            raise InputError(
                f"{rows} rows need {size * rows / 2**30:.1f} GiB of KV cache on {device}, {free / 2**30:.1f} GiB are free: at "
                f"most {free // size} rows fit; lower batch_size or max_new_tokens"
            )


def free_bytes(device: torch.device) -> int | None:
    """How much memory a device has left; None where it cannot be told."""
    if device.type == "cuda":
        kept_by_torch = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + kept_by_torch
    try:
        with open("/proc/meminfo") as file:
            return next(int(line.split()[1]) * 1024 for line in file if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return None


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    """The length of the common beginning of two sequences, by bisection over comparisons of slices."""
    low, high = 0, min(len(a), len(b))
    if a[:high] == b[:high]:
        return high
    while high - low > 1:
        middle = (low + high) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle
    return low
