"""Checks that refuse an SGLang version or server arguments that a rule cannot work with."""

from __future__ import annotations

import inspect
import json
import os
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from lenience.core.errors import InputError, first_line
from lenience.core.identity import checkpoint_fingerprint, tokenizer_fingerprint
from lenience.core.needs import Layers, Parts
from lenience.core.version import VERSION
from lenience.heads.head import shown_layers
from lenience.integrations.deciding.inputs import compares_distributions
from lenience.integrations.deciding.rule import ServedRule
from lenience.rules.combine import AnyOf

KNOWN = ("0.5.23",)
"""Supported versions of SGLang, whose sources were read."""
WITH_STATES = ("EAGLE", "NEXTN", "EAGLE3")
"""Algorithms that keep the target's states of a window."""
KNOWN_ALGORITHMS = (*WITH_STATES, "STANDALONE", "NGRAM")
"""Algorithms whose windows SGLang verifies in eagle_sample."""
SIMULATED = "SGLANG_SIMULATE_ACC_LEN"


def sglang_version() -> str:
    """Return the version of the installed SGLang. Raises InputError if it is missing or
    unsupported."""
    try:
        found = version("sglang")
    except PackageNotFoundError:
        raise InputError(
            "SGLang: is not installed here; docs/sglang.md shows how to install it"
        ) from None
    if found not in KNOWN:
        raise InputError(
            f"SGLang {found}: is not known; lenience {VERSION} knows {' and '.join(KNOWN)}"
        )
    return found


def check_parameters(function: Callable[..., Any], parameters: Sequence[str]) -> None:
    """Raise InputError if the first parameters of one of SGLang's functions have changed."""
    found = tuple(inspect.signature(function).parameters)
    if found[: len(parameters)] != tuple(parameters):
        raise InputError(
            f"SGLang {sglang_version()}: {function.__name__} takes {', '.join(found)}, not "
            f"{', '.join(parameters)}"
        )


def check(server: ServedRule, args: Any) -> str:
    """Check a server's arguments and return the start message. Raises InputError for the first
    argument with which the server's rules cannot decide."""
    found = sglang_version()
    if not server.judges:
        return f"rule {server.rule}, SGLang {found}"
    _check_engine(server, args)
    for rule in server.rules:
        _check_rule(rule, args)
    heads = ", ".join(
        f"head {part.head.fingerprint} "
        f"({'unchecked' if part.unchecked else 'of these models'})"
        for part in server.rule.heads
    )
    parts = [
        f"rule {server.rule}",
        heads,
        f"lenience {VERSION}",
        f"SGLang {found}",
        "no certificate",
    ]
    return ", ".join(part for part in parts if part)


def _check_engine(server: ServedRule, args: Any) -> None:
    """Raise InputError for arguments with which windows are decided elsewhere, or are no chains."""
    algorithm = args.speculative_algorithm
    if algorithm is None:
        raise InputError(
            "this server does not draft, so there is nothing to accept; add "
            "--speculative-algorithm, such as EAGLE3"
        )
    is_ngram = algorithm == "NGRAM"
    breadth = args.speculative_ngram_max_bfs_breadth if is_ngram else 1
    refused = {
        f"--speculative-algorithm {algorithm}: is not known; take one of "
        f"{', '.join(KNOWN_ALGORITHMS)}": algorithm not in KNOWN_ALGORITHMS,
        "--speculative-eagle-topk: a rule decides on chains; set it to 1": (
            not is_ngram and args.speculative_eagle_topk not in (None, 1)
        ),
        "--speculative-ngram-max-bfs-breadth: a rule decides on chains; set it to 1": (
            breadth != 1
        ),
        "--speculative-use-rejection-sampling: decides by the draft's distribution; leave it "
        "out": bool(args.speculative_use_rejection_sampling),
        "--enable-watermark: chooses tokens by itself; leave it out": bool(
            getattr(args, "enable_watermark", False)
        ),
        "--tokenizer-worker-num: those workers load no plugins; leave it out": (
            getattr(args, "tokenizer_worker_num", 1) > 1
        ),
        "--use-ray: its actors load no plugins; leave it out": bool(
            getattr(args, "use_ray", False)
        ),
        "--enable-lora: makes other models of the target, and a head was fitted to one; leave it "
        "out": bool(args.enable_lora and any(rule.heads for rule in server.rules)),
        f"{SIMULATED}: invents acceptances; unset it": (
            float(os.environ.get(SIMULATED) or 0) > 0
        ),
        "certified rules are not known in SGLang; certify its endpoint "
        "(docs/certify-a-server.md)": server.certificate is not None,
    }
    for why, is_so in refused.items():
        if is_so:
            raise InputError(f"rule {server.rule}: {why}")


def _check_rule(rule: AnyOf, args: Any) -> None:
    """Raise InputError if SGLang lacks an input of the rule, or a head belongs to other models."""
    if compares_distributions(rule):
        raise InputError(
            f"rule {rule}: compares the draft's distribution with the target's, and SGLang "
            "keeps none"
        )
    if Parts.STATES in rule.needs.window:
        raise InputError(
            f"rule {rule}: reads the draft's states, which SGLang does not keep; train a "
            "judge with --models target"
        )
    if rule.needs.layers is None:
        return
    algorithm = args.speculative_algorithm
    if algorithm not in WITH_STATES:
        raise InputError(
            f"rule {rule}: reads the target's states, which SGLang keeps with "
            f"{', '.join(WITH_STATES)}, not with {algorithm}"
        )
    config = _config(args.model_path)
    kept = _eagle3_layers(args, config) if algorithm == "EAGLE3" else (None,)
    if rule.needs.layers != kept:
        raise InputError(
            f"rule {rule}: reads the states after layers {shown_layers(rule.needs.layers)}, "
            f"and with {algorithm} SGLang keeps those after {shown_layers(kept)}; train a "
            "judge of those"
        )

    def known() -> Mapping[str, str]:
        found = {
            "target": _weights(args.model_path),
            "tokenizer": _vocabulary(
                args.tokenizer_path or args.model_path, args.trust_remote_code
            ),
        }
        if algorithm == "STANDALONE":
            found["draft"] = _weights(args.speculative_draft_model_path)
        return found

    rule.check(known, {"target": config["hidden_size"]})


def _folder(name: str) -> Path:
    """Return the folder of a checkpoint. A model of the Hub is downloaded."""
    if Path(name).is_dir():
        return Path(name)
    from huggingface_hub import snapshot_download

    return Path(
        snapshot_download(name, allow_patterns=["*.safetensors", "config.json"])
    )


def _config(name: str) -> dict[str, Any]:
    """Return the configuration of a checkpoint, of its text part if there are others."""
    path = _folder(name) / "config.json"
    try:
        config = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: cannot be read ({first_line(error)})") from None
    found: dict[str, Any] = config.get("text_config", config)
    return found


def _eagle3_layers(args: Any, config: Mapping[str, Any]) -> Layers:
    """Return the layers whose states EAGLE-3 captures, counted from 1."""
    draft = _config(args.speculative_draft_model_path)
    nested = draft.get("eagle_config") or {}
    named = nested.get("eagle_aux_hidden_state_layer_ids")
    if named and nested.get("use_aux_hidden_state", True):
        return tuple(int(layer) + 1 for layer in named)
    depth = int(config["num_hidden_layers"])
    return (2, depth // 2, depth - 3)


@lru_cache
def _weights(name: str) -> str:
    return checkpoint_fingerprint(_folder(name))


@lru_cache
def _vocabulary(name: str, trust_remote_code: bool) -> str:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=trust_remote_code)
    return tokenizer_fingerprint(tokenizer)
