"""What a server and a request may ask of the vLLM plugin, without vLLM."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lenience.core.errors import InputError
from lenience.core.files import EMBEDDED
from lenience.core.identity import checkpoint_fingerprint, tokenizer_fingerprint
from lenience.core.needs import Needs
from lenience.decoding.pair import Pair
from lenience.heads.head import Head, Inputs
from lenience.integrations.engine_rules import inputs
from lenience.integrations.engine_rules import rule as served_rule
from lenience.integrations.engine_rules.counts import Counts
from lenience.integrations.engine_rules.windows import WindowDecider, Windows
from lenience.integrations.vllm import checks
from lenience.integrations.vllm.counts import attach, put


def options(**given: Any) -> dict[str, Any]:
    return {"lenience": given}


def test_nothing_is_asked_for_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(served_rule.VARIABLE, raising=False)
    assert served_rule.read({}) is None and served_rule.read({"other": 1}) is None
    monkeypatch.setenv(served_rule.VARIABLE, "topk:3")
    server = served_rule.read({})
    assert server is not None and str(server.rule) == "topk:3"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "lacks rule"),
        ({"rule": "topk:3", "rul": 1}, "has rul, which is unknown"),
        ({"rule": "topk"}, "topk needs k"),
        ({"rule": "exact", "allow": ["tpk:3"]}, "there is no rule 'tpk'"),
        ({"rule": "exact", "max_unjudged": 2}, "max_unjudged"),
        ("topk:3", "must be an object"),
    ],
)
def test_wrong_options_are_one_line(given: Any, message: str) -> None:
    with pytest.raises(InputError, match=message) as error:
        served_rule.read({"lenience": given})
    assert "\n" not in str(error.value)


def test_a_rule_is_named_in_one_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(served_rule.VARIABLE, "topk:3")
    with pytest.raises(InputError, match="give one"):
        served_rule.read(options(rule="exact"))


@pytest.mark.parametrize(
    ("rule", "dial", "taken"),
    [
        ("fuzzy:js@0.4", None, "fuzzy:js@0.4"),
        ("fuzzy:js@0.4", "exact", "exact"),
        ("fuzzy:js@0.4", "speculative", "speculative"),
        ("fuzzy:js@0.4", "fuzzy:js@0.3", "fuzzy:js@0.3"),
        ("fuzzy:js@0.4", 0.1, "fuzzy:js@0.1"),
        ("fuzzy:js@0.4", "0.1", "fuzzy:js@0.1"),
        ("judge:r/judge@0.9", "judge:r/judge@0.95", "judge:r/judge@0.95"),
        ("judge:r/judge@0.9", 0.99, "judge:r/judge@0.99"),
        ("judge:r/judge@0.9&topk:4", 0.99, "judge:r/judge@0.99&topk:4"),
        ("judge:r/judge@0.9", "topk:2", "topk:2"),
    ],
)
def test_a_request_may_be_stricter(rule: str, dial: object, taken: str) -> None:
    server = served_rule.read(options(rule=rule, allow=["topk:2"]))
    assert server is not None and str(server.rule_for(dial)) == taken


@pytest.mark.parametrize(
    ("rule", "dial"),
    [
        ("fuzzy:js@0.4", "fuzzy:js@0.5"),
        ("fuzzy:js@0.4", 0.5),
        ("fuzzy:js@0.4", "fuzzy:kl@0.1"),
        ("judge:r/judge@0.9", "judge:r/judge@0.85"),
        ("judge:r/judge@0.9", "judge:other/judge@0.95"),
        ("judge:r/judge@0.9", 0.5),
        ("judge:r/judge@0.9&topk:4", "judge:r/judge@0.9"),
        ("exact", "topk:3"),
        ("topk:4", "topk:3"),
    ],
)
def test_a_request_may_not_be_more_lenient(rule: str, dial: object) -> None:
    server = served_rule.read(options(rule=rule, allow=["topk:2"]))
    assert server is not None
    with pytest.raises(
        InputError, match=r"may be more lenient than the server's rule.*topk:2"
    ):
        server.rule_for(dial)


def test_a_threshold_needs_a_rule_that_has_one() -> None:
    server = served_rule.read(options(rule="topk:4"))
    assert server is not None
    with pytest.raises(InputError, match="name a whole rule"):
        server.rule_for(0.5)
    with pytest.raises(InputError, match="there is no rule 'strict'"):
        server.rule_for("strict")
    with pytest.raises(InputError, match="longer than 1000 characters"):
        server.rule_for("topk:4&" * 500)


def test_lenient_rules_can_be_forbidden(
    monkeypatch: pytest.MonkeyPatch, llama: Pair
) -> None:
    monkeypatch.setenv("LENIENCE_FORBID", "1")
    with pytest.raises(InputError, match="LENIENCE_FORBID=1 forbids"):
        served_rule.read(options(rule="typical:0.3,0.6", allow=["exact"]))
    with pytest.raises(InputError, match="LENIENCE_FORBID=1 forbids"):
        served_rule.read(options(rule="exact", allow=["typical:0.31,0.6"]))
    assert served_rule.read(options(rule="speculative")) is not None
    for lenient in (
        {"rule": "topk:2"},
        {"rule": "draft"},
        {"rule": "exact|random:0.1"},
    ):
        with pytest.raises(InputError, match="LENIENCE_FORBID=1 forbids"):
            llama.generate([3, 4], **lenient)
    strict = llama.generate([3, 4], rule="exact", max_new_tokens=4).tokens
    assert strict == llama.generate([3, 4], rule="target", max_new_tokens=4).tokens


# ---- a server's configuration


def config(**changes: Any) -> Any:
    """The parts of a VllmConfig that are looked at, of the built-in pair."""
    model = SimpleNamespace(
        model=str(EMBEDDED / "target"),
        tokenizer=str(EMBEDDED / "target"),
        tokenizer_revision=None,
        trust_remote_code=False,
        revision=None,
        get_hidden_size=lambda: 320,
    )
    speculative = SimpleNamespace(
        method="draft_model",
        target_model_config=model,
        draft_model_config=SimpleNamespace(
            model=str(EMBEDDED / "draft"), revision=None
        ),
        rejection_sample_method="standard",
        draft_sample_method="greedy",
    )
    for name in [name for name in changes if hasattr(speculative, name)]:
        setattr(speculative, name, changes.pop(name))
    parts = dict(
        model_config=model,
        speculative_config=speculative,
        scheduler_config=SimpleNamespace(
            async_scheduling=changes.pop("async_scheduling", False)
        ),
        lora_config=None,
        parallel_config=SimpleNamespace(
            distributed_executor_backend=None,
            prefill_context_parallel_size=changes.pop(
                "prefill_context_parallel_size", 1
            ),
        ),
        load_config=SimpleNamespace(download_dir=None),
    )
    return SimpleNamespace(**{**parts, **changes})


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "version", lambda name: "0.32.7")


def judge_of(folder: Path, inputs: Inputs, fingerprints: dict[str, str]) -> str:
    weight = torch.zeros(inputs.width({"target": 320, "draft": 128}))
    Head(weight, 0.0, inputs, 0.5, fingerprints).save(folder)
    return f"judge:{folder}@0.5"


def test_a_start_up_line_names_rule_head_and_versions(
    known: None, tmp_path: Path, built_in: Pair
) -> None:
    rule = judge_of(tmp_path, Inputs(("target",)), built_in.fingerprints)
    server = served_rule.read(options(rule=rule))
    assert server is not None
    said = checks.check(server, config())
    assert rule in said and "vLLM 0.32.7" in said and "of these models" in said
    assert server.rule.heads[0].head.fingerprint in said and "no certificate" in said


@pytest.mark.parametrize(
    ("rule", "changes", "message"),
    [
        ("topk:3", {"speculative_config": None}, "does not draft"),
        (
            "topk:3",
            {"rejection_sample_method": "synthetic"},
            "'synthetic' is a rule of its own",
        ),
        ("topk:3", {"prefill_context_parallel_size": 2}, "prefill context parallelism"),
        (
            "topk:3",
            {"method": "extract_hidden_states"},
            "is not known; lenience decides with draft_model, eagle, eagle3, mtp",
        ),
        (
            "fuzzy:js@0.3",
            {"method": "suffix", "draft_sample_method": "probabilistic"},
            "and suffix has none",
        ),
        ("fuzzy:js@0.3", {}, '"draft_sample_method": "probabilistic"'),
        ("ensemble:0.5", {}, '"draft_sample_method": "probabilistic"'),
    ],
)
def test_what_a_rule_cannot_be_held_to_in_is_refused(
    known: None, rule: str, changes: dict[str, Any], message: str
) -> None:
    server = served_rule.read(options(rule=rule))
    assert server is not None
    with pytest.raises(InputError, match=message):
        checks.check(server, config(**changes))


def test_heads_that_do_not_fit_are_refused(
    known: None, tmp_path: Path, built_in: Pair
) -> None:
    def refused(
        inputs: Inputs, fingerprints: dict[str, str], message: str, **changes: Any
    ) -> None:
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        server = served_rule.read(options(rule=judge_of(folder, inputs, fingerprints)))
        assert server is not None
        with pytest.raises(InputError, match=message):
            checks.check(server, config(**changes))

    own, target = built_in.fingerprints, Inputs(("target",))
    refused(Inputs(), own, "take a judge trained with --models target")
    refused(Inputs(("target",), layers=(-1,)), own, "train a judge without --layer")
    refused(target, {**own, "target": "another"}, "was trained for another target")
    refused(target, {**own, "draft": "another"}, "was trained for another draft")
    refused(
        target, {**own, "tokenizer": "another"}, "was trained for another tokenizer"
    )
    refused(target, own, "LoRA", lora_config=object())
    draft = Path(shutil.copytree(EMBEDDED / "draft", tmp_path / "small-draft"))
    (draft / "draft_vocab.json").write_text('{"tokens": [1, 2]}')
    small = SimpleNamespace(model=str(draft), revision=None)
    refused(target, own, "has a draft vocabulary", draft_model_config=small)
    allowed = judge_of(tmp_path / "allowed", target, own)
    server = served_rule.read(options(rule="exact", allow=[allowed]))
    assert server is not None
    with pytest.raises(InputError, match="LoRA"):
        checks.check(server, config(lora_config=object()))
    assert own["target"] == checkpoint_fingerprint(EMBEDDED / "target")
    assert own["tokenizer"] == tokenizer_fingerprint(built_in.target.tokenizer)


def test_a_variable_does_not_reach_rays_workers(
    known: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(served_rule.VARIABLE, "topk:3")
    server = served_rule.read({})
    assert server is not None and checks.check(server, config())
    ray = SimpleNamespace(distributed_executor_backend="ray")
    with pytest.raises(InputError, match="name the rule in --additional-config"):
        checks.check(server, config(parallel_config=ray))


def test_a_requests_rule_has_the_head_that_was_checked(
    tmp_path: Path, built_in: Pair
) -> None:
    rule = judge_of(tmp_path, Inputs(("target",)), built_in.fingerprints)
    server = served_rule.read(options(rule=rule))
    assert server is not None
    head = server.rule.heads[0].head
    (tmp_path / "judge.safetensors").write_bytes(b"another fit")
    for dial in (0.9, rule.replace("@0.5", "@0.7"), rule):
        assert server.rule_for(dial).heads[0].head is head


def test_an_unknown_vllm_or_a_changed_place_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(checks, "version", lambda name: "0.40.1")
    with pytest.raises(InputError, match=r"vLLM 0\.40\.1: is not known"):
        checks.vllm_version()
    monkeypatch.setattr(checks, "version", lambda name: "0.33.0")
    assert checks.vllm_version() == "0.33.0"

    class Place:
        def method(self, a: int, b: int, c: int = 0) -> None: ...

    checks.check_seams([(Place, "method", ("self", "a", "b"))])
    for name, parameters in (("method", ("self", "b")), ("gone", ("self",))):
        with pytest.raises(InputError, match=rf"Place\.{name} takes"):
            checks.check_seams([(Place, name, parameters)])


@pytest.mark.parametrize(
    ("rule", "temperature", "message"),
    [
        ("fuzzy:js@0.3", 0, "keeps for sampled requests alone"),
        ("mentored:0.3", 0, "has no greedy form"),
        ("fuzzy:js@0.3", 1, None),
        ("topk:2", 0, None),
    ],
)
def test_requests_that_a_rule_has_no_meaning_for_are_refused(
    rule: str, temperature: float, message: str | None
) -> None:
    server, params = (
        served_rule.read(options(rule=rule)),
        SimpleNamespace(temperature=temperature, min_p=0),
    )
    assert server is not None
    if message is None:
        inputs.check_request(server.rule, params)
    else:
        with pytest.raises(InputError, match=message):
            inputs.check_request(server.rule, params)


def test_counts_reach_a_requests_outputs_beside_what_others_say() -> None:
    output = SimpleNamespace()
    deciding = SimpleNamespace(
        counts={"a": Counts(3, 5, 2), "b": Counts(1)},
        take_steps=lambda: {"b": {"kept": 0}},
    )
    put(output, deciding)
    outputs = [
        SimpleNamespace(request_id=id, kv_transfer_params=given)
        for id, given in (("a", None), ("b", {"remote": 1}), ("c", None))
    ]
    attach({0: SimpleNamespace(outputs=outputs)}, None, None, output)
    counted = {
        "passes": 3,
        "kept_strictly": 5,
        "kept_leniently": 2,
        "unjudged": 0,
        "non_finite": 0,
    }
    given = [one.kv_transfer_params for one in outputs]
    told = {
        "passes": 1,
        "kept_strictly": 0,
        "kept_leniently": 0,
        "unjudged": 0,
        "non_finite": 0,
    }
    told["step"] = {"kept": 0}
    assert given == [{"lenience": counted}, {"remote": 1, "lenience": told}, None]


class OneRequest:
    """A runner's requests: one named "a", greedy, after a prompt of three tokens."""

    given = SimpleNamespace(
        extra_args=None, temperature=0.0, top_k=0, top_p=1.0, seed=0, max_tokens=20,
        ignore_eos=False, all_stop_token_ids=set(),
    )  # fmt: skip

    def __contains__(self, id: str) -> bool:
        return id == "a"

    def params(self, id: str) -> Any:
        return self.given

    def prompt(self, id: str) -> list[int]:
        return [1, 2, 3]

    def length(self, id: str) -> int:
        return 0

    def tokens(self, id: str, start: int) -> list[int]:
        return []


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("at", [None, 0, 2])
def test_no_drafted_token_is_kept_by_logits_that_are_not_finite(
    at: int | None, value: float, caplog: pytest.LogCaptureFixture
) -> None:
    server = served_rule.read(options(rule="topk:2"))
    deciding = WindowDecider(OneRequest(), server, SimpleNamespace(model="org/model"))
    # the second most probable token was drafted
    logits = torch.tensor([[0.0, 3, 2, 1]] * 4)
    if at is not None:
        logits[at, 3] = value
    windows = Windows(
        ["a"], torch.tensor([2, 2, 2, 2]), [4], logits, torch.zeros(5, 1), probs=None
    )
    for _ in range(2):
        orders = deciding.orders(windows, greedy=True)
        kept = 4 if at is None else at
        assert orders.tokens == dict.fromkeys(range(kept), 2) and orders.ends == []
    told = [record.getMessage() for record in caplog.records]
    if at is None:
        assert not told and deciding.counts["a"].non_finite == 0
    else:
        assert deciding.counts["a"].non_finite == 2
        (said,) = told
        assert (
            f"request a: the logits of org/model are NaN or infinite at position {3 + at}"
            in said
        )


class ManyRequests(OneRequest):
    """The same of several requests, at a temperature."""

    given = SimpleNamespace(**{**vars(OneRequest.given), "temperature": 0.5})

    def __contains__(self, id: str) -> bool:
        return True


def test_a_rule_is_handed_each_requests_own_states_and_the_drafts_logits() -> None:
    seen: list[Any] = []

    class Spy:
        """Stands in for the rule; it keeps what it is handed."""

        needs = Needs()

        def __call__(self, draft: Any, reading: Any, ctx: Any) -> list[Any]:
            seen.append((draft, reading))
            rule = served_rule.read(options(rule="fuzzy:js@0.9")).rule
            return rule(draft, reading, ctx)

        def __getattr__(self, name: str) -> Any:
            return getattr(served_rule.read(options(rule="fuzzy:js@0.9")).rule, name)

    server = served_rule.read(options(rule="fuzzy:js@0.9"))
    deciding = WindowDecider(ManyRequests(), server, SimpleNamespace(model="org/model"))
    spy = Spy()
    deciding.__dict__["_rule_for"] = lambda dial: spy
    probs = torch.tensor([[0.1, 0.2, 0.3, 0.4]]).expand(5, -1)
    # of three requests, one more each than drafted tokens
    hidden = torch.arange(8.0)[:, None]
    windows = Windows(
        ["a", "b", "c"],
        torch.tensor([3, 3, 2, 2, 2]),
        [2, 0, 3],
        torch.zeros(5, 4),
        hidden,
        probs,
    )
    deciding.orders(windows, greedy=False)
    ((draft, reading),) = seen
    assert reading.hidden[..., 0].tolist() == [[0, 1, 2, 2], [4, 5, 6, 7]]
    # temperature 0.5 makes the draft's own distribution of its logits
    torch.testing.assert_close((draft.logits[0, 0] / 0.5).softmax(-1), probs[0])


def test_a_session_goes_on_from_its_new_prompt() -> None:
    """vLLM's sessions keep a request's id, and move its answer into the prompt."""

    class Session:
        def __init__(self) -> None:
            self.asked = [1, 2, 3]
            self.answered = [10, 11]

        def params(self, id: str) -> Any:
            return SimpleNamespace(seed=None)

        def prompt(self, id: str) -> list[int]:
            return list(self.asked)

        def length(self, id: str) -> int:
            return len(self.answered)

        def tokens(self, id: str, start: int) -> list[int]:
            return self.answered[start:]

    session = Session()
    server = served_rule.read(options(rule="topk:2"))
    assert server is not None
    decider = WindowDecider(session, server, SimpleNamespace())  # type: ignore[arg-type]
    assert decider._row("a").prefix == [1, 2, 3, 10, 11]
    session.asked = [1, 2, 3, 10, 11, 12, 50]
    session.answered = [60]
    assert decider._row("a").prefix == [1, 2, 3, 10, 11, 12, 50, 60]
    session.answered = [60, 61]
    assert decider._row("a").prefix[-3:] == [50, 60, 61]
