"""Upload of heads to the Hub, with a model card."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from lenience.certification.certificate import FILE, Certificate, read_certificate
from lenience.core.errors import InputError
from lenience.core.hub import PREFIX, upload
from lenience.evaluation.pages import template
from lenience.heads.head import Head, Role, load_head
from lenience.runs.record import RunRecord, read_run

DOES: dict[Role, str] = {
    "judge": "predicts which tokens that differ from the target's do not matter for the task",
    "stop": "predicts where the target would reject a token, and ends the window there",
    "gate": "predicts which tokens the target would accept, and lets them skip verification",
    "mixture": "weighs the target's distribution against the draft's at each position",
}
"""Purpose of a head of each role."""


def push(folder: Path, name: str, licence: str | None, private: bool) -> str:
    """Upload a trained head to the Hub as "org/name", with a card of its training, its metrics and
    its run's certificate, and return its address. Raises InputError if the folder holds no head,
    and RunError if the Hub refuses."""
    role = next((known for known in DOES if (folder / f"{known}.json").is_file()), None)
    if role is None:
        raise InputError(
            f"{folder}: holds no head; name a folder that lenience fit wrote, such as "
            "RUN/judge"
        )
    head = load_head(folder, role)
    run = folder.parent
    certificate = _certificate(run, head)
    with TemporaryDirectory() as made:
        for file in (f"{role}.json", f"{role}.safetensors"):
            shutil.copyfile(folder / file, Path(made) / file)
        if certificate is not None:
            shutil.copyfile(run / FILE, Path(made) / FILE)
        record = read_run(run) if (run / "run.json").is_file() else None
        text = card(head, name, licence, record, certificate)
        (Path(made) / "README.md").write_text(text, encoding="utf-8")
        return upload(Path(made), name, private)


def card(
    head: Head,
    name: str,
    licence: str | None,
    record: RunRecord | None,
    certificate: Certificate | None,
) -> str:
    """Return a head's model card, in Markdown."""
    models = (
        {}
        if record is None
        else {role: model.name for role, model in record.models.items()}
    )
    return template("card.md").render(
        name=name,
        role=head.role,
        does=DOES[head.role],
        licence=licence,
        bases=[
            model
            for model in models.values()
            if model.count("/") == 1 and not Path(model).exists()
        ],
        pair=_loaded(models),
        facts=list(_facts(head, record)),
        used=_used(head, name),
        fingerprints=list(head.fingerprints.items()),
        thresholds=head.metrics.get("thresholds", ()),
        certificate=_told(certificate),
    )


def _loaded(models: Mapping[str, str]) -> str:
    """Return the arguments of load_pair for these models, as source text; "" for the built-in
    pair."""
    names = [models.get(role, role.upper()) for role in ("target", "draft")]
    if names == ["built-in target", "built-in draft"]:
        return ""
    return ", ".join(map(json.dumps, names))


def _facts(head: Head, record: RunRecord | None) -> Iterator[tuple[str, Any]]:
    """Yield the facts about a head, as (name, value)."""
    metrics = head.metrics
    if record is not None:
        for role, model in record.models.items():
            yield role, model.name
        yield "task", record.task
    if "samples" in metrics:
        data = f"{metrics['mismatches']} mismatches of {metrics['samples']} samples"
        important = metrics.get("important")
        yield (
            "fitted to",
            data + (f", {important} of them important" if important else ""),
        )
    reads = f"states of {' and '.join(head.inputs.models)} after {' and '.join(head.inputs.tokens)}"
    yield "reads", reads
    yield "kind", head.kind
    if "auc_out_of_fold" in metrics:
        low, high = metrics.get("auc_interval", (None, None))
        interval = "" if low is None else f" (95 %: {low:.3f}–{high:.3f})"
        yield "AUC out of fold", f"{metrics['auc_out_of_fold']:.3f}{interval}"
    if head.role != "mixture":
        yield "its own threshold", f"{head.threshold:.6g}"


def _used(head: Head, name: str) -> str:
    """Return the spec of a rule or stop condition that uses a head of the Hub."""
    if head.role == "mixture":
        return f"diversed:{PREFIX}{name}"
    asked = f"{PREFIX}{name}@{head.threshold:.6g}"
    return {"judge": f"judge:{asked}", "stop": f"exact; stop=head:{asked}"}.get(
        head.role, f"speculative; stop=gate:{asked}"
    )


def _certificate(run: Path, head: Head) -> Certificate | None:
    """Return the run's certificate if it certifies a setting with this head; otherwise None."""
    if not (run / FILE).is_file():
        return None
    certificate = read_certificate(run)
    bound = head.fingerprint in certificate.binds["heads"]
    return certificate if certificate.holds and bound else None


def _told(certificate: Certificate | None) -> str:
    """Return a certificate's statement in one sentence."""
    if certificate is None or certificate.certified is None:
        return "There is none: what it loses was not bounded."
    certified = certificate.certified
    setting = "this head"
    if certified.threshold is not None:
        setting = f"threshold {certified.threshold:.6g}"
    return (
        f"With {certificate.confidence:.4g} confidence the loss ({certificate.loss}) "
        f"of {setting} at window {certified.shown_window} is at most "
        f"{certificate.max_drop:.2%}, by {certificate.n} prompts of "
        f"{certificate.binds['task']}, "
        f"at {certified.tokens_per_pass:.2f} tokens per pass; certificate.json says "
        "what it binds. "
        "It holds in the run folder that it was made in: certify anew for other "
        "prompts."
    )
