"""A Hugging Face causal language model with its tokenizer, its states and its checks."""

from __future__ import annotations

import inspect
import struct
import threading
import warnings
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol, TypeVar, cast

import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationMixin,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.cache_utils import (
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionLayer,
)
from transformers.utils import logging

from lenience.core.errors import InputError, RunError, TooLong, first_line
from lenience.core.files import written
from lenience.core.identity import (
    tokenizer_fingerprint,
    tokens_with,
    weights_fingerprint,
)
from lenience.models import gguf
from lenience.models.pass_cache import (
    KNOWN_LAYERS,
    LAST,
    States,
    cache_argument,
    cache_layers,
    handing_over,
    new_cache,
    own_cache_class,
)
from lenience.models.prompts import Chat, Prompt, is_ids, plain, refuse_unusable
from lenience.models.vocabulary import restrict_as_saved, save_whole, vocabulary_of

T = TypeVar("T")
CHUNK_SIZES = ("chunk_size", "mamba_chunk_size")
"""Fields of configurations that hold the number of tokens in a chunk of a recurrence."""
LONG_CHUNK = 128
CPU_STEPS = 16
"""Number of tokens up to which single steps are faster than a chunk of at least LONG_CHUNK tokens,
measured by benchmarks/states.py."""
CAUSES = "usual causes: overflow in float16, a broken quantisation or damaged weights"
"""Usual causes of NaN or infinite logits and states."""
LOADING_ERRORS = (
    OSError,
    ValueError,
    KeyError,
    IndexError,
    TypeError,
    ImportError,
    NotImplementedError,
    struct.error,
)
"""Exceptions that from_pretrained and its GGUF reader raise for a model that cannot be loaded."""


class Backend(Protocol):
    """A forward pass that replaces the model's own, see `lenience.models.compile`. It returns the
    states that the LM head takes, or other states."""

    shares_layers: bool
    """True if a model that consists of some of the layers can use the same cache memory, given such
    a backend too."""
    makes_others: bool
    """True if the backend exports missing graphs for other states."""

    def cache(self, lm: LM, rows: int, capacity: int) -> Any:
        """Create a cache, or reuse the cache of a closed session: a
        `lenience.models.kv_cache.RowCache`."""
        ...

    def giving(self, lm: LM, states: States) -> Backend | None:
        """Return a backend of the same kind that returns other states; None if there is none."""
        ...

    def for_trees(self, lm: LM) -> Backend | None:
        """Return a backend with the same states that also reads trees of tokens; None if there is
        none."""
        ...

    def has_spare(self, rows: int, capacity: int) -> bool:
        """Return True if the next session can reuse a cache and needs no new memory."""
        ...

    def drop_spare(self, rows: int, capacity: int) -> None:
        """Drop a kept cache that the next session cannot reuse."""
        ...


class LM:
    """A causal language model and its tokenizer, ready for inference."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        name: str,
        role: str = "target",
    ):
        self.model = model.eval()
        self.tokenizer = tokenizer
        self.name = name
        self.role = role
        self.embedding = cast(torch.nn.Embedding, model.get_input_embeddings())
        kinds = {type(layer) for layer in cache_layers(model, f"{role} {name!r}")}
        own = own_cache_class(cast(Hashable, type(model)))
        attention = {DynamicLayer, DynamicSlidingWindowLayer}
        self.only_attends = own is None and kinds <= attention
        """True if each layer of the cache keeps keys and values of its own."""
        self.copies_cache = own is not None or not kinds <= {*KNOWN_LAYERS}
        """True if rolling back takes copies of the whole cache, as only the model itself can
        continue it (see `lenience.models.copied_cache`)."""
        self.has_states = any(issubclass(kind, LinearAttentionLayer) for kind in kinds)
        """True if some layers keep a recurrent or convolutional state."""
        self.lock = threading.RLock()
        """Lock held during checks of the model, its export, and its registration of hooks."""
        self.chat = Chat()
        """Chat template settings for text and messages."""
        self.backend: Backend | None = None
        """Forward pass in use instead of the model's own, see lenience.models.compile."""
        self._known: dict[Hashable, Any] = {}
        self._captured_layers: set[int] = set()
        head = cast(torch.nn.Linear | None, model.get_output_embeddings())
        if head is None:
            kind = type(model).__name__
            raise InputError(
                f"{role} {name!r}: {kind} has no LM head; name a causal language model"
            )
        self.hidden_size = head.weight.shape[1]
        self.reads_one_by_one = False
        """True if the mixers take one token at a time, as they cannot continue from a state with
        several (see `lenience.models.recurrent`)."""
        decoder = cast(torch.nn.Module, model.get_decoder())
        if decoder is head:  # some kinds call their LM head so
            decoder = cast(torch.nn.Module, model.base_model)
        decoder.register_forward_hook(handing_over(None), with_kwargs=True)

    def check_states(self) -> None:
        """Raise InputError if the model transforms its states before the LM head, since heads would
        be trained on other states. The check runs once per model."""
        if not self.once("states", self._try_states):
            raise InputError(
                f"{self.role} {self.name!r}: {type(self.model).__name__} transforms "
                "its states "
                "before the LM head, and heads cannot be trained on it"
            )

    @torch.inference_mode()
    def _try_states(self) -> bool:
        head = cast(torch.nn.Module, self.model.get_output_embeddings())
        read: list[Tensor] = []
        handle = head.register_forward_pre_hook(lambda _, args: read.append(args[0]))
        cache = new_cache(self.model)
        try:
            ids = torch.tensor([[0]], device=self.device)
            self.model(
                input_ids=ids, use_cache=True, **cache_argument(self.model, cache)
            )
        finally:
            handle.remove()
        given, _ = cache.take_hidden()
        check_finite(self, given)
        return given.shape == read[0].shape and torch.equal(
            given, read[0].to(given.device)
        )

    def use(self, backend: Backend | None) -> None:
        """Use a backend for all passes from now on; None for the model's own forward pass."""
        self.backend = backend

    def backend_for(self, states: States, trees: bool = False) -> Backend | None:
        """Return the backend for these states, with `trees` for trees of tokens; None for the
        model's own forward pass."""
        backend = self.backend
        if backend is not None and states != LAST:
            whole = backend
            backend = self.once(
                ("states", states, id(whole)), lambda: whole.giving(self, states)
            )
        if backend is not None and trees:
            chains = backend
            backend = self.once(("trees", id(chains)), lambda: chains.for_trees(self))
        return backend

    def once(self, what: Hashable, find: Callable[[], T]) -> T:
        """Return `find()`, called at the first request for the key `what` and remembered."""
        with self.lock:
            if what not in self._known:
                self._known[what] = find()
            return cast(T, self._known[what])

    @classmethod
    def load(
        cls, source: str, role: str, options: Mapping[str, Any], name: str | None = None
    ) -> LM:
        """Load a Hub name, a local folder or a GGUF file (see `gguf`), shown as `name` if given.
        `options` holds `dtype`, `device` and further arguments of the model's from_pretrained.
        Raises InputError if the model cannot be loaded."""
        kwargs = dict(options)
        dtype = kwargs.pop("dtype")
        device = kwargs.pop("device")
        _check_placement(dtype, device)
        shared = dict[str, Any]()
        for key in ("revision", "trust_remote_code", "token", "cache_dir"):
            if key in kwargs:
                shared[key] = kwargs[key]
        place = source
        if gguf.is_named(source):
            if "quantization_config" in kwargs:
                raise InputError(
                    f"{role} {source!r}: is a GGUF file, whose weights are rounded already; leave "
                    "the quantization out, or name the model in safetensors"
                )
            place, file = gguf.located(source, role)
            shared |= file
            kwargs |= gguf.dequantized(file["gguf_file"])
            dtype = gguf.dtype_of(dtype, device)
        try:
            tokenizer = AutoTokenizer.from_pretrained(place, **shared)
            if _caps_attention(place, shared):
                kwargs.setdefault("attn_implementation", "eager")
            model = AutoModelForCausalLM.from_pretrained(place, dtype=dtype, **kwargs)
        except SafetensorError as error:
            why = (
                f"its safetensors file is corrupt ({first_line(error)}); fetch it again"
            )
            raise InputError(f"{role} {source!r}: {why}") from error
        except LOADING_ERRORS as error:
            fix = (
                ""
                if Path(place).is_dir()
                else "; give a Hub name or a folder that holds config.json"
            )
            why = f"cannot be loaded ({first_line(error)}){fix}"
            raise InputError(f"{role} {source!r}: {why}") from error
        except RuntimeError as error:
            _refuse_rounding(f"{role} {source!r}", kwargs, error)
            raise
        restrict_as_saved(model, Path(place))
        if "device_map" not in kwargs and not getattr(model, "is_quantized", False):
            model.to(torch.device(device))  # type: ignore[arg-type]
        return cls(model, tokenizer, name or source, role)

    @property
    def num_layers(self) -> int:
        return int(self.model.config.get_text_config().num_hidden_layers)

    def blocks(self, model: torch.nn.Module | None = None) -> torch.nn.ModuleList:
        """Return the layers of the model, or of another `model` with as many layers. The list is
        empty if they cannot be identified."""
        parts = (model or self.model).modules()
        lists = [part for part in parts if isinstance(part, torch.nn.ModuleList)]
        return next(
            (part for part in lists if len(part) == self.num_layers),
            torch.nn.ModuleList(),
        )

    def block(
        self, layer: int, model: torch.nn.Module | None = None
    ) -> torch.nn.Module:
        """Return a layer of the model, or of another `model` with as many layers; 1 is the first
        and -1 the last. Raises InputError if there is no such layer."""
        blocks = self.blocks(model)
        if not 1 <= abs(layer) <= len(blocks):
            has = f"{self.role} {self.name!r} has {len(blocks)}, 1 the first and -1 the last"
            raise InputError(f"layer {layer}: {has}")
        return blocks[layer - (layer > 0)]

    def capture(self, states: States) -> None:
        """Store these states in the PassCache of each pass from now on. Raises InputError if there
        is no such layer."""
        for layer in (*states.layers, *states.features):
            if layer is not None:
                self._capture(layer)

    def _capture(self, layer: int) -> None:
        block = self.block(layer)
        with self.lock:
            if layer not in self._captured_layers:
                self._captured_layers.add(layer)
                block.register_forward_hook(handing_over(layer), with_kwargs=True)

    @property
    def device(self) -> torch.device:
        return self.embedding.weight.device

    @property
    def dtype(self) -> str:
        """Return the name of the weights' dtype, such as float32."""
        return str(self.model.dtype).removeprefix("torch.")

    @property
    def output_matrix(self) -> Tensor:
        """Return the weight [V, H] of the LM head."""
        return cast(torch.nn.Linear, self.model.get_output_embeddings()).weight

    def generation_settings(self) -> dict[str, Any]:
        """Return the non-default settings of the model's generation_config as JSON values."""
        config = self.model.generation_config
        settings = {} if config is None else config.to_diff_dict()
        plain = {}
        for name, value in settings.items():
            if name != "transformers_version":
                simple = isinstance(value, int | float | str | None)
                plain[name] = value if simple else repr(value)
        return plain

    @cached_property
    def context_length(self) -> int | None:
        """Return the maximum number of tokens in the model's context; None if its configuration
        sets no limit."""
        config = self.model.config.get_text_config()
        positions = getattr(config, "max_position_embeddings", None)
        return positions or getattr(config, "n_positions", None)

    @cached_property
    def vocab_size(self) -> int:
        """Return the number of rows V of the input embedding. Valid token ids are below V."""
        return self.embedding.weight.shape[0]

    @cached_property
    def eos_ids(self) -> frozenset[int]:
        """Return the tokens that end a response: those of generation_config, or the tokenizer's EOS
        if it lists none. With a chat template the tokenizer's EOS and the end-of-turn token are
        added, with a warning, since answers would otherwise run on into further turns."""
        config = self.model.generation_config
        listed = config.eos_token_id if config else None
        own = self.tokenizer.eos_token_id
        if listed is None:
            listed = own
        ids = {listed} if isinstance(listed, int) else set(listed or ())
        if not self.chats:
            return frozenset(ids)
        turn = self.chat.end_of_turn(self.tokenizer)
        added = sorted({token for token in (own, turn) if token is not None} - ids)
        if added and ids:
            names = ", ".join(
                repr(self.tokenizer.convert_ids_to_tokens(token)) for token in added
            )
            warnings.warn(
                f"{self.role} {self.name!r}: answers also end at {names}, which ends a "
                "turn but is "
                "missing from the eos_token_id of generation_config",
                stacklevel=2,
            )
        return frozenset(ids.union(added))

    @property
    def forced_eos(self) -> int | None:
        """Return the token with which an answer of the maximum length ends, the
        `forced_eos_token_id` of generation_config; None if there is none. Raises InputError for
        several tokens."""
        config = self.model.generation_config
        token = config.forced_eos_token_id if config else None
        if not isinstance(token, list | tuple):
            return token
        if len(token) != 1:
            raise InputError(
                f"{self.role} {self.name!r}: forced_eos_token_id={token!r} of its "
                "generation_config names several tokens; keep one of them"
            )
        return int(token[0])

    @cached_property
    def fingerprint(self) -> str:
        """Return a hash that identifies the weights, independent of the dtype they are loaded
        in."""
        return weights_fingerprint(self.model.state_dict())

    @cached_property
    def tokenizer_fingerprint(self) -> str:
        return tokenizer_fingerprint(self.tokenizer)

    @cached_property
    def reads_inputs(self) -> bool:
        """Return True if the model takes a state along with each token, see `Forward.inputs`."""
        return "inputs" in inspect.signature(self.model.forward).parameters

    @property
    def mixer_steps(self) -> int:
        """Return the largest number of tokens that the mixers take one by one. transformers pads a
        pass to whole chunks; on a CPU, single steps are faster than a chunk of Mamba 2."""
        if self.reads_one_by_one:
            return 1 << 30
        config = self.model.config.get_text_config()
        chunks = [getattr(config, name, None) or 0 for name in CHUNK_SIZES]
        slow = self.device.type == "cpu" and max(chunks) >= LONG_CHUNK
        return CPU_STEPS if slow else 0

    @cached_property
    def takes_positions(self) -> bool:
        """Return True if the model takes the tokens' positions, as `generate` of transformers hands
        them over."""
        return "position_ids" in inspect.signature(self.model.forward).parameters

    @cached_property
    def rope_switch(self) -> int | None:
        """Return the length beyond which a pass uses other rotary factors for all its tokens
        (longrope); None for a model without such a length. For a window that reaches beyond it, one
        pass and token-by-token passes differ."""
        config: Any = self.model.config.get_text_config()
        rope = getattr(config, "rope_parameters", None) or {}
        for settings in (
            rope,
            *(value for value in rope.values() if isinstance(value, dict)),
        ):
            if (
                settings.get("rope_type") == "longrope"
                and settings["short_factor"] != settings["long_factor"]
            ):
                inside = settings.get("original_max_position_embeddings")
                return inside or getattr(
                    config, "original_max_position_embeddings", None
                )
        return None

    @cached_property
    def restarts_at_switch(self) -> bool:
        """True if `transformers` recomputes the cache once a text grows beyond `rope_switch`, as
        for Phi-3. For other models the cached keys keep their rotation."""
        own = type(self.model).prepare_inputs_for_generation
        has_length = hasattr(self.model.config, "original_max_position_embeddings")
        return has_length and own is not GenerationMixin.prepare_inputs_for_generation

    @cached_property
    def reads_rows_apart(self) -> bool:
        """Return True if a row's output depends on the rows batched with it, so that rows must run
        one by one."""
        config: Any = self.model.config.get_text_config()
        rope = str(
            getattr(config, "rope_parameters", None)
            or getattr(config, "rope_scaling", None)
        )
        return (
            config.model_type
            == "gpt_neo"  # its local layers place their window by the longest row
            or "longrope" in rope  # rescales positions by the longest row
            or "dynamic" in rope
            or bool(
                {*(getattr(config, "layer_types", None) or ())}
                - {"full_attention", "sliding_attention"}
            )
        )

    def masks(self, at: Tensor, keys: Tensor) -> dict[str, Tensor]:
        """Return, for each kind of layer, the attention mask [m, 1, T, K] bool of queries at
        positions `at` [m, T] over keys at positions `keys` [m, K] or [K]."""
        config: Any = self.model.config.get_text_config()
        kinds = set(getattr(config, "layer_types", None) or ())
        window = getattr(config, "sliding_window", None)
        keys = keys[..., None, :]
        full = (keys <= at[..., None])[:, None]
        sliding = full & (keys > at[..., None] - window)[:, None] if window else full
        if "sliding_attention" in kinds:
            return {"full_attention": full, "sliding_attention": sliding}
        return {"full_attention": full if kinds else sliding}

    @property
    def chats(self) -> bool:
        """Return True if text and messages go through a chat template."""
        return self.chat.template_of(self.tokenizer) is not None

    def encode(self, prompt: Prompt, any_length: bool = False) -> list[int]:
        """Return the token ids of a prompt.

        Ids are returned unchanged, also from a tensor, an array or a tokenizer's output for one
        text. Text and messages go through the chat template if there is one. Raises InputError for
        an empty prompt, ids out of range, messages without a template and words that the vocabulary
        lacks. Raises TooLong, unless `any_length`, for a prompt that leaves no room in the context.
        """
        prompt = plain(prompt)
        refuse_unusable(prompt)
        if is_ids(prompt):
            ids = cast(list[int], list(prompt))
        elif self.chats:
            what = f"{self.role} {self.name!r}"
            ids = self.chat.ids(
                cast(str | list[dict[str, str]], prompt), self.tokenizer, what
            )
        elif isinstance(prompt, str):
            ids = cast(list[int], self.tokenize(prompt)["input_ids"])
        else:
            why = (
                "goes through no chat template (--no-chat)"
                if self.chat.use is False
                else ""
            )
            why = why or "has no chat template"
            raise InputError(
                f"{self.role} {self.name!r} {why}; messages need one, and text goes "
                "without"
            )
        if not ids:
            raise InputError("the prompt is empty; give some text or token ids")
        if not all(0 <= item < self.vocab_size for item in ids):
            raise InputError(
                f"the prompt holds token ids outside 0…{self.vocab_size - 1}, the "
                "vocabulary of "
                f"{self.name!r}"
            )
        if not any_length and self.context_length and len(ids) >= self.context_length:
            room = f"{self.name!r} has room for {self.context_length - 1} and a new one"
            raise TooLong(f"the prompt has {len(ids)} tokens, {room}; shorten it")
        return ids

    def tokenize(self, text: str, **options: Any) -> Any:
        """Return the tokenizer's output for a text. Raises InputError for words that the vocabulary
        lacks."""
        return tokenize(self.tokenizer, self.name, text, **options)

    def decode(self, ids: Sequence[int], special: bool = False) -> str:
        """Return the text of tokens. Special tokens are left out unless `special`, and so is a
        final EOS that the tokenizer does not list as special."""
        if not special and len(ids) and ids[-1] in self.eos_ids:
            ids = ids[:-1]
        return cast(
            str, self.tokenizer.decode(list(ids), skip_special_tokens=not special)
        )

    def token_mask(self, pattern: str) -> Tensor:
        """Return [V] bool: True for tokens whose text matches a regular expression anywhere.
        Computed once per pattern."""
        return self.once(
            ("tokens", pattern),
            lambda: tokens_with(self.tokenizer, pattern, self.vocab_size).to(
                self.device
            ),
        )


def tokenize(
    tokenizer: PreTrainedTokenizerBase, name: str, text: str | list[str], **options: Any
) -> Any:
    """Return a tokenizer's output for one text or several. Raises InputError for words that the
    vocabulary lacks."""
    try:
        return tokenizer(text, **options)
    except Exception as error:
        # the error of a WordLevel vocabulary without an unknown token does not name the word
        known = tokenizer.get_vocab()
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None or not backend.pre_tokenizer:
            raise
        whole = text if isinstance(text, str) else " ".join(text)
        pieces = [piece for piece, _ in backend.pre_tokenizer.pre_tokenize_str(whole)]
        unknown = [piece.strip("▁") for piece in pieces if piece not in known]
        if not unknown:
            raise
        words = ", ".join(map(repr, dict.fromkeys(unknown[:5])))
        raise InputError(
            f"the text holds what the vocabulary of {name!r} lacks: {words}; it knows "
            "only the words of its task"
        ) from error


def _refuse_rounding(what: str, kwargs: Mapping[str, Any], error: RuntimeError) -> None:
    """Raise InputError if a model could not be loaded because its weights cannot be rounded."""
    if "quantization_config" in kwargs:
        raise InputError(
            f"{what}: its weights cannot be rounded as asked ({first_line(error)}); int4 needs "
            "layers whose widths are multiples of 32, int8 takes any"
        ) from error


@contextmanager
def without_bars() -> Iterator[None]:
    """Silence transformers' progress bar for loading weights; downloads keep their bars."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def save_model(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    others: Tensor | None = None,
) -> None:
    """Save a model and its tokenizer in the format of `transformers`. A model with a draft
    vocabulary is saved with a whole LM head, which takes its missing rows from `others` [V, H]."""
    with without_bars(), written(folder):
        if vocabulary_of(model) is None:
            model.save_pretrained(folder)
        else:
            assert others is not None
            save_whole(model, others, folder)
        tokenizer.save_pretrained(folder)


def _check_placement(dtype: object, device: object) -> None:
    """Raise InputError for an unknown dtype or a device that this machine cannot use."""
    known = isinstance(dtype, str) and isinstance(
        getattr(torch, dtype, None), torch.dtype
    )
    if dtype != "auto" and not known:
        raise InputError(
            f"dtype {dtype!r}: is unknown; name float32, bfloat16, float16 or auto"
        )
    try:
        torch.empty(0, device=device)  # type: ignore[call-overload]
    except (RuntimeError, AssertionError) as error:
        raise InputError(
            f"device {device!r}: cannot be used ({first_line(error)}); name cpu, cuda "
            "or auto"
        ) from None


def load_tokenizer(source: str) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a Hub name, local folder or GGUF file. Raises InputError if it cannot
    be loaded."""
    try:
        file: dict[str, str] = {}
        if gguf.is_named(source):
            source, file = gguf.located(source, "target")
        return cast(
            PreTrainedTokenizerBase, AutoTokenizer.from_pretrained(source, **file)
        )
    except LOADING_ERRORS as error:
        why = f"its tokenizer cannot be loaded ({first_line(error)})"
        raise InputError(
            f"target {source!r}: {why}; give a Hub name or a folder"
        ) from error


def _caps_attention(source: str, options: Mapping[str, Any]) -> bool:
    """Return True if a model caps its attention scores (softcapping). Some versions of transformers
    ignore the cap unless attention is eager."""
    config = AutoConfig.from_pretrained(source, **options).get_text_config()
    return getattr(config, "attn_logit_softcapping", None) is not None


def check_finite(lm: LM, states: Tensor) -> None:
    """Raise RunError if a model's hidden states [..., H] are NaN or infinite."""
    if not bool(states.isfinite().all()):
        raise RunError(
            f"{lm.role} {lm.name!r}: its hidden states are NaN or infinite; {CAUSES}"
        )
