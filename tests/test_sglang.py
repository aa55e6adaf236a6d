"""The rules in SGLang: its own verification, requests and registry of hooks, with its kernels in
Python and a matrix in place of a model.

    make test-sglang

runs it. SGLang's packages lie in a folder of their own, as they need a GPU to be installed."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

FOLDER = os.environ.get("LENIENCE_SGLANG")
if not FOLDER:
    pytest.skip("needs SGLang's packages: make test-sglang", allow_module_level=True)

# ruff: noqa: E402
sys.path.insert(0, str(Path(__file__).parent))
from sglang_on_cpu import kernels, stand_ins

stand_ins.install([FOLDER])

import sglang.srt.speculative.eagle_utils as eagle_utils
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardMode
from sglang.srt.runtime_context import get_context, get_parallel
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.speculative import eagle_worker_common, ngram_worker
from sglang.srt.speculative.eagle_info import EagleVerifyInput
from sglang.srt.speculative.ngram_info import NgramVerifyInput

from lenience.core.context import Context, Row
from lenience.core.errors import InputError
from lenience.core.files import EMBEDDED
from lenience.core.noise import Noise
from lenience.core.types import Draft, Reading, Verdict
from lenience.heads.head import Head, Inputs
from lenience.integrations import sglang as plugin
from lenience.integrations.engine_rules import rule as served_rule
from lenience.integrations.sglang import checks, hooks
from lenience.integrations.sglang.verification import Verification
from lenience.rules.parsing import parse_spec

kernels.put(eagle_utils)
V, H, WINDOW = 31, 8, 3
PROMPT = [1, 2, 3]
WEIGHT = torch.randn(H, V, generator=torch.Generator().manual_seed(5))
"""Maps states to logits, in place of a model."""


class Current:
    """The verification that SGLang's functions call; tests change it."""

    it: Verification | None = None

    def hook(self, name: str) -> Callable[..., Any]:
        def hooked(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            if self.it is None:
                return original(*args, **kwargs)
            return getattr(self.it, name)(original, *args, **kwargs)

        return hooked


current = Current()


@pytest.fixture(scope="module", autouse=True)
def engine() -> Iterator[None]:
    """SGLang's functions, wrapped by its own registry."""
    hooks.wrap(hooks.SAMPLE, current.hook("sample"))
    hooks.wrap(hooks.GREEDY, current.hook("greedy"))
    hooks.wrap(hooks.SAMPLED, current.hook("sampled"))
    # both workers imported the function by name
    assert eagle_worker_common.eagle_sample is eagle_utils.eagle_sample
    assert ngram_worker.eagle_sample is eagle_utils.eagle_sample
    one = SimpleNamespace(world_size=1)
    with (
        get_context().override_server_args(speculative_algorithm="EAGLE"),
        get_parallel().override(tp_group=one),
    ):
        yield


def arguments(**changes: Any) -> SimpleNamespace:
    """The server arguments that are looked at."""
    given = dict(
        model_path=str(EMBEDDED / "target"),
        tokenizer_path=None,
        trust_remote_code=False,
        speculative_algorithm="EAGLE",
        speculative_draft_model_path=str(EMBEDDED / "draft"),
        speculative_eagle_topk=1,
        speculative_ngram_max_bfs_breadth=10,
        speculative_use_rejection_sampling=False,
        speculative_ngram_external_sam_budget=0,
        speculative_accept_threshold_single=1.0,
        speculative_accept_threshold_acc=1.0,
        speculative_draft_model_revision=None,
        revision=None,
        download_dir=None,
        enable_watermark=False,
        tokenizer_worker_num=1,
        use_ray=False,
        grpc_mode=False,
        smg_grpc_mode=False,
        enable_lora=False,
    )
    return SimpleNamespace(**{**given, **changes})


@pytest.fixture
def rule_of(judge: str) -> Iterator[Callable[..., Verification]]:
    """Lets a server's rule decide; requests may ask for any."""

    def made(rule: str = judge, algorithm: str = "EAGLE") -> Verification:
        server = served_rule.read({"lenience": {"rule": rule, "allow": ["*"]}})
        assert server is not None
        args = arguments(speculative_algorithm=algorithm)
        current.it = Verification(server, args.model_path, args)
        return current.it

    yield made
    current.it = None


@pytest.fixture
def judge(tmp_path: Path) -> str:
    weight = torch.randn(H, generator=torch.Generator().manual_seed(2)) * 2
    Head(weight, 0.0, Inputs(("target",), ("draft",)), 0.5, {}).save(tmp_path / "judge")
    return f"judge:{tmp_path / 'judge'}@0.5"


def request(id: str, rule: str | None = None, **options: Any) -> Any:
    """A request whose first token has been sampled."""
    given = {"temperature": 0.0, "max_new_tokens": 400, "sampling_seed": 7, **options}
    custom = None if rule is None else {"lenience": rule}
    params = SamplingParams(**given, custom_params=custom)
    params.normalize(None)
    params.verify(V)
    made = Req(
        rid=id,
        origin_input_text="",
        origin_input_ids=array("q", PROMPT),
        sampling_params=params,
        vocab_size=V,
    )
    made.tokens = [5]  # type: ignore[attr-defined]  # what it has in truth
    return made


def batch_of(requests: Sequence[Any]) -> Any:
    batch = ScheduleBatch(
        reqs=list(requests), device="cpu", forward_mode=ForwardMode.TARGET_VERIFY
    )
    lengths = [len(PROMPT) + len(one.tokens) - 1 for one in requests]
    batch.seq_lens = torch.tensor(lengths)
    batch.seq_lens_cpu = batch.seq_lens.clone()
    batch.req_pool_indices = torch.arange(len(requests))
    info = SamplingBatchInfo.from_schedule_batch(batch, V)
    batch.sampling_info = info.copy_for_forward()
    return batch


def chains(requests: Sequence[Any], windows: Sequence[list[int]]) -> Any:
    """The chains of topk 1, as SGLang links them."""
    width = len(windows[0]) + 1
    rows = [[one.tokens[-1], *drafted] for one, drafted in zip(requests, windows)]
    links = torch.arange(1, width + 1).repeat(len(rows), 1)
    links[:, -1] = -1
    return EagleVerifyInput(
        draft_token=torch.tensor(rows).flatten(),
        custom_mask=torch.ones(1, dtype=torch.bool),
        positions=torch.zeros(len(rows) * width, dtype=torch.long),
        retrieve_index=torch.arange(len(rows) * width).view(-1, width),
        retrieve_next_token=links,
        retrieve_next_sibling=torch.full((len(rows), width), -1),
        draft_token_num=width,
        retrieve_cum_len=None,
        spec_steps=width - 1,
        topk=1,
        capture_hidden_mode=CaptureHiddenMode.FULL,
        seq_lens_sum=None,
        seq_lens_cpu=None,
    )


def verify(
    requests: Sequence[Any],
    verify_input: Any,
    states: torch.Tensor,
    mask: Any = None,
    has_states: bool = True,
) -> tuple[list[list[int]], torch.Tensor]:
    """One step of SGLang: the emitted tokens of each request, and the logits after it."""
    output = LogitsProcessorOutput(
        next_token_logits=states @ WEIGHT, hidden_states=states if has_states else None
    )
    batch = batch_of(requests)
    predict, lengths, index = eagle_utils.eagle_sample(
        verify_input, batch, output, mask, watermark_state=None
    )
    emitted = [
        predict[path[:n].long()].tolist() for path, n in zip(index, lengths.tolist())
    ]
    for one, tokens in zip(requests, emitted):
        # the scheduler runs a step behind
        one.output_ids = array("q", one.tokens)
        one.tokens += tokens
    return emitted, output.next_token_logits


def states_of(count: int, seed: int) -> torch.Tensor:
    return torch.randn(count, H, generator=torch.Generator().manual_seed(seed))


def windows_of(states: torch.Tensor, seed: int) -> list[list[int]]:
    """Windows whose tokens are the target's own choices in about half of the places."""
    generator = torch.Generator().manual_seed(seed)
    best = (states @ WEIGHT).argmax(-1).view(-1, WINDOW + 1)[:, :WINDOW]
    other = torch.randint(V, best.shape, generator=generator)
    is_best = torch.rand(best.shape, generator=generator) < 0.5
    found: list[list[int]] = torch.where(is_best, best, other).tolist()
    return found


def by_itself(rule: str, one: Any, drafted: list[int], states: torch.Tensor) -> Verdict:
    """What a rule says of one window, asked alone."""
    params = one.sampling_params
    greedy = params.top_k == 1
    tokens = [*PROMPT, *one.tokens]
    row = Row(Noise.for_prompt(7, PROMPT), tokens, len(one.tokens))
    ctx = Context(
        rows=[row], temperature=0.0 if greedy else params.temperature, window=WINDOW
    )
    draft = Draft(torch.tensor([drafted]), torch.tensor([len(drafted)]))
    reading = Reading((states @ WEIGHT)[None], states[None])
    (verdict,) = parse_spec(rule)(draft, reading, ctx)
    return verdict


RULES = ("exact", "topk:5", "typical:0.3,0.6", "topk:9,floor=0.6", "judge")


@pytest.mark.parametrize("has_states", [True, False])
def test_greedy_windows_end_as_each_rule_says(
    rule_of: Callable[..., Verification], judge: str, has_states: bool
) -> None:
    """With and without the target's states; strict requests are SGLang's own."""
    rules = [judge if rule == "judge" else rule for rule in RULES]
    if not has_states:
        rules.remove(judge)
    verification = rule_of(judge if has_states else "topk:5")
    requests = [request(str(i), rule) for i, rule in enumerate(rules)]
    lenient = redrawn = 0
    for seed in range(24):
        states = states_of(len(requests) * (WINDOW + 1), seed)
        windows = windows_of(states, seed)
        own = states.view(len(requests), WINDOW + 1, H)
        verdicts = [
            by_itself(rule, *asked)
            for rule, *asked in zip(rules, requests, windows, own)
        ]
        emitted, _ = verify(
            requests, chains(requests, windows), states, has_states=has_states
        )
        for tokens, drafted, verdict, state in zip(emitted, windows, verdicts, own):
            kept = verdict.num_accepted
            best = (state @ WEIGHT).argmax(-1).tolist()
            wanted = best[kept] if verdict.next_token is None else verdict.next_token
            assert tokens == [*drafted[:kept], wanted]
            lenient += sum(not strict for strict in verdict.exact[:kept])
            redrawn += kept < WINDOW and wanted == drafted[kept]
    totals = verification.totals()
    assert totals["kept_leniently"] == lenient > 3 and redrawn > 0
    assert totals["passes"] == 24 * (len(rules) - 1)


def test_sampled_windows_end_as_each_rule_says(
    rule_of: Callable[..., Verification], judge: str
) -> None:
    """Greedy requests among them too: SGLang samples the whole batch."""
    rule_of()
    rules = [judge, "topk:5", "topk:9,floor=0.6", "typical:0.3,0.6", judge]
    requests = [request(str(i), rule, temperature=0.8) for i, rule in enumerate(rules)]
    requests[-1] = request("greedy", judge)
    seen = redrawn = 0
    for seed in range(20):
        states = states_of(len(requests) * (WINDOW + 1), seed)
        windows = windows_of(states, seed)
        own = states.view(len(requests), WINDOW + 1, H)
        verdicts = [
            by_itself(rule, *asked)
            for rule, *asked in zip(rules, requests, windows, own)
        ]
        emitted, _ = verify(requests, chains(requests, windows), states)
        for tokens, drafted, verdict in zip(emitted, windows, verdicts):
            kept = verdict.num_accepted
            assert tokens[:-1] == drafted[:kept]
            if kept < WINDOW and verdict.next_token is not None:
                assert tokens[-1] == verdict.next_token
                redrawn += tokens[-1] == drafted[kept]
                seen += 1
    assert seen > 20 and redrawn > 0


def test_strict_requests_are_sglangs_own(rule_of: Callable[..., Verification]) -> None:
    """Among lenient ones and alone, greedy and sampled, with the same coins."""
    for temperature in (0.0, 0.7):
        found = []
        for decides in (False, True):
            if decides:
                rule_of("exact")
            requests = [
                request(str(i), "exact" if decides else None, temperature=temperature)
                for i in range(3)
            ]
            steps = []
            for seed in range(8):
                torch.manual_seed(seed)
                states = states_of(3 * (WINDOW + 1), seed)
                best = (states @ WEIGHT).argmax(-1).view(3, -1)[:, :WINDOW].tolist()
                steps.append(verify(requests, chains(requests, best), states)[0])
            found.append(steps)
            current.it = None
        assert found[0] == found[1] and any(len(one) > 2 for one in found[0][0])


class Mask:
    """A grammar that excludes tokens."""

    def __init__(self, excluded: list[int]):
        self.excluded = excluded

    def apply(self, logits: torch.Tensor) -> None:
        logits[:, self.excluded] = -torch.inf


def test_penalties_and_grammars_bind_a_rule(
    rule_of: Callable[..., Verification], judge: str
) -> None:
    """A rule reads the logits after them, and never keeps what they exclude; and the logits that
    log-probabilities are computed from stay SGLang's own."""
    rules = ["topk:31", judge, "topk:31"]
    for excluded, bias in (([7, 9], None), ([], {"7": -200.0})):
        options: dict[str, Any] = {} if bias is None else {"logit_bias": bias}
        windows = [[4, 7, 8], [4, 8, 7], [9, 7, 8]]
        states = states_of(12, 3)
        logits = []
        for decides in (False, True):
            current.it = None
            if decides:
                rule_of()
            requests = [
                request(str(i), rule if decides else None, **options)
                for i, rule in enumerate(rules)
            ]
            mask = Mask(excluded) if excluded else None
            emitted, left = verify(requests, chains(requests, windows), states, mask)
            logits.append(left)
        assert torch.equal(*logits)
        assert emitted[0][0] == 4
        if excluded:
            assert not {7, 9} & {token for tokens in emitted for token in tokens}
        else:
            assert emitted[2][:2] == [9, 7]  # topk:31 keeps what is only unlikely


def test_histories_do_not_lag(rule_of: Callable[..., Verification]) -> None:
    """SGLang's scheduler runs a step behind. A budget lasts over a preemption, and ends with its
    request."""
    verification = rule_of("topk:31,budget=4")
    one = request("a")
    other = request("b")
    for seed in range(2):
        states = states_of(8, seed)
        other_tokens = ((states @ WEIGHT).argmin(-1).view(2, -1)[:, :WINDOW]).tolist()
        verify([one, other], chains([one, other], other_tokens), states)
        assert verification.requests.outputs["a"] == one.tokens
    counts = verification.deciding.counts
    assert counts["a"].kept_leniently == 4 and counts["b"].kept_leniently == 4
    # preempted: its tokens are sent, and its last token is another one
    one.tokens[-1] = 30
    one.output_ids = array("q", one.tokens)
    before = [*PROMPT, *one.tokens]
    verify([one], chains([one], [[7, 8, 9]]), states_of(4, 5))
    assert verification.requests.outputs["a"] == one.tokens
    assert verification.deciding.rows["a"].prefix == before
    assert counts["a"].kept_leniently == 4
    again = request("a")  # another request of the same id
    before = [*PROMPT, *again.tokens]
    verify([again], chains([again], [[7, 8, 9]]), states_of(4, 6))
    assert verification.requests.outputs["a"] == again.tokens
    assert verification.deciding.rows["a"].prefix == before
    assert 0 < counts["a"].kept_leniently <= 3 and counts["a"].passes == 1
    assert verification.requests.outputs["b"] == other.tokens
    other.finished_reason = SimpleNamespace()
    passes = verification.totals()["passes"]
    verify([again], chains([again], [[7, 8, 9]]), states_of(4, 7))
    assert "b" not in verification.requests and "b" not in counts
    assert verification.totals()["passes"] == passes + 1


def test_a_finished_request_in_a_batch_is_left_to_sglang(
    rule_of: Callable[..., Verification],
) -> None:
    verification = rule_of("topk:31")
    one = request("a")
    one.finished_reason = SimpleNamespace()
    states = states_of(4, 1)
    worst = (states @ WEIGHT).argmin(-1)[:WINDOW].tolist()
    emitted, _ = verify([one], chains([one], [worst]), states)
    assert emitted == [[int((states[0] @ WEIGHT).argmax())]]
    assert verification.totals()["passes"] == 0


def test_what_comes_after_an_answers_end_is_not_counted(
    rule_of: Callable[..., Verification],
) -> None:
    """SGLang drafts once more for a request that has just ended."""
    for options in ({"max_new_tokens": 4}, {"stop_token_ids": [8]}):
        verification = rule_of("topk:31")
        one = request("a", **options)
        for _ in range(2):
            verify([one], chains([one], [[7, 8, 9]]), states_of(4, 1))
        totals = verification.totals()
        assert totals["passes"] == 1
        kept = totals["kept_strictly"] + totals["kept_leniently"]
        assert kept == (3 if "max_new_tokens" in options else 2)


def test_an_aborted_request_is_forgotten(rule_of: Callable[..., Verification]) -> None:
    """Also one that waits after a preemption: nothing says so, but SGLang drops it."""
    verification = rule_of("topk:31")
    one, other = request("a"), request("b")
    verify([one, other], chains([one, other], [[7, 8, 9]] * 2), states_of(8, 1))
    del one
    gc.collect()
    verify([other], chains([other], [[7, 8, 9]]), states_of(4, 2))
    assert "a" not in verification.requests and "a" not in verification.deciding.rows
    assert verification.totals()["passes"] == 3


@pytest.mark.parametrize("dial", ["tpk", "topk:9", {"rule": "topk:3"}])
def test_a_request_that_came_in_unchecked_is_aborted(
    rule_of: Callable[..., Verification], dial: Any
) -> None:
    verification = rule_of("topk:3")
    verification.deciding.server = replace(
        verification.deciding.server, allow_any=False
    )
    one, good = request("bad", dial), request("good", "exact")
    states = states_of(8, 1)
    best = (states @ WEIGHT).argmax(-1).tolist()
    emitted, _ = verify([one, good], chains([one, good], [[7, 8, 9]] * 2), states)
    assert emitted[0][0] == best[0] and emitted[1][0] == best[4]
    assert one.to_finish.status_code == 400 and good.to_finish is None


def test_the_padding_of_ngrams_is_not_kept(
    rule_of: Callable[..., Verification],
) -> None:
    """SGLang fills windows of n-grams up with token 0 under the root."""
    rule_of("topk:31", algorithm="NGRAM")
    requests = [request("matched"), request("unmatched")]
    width = 4
    # the first: 5 → 7 → 8 with one node of padding; the second: padding alone
    rows = [[5, 7, 8, 0], [5, 0, 0, 0]]
    verify_input = NgramVerifyInput(
        draft_token=torch.tensor(rows).flatten(),
        custom_mask=torch.ones(1, dtype=torch.bool),
        positions=torch.zeros(8, dtype=torch.long),
        retrieve_index=torch.arange(8).view(2, width),
        retrieve_next_token=torch.tensor([[1, 2, -1, -1], [1, -1, -1, -1]]),
        retrieve_next_sibling=torch.tensor([[-1, 3, -1, -1], [-1, 2, 3, -1]]),
        draft_token_num=width,
    )
    states = states_of(8, 4)
    best = (states @ WEIGHT).argmax(-1).tolist()
    assert 0 not in (best[0], best[4])
    emitted, _ = verify(requests, verify_input, states, has_states=False)
    assert emitted == [[7, 8, best[2]], [best[4]]]


def test_an_idle_batch_is_passed_on(rule_of: Callable[..., Verification]) -> None:
    rule_of()
    batch = batch_of([request("a")])
    batch.forward_mode = ForwardMode.IDLE
    found = eagle_utils.eagle_sample(None, batch, None)
    assert [len(one) for one in found] == [0, 0, 0]


# ---- what is refused


def started(rule: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Load SGLang's plugins in a process of its own, as its processes do."""
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from sglang_on_cpu import stand_ins, kernels\n"
        "stand_ins.install([sys.argv[2]])\n"
        "import sglang.srt.speculative.eagle_utils as eagle_utils\n"
        "kernels.put(eagle_utils)\n"
        "exec(sys.argv[3])\n"
        "from sglang.srt.plugins import load_plugins\n"
        "load_plugins()\n"
        "from sglang.srt.plugins.hook_registry import HookRegistry\n"
        "print('serves with', sorted(HookRegistry._patched))\n"
    )
    change = environment.pop("change", "")
    env = {**os.environ, **environment, "LENIENCE_RULE": rule}
    if not rule:
        del env["LENIENCE_RULE"]
    assert FOLDER
    return subprocess.run(
        [sys.executable, "-c", code, str(Path(__file__).parent), FOLDER, change],
        capture_output=True,
        text=True,
        env=env,
    )


def test_sglang_loads_the_plugin_or_does_not_start() -> None:
    """Through the entry point. SGLang swallows exceptions of plugins; ours ends the process."""
    on = started("topk:3")
    assert on.returncode == 0, on.stderr
    for target in (hooks.VERIFY, hooks.CHECK_ARGUMENTS, hooks.START):
        assert target in on.stdout
    off = started("")
    assert off.returncode == 0 and "serves with []" in off.stdout


@pytest.mark.parametrize(
    ("rule", "change", "message"),
    [
        ("tpk:3", "", "there is no rule 'tpk'"),
        (
            "topk:3",
            "from lenience.integrations.sglang import checks; checks.SUPPORTED_VERSIONS = ('9.9',)",
            "is not known; lenience",
        ),
        (
            "topk:3",
            "from sglang.srt.sampling.sampling_params import SamplingParams as S\n"
            "S.verify = lambda self, other: None",
            "takes self, other, not self, vocab_size",
        ),
        (
            "topk:3",
            "from lenience.integrations.sglang import hooks\n"
            "def install(): raise OSError('no libcuda')\n"
            "hooks.install = install",
            "OSError: no libcuda",
        ),
        (
            "topk:3",
            "from sglang.srt.server_args import ServerArgs as A\n"
            "del A.check_server_args",
            "has no sglang.srt.server_args.ServerArgs.check_server_args",
        ),
        (
            "topk:3",
            "from sglang.srt.plugins.hook_registry import HookRegistry as R\n"
            "R.apply_hooks = classmethod(lambda cls: None)",
            "cannot be wrapped",
        ),
    ],
)
def test_a_server_that_cannot_decide_ends_before_it_begins(
    rule: str, change: str, message: str
) -> None:
    done = started(rule, change=change)
    assert done.returncode != 0 and "serves with" not in done.stdout
    assert message in done.stderr and "LENIENCE_RULE" in done.stderr
    assert len([line for line in done.stderr.splitlines() if "lenience:" in line]) == 1


@pytest.mark.parametrize(
    "name", [hooks.SAMPLE, hooks.GREEDY, hooks.SAMPLED, hooks.STATE]
)
def test_the_functions_that_are_wrapped_later_are_checked_too(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def changed(self: Any, other: Any) -> None: ...

    import pkgutil

    owner, _, attribute = name.rpartition(".")
    hooks.check_target(name)
    monkeypatch.setattr(pkgutil.resolve_name(owner), attribute, changed)
    if name != hooks.STATE:
        with pytest.raises(InputError, match=f"{attribute} takes self, other, not"):
            hooks.check_target(name)
    monkeypatch.setattr(pkgutil.resolve_name(owner), attribute, None)
    with pytest.raises(InputError, match="has no"):
        hooks.check_target(name)


@pytest.mark.parametrize(
    ("rule", "changes", "message"),
    [
        ("topk:3", {"speculative_algorithm": None}, "does not draft"),
        ("topk:3", {"speculative_algorithm": "DFLASH"}, "DFLASH: is not known"),
        ("topk:3", {"speculative_eagle_topk": 4}, "speculative-eagle-topk"),
        ("topk:3", {"speculative_algorithm": "NGRAM"}, "max-bfs-breadth"),
        ("topk:3", {"speculative_use_rejection_sampling": True}, "rejection-sampling"),
        ("topk:3", {"tokenizer_worker_num": 2}, "tokenizer-worker-num"),
        ("topk:3", {"enable_watermark": True}, "watermark"),
        (
            "topk:3",
            {
                "speculative_algorithm": "NGRAM",
                "speculative_ngram_max_bfs_breadth": 1,
                "speculative_ngram_external_sam_budget": 2,
            },
            "external-sam-budget",
        ),
        ("topk:3", {"speculative_accept_threshold_single": 0.9}, "accept-threshold"),
        ("topk:3", {"speculative_accept_threshold_acc": 0.9}, "accept-threshold"),
        ("topk:3", {"grpc_mode": True}, "grpc-mode"),
        ("mentored:0.3", {}, "warm-up and health checks ask greedily"),
        ("topk:3", {"use_ray": True}, "use-ray"),
        ("judge", {"enable_lora": True}, "enable-lora"),
        ("fuzzy:js@0.3", {}, "SGLang keeps none"),
        ("judge", {"speculative_algorithm": "STANDALONE"}, "not with STANDALONE"),
        ("judge", {"speculative_algorithm": "EAGLE3"}, "train a judge of those"),
        ("other", {}, "was trained for another target"),
    ],
)
def test_arguments_that_a_rule_cannot_work_with_are_refused(
    tmp_path: Path, rule: str, changes: dict[str, Any], message: str
) -> None:
    fingerprints = {"target": "another"} if rule == "other" else {}
    head = Head(torch.zeros(640), 0.0, Inputs(("target",)), 0.5, fingerprints)
    head.save(tmp_path / "judge")
    named = f"judge:{tmp_path / 'judge'}@0.5" if ":" not in rule else rule
    server = served_rule.read({"lenience": {"rule": named}})
    assert server is not None
    with pytest.raises(InputError, match=message):
        checks.check(server, arguments(**changes))


def test_simulated_acceptance_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    server = served_rule.read({"lenience": {"rule": "topk:3"}})
    assert server is not None
    assert "rule topk:3" in checks.check(server, arguments())
    for variable, value, message in (
        (checks.SIMULATED, "2.5", "invents acceptances"),
        (checks.RUST, "1", "come in unchecked"),
    ):
        with monkeypatch.context() as changed:
            changed.setenv(variable, value)
            with pytest.raises(InputError, match=message):
                checks.check(server, arguments())
    monkeypatch.setattr("torch.version.hip", "6.0")
    with pytest.raises(InputError, match="AMD"):
        checks.check(server, arguments())


def test_each_argument_that_is_looked_at_is_sglangs() -> None:
    from sglang.srt.server_args import ServerArgs

    for name in vars(arguments()):
        assert name in ServerArgs.__struct_fields__, name


def test_a_judge_of_eagles_layers_is_taken(tmp_path: Path) -> None:
    """EAGLE-3 keeps the states after the layers that its checkpoint names, counted from 0, or the
    final states if it says so."""
    (tmp_path / "eagle").mkdir()
    (tmp_path / "eagle/config.json").write_text(
        '{"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 2, 3]}}'
    )
    layers = (1, 3, 4)
    inputs = Inputs(("target",), layers=layers)
    width = inputs.width({"target": 320})
    Head(torch.zeros(width), 0.0, inputs, 0.5, {}).save(tmp_path / "judge")
    server = served_rule.read({"lenience": {"rule": f"judge:{tmp_path / 'judge'}@0.5"}})
    assert server is not None
    args = arguments(
        speculative_algorithm="EAGLE3",
        speculative_draft_model_path=str(tmp_path / "eagle"),
    )
    assert "head" in checks.check(server, args)
    final = Inputs(("target",))
    Head(torch.zeros(640), 0.0, final, 0.5, {}).save(tmp_path / "final")
    other = served_rule.read({"lenience": {"rule": f"judge:{tmp_path / 'final'}@0.5"}})
    assert other is not None
    with pytest.raises(InputError, match="train a judge of those"):
        checks.check(other, args)
    (tmp_path / "eagle/config.json").write_text(
        '{"eagle_config": {"use_aux_hidden_state": false}}'
    )
    assert "head" in checks.check(other, args)
    (tmp_path / "eagle/config.json").write_text("{}")
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text(
        '{"architectures": ["DeepseekV2ForCausalLM"], "hidden_size": 320}'
    )
    args.model_path = str(tmp_path / "model")
    with pytest.raises(InputError, match="are not known for it"):
        checks.check(server, args)


def test_dials_may_be_stricter(monkeypatch: pytest.MonkeyPatch) -> None:
    server = served_rule.read({"lenience": {"rule": "topk:4"}})
    assert server is not None
    checked: list[Any] = []

    def original(sampling: Any, vocab_size: int) -> None:
        checked.append(sampling)

    def asked(dial: Any, **options: Any) -> None:
        custom = {"custom_params": {"lenience": dial}} if dial is not None else {}
        params = SamplingParams(**options, **custom)
        params.normalize(None)
        hooks._requested(server, original, params, V)

    for dial in (None, "exact", "topk:4"):
        asked(dial, temperature=0)
    for dial, options, message in (
        ("topk:3", {}, "may be more lenient"),  # only thresholds are compared
        ("topk:5", {}, "may be more lenient"),
        ("tpk", {}, "there is no rule"),
        (None, {"min_p": 0.1}, "min_p"),
    ):
        with pytest.raises(ValueError, match=message):
            asked(dial, **options)
    assert len(checked) == 7
    asked("exact", min_p=0.1)


def test_a_scheduler_starts_with_the_rule_and_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server = served_rule.read({"lenience": {"rule": "topk:3"}})
    assert server is not None
    wrapped: dict[str, Callable[..., Any]] = {}
    monkeypatch.setattr(hooks, "resolved_view", lambda args: args)
    monkeypatch.setattr(hooks, "wrap", lambda name, hook: wrapped.update({name: hook}))
    begun: list[Any] = []
    hooks._started(server, lambda *args: begun.append(args), "scheduler", arguments())
    assert len(begun) == 1
    assert set(wrapped) == {hooks.SAMPLE, hooks.GREEDY, hooks.SAMPLED, hooks.STATE}
    state = SimpleNamespace(internal_state={"other": 1})
    told = wrapped[hooks.STATE](lambda *_: state).internal_state
    assert told["other"] == 1 and told["lenience"]["kept_leniently"] == 0
    assert "rule topk:3" in told["lenience"]["started"]
    for hook in (hooks._configured, hooks._started):
        with pytest.raises((SystemExit, InputError), match="does not draft"):
            hook(server, lambda *_: None, *_asked(hook))


def _asked(hook: Any) -> list[Any]:
    args = arguments(speculative_algorithm=None)
    return [args] if hook is hooks._configured else ["scheduler", args]


def test_nothing_happens_without_a_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(served_rule.VARIABLE, raising=False)
    installed: list[str] = []
    monkeypatch.setattr(hooks, "install", lambda: installed.append("installed"))
    plugin.register()
    assert not installed
    monkeypatch.setenv(served_rule.VARIABLE, "topk:3")
    plugin.register()
    assert installed


def test_ranks_agree(
    rule_of: Callable[..., Verification], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first tensor-parallel rank's decisions are sent to the others."""
    rule_of("topk:31")
    sent: list[torch.Tensor] = []

    def broadcast(tensor: torch.Tensor, src: int) -> None:
        assert src == 0
        sent.append(tensor)
        if len(sent) == 1:  # another rank decided to keep nothing
            tensor.view(-1)[0] = 12

    group = SimpleNamespace(world_size=2, broadcast=broadcast)
    parallel = SimpleNamespace(tp_group=group, attn_tp_group=group)
    monkeypatch.setattr("sglang.srt.runtime_context.get_parallel", lambda: parallel)
    one = request("a")
    emitted, _ = verify([one], chains([one], [[7, 8, 9]]), states_of(4, 1))
    assert emitted == [[12]] and len(sent) == 2
