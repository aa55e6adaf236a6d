"""Checks that refuse an SGLang version or server arguments that a rule cannot work with."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from lenience.core.errors import InputError, first_line
from lenience.core.needs import Layers, Parts
from lenience.core.version import VERSION
from lenience.heads.head import shown_layers
from lenience.integrations.engine_rules.checkpoints import (
    folder_of,
    vocabulary,
    weights,
)
from lenience.integrations.engine_rules.inputs import (
    check_request,
    compares_distributions,
)
from lenience.integrations.engine_rules.rule import ServedRule
from lenience.integrations.sglang.requests import RequestParams
from lenience.rules.combine import AnyOf

SUPPORTED_VERSIONS = ("0.5.23",)
"""Supported versions of SGLang, whose sources were read."""
WITH_STATES = ("EAGLE", "NEXTN", "EAGLE3")
"""Algorithms that keep the target's states of a window."""
KNOWN_ALGORITHMS = (*WITH_STATES, "STANDALONE", "NGRAM")
"""Algorithms whose windows SGLang verifies in eagle_sample."""
EAGLE3_COUNTED_FROM_0 = ("Llama", "Qwen2", "Qwen3", "Gemma3", "Mistral")
"""Beginnings of the architectures for which EAGLE-3 checkpoints count layers from 0. For some
others SGLang takes the numbers as they are."""
SIMULATED = "SGLANG_SIMULATE_ACC_LEN"
RUST = "SGLANG_RUST_SERVER"
GREEDILY = RequestParams(temperature=0.0)
"""Parameters of the requests with which SGLang warms up and checks its health."""


def sglang_version() -> str:
    """Return the version of the installed SGLang. Raises InputError if it is missing or
    unsupported."""
    try:
        found = version("sglang")
    except PackageNotFoundError:
        raise InputError(
            "SGLang: is not installed here; docs/sglang.md shows how to install it"
        ) from None
    if found not in SUPPORTED_VERSIONS:
        raise InputError(
            f"SGLang {found}: is not known; lenience {VERSION} knows "
            f"{' and '.join(SUPPORTED_VERSIONS)}"
        )
    return found


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
    versions = f"lenience {VERSION}, SGLang {found}"
    parts = (f"rule {server.rule}", heads, versions, "no certificate")
    return ", ".join(part for part in parts if part)


def _check_engine(server: ServedRule, args: Any) -> None:
    """Raise InputError for arguments with which windows are no chains, or are decided elsewhere, or
    requests come in unchecked."""
    algorithm = args.speculative_algorithm
    if algorithm is None:
        raise InputError(
            f"rule {server.rule}: this server does not draft, so there is nothing to accept; "
            "add --speculative-algorithm, such as EAGLE3"
        )
    is_ngram = algorithm == "NGRAM"
    has_heads = any(rule.heads for rule in server.rules)
    refused = {
        f"--speculative-algorithm {algorithm}: is not known; take one of "
        f"{', '.join(KNOWN_ALGORITHMS)}": algorithm not in KNOWN_ALGORITHMS,
        "--speculative-eagle-topk: a rule decides on chains; set it to 1": (
            not is_ngram and args.speculative_eagle_topk not in (None, 1)
        ),
        "--speculative-ngram-max-bfs-breadth: a rule decides on chains; set it to 1": (
            is_ngram and args.speculative_ngram_max_bfs_breadth != 1
        ),
        "--speculative-ngram-external-sam-budget: makes trees of chains; leave it out": (
            is_ngram and args.speculative_ngram_external_sam_budget > 0
        ),
        "--speculative-accept-threshold-single and -acc: accept by themselves, strict "
        "requests' tokens too; leave them out": (
            args.speculative_accept_threshold_single != 1
            or args.speculative_accept_threshold_acc != 1
        ),
        "--speculative-use-rejection-sampling: decides by the draft's distribution; leave it "
        "out": bool(args.speculative_use_rejection_sampling),
        "--enable-watermark: chooses tokens by itself; leave it out": bool(
            args.enable_watermark
        ),
        "--tokenizer-worker-num: those workers load no plugins; leave it out": (
            args.tokenizer_worker_num > 1
        ),
        "--use-ray: its actors load no plugins; leave it out": bool(args.use_ray),
        "--grpc-mode, --smg-grpc-mode: requests come in unchecked; leave them out": bool(
            args.grpc_mode or args.smg_grpc_mode
        ),
        f"{RUST}: requests come in unchecked; unset it": _is_on(RUST),
        f"{SIMULATED}: invents acceptances; unset it": (
            float(os.environ.get(SIMULATED) or 0) > 0
        ),
        "--enable-lora: makes other models of the target, and a head was fitted to one; leave it "
        "out": bool(args.enable_lora and has_heads),
        "on AMD's GPUs SGLang decides sampled requests as greedy ones, which the plugin cannot "
        "follow": torch.version.hip is not None,
        "certified rules are not known in SGLang; certify its endpoint "
        "(docs/certify-a-server.md)": server.certificate is not None,
    }
    for why, is_so in refused.items():
        if is_so:
            raise InputError(f"rule {server.rule}: {why}")


def _is_on(variable: str) -> bool:
    """Return True if an environment variable switches something on, as SGLang reads it."""
    return os.environ.get(variable, "").lower() in ("true", "1", "yes", "y")


def _check_rule(rule: AnyOf, args: Any) -> None:
    """Raise InputError if SGLang lacks an input of the rule, or a head belongs to other models."""
    if compares_distributions(rule):
        raise InputError(
            f"rule {rule}: compares the draft's distribution with the target's, and SGLang "
            "keeps none"
        )
    if Parts.STATES in rule.needs.window:
        raise InputError(
            f"rule {rule}: reads the draft's states, which SGLang does not keep; take "
            "a judge trained with --models target"
        )
    try:
        check_request(rule, GREEDILY)
    except InputError as error:
        raise InputError(
            f"{error}; SGLang's warm-up and health checks ask greedily, so no server can have "
            "this rule"
        ) from None
    if rule.needs.layers is not None:
        _check_states(rule, rule.needs.layers, args)


def _check_states(rule: AnyOf, reads: Layers, args: Any) -> None:
    """Raise InputError if SGLang does not keep the states that the rule reads, or a head belongs to
    other models."""
    algorithm = args.speculative_algorithm
    if algorithm not in WITH_STATES:
        raise InputError(
            f"rule {rule}: reads the target's states, which SGLang keeps with "
            f"{', '.join(WITH_STATES)}, not with {algorithm}"
        )
    folder = folder_of(args.model_path, args.revision, args.download_dir)
    config = _config(folder)
    kept = _eagle3_layers(args, config) if algorithm == "EAGLE3" else (None,)
    if reads != kept:
        raise InputError(
            f"rule {rule}: reads the states after layers {shown_layers(reads)}, and with "
            f"{algorithm} SGLang keeps those after {shown_layers(kept)}; train a judge of those"
        )
    tokenizer = args.tokenizer_path or args.model_path

    def known() -> Mapping[str, str]:
        return {
            "target": weights(folder),
            "tokenizer": vocabulary(tokenizer, args.revision, args.trust_remote_code),
        }

    rule.check(known, {"target": config["hidden_size"]})


def _eagle3_layers(args: Any, config: Mapping[str, Any]) -> Layers:
    """Return the layers whose states EAGLE-3 captures, counted from 1."""
    draft = args.speculative_draft_model_path
    revision = args.speculative_draft_model_revision
    said = _config(folder_of(draft, revision, args.download_dir))
    nested = said.get("eagle_config") or {}
    if not nested.get("use_aux_hidden_state", True):
        return (None,)
    architecture = str((config.get("architectures") or [""])[0])
    if not architecture.startswith(EAGLE3_COUNTED_FROM_0):
        raise InputError(
            f"{architecture or args.model_path}: the layers that EAGLE3 captures are not known "
            "for it; take a rule from logits"
        )
    named = nested.get("eagle_aux_hidden_state_layer_ids")
    if named:
        return tuple(int(layer) + 1 for layer in named)
    depth = int(config["num_hidden_layers"])
    return (2, depth // 2, depth - 3)


def _config(folder: Path) -> dict[str, Any]:
    """Return the configuration of a checkpoint, of its text part if there are others."""
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: cannot be read ({first_line(error)})") from None
    text = config.get("text_config") or {}
    return {**config, **text, "architectures": config.get("architectures")}
