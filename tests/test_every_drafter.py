"""What holds of every drafter: strict answers are the target's own on every architecture, and what
is sampled keeps its distribution."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import test_dflash
import torch
from conftest import CONFIGS, VOCABULARY
from scipy.stats import chi2
from test_drafters import Counting, random_heads
from test_eagle import write
from test_serve import serves_as_alone

from lenience.certification.certify import certify
from lenience.certification.question import CertifyConfig
from lenience.core.context import Context, Row
from lenience.core.errors import InputError
from lenience.core.needs import Sources
from lenience.core.noise import Noise
from lenience.core.profile import Profile
from lenience.decoding.loading import load_pair
from lenience.decoding.loop import cycle
from lenience.decoding.pair import Pair
from lenience.drafting.base import DrafterSetup
from lenience.drafting.datastore import build_store
from lenience.drafting.parsing import parse_drafter, parse_stop, parse_tree
from lenience.drafting.registry import DRAFTERS
from lenience.evaluation.compare import CompareConfig, compare
from lenience.evaluation.pages import write_report
from lenience.mining.search import MineConfig, mine
from lenience.models.pass_cache import LAST, States
from lenience.models.session import Session
from lenience.rules.parsing import parse_rule

PROMPTS = [[5, 6, 7], list(range(1, 20)), [9], [3, 3, 3, 3, 8, 8]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What drafters are loaded from, of random weights."""
    made = tmp_path_factory.mktemp("drafters")
    for kind in ("medusa", "blockwise"):
        random_heads(kind, 3).save(made / kind)
    for version in (1, 3):
        write(made / f"eagle{version}", version)
    test_dflash.write(made / "dflash")
    return made


SPECS = {  # and the trees that each proposes
    "model": ("dynamic:6", "cartesian:2,2"),
    "medusa:{folder}/medusa": ("dynamic:6", "cartesian:2,2"),
    "blockwise:{folder}/blockwise": ("dynamic:6", "cartesian:2,2"),
    "eagle:{folder}/eagle1": ("dynamic:6", "cartesian:2,2"),
    "eagle:{folder}/eagle3": ("dynamic:6", "cartesian:2,2"),
    "dflash:{folder}/dflash": ("dynamic:6", "cartesian:2,2"),
    "exit:1": ("dynamic:6", "cartesian:2,2"),
    "skip:1": ("dynamic:6", "cartesian:2,2"),
    "ngram": (),
    "suffix": ("dynamic:6",),
    "datastore:{folder}/store,shortest=1": ("dynamic:6",),
    "suffix|model": ("dynamic:6",),
    "medusa:{folder}/medusa|model": ("dynamic:6",),
    "ngram>model": (),
    "suffix>exit:1": (),
    "model:2+ngram": (),
}
OF_LAYERS = (
    "model",
    "eagle:{folder}/eagle3",
    "dflash:{folder}/dflash",
    "exit:1",
    "skip:1",
)
"""Drafters that depend on how a kind of model is built."""


def test_every_drafter_is_here() -> None:
    here = {spec.split(":")[0] for spec in SPECS}
    # the target must hold the layer of mtp: tests/test_mtp.py
    assert here >= DRAFTERS.keys() - {"mtp"}


@pytest.mark.parametrize("name", [name for name in CONFIGS if name != "gpt_neo"])
def test_strict_answers_are_the_targets_own(
    name: str, folder: Path, pairs: Callable[[str], Pair]
) -> None:
    """Of `transformers`' own pass: of one kind of model with every drafter, and of others with what
    reads their layers."""
    if name == "llama":
        answers_as_the_target(pairs(name), folder, list(SPECS))
    else:
        answers_as_the_target(pairs(name), folder, list(OF_LAYERS), sizes=(3,))


@pytest.mark.usefixtures("graphs")
def test_strict_answers_of_exported_passes_are_the_targets_own(
    folder: Path, checkpoints: Callable[[str], tuple[str, str]]
) -> None:
    pair = load_pair(*checkpoints("llama"), dtype="float32", compile=False)
    pair.compile()
    assert pair.compiled
    some = ["medusa:{folder}/medusa", "suffix", "ngram>model", "model:2+ngram"]
    answers_as_the_target(pair, folder, some)


def answers_as_the_target(
    pair: Pair, folder: Path, specs: list[str], sizes: tuple[int, ...] = (1, 3)
) -> None:
    build_store(
        iter([[5, 6, 7, 9, 3, 8]]), pair.target.tokenizer_fingerprint, folder / "store"
    )
    wanted = [
        pair.generate(one, rule="target", max_new_tokens=30).tokens for one in PROMPTS
    ]
    for spec in specs:
        for tree in ("chain", *SPECS[spec]):
            for size in sizes:
                outs = pair.generate_batch(
                    PROMPTS,
                    drafter=spec.format(folder=folder),
                    tree=tree,
                    batch_size=size,
                    max_new_tokens=30,
                    window=4,
                )
                assert [out.tokens for out in outs] == wanted, (spec, tree, size)


@pytest.mark.parametrize("spec", [*SPECS, "mtp"])
def test_drafters_that_name_layers_say_that_they_read_them(
    llama: Pair, folder: Path, spec: str
) -> None:
    if "store" in spec:
        build_store(
            iter([[5, 6, 7, 9]]), llama.target.tokenizer_fingerprint, folder / "store"
        )
    drafter = parse_drafter(spec.format(folder=folder))
    reads = Sources.LAYER_STATES in drafter.needs
    assert reads is bool(drafter.features(llama.target))


@pytest.mark.slow
@pytest.mark.parametrize("spec", SPECS)
def test_every_drafter_serves(llama: Pair, folder: Path, spec: str) -> None:
    if "store" in spec:
        build_store(
            iter([[5, 6, 7, 9]]), llama.target.tokenizer_fingerprint, folder / "store"
        )
    drafter = spec.format(folder=folder)
    remembers = Sources.EARLIER_ANSWERS in parse_drafter(drafter).needs
    for tree in ("chain", *SPECS[spec][:1]):
        options = {"drafter": drafter, "tree": tree, "window": 4}
        serves_as_alone(llama, options, "exact" if remembers else "topk:3")


@pytest.fixture(scope="module")
def later(llama: Pair) -> tuple[list[int], list[torch.Tensor]]:
    """A prompt, and the target's distributions of the second and of the third token after it, over
    all that may stand before them."""
    prompt = [*range(1, 10), 4]

    def after(texts: list[list[int]]) -> torch.Tensor:
        logits = llama.target.model(torch.tensor(texts)).logits[:, -1]
        return torch.softmax(logits.double(), -1)

    with torch.inference_mode():
        first = after([prompt])[0]
        second = after([[*prompt, a] for a in range(VOCABULARY)])
        third = after(
            [[*prompt, a, b] for a in range(VOCABULARY) for b in range(VOCABULARY)]
        )
    return prompt, [first @ second, (first[:, None] * second).flatten() @ third]


WITH, WITHOUT = (
    "cartesian:2,2,draw=with-replacement",
    "cartesian:2,2,draw=without-replacement",
)
SAMPLED = [
    ("medusa:{folder}/medusa", "speculative", "chain", "fixed"),
    ("medusa:{folder}/medusa", "speculative", WITH, "fallback:0.2"),
    ("blockwise:{folder}/blockwise", "block", "chain", "confidence:0.2"),
    ("blockwise:{folder}/blockwise", "speculative", WITHOUT, "fixed"),
    ("eagle:{folder}/eagle3", "block", "chain", "fixed"),
    ("eagle:{folder}/eagle3", "speculative", WITHOUT, "confidence:0.2"),
    ("eagle:{folder}/eagle1", "block", WITH, "fixed"),
    ("exit:1", "speculative", "chain", "entropy:0.5"),
    ("exit:1", "block", WITH, "confidence:0.2"),
    ("skip:1", "speculative", WITHOUT, "fixed"),
]


@pytest.mark.parametrize(("drafter", "rule", "tree", "stop"), SAMPLED)
def test_what_is_sampled_keeps_the_targets_distribution(
    drafter: str,
    rule: str,
    tree: str,
    stop: str,
    folder: Path,
    llama: Pair,
    later: tuple[list[int], list[torch.Tensor]],
) -> None:
    """Over several windows, the first of which is empty where the target must have read first."""
    n, (prompt, wanted) = 2000, later
    spec, shape = parse_drafter(drafter.format(folder=folder)), parse_tree(tree)
    features = spec.features(llama.target)
    session = Session(
        llama.target, n, 32, states=States(features=features) if features else LAST
    )
    setup = DrafterSetup(
        llama.target, llama.draft, n, 32, parse_stop(stop), shape, keep_states=False,
        profile=Profile(), session=session,
    )  # fmt: skip
    decides, drafts = parse_rule(rule), spec.build(setup)
    rows = [Row(Noise(seed, b""), list(prompt)) for seed in range(n)]
    fresh = decides.needs.whole_window or shape.draws is not None
    ctx = Context(rows, window=2, temperature=1.0, fresh_noise_per_window=fresh)
    kept = 0
    while min(len(row.prefix) for row in rows) < len(prompt) + 3:
        _, _, verdicts = cycle(session, drafts, decides, ctx, [6] * n)
        for row, verdict in zip(rows, verdicts):
            more = [verdict.drafted[i] for i in verdict.path]
            kept += len(more)
            more += [] if verdict.next_token is None else [verdict.next_token]
            row.prefix += more
            row.position += len(more)
    assert kept > n / 20
    for place, chances in enumerate(wanted, 1):
        found = torch.tensor([row.prefix[len(prompt) + place] for row in rows])
        counts = torch.bincount(found, minlength=VOCABULARY).double()
        rare = n * chances < 5
        counts = torch.cat([counts[~rare], counts[rare].sum()[None]])
        due = torch.cat([n * chances[~rare], n * chances[rare].sum()[None]])
        assert chi2.sf(float(((counts - due) ** 2 / due).sum()), len(due) - 1) > 1e-3


def test_heads_verify_and_predict_in_one_pass(folder: Path, llama: Pair) -> None:
    """Where all k heads are right, m tokens take m / (k + 1) passes and one for the prompt (Stern
    2018, section 4); a rule that accepts everything makes them right."""
    out = llama.generate(
        [5, 6, 7], drafter=f"blockwise:{folder / 'blockwise'}", window=3, max_new_tokens=41,
        rule=f"topk:{VOCABULARY}",
    )  # fmt: skip
    assert len(out.tokens) == 41 and out.target_passes == 1 + 40 / 4


def test_a_certificate_binds_a_drafter_and_its_tree(
    llama: Pair, tmp_path: Path
) -> None:
    mine(llama, Counting(), tmp_path, MineConfig(answers_only=True, limit=12))
    options = {"drafter": "suffix|model", "tree": "dynamic:6", "window": 3}
    config = CertifyConfig(
        rules=("topk:1",), options=options, max_drop=0.9, confidence=0.5, split="test",
        loss="disagreement",
    )  # fmt: skip
    assert certify(llama, Counting(), tmp_path, config).certified
    out = llama.generate("w1 w2", rule=f"certified:{tmp_path}")
    assert out.drafted and out.tree == "dynamic:6"
    for other in (
        {"tree": "dynamic:8"},
        {"tree": "chain"},
        {"drafter": "model"},
        {"window": 4},
    ):
        with pytest.raises(InputError, match=f"certified.*{next(iter(other))}"):
            llama.generate("w1 w2", rule=f"certified:{tmp_path}", **other)


def test_drafters_and_trees_are_compared_and_reported(
    folder: Path, llama: Pair, tmp_path: Path
) -> None:
    settings = (
        "exact; window=3; tree=dynamic:6",
        f"topk:2; window=3; drafter=medusa:{folder / 'medusa'}",
        "exact; window=3; drafter=suffix|model; tree=dynamic:6",
    )
    config = CompareConfig(settings=settings, limit=4, timed=1, repeats=1)
    found = compare(llama, Counting(), config)
    rows = {
        (row.rule, *sorted(row.options.items())): row
        for row in found.rows
        if row.window
    }
    assert set(rows) == {
        ("exact", ("tree", "dynamic:6")),
        ("topk:2", ("drafter", f"medusa:{folder / 'medusa'}")),
        ("exact", ("drafter", "suffix|model"), ("tree", "dynamic:6")),
    }
    samples = [*Counting().samples("test")][:4]
    for (rule, *options), row in rows.items():
        outs = [
            llama.generate(
                one.prompt, rule=rule, window=3, max_new_tokens=40, **dict(options)
            )
            for one in samples
        ]
        tokens, passes = (
            sum(len(out.tokens) for out in outs),
            sum(o.target_passes for o in outs),
        )
        assert row.tokens_per_pass == pytest.approx(tokens / passes)
    write_report(tmp_path / "report.html", found)
    page = (tmp_path / "report.html").read_text()
    assert "dynamic:6" in page and "suffix|model" in page
    assert "drafter=medusa:medusa" in page, "by its folder, as there is little room"
