"""Tiny checkpoints with random weights, made once a session: one pair of folders for each
architecture."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"
if (
    "PYTEST_XDIST_WORKER" not in os.environ
):  # workers share the folder that their controller made
    # exported models
    os.environ["LENIENCE_CACHE"] = tempfile.mkdtemp(prefix="lenience-tests-")

from collections.abc import Callable, Generator, Sequence
from itertools import cycle
from pathlib import Path
from typing import TypeVar

import pytest
import torch
from capabilities import fail_if_skipped, skip_unless_capable
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import WordLevel
from transformers import (
    AutoTokenizer,
    Gemma2Config,
    GPT2Config,
    GPTNeoConfig,
    Lfm2Config,
    LlamaConfig,
    MambaConfig,
    MistralConfig,
    PretrainedConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3_5TextConfig,
    Qwen3Config,
)
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from lenience.core.needs import Parts
from lenience.decoding.loading import load_pair
from lenience.decoding.pair import Pair
from lenience.drafting.base import DrafterSpec
from lenience.drafting.registry import DRAFTERS
from lenience.heads.head import Head, Inputs

torch.set_num_threads(1)
# no test is about time, and seeds are explicit
settings.register_profile("lenience", deadline=None, derandomize=True)
settings.load_profile("lenience")


@pytest.fixture(autouse=True)
def home(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Path:
    """A ledger of its own for each test."""
    folder = tmp_path_factory.mktemp("home")
    monkeypatch.setenv("LENIENCE_HOME", str(folder))
    return folder


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cache of exported tiny models: shared by the tests that export, hidden from others."""
    monkeypatch.setenv("LENIENCE_CACHE", os.environ["LENIENCE_CACHE"] + "/tiny")


LONGEST = ("test_gpu.py", "test_workers.py", "test_cli.py")
"""Modules whose tests begin first: one that takes a minute and comes last runs alone."""
ENGINES = ("engine", "in_vllm")
"""Fixtures of test_vllm.py that start a vLLM for many tests."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the cases that slow.txt names."""
    slow = set(
        (Path(__file__).parent / "slow.txt").read_text(encoding="utf-8").split("\n")
    )
    for item in items:
        if f"{item.path.name}::{item.nodeid.split('::', 1)[1]}" in slow:
            item.add_marker(pytest.mark.slow)
        for engine in item.fixturenames if item.path.name == "test_vllm.py" else ():
            if engine in ENGINES:  # with --dist loadgroup one worker starts it
                item.add_marker(pytest.mark.xdist_group(engine))
    items.sort(key=lambda item: item.path.name not in LONGEST)


def pytest_runtest_setup(item: pytest.Item) -> None:
    skip_unless_capable(item)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[
    None, pytest.TestReport, pytest.TestReport
]:
    report = yield
    fail_if_skipped(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[
    None, pytest.CollectReport, pytest.CollectReport
]:
    report = yield
    fail_if_skipped(report)
    return report


def pytest_unconfigure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        shutil.rmtree(os.environ["LENIENCE_CACHE"], ignore_errors=True)


VOCABULARY = 48


def quick(max_examples: int) -> settings:
    """So many examples and no shrinking: each one decodes."""
    phases = (Phase.explicit, Phase.generate)
    return settings(
        max_examples=max_examples,
        suppress_health_check=list(HealthCheck),
        phases=phases,
    )


T = TypeVar("T")


def spread(
    names: Sequence[str], others: Sequence[T], times: int = 2
) -> list[tuple[str, T]]:
    """Pair the first name with all of the others, and each further name with so many of them, in
    turn."""
    first, *further = names
    turns = cycle(others)
    return [
        *((first, other) for other in others),
        *((name, next(turns)) for name in further for _ in range(times)),
    ]


def prompt_lists(most: int) -> st.SearchStrategy[list[list[int]]]:
    """Between one and `most` prompts of up to 30 tokens, none of them the EOS."""
    prompt = st.lists(st.integers(1, VOCABULARY - 1), min_size=1, max_size=30)
    return st.lists(prompt, min_size=1, max_size=most)


COMMON = dict(
    vocab_size=VOCABULARY,
    eos_token_id=0,
    bos_token_id=None,
    pad_token_id=0,
    initializer_range=0.35,
)
SMALL = dict(
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    max_position_embeddings=256,
)
CONFIGS: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**COMMON, **SMALL, num_key_value_heads=2),
    "qwen2": Qwen2Config(**COMMON, **SMALL, num_key_value_heads=2),
    "qwen3": Qwen3Config(**COMMON, **SMALL, num_key_value_heads=2, head_dim=8),
    # the sliding window is far shorter than what the tests decode
    "gemma2": Gemma2Config(
        **COMMON,
        **SMALL,
        num_key_value_heads=2,
        head_dim=8,
        sliding_window=12,
        query_pre_attn_scalar=8,
    ),
    "mistral": MistralConfig(
        **COMMON, **SMALL, num_key_value_heads=2, sliding_window=12
    ),
    "gpt2": GPT2Config(**COMMON, n_embd=32, n_layer=2, n_head=4, n_positions=256),
    "gpt_neo": GPTNeoConfig(
        **COMMON,
        hidden_size=32,
        num_layers=2,
        num_heads=4,
        attention_types=[[["global", "local"], 1]],
        window_size=12,
        max_position_embeddings=256,
    ),
}

WITH_STATES: dict[str, PretrainedConfig] = {
    # a recurrence beside attention
    "qwen3_5_text": Qwen3_5TextConfig(
        **COMMON,
        **SMALL,
        num_key_value_heads=2,
        head_dim=8,
        layer_types=["linear_attention", "full_attention"],
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
    ),
    # a convolution beside attention
    "lfm2": Lfm2Config(
        **COMMON,
        **SMALL,
        num_key_value_heads=2,
        layer_types=["conv", "full_attention"],
    ),
    # a recurrence alone, which transformers continues with one token at a time
    "mamba": MambaConfig(
        **COMMON, hidden_size=32, num_hidden_layers=2, state_size=4, time_step_rank=4
    ),
}
"""Kinds whose layers keep a state that follows the tokens."""


def make_tokenizer(words: int = VOCABULARY) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(
        WordLevel({"<eos>": 0, **{f"w{i}": i for i in range(1, words)}})
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(
        replacement="▁", prepend_scheme="never"
    )
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.WordPiece(prefix="##", cleanup=False)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<eos>"
    )


def save_model(
    folder: Path,
    config: PretrainedConfig,
    seed: int,
    noise: float = 0.0,
    words: int = VOCABULARY,
) -> Path:
    """Random weights from a seed; `noise` is added to them, so that a draft agrees with its target
    now and then."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config)
    torch.manual_seed(seed + 1)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight) * noise * weight.std().nan_to_num())
    model.save_pretrained(folder)
    make_tokenizer(words).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def checkpoints(
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[[str], tuple[str, str]]:
    made: dict[str, tuple[str, str]] = {}

    def get(name: str) -> tuple[str, str]:
        if name not in made:
            folder = tmp_path_factory.mktemp(name)
            config = (CONFIGS | WITH_STATES)[name]
            target = save_model(folder / "target", config, seed=1)
            draft = save_model(folder / "draft", config, seed=1, noise=0.15)
            made[name] = (str(target), str(draft))
        return made[name]

    return get


@pytest.fixture(scope="session")
def pairs(checkpoints: Callable[[str], tuple[str, str]]) -> Callable[[str], Pair]:
    made: dict[str, Pair] = {}

    def get(name: str) -> Pair:
        if name not in made:
            made[name] = load_pair(*checkpoints(name), dtype="float32", compile=False)
        return made[name]

    return get


@pytest.fixture(scope="session")
def llama(pairs: Callable[[str], Pair]) -> Pair:
    return pairs("llama")


@pytest.fixture(scope="session")
def built_in() -> Pair:
    return load_pair(compile=False)


@pytest.fixture(scope="session")
def built_in_exported() -> Pair:
    """The built-in pair through the graphs that come with it, several times faster."""
    return load_pair()


@pytest.fixture
def repeating(monkeypatch: pytest.MonkeyPatch) -> str:
    """The spec of a drafter that proposes for certain: CONTRIBUTING's."""
    from test_contributing import EXAMPLES

    namespace: dict = {"__name__": "repeating"}
    monkeypatch.setitem(sys.modules, "repeating", sys.modules[__name__])
    exec(EXAMPLES["src/lenience/drafting/repeat.py"], namespace)
    drafter: type[DrafterSpec] = namespace["Repeat"]
    assert Parts.PROBS not in drafter().offers and not drafter().needs_draft
    monkeypatch.setitem(DRAFTERS, "repeat", drafter)
    return "repeat"


@pytest.fixture(scope="session")
def judge(tmp_path_factory: pytest.TempPathFactory, llama: Pair) -> str:
    folder = tmp_path_factory.mktemp("judge")
    width = 2 * (llama.target.hidden_size + llama.draft.hidden_size)
    weight = torch.randn(width, generator=torch.Generator().manual_seed(1)) / 4
    Head(weight, 0.0, Inputs(), 0.5, llama.fingerprints).save(folder)
    return f"judge:{folder}@0.5"


TEMPLATE = (
    "{% if enable_thinking %}w9 {% endif %}"
    "{% for m in messages %}{{ 'w3' if m.role == 'system' else 'w1' }} {{ m.content }} {% endfor %}"
    "w2"
)


@pytest.fixture
def chatting(checkpoints, tmp_path) -> str:
    """A target with a chat template; its draft has none."""
    target, _ = checkpoints("llama")
    tokenizer = AutoTokenizer.from_pretrained(target)
    tokenizer.chat_template = TEMPLATE
    folder = tmp_path / "chatting"
    shutil.copytree(target, folder)
    tokenizer.save_pretrained(folder)
    return str(folder)
