"""Withdrawal of certificates whose setting failed in a later question."""

from __future__ import annotations

from pathlib import Path

from scipy.stats import binom

from lenience.certification.calibration import Calibration
from lenience.certification.certificate import FILE, Certificate, TriedSetting
from lenience.certification.page import write_page
from lenience.core.files import digest, read_json, write_json
from lenience.runs.ledger import Ledger, Outcome


def account(on: Calibration, folder: Path, certificate: Certificate) -> None:
    """Record the certified setting in the ledger, and withdraw certificates that the tests
    contradict."""
    with on.ledger.held():
        if certificate.certified:
            for at in _at_each_window(certificate.certified):
                on.ledger.keep(_outcome(on, folder, certificate, at))
        for row in certificate.tried:
            for at in _at_each_window(row) if not row.passed else ():
                _withdraw(on, at, _outcome(on, folder, certificate, at))


def _at_each_window(row: TriedSetting) -> list[TriedSetting]:
    """Return the outcome of a setting at each of its windows."""
    found = list[TriedSetting]()
    for window, lost in (row.windows or {row.window: row.losses}).items():
        found.append(row.model_copy(update={"window": window, "losses": lost}))
    return found


def _withdraw(on: Calibration, row: TriedSetting, now: Outcome) -> None:
    why = f"attempt {on.attempt.number} lost {row.losses:g} of {row.n} prompts with it"
    for earlier in on.ledger.outcomes():
        if not earlier.withdrawn and _contradicts(row, now, earlier):
            on.ledger.keep(earlier.model_copy(update={"withdrawn": why}))
            mark(on.ledger, Path(earlier.folder))


def mark(ledger: Ledger, folder: Path) -> None:
    """Mark the certificates in a folder that the ledger has as withdrawn."""
    for path in (folder / FILE, *sorted(folder.glob("certificate-*.json"))):
        if path.exists():
            made = Certificate.read(read_json(path), str(path))
            stands = as_it_stands(ledger, made)
            if stands.withdrawn != made.withdrawn:
                write_page(path.with_suffix(".html"), stands)
                write_json(path, stands.to_json())


def as_it_stands(ledger: Ledger, certificate: Certificate) -> Certificate:
    """Return a certificate, marked as withdrawn if the ledger says so."""
    withdrawn = {}
    for outcome in ledger.outcomes():
        if outcome.withdrawn:
            withdrawn[outcome.key] = outcome.withdrawn
    if certificate.certified is None or certificate.key not in withdrawn:
        return certificate
    return certificate.model_copy(update={"withdrawn": withdrawn[certificate.key]})


def _outcome(
    on: Calibration, folder: Path, certificate: Certificate, row: TriedSetting
) -> Outcome:
    decoder = on.decoding_of(row)
    binds = {**on.pair.binding(decoder), **decoder.bound(), "reads": on.task.reads}
    binds |= {"loss": certificate.loss, "task": on.task.label, "stop": None}
    binds["drafter"] = str(decoder.without_paths().drafter)
    if decoder.tree.is_chain:
        del binds["tree"]  # as in ledgers from before there were trees
    return Outcome(
        key=on.attempt.key,
        pair=on.ledger.pair,
        setting=str(decoder.without_paths()),
        binds=digest(binds, sort_keys=True),
        max_drop=certificate.max_drop,
        confidence=certificate.confidence,
        n=row.n,
        folder=str(folder.resolve()),
    )


def _contradicts(row: TriedSetting, now: Outcome, earlier: Outcome) -> bool:
    """Return True if a setting that failed now contradicts its earlier certificate: it has lost too
    much for that certificate's bound, on more prompts."""
    if (now.setting, now.binds) != (earlier.setting, earlier.binds):
        return False
    if now.key == earlier.key or now.n <= earlier.n:
        return False
    return bool(binom.cdf(row.losses, row.n, earlier.max_drop) > 1 - earlier.confidence)
