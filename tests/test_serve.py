"""`lenience serve`: requests that share a batch, through HTTP, against the pair's own answers."""

from __future__ import annotations

import ctypes
import json
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx2
import pytest
import torch
import uvicorn
from conftest import VOCABULARY
from test_certify import Echo, certify, question
from transformers import LogitsProcessorList, RepetitionPenaltyLogitsProcessor

from lenience.certification.certificate import narrowed
from lenience.cli import main
from lenience.cli.serve import bound_socket
from lenience.core.context import Context, Row
from lenience.core.errors import InputError
from lenience.core.noise import Noise
from lenience.core.types import Step
from lenience.decoding.decoder import Binding, Decoder
from lenience.decoding.pair import Pair
from lenience.rules.combine import AnyOf
from lenience.serving import batch as batches
from lenience.serving.app import make_app
from lenience.serving.batch import Job, RuleOfRow, RunningBatch
from lenience.serving.dial import Dial
from lenience.serving.guard import LARGEST_BODY
from lenience.serving.service import CountPenalty, Penalties, ServeConfig, Service
from lenience.serving.worker import Busy, DecodingThread, Lane
from lenience.tasks import WordMath

URL = "http://127.0.0.1"


def prompts(n: int, longest: int = 12, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [
        [rng.randrange(3, VOCABULARY) for _ in range(rng.randint(1, longest))]
        for _ in range(n)
    ]


def rule(spec: str) -> AnyOf:
    found = Decoder.of({"rule": spec}).rule
    assert isinstance(found, AnyOf)
    return found


class Served:
    """A server in this process, and a client of it."""

    def __init__(self, service: Service, **options: Any):
        self.service = service
        self.app = make_app(service, **options)
        config = uvicorn.Config(self.app, port=0, log_level="error", access_log=False)
        self._socket = config.bind_socket()
        self.url = f"{URL}:{self._socket.getsockname()[1]}"
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(
            target=self._server.run, kwargs={"sockets": [self._socket]}
        )
        self._thread.start()
        self.client = httpx2.Client(base_url=self.url, timeout=60)
        while not self._server.started:
            time.sleep(0.01)

    @property
    def worker(self) -> DecodingThread:
        return self.app.state.server.worker

    def post(self, path: str = "/v1/completions", **body: Any) -> httpx2.Response:
        return self.client.post(path, json=body)

    def complete(self, **body: Any) -> dict[str, Any]:
        """The only choice of a completion."""
        answer = self.post(**{"return_token_ids": True, "max_tokens": 20, **body})
        assert answer.status_code == 200, answer.text
        (choice,) = answer.json()["choices"]
        return choice

    def count(self, name: str) -> float:
        """A count of /metrics."""
        for line in self.client.get("/metrics").text.splitlines():
            if line.startswith(f"{name}{{") or line.startswith(f"{name} "):
                return float(line.split()[-1])
        raise AssertionError(name)

    def is_idle(self) -> bool:
        lanes = self.worker.lanes.values()
        return not any(lane.waiting or lane.admitted for lane in lanes)

    def close(self) -> None:
        self._server.should_exit = True
        self._thread.join()
        self.client.close()


@contextmanager
def served(
    pair: Pair, options: dict[str, Any], key: str | None = None, **config: Any
) -> Iterator[Served]:
    found = Served(
        Service(pair, pair.decoder(options), ServeConfig(**config)), api_key=key
    )
    try:
        yield found
    finally:
        found.close()


LENIENT = {"rule": "fuzzy:js@0.6", "window": 4}
ALLOWED = ("typical:0.3,0.6", "topk:3")


@pytest.fixture(scope="module")
def server(llama: Pair) -> Iterator[Served]:
    allow = tuple(map(rule, ALLOWED))
    with served(llama, LENIENT, max_rows=4, context=96, allow=allow) as found:
        yield found


def wait_for(condition: Callable[[], bool], seconds: float = 20) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "it did not happen"
        time.sleep(0.01)


ASKED: tuple[tuple[dict[str, Any], dict[str, Any]], ...] = (
    ({}, {}),
    ({"lenience": "exact"}, {"rule": "exact"}),
    ({"vllm_xargs": {"lenience": "exact"}}, {"rule": "exact"}),
    ({"lenience": "fuzzy:js@0.2"}, {"rule": "fuzzy:js@0.2"}),
    ({"lenience": 0.3}, {"rule": "fuzzy:js@0.3"}),
    ({"temperature": 0.8, "seed": 3}, {"temperature": 0.8, "seed": 3}),
    (
        {"temperature": 1.3, "seed": 4, "top_k": 5, "lenience": "speculative"},
        {"rule": "speculative", "temperature": 1.3, "seed": 4, "top_k": 5},
    ),
    (
        {"temperature": 0.7, "seed": 5, "top_p": 0.8, "lenience": "typical:0.3,0.6"},
        {"rule": "typical:0.3,0.6", "temperature": 0.7, "seed": 5, "top_p": 0.8},
    ),
    (
        {"temperature": 0.9, "seed": 6, "lenience": "block"},
        {"rule": "block", "temperature": 0.9, "seed": 6},
    ),
    ({"lenience": "topk:3"}, {"rule": "topk:3"}),
    ({"stop": "w7", "max_tokens": 30}, {"stop_strings": "w7", "max_new_tokens": 30}),
    ({"stop": ["w9", "w3 w"], "max_tokens": 7}, {"stop_strings": ("w9", "w3 w")}),
)
"""What requests ask for, and the same as options of `generate`."""


def test_an_answer_does_not_depend_on_its_neighbours(
    server: Served, llama: Pair
) -> None:
    """Each request alone and among others of all kinds, and some that leave."""
    wanted, bodies = [], []
    for i, prompt in enumerate(prompts(36)):
        asked, options = ASKED[i % len(ASKED)]
        body = {"prompt": prompt, "max_tokens": 20, "return_token_ids": True, **asked}
        most = body["max_tokens"]
        own = {**LENIENT, "max_new_tokens": most, **options}
        wanted.append(llama.generate(prompt, **own))
        bodies.append(body)

    def leave(body: dict[str, Any]) -> None:
        with (
            httpx2.Client(base_url=server.url, timeout=60) as client,
            client.stream(
                "POST", "/v1/completions", json={**body, "stream": True}
            ) as answer,
        ):
            next(answer.iter_lines())

    with ThreadPoolExecutor(12) as pool:
        left = [pool.submit(leave, body) for body in bodies[::5]]
        found = list(pool.map(lambda body: server.complete(**body), bodies))
        for one in left:
            one.result()
    for body, choice, out in zip(bodies, found, wanted):
        assert choice["token_ids"] == out.tokens, body
        assert choice["text"] == out.text, body
    alone = [server.complete(**body)["token_ids"] for body in bodies[: len(ASKED)]]
    assert alone == [out.tokens for out in wanted[: len(ASKED)]]
    wait_for(server.is_idle)


def test_a_stream_has_the_same_text_and_counts(server: Served, llama: Pair) -> None:
    prompt = next(
        each
        for each in prompts(50, seed=3)
        if len(llama.generate(each, **LENIENT, max_new_tokens=25).tokens) > 10
    )
    whole = server.post(prompt=prompt, max_tokens=25)
    body = {"prompt": prompt, "max_tokens": 25, "stream": True}
    body["stream_options"] = {"include_usage": True}
    lines = server.post(**body).text.split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    *chunks, last = [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]
    text = "".join(chunk["choices"][0]["text"] for chunk in chunks)
    out = llama.generate(prompt, **LENIENT, max_new_tokens=25)
    assert text == whole.json()["choices"][0]["text"] == out.text
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
    assert reasons[:-1] == [None] * len(reasons[:-1])
    assert reasons[-1] == {"eos": "stop", "length": "length"}[out.finish]
    assert last["choices"] == []
    used = {key: last["usage"][key] for key in ("prompt_tokens", "completion_tokens")}
    assert used == {"prompt_tokens": len(prompt), "completion_tokens": len(out.tokens)}
    counts = last["metrics"]
    assert counts == whole.json()["metrics"] == chunks[-1]["metrics"]
    kept = out.accepted_exact + out.accepted_lenient
    assert counts["lenience"] == {
        "rule": "fuzzy:js@0.6",
        "passes": out.target_passes,
        "drafted": out.drafted,
        "accepted_strictly": out.accepted_exact,
        "accepted_leniently": out.accepted_lenient,
    }
    theirs = counts["speculative_decoding"]
    assert theirs["num_accepted_draft_tokens"] == kept
    histogram = theirs["acceptance_histogram"]
    assert sum(n * windows for n, windows in enumerate(histogram)) == kept
    assert sum(histogram) == theirs["num_spec_steps"]


def test_totals_are_those_of_the_requests(llama: Pair) -> None:
    asked = prompts(6)
    options = {"rule": "topk:2", "window": 4}
    with served(llama, options, max_rows=3) as found:
        for prompt in asked:
            found.post(prompt=prompt, max_tokens=15)
        outs = [llama.generate(each, **options, max_new_tokens=15) for each in asked]
        rejected = [out.drafted - len(out.tokens) for out in outs]
        assert max(rejected) > 0
        kept = [
            sum(entry.origin.startswith("draft") for entry in out.trace) for out in outs
        ]
        assert found.count("vllm:spec_decode_num_accepted_tokens_total") == sum(kept)
        drafted = found.count("vllm:spec_decode_num_draft_tokens_total")
        assert drafted == sum(out.drafted for out in outs)
        text = found.client.get("/metrics").text
        by_position = [
            float(line.split()[-1])
            for line in text.splitlines()
            if line.startswith("vllm:spec_decode_num_accepted_tokens_per_pos_total{")
        ]
        assert sum(by_position) == sum(kept)
        assert by_position == sorted(by_position, reverse=True) and by_position[0] > 0
        assert found.count("lenience:passes_total") == sum(
            out.target_passes for out in outs
        )
        new = found.count("vllm:generation_tokens_total")
        assert new == sum(len(out.tokens) for out in outs)


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({"prompt": [5], "tools": [{"type": "function"}]}, 400, "tools"),
        (
            {"prompt": [5], "response_format": {"type": "json_object"}},
            400,
            "response_format",
        ),
        ({"prompt": [5], "min_p": 0.1}, 400, "min_p"),
        ({"prompt": [5], "colour": "red"}, 400, "colour"),
        ({"prompt": [5], "max_tokens": 0}, 400, "max_tokens"),
        ({"prompt": [5], "temperature": -1}, 400, "temperature"),
        ({"prompt": [5], "n": 1000}, 400, "n"),
        ({"prompt": [5], "model": "other"}, 404, "model"),
        ({"prompt": [5], "logit_bias": {"x": 1}}, 400, "logit_bias"),
        ({"prompt": [5], "logit_bias": {"²": 1}}, 400, "logit_bias"),
        ({"prompt": [5], "logit_bias": {"9" * 5000: 1}}, 400, "logit_bias"),
        ({"prompt": [5], "vllm_xargs": {"other": 1}}, 400, "vllm_xargs"),
        (
            {"prompt": [5], "lenience": "exact", "vllm_xargs": {"lenience": 2}},
            400,
            "lenience",
        ),
        ({"prompt": [10**6]}, 400, "prompt"),
        ({"prompt": []}, 400, "prompt"),
        ({"prompt": "not a word of it"}, 400, "prompt"),
        ({"prompt": [5] * 95, "max_tokens": 10}, 400, None),
        ({"prompt": [5] * 400}, 400, "prompt"),
        ({"prompt": [5], "lenience": "topk:4"}, 400, None),
        ({"prompt": [5], "lenience": 0.61}, 400, None),
        ({"prompt": [5], "lenience": "random:0.5"}, 400, None),
        ({"prompt": [5], "lenience": "judge:/etc/passwd@0.5"}, 400, None),
        ({"prompt": [5], "lenience": "nonsense"}, 400, None),
        ({"prompt": [5], "stop": ""}, 400, None),
        ({}, 400, "prompt"),
    ],
)
def test_what_cannot_be_done_is_an_error_of_its_field(
    server: Served, body: dict[str, Any], status: int, param: str | None
) -> None:
    answer = server.post(**body)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (status, param), answer.text
    assert error["message"] and "\n" not in error["message"]
    assert server.is_idle()


def test_neutral_and_unread_fields_are_taken(server: Served) -> None:
    asked = {"tools": None, "min_p": 0, "user": "me", "best_of": 1, "suffix": None}
    asked |= {"stop": None, "stream": None, "presence_penalty": 0}
    found = server.complete(prompt=[5, 6], **asked)
    assert found["token_ids"] == server.complete(prompt=[5, 6])["token_ids"]


def test_bodies_that_are_no_requests(server: Served) -> None:
    headers = {"Content-Type": "application/json"}
    for content in (b"{bad", b"[1]", b"null", b"\xff\xfe"):
        answer = server.client.post("/v1/completions", content=content, headers=headers)
        assert answer.status_code == 400, content
        assert answer.json()["error"]["type"] == "invalid_request_error"
    large = b'{"prompt": "' + b"w" * LARGEST_BODY + b'"}'
    for body in (large, iter([large[: 1 << 20]] * 5)):  # with and without a length
        answer = server.client.post("/v1/completions", content=body, headers=headers)
        assert answer.status_code == 413
    assert server.client.get("/nothing").status_code == 404
    assert server.client.get("/v1/completions").status_code == 405
    assert server.complete(prompt=[5])


def test_further_choices_have_the_next_seeds(server: Served, llama: Pair) -> None:
    body = {"prompt": [5, 9], "n": 3, "temperature": 1.0, "seed": 7, "max_tokens": 12}
    answer = server.post(**body, return_token_ids=True).json()
    found = [choice["token_ids"] for choice in answer["choices"]]
    sampled = {**LENIENT, "temperature": 1.0, "max_new_tokens": 12}
    outs = [llama.generate([5, 9], **sampled, seed=seed) for seed in (7, 8, 9)]
    assert found == [out.tokens for out in outs]
    assert answer["usage"]["prompt_tokens"] == 2
    unseeded = [
        server.complete(prompt=[5, 9], temperature=1.0)["token_ids"] for _ in range(5)
    ]
    assert len({tuple(tokens) for tokens in unseeded}) > 1


def test_several_prompts_and_log_probabilities(server: Served, llama: Pair) -> None:
    """Log-probabilities are those of the model's own pass over prompt and answer."""
    asked = prompts(3, seed=8)
    body = {"prompt": asked, "logprobs": 3, "max_tokens": 10, "return_token_ids": True}
    choices = server.post(**body).json()["choices"]
    assert [choice["index"] for choice in choices] == [0, 1, 2]
    for prompt, choice in zip(asked, choices):
        tokens = choice["token_ids"]
        with torch.inference_mode():
            logits = llama.target.model(torch.tensor([prompt + tokens])).logits[0]
        own = torch.log_softmax(logits[len(prompt) - 1 : -1].float(), -1)
        told = choice["logprobs"]
        wanted = own[range(len(tokens)), tokens]
        torch.testing.assert_close(
            torch.tensor(told["token_logprobs"]), wanted, atol=1e-4, rtol=1e-4
        )
        for row, best in zip(own, told["top_logprobs"]):
            values = sorted(best.values(), reverse=True)
            torch.testing.assert_close(
                torch.tensor(values), row.topk(3).values, atol=1e-4, rtol=1e-4
            )


def test_the_repetition_penalty_is_that_of_transformers(
    server: Served, llama: Pair
) -> None:
    for prompt in prompts(4, seed=2):
        wanted = llama.target.model.generate(
            torch.tensor([prompt]),
            max_new_tokens=20,
            do_sample=False,
            repetition_penalty=1.5,
            pad_token_id=0,
        )[0, len(prompt) :].tolist()
        found = server.complete(prompt=prompt, repetition_penalty=1.5, lenience="exact")
        assert found["token_ids"] == wanted


def test_a_requests_penalty_replaces_the_models_own(
    llama: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = [5, 6, 5, 6]
    plain = llama.generate(prompt, **LENIENT, max_new_tokens=20).tokens
    config = llama.target.model.generation_config
    monkeypatch.setattr(config, "repetition_penalty", 1.8)
    penalised = llama.generate(prompt, **LENIENT, max_new_tokens=20).tokens
    assert penalised != plain
    with served(llama, LENIENT, max_rows=2, context=96) as found:
        assert found.complete(prompt=prompt)["token_ids"] == penalised
        free = found.complete(prompt=prompt, repetition_penalty=1.0)
        assert free["token_ids"] == plain


def test_a_judge_at_a_larger_logit_is_stricter_also_beyond_probabilities(
    judge: str,
) -> None:
    """Logits above 37 have one probability, 1."""
    path = judge.rpartition("@")[0]
    dial = Dial(rule(f"{path}@logit=45"))
    assert str(dial.rule_for(f"{path}@logit=46")).endswith("logit=46")
    for laxer in (f"{path}@logit=40", f"{path}@logit=44.5", f"{path}@0.9"):
        with pytest.raises(InputError, match="more lenient"):
            dial.rule_for(laxer)


def test_presence_and_frequency_count_the_answer_alone() -> None:
    scores = torch.zeros(1, 6)
    ids = torch.tensor([[0, 1, 2, 3, 3, 4]])
    lowered = CountPenalty(2, presence=1.0, frequency=0.25)(ids, scores)
    assert lowered.tolist() == [[0, 0, -1.25, -1.5, -1.25, 0]]
    assert not Penalties() and Penalties(bias={3: 1.0})


def test_penalties_and_biases_change_the_answer_of_one_row(server: Served) -> None:
    """A strong bias forces a token; a neighbour without it keeps its answer."""
    plain = server.complete(prompt=[5, 6])["token_ids"]
    with ThreadPoolExecutor(2) as pool:
        forced = pool.submit(server.complete, prompt=[5, 6], logit_bias={"9": 100})
        beside = pool.submit(server.complete, prompt=[5, 6])
        assert set(forced.result()["token_ids"]) == {9}
        assert beside.result()["token_ids"] == plain
    # a frequency penalty of 2 at each use makes room for other tokens
    body = {"prompt": [5, 6], "logit_bias": {"9": 9}, "lenience": "exact"}
    some = server.complete(**body, frequency_penalty=2.0)["token_ids"]
    assert len(set(some)) > 1


def test_eos_can_be_ignored(server: Served, llama: Pair) -> None:
    ends = next(
        prompt
        for prompt in prompts(200, seed=4)
        if llama.generate(prompt, rule="exact", max_new_tokens=15).finish == "eos"
    )
    body = {"prompt": ends, "max_tokens": 30, "lenience": "exact"}
    found = server.complete(**body, ignore_eos=True)
    assert (len(found["token_ids"]), found["finish_reason"]) == (30, "length")
    short = server.complete(**body)
    assert short["finish_reason"] == "stop"
    assert found["token_ids"][: len(short["token_ids"])] == short["token_ids"]


def test_models_tokens_and_version(server: Served, llama: Pair) -> None:
    (card,) = server.client.get("/v1/models").json()["data"]
    assert (card["id"], card["max_model_len"]) == (server.service.name, 96)
    ids = server.post("/tokenize", prompt="w5 w6").json()["tokens"]
    assert ids == llama.encode("w5 w6", llama.target)
    assert server.post("/detokenize", tokens=[5, 6]).json()["prompt"] == "w5 w6"
    assert server.post("/detokenize", tokens=[10**6]).status_code == 400
    assert server.client.get("/health").status_code == 200
    assert server.client.get("/version").json()["rule"] == "fuzzy:js@0.6"
    schema = server.client.get("/openapi.json").json()
    assert "/v1/chat/completions" in schema["paths"]


def test_chat_needs_a_template(server: Served) -> None:
    body = {"messages": [{"role": "user", "content": "w5"}]}
    answer = server.post("/v1/chat/completions", **body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "messages")


def test_chat_answers_messages(llama: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    template = "{% for m in messages %}{{ m.content }} {% endfor %}w4"
    monkeypatch.setattr(llama.tokenizer, "chat_template", template)
    messages = [
        {"role": "system", "content": "w3"},
        {"role": "user", "content": [{"type": "text", "text": "w5 w6"}]},
    ]
    with served(llama, LENIENT, max_rows=2, context=64) as found:
        path = "/v1/chat/completions"
        body = {"messages": messages, "max_completion_tokens": 9}
        whole = found.post(path, **body, logprobs=True, top_logprobs=2).json()
        raw = llama.generate(
            found.post("/tokenize", prompt="w3 w5 w6 w4").json()["tokens"],
            **LENIENT,
            max_new_tokens=9,
        )
        (choice,) = whole["choices"]
        assert choice["message"] == {"role": "assistant", "content": raw.text}
        told = choice["logprobs"]["content"]
        assert len(told) == len(raw.tokens)
        assert {len(entry["top_logprobs"]) for entry in told} == {2}
        lines = found.post(path, **body, stream=True).text.split("\n\n")[:-2]
        deltas = [
            json.loads(line.removeprefix("data: "))["choices"][0]["delta"]
            for line in lines
        ]
        assert deltas[0] == {"role": "assistant", "content": ""}
        assert "".join(delta["content"] for delta in deltas) == raw.text
        image = [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]
        assert found.post(path, messages=image).status_code == 400
        # without a limit the answer may fill the context
        free = found.post(path, messages=messages, ignore_eos=True).json()
        assert free["usage"]["total_tokens"] == 64


def test_a_key_is_asked_for_everywhere_but_where_nothing_decodes(llama: Pair) -> None:
    with served(llama, LENIENT, key="secret") as found:
        for path in ("/v1/completions", "/v1/chat/completions", "/live", "/tokenize"):
            assert found.post(path, prompt=[5]).status_code == 401, path
        assert found.client.get("/v1/models").status_code == 401
        for path in ("/health", "/metrics", "/version", "/"):
            assert found.client.get(path).status_code == 200, path
        found.client.headers["Authorization"] = "Bearer secret2"
        assert found.post(prompt=[5]).status_code == 401
        found.client.headers["Authorization"] = "Bearer secret"
        assert found.post(prompt=[5]).status_code == 200


def test_other_names_of_the_host_are_refused(server: Served) -> None:
    """A web page of another name, rebound to this address, cannot reach the server."""
    answer = server.client.get("/v1/models", headers={"Host": "evil.example"})
    assert answer.status_code == 400
    assert server.client.get("/v1/models", headers={"Host": "localhost"}).is_success


def test_the_queue_is_bounded(llama: Pair) -> None:
    with served(llama, LENIENT, max_rows=1, max_queue=2, context=200) as found:
        body = {"prompt": [5], "max_tokens": 150, "ignore_eos": True}
        with ThreadPoolExecutor(12) as pool:
            answers = list(pool.map(lambda _: found.post(**body), range(12)))
        codes = [answer.status_code for answer in answers]
        assert set(codes) == {200, 429}
        assert 3 <= codes.count(200) < 12
        refused = next(answer for answer in answers if answer.status_code == 429)
        assert int(refused.headers["Retry-After"]) >= 1
        assert found.count("lenience:requests_refused_total") == codes.count(429)
        # more than ever fit are wrong input: sending them again would not help
        answer = found.post(prompt=[5] * 3, n=3)
        assert answer.status_code == 400 and "at most 2" in answer.text
        wait_for(found.is_idle)


def test_a_client_that_leaves_frees_its_row(llama: Pair) -> None:
    with served(llama, LENIENT, max_rows=1, context=250) as found:
        body = {"prompt": [5], "max_tokens": 240, "ignore_eos": True}
        for stream in (True, False):
            client = httpx2.Client(base_url=found.url, timeout=0.1)
            if stream:
                with client.stream(
                    "POST", "/v1/completions", json={**body, "stream": True}
                ) as answer:
                    next(answer.iter_lines())
            else:
                with pytest.raises(httpx2.TimeoutException):
                    client.post("/v1/completions", json=body)
            client.close()
            wait_for(found.is_idle)
        assert found.count("lenience:requests_cancelled_total") == 2
        assert found.complete(prompt=[5, 6])["token_ids"]


def worker_threads() -> list[threading.Thread]:
    """The threads that decode, in the order in which they were started."""
    return [each for each in threading.enumerate() if each.name == "lenience worker"]


def kill(thread: threading.Thread) -> None:
    """Raise SystemExit in a thread."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(
        ctypes.c_ulong(thread.ident or 0), ctypes.py_object(SystemExit)
    )


def test_a_dead_worker_is_replaced(llama: Pair) -> None:
    with served(llama, LENIENT, max_rows=2, context=250) as found:
        wanted = found.complete(prompt=[5, 6])["token_ids"]
        body = {"prompt": [5], "max_tokens": 240, "ignore_eos": True}
        with ThreadPoolExecutor(3) as pool:
            running = pool.submit(found.post, **body)
            streamed = pool.submit(found.post, **body, stream=True)
            wait_for(lambda: len(found.worker.lanes["main"].admitted) == 2)
            waiting = pool.submit(found.complete, prompt=[5, 6])
            wait_for(lambda: len(found.worker.lanes["main"].waiting) == 1)
            kill(worker_threads()[-1])
            assert running.result().status_code == 500
            assert "data: [DONE]" in streamed.result().text
            assert '"error"' in streamed.result().text
            assert waiting.result()["token_ids"] == wanted
        assert found.worker.restarts == 1
        assert found.client.get("/health").status_code == 200
        assert found.count("lenience:worker_restarts") == 1
        assert found.complete(prompt=[5, 6])["token_ids"] == wanted


def test_a_failed_cycle_fails_its_requests_alone(
    llama: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    with served(llama, LENIENT, max_rows=2) as found:
        wanted = found.complete(prompt=[5, 6])["token_ids"]

        def fail(*_: Any) -> None:
            raise RuntimeError("out of memory")

        with monkeypatch.context() as patch:
            patch.setattr(batches, "cycle", fail)
            answer = found.post(prompt=[5, 6])
        assert answer.status_code == 500
        assert answer.json()["error"]["message"] == "decoding failed: out of memory"
        assert found.worker.restarts == 0
        assert found.complete(prompt=[5, 6])["token_ids"] == wanted


def test_closing_finishes_answers_and_ends_the_rest(llama: Pair) -> None:
    service = Service(llama, llama.decoder(LENIENT), ServeConfig(max_rows=1))
    told: list[Step | Exception] = []

    class Told:
        def on_step(self, job: Job, step: Step) -> None:
            told.append(step)

        def on_error(self, job: Job, error: Exception) -> None:
            told.append(error)

    worker = service.worker()
    short = [(service.job([5], {"max_new_tokens": 8}), Told()) for _ in range(3)]
    worker.submit("main", short)
    worker.close(20)
    assert [job.response.finish is not None for job, _ in short] == [True] * 3
    assert not any(isinstance(item, Exception) for item in told)
    told.clear()
    worker = service.worker()
    options = {"max_new_tokens": 100}
    long = [(service.job([5], options, ignore_eos=True), Told()) for _ in range(3)]
    worker.submit("main", long)
    worker.close(0)
    assert [str(item) for item in told if isinstance(item, Exception)] == [
        "decoding failed: the server shut down"
    ] * 3
    with pytest.raises(Exception, match="shutting down"):
        worker.submit("main", long)


def test_a_batch_that_cannot_be_made_fails_those_who_wait() -> None:
    def fail() -> RunningBatch:
        raise InputError("no room")

    errors: list[Exception] = []

    class Told:
        def on_step(self, job: Job, step: Step) -> None: ...

        def on_error(self, job: Job, error: Exception) -> None:
            errors.append(error)

    worker = DecodingThread({"main": Lane(fail, longest=2)})
    job: Any = type("Job", (), {"cancelled": False})()
    worker.submit("main", [(job, Told())])
    wait_for(lambda: len(errors) == 1)
    assert worker.is_alive
    with pytest.raises(Busy):
        worker.submit("main", [(job, Told())] * 3)
    worker.close(1)


def test_rows_of_a_mixed_batch_are_as_alone() -> None:
    """Draws, distributions and noise of each row by its own parameters."""
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(4, 2, VOCABULARY, generator=generator) * 3
    penalty = LogitsProcessorList([RepetitionPenaltyLogitsProcessor(1.7)])
    own = [
        None,
        Context(temperature=0.7, top_k=5, draft_temperature=0.2),
        Context(temperature=1.4, fresh_noise_per_window=True),
        Context(processors=penalty),
    ]
    rows = [
        Row(Noise.for_prompt(b, [b]), [b, 5, 6], position=2, sampling=context)
        for b, context in enumerate(own)
    ]
    batch = Context(rows=rows, temperature=0.3)
    ahead = torch.tensor([[1, 2]] * 4)
    for mixed, alone in (
        (batch, lambda ctx: ctx),
        (batch.drafting(), lambda ctx: ctx.drafting()),
    ):
        assert not mixed.greedy and mixed.processes
        found = {
            "process": mixed.process(logits, ahead),
            "probs": mixed.probs(logits),
            "log_probs": mixed.log_probs(logits),
            "draw": mixed.draw(logits, 1),
            "noise": mixed.noise_keys(3, "accept", 1),
        }
        for b, row in enumerate(rows):
            like = own[b] or Context(temperature=0.3)
            ctx = alone(replace(like, rows=[replace(row, sampling=None)]))
            some = logits[b : b + 1]
            wanted = {
                "process": ctx.process(some, ahead[b : b + 1]),
                "probs": ctx.probs(some),
                "log_probs": ctx.log_probs(some),
                "draw": ctx.draw(some, 1),
                "noise": ctx.noise_keys(3, "accept", 1),
            }
            for name, value in wanted.items():
                assert torch.equal(found[name][b], value[0]), (name, b)


def test_the_socket_sends_at_once_and_a_taken_port_is_named() -> None:
    """asyncio turns Nagle's algorithm off where the socket's protocol is TCP by name."""
    with bound_socket("127.0.0.1", 0) as bound:
        assert bound.proto == socket.IPPROTO_TCP
        bound.listen()
        port = bound.getsockname()[1]
        with pytest.raises(InputError, match=f"--port {port}: cannot listen there"):
            bound_socket("127.0.0.1", port)
    with pytest.raises(InputError, match="--host nowhere"):
        bound_socket("nowhere.invalid", 0)
    with pytest.raises(InputError, match="--port 99999: must be"):
        bound_socket("127.0.0.1", 99999)


@pytest.mark.slow
def test_sigterm_ends_running_answers_and_the_process(tmp_path: Path) -> None:
    """The command itself on the built-in pair: the running answer is finished."""
    key = tmp_path / "key"
    key.write_text("secret\n")
    argv = [sys.executable, "-m", "lenience", "serve", "--port", "0", "--no-compile"]
    with subprocess.Popen(
        [*argv, "--api-key-file", str(key)], stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr
        line = next(line for line in process.stderr if "http://" in line)
        url = line.split()[0]
        prompt = str(next(iter(WordMath().samples("test"))).prompt)
        body = {"prompt": prompt, "max_tokens": 400, "stream": True, "ignore_eos": True}
        headers = {"Authorization": "Bearer secret"}
        with httpx2.stream(
            "POST", f"{url}/v1/completions", json=body, headers=headers, timeout=60
        ) as answer:
            lines = answer.iter_lines()
            next(lines)
            process.send_signal(signal.SIGTERM)
            rest = list(lines)
        assert "data: [DONE]" in rest[-2:]
        last = json.loads([line for line in rest if line.startswith("data: {")][-1][6:])
        assert last["choices"][0]["finish_reason"] == "length"
        assert process.wait(30) == 0


def test_a_missing_extra_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    with pytest.raises(SystemExit) as ended:
        main(["serve"])
    assert ended.value.code == 2
    assert "lenience[serve]" in capsys.readouterr().err


class Alone:
    """A batch without a server."""

    def __init__(self, pair: Pair, options: dict[str, Any], size: int, context: int):
        self.pair = pair
        self.decoder = pair.decoder(options)
        self.batch = RunningBatch(
            pair, self.decoder, RuleOfRow([self.decoder.rule]), size, context
        )
        self.cycles: list[list[tuple[Job, Step]]] = []

    def job(self, prompt: list[int], **changed: Any) -> Job:
        return Job.of(self.pair, replace(self.decoder, **changed), prompt)

    def run(self, jobs: list[Job]) -> None:
        waiting = iter(jobs)
        while True:
            self.cycles.append(self.batch.cycle(lambda: next(waiting, None)))
            if not self.batch.jobs:
                return


def test_long_prompts_do_not_stall_running_answers(
    llama: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt of 200 tokens is read in parts of 32, and the other answer goes on meanwhile."""
    monkeypatch.setattr(batches, "PART_ON_CPU", 32)
    found = Alone(llama, {**LENIENT, "max_new_tokens": 40}, 2, 250)
    short = found.job([5, 6], rule=rule("exact"), window=0)
    late = found.job(random.Random(1).choices(range(3, VOCABULARY), k=200))
    reads: list[int] = []
    session = found.batch._session
    own = session.read

    def read(sequences: Any, *args: Any, **kwargs: Any) -> Any:
        reading = own(sequences, *args, **kwargs)
        reads.append(max(reading.tokens_read))
        return reading

    monkeypatch.setattr(session, "read", read)
    found.run([short, late])
    assert max(reads) <= 32 + LENIENT["window"] + 1
    began = next(i for i, steps in enumerate(found.cycles) if len(steps) == 2)
    assert began >= 200 // 32 - 1
    assert all(len(steps) >= 1 for steps in found.cycles[:began])
    for job in (short, late):
        wanted = llama.generate(job.prompt, job.decoder)
        assert job.tokens == wanted.tokens


def test_prefixes_are_reused_from_running_and_finished_requests(llama: Pair) -> None:
    shared = prompts(1, seed=6, longest=80)[0] + [7] * 60
    found = Alone(llama, {**LENIENT, "max_new_tokens": 12}, 2, 300)
    first = [found.job([*shared, 5]), found.job([*shared, 6, 8])]
    found.run(first)
    assert first[0].reused == 0 and first[1].reused >= len(shared)
    others = [found.job(prompt) for prompt in prompts(2, seed=9, longest=60)]
    found.run(others)
    again = [
        found.job([*shared, 5, *first[0].tokens, 9]),
        found.job([*shared, 9]),
    ]
    found.run(again)
    assert again[0].reused >= len(shared) and again[1].reused >= len(shared)
    for job in (*first, *others, *again):
        assert job.tokens == llama.generate(job.prompt, job.decoder).tokens


def can_check(pair: Pair, decoder: Decoder) -> bool:
    try:
        pair.check(decoder)
    except InputError:
        return False
    return True


def serves_as_alone(pair: Pair, options: dict[str, Any], lenient: str) -> None:
    """Requests of mixed rules and temperatures, with shared beginnings, in rows that are
    refilled."""
    found = Alone(pair, {"rule": lenient, **options, "max_new_tokens": 24}, 3, 120)
    kinds: tuple[dict[str, Any], ...] = (
        {},
        {"rule": rule("exact")},
        {"rule": rule("exact"), "temperature": 0.8, "seed": 4},
        {"rule": rule("exact"), "window": 0},
        {"rule": rule("speculative"), "temperature": 1.2, "seed": 9},
    )
    (shared,) = prompts(1, seed=14, longest=50)
    jobs = []
    for i, prompt in enumerate(prompts(12, seed=5)):
        decoder = replace(found.decoder, **kinds[i % len(kinds)])
        if not can_check(pair, decoder):  # such as drawn tokens of a tree
            decoder = found.decoder
        own = pair.context(decoder) if decoder.temperature else None
        prompt = shared[: 20 + i] + prompt if i % 3 else prompt
        jobs.append(Job.of(pair, decoder, prompt, own))
    found.run(jobs)
    found.run([again := Job.of(pair, found.decoder, jobs[0].row.prefix[:60])])
    for job in (*jobs, again):
        wanted = pair.generate(job.prompt, job.decoder)
        assert job.tokens == wanted.tokens, str(job.decoder)


@pytest.mark.parametrize(
    "options",
    [
        {"drafter": "ngram", "window": 4},
        {"tree": "dynamic:6", "window": 4},
        {"drafter": "ngram>model", "window": 4},
        {"stop": "confidence:0.3", "window": 5},
    ],
)
def test_kinds_of_drafters_serve(llama: Pair, options: dict[str, Any]) -> None:
    serves_as_alone(llama, options, "topk:3")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["mamba", "lfm2", "qwen3_5_text", "mistral", "gemma2"])
def test_models_with_states_serve(kind: str, pairs: Callable[[str], Pair]) -> None:
    serves_as_alone(pairs(kind), {"window": 4}, "topk:3")


@pytest.mark.parametrize(
    ("options", "config", "said"),
    [
        ({"window": "auto"}, {}, "window auto"),
        ({"rule": "target"}, {}, "rule target: decodes without a window"),
        ({}, {"context": 10**7}, "has room for"),
        ({}, {"max_rows": 0}, "max_rows 0"),
        ({}, {"strict": Decoder.of({"rule": "topk:2"})}, "its rule is lenient"),
        ({}, {"strict": Decoder.of({"window": "auto"})}, "window auto"),
        ({}, {"allow": ("judge:nowhere@0.5",)}, "nowhere"),
    ],
)
def test_impossible_servers(
    llama: Pair, options: dict[str, Any], config: dict[str, Any], said: str
) -> None:
    if "allow" in config:
        config = {"allow": tuple(map(rule, config["allow"]))}
    decoder = Decoder.of({"rule": "exact", **options})
    with pytest.raises(InputError, match=said):
        Service(llama, decoder, ServeConfig(**config))


@pytest.fixture(scope="module")
def certified(llama: Pair, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("served")
    asked = question(rules=("topk:5",), max_drop=0.95, home=run)
    assert certify(llama, Echo(llama), run, asked)["certified"]
    return run


def test_a_certified_server_fails_closed(llama: Pair, certified: Path) -> None:
    name = f"certified:{certified}"
    with served(llama, {"rule": name}, max_rows=2) as found:
        most = found.service.decoder.max_new_tokens
        for prompt in prompts(4, seed=12):
            for n in (3, most):
                wanted = llama.generate(prompt, rule=name, max_new_tokens=n)
                choice = found.complete(prompt=prompt, max_tokens=n)
                assert choice["token_ids"] == wanted.tokens
            strict = found.complete(prompt=prompt, lenience="exact", max_tokens=most)
            alone = llama.generate(prompt, rule="target", max_new_tokens=most)
            assert strict["token_ids"] == alone.tokens
        for body in (
            {"temperature": 0.5},
            {"top_k": 3},
            {"max_tokens": most + 1},
            {"presence_penalty": 1.0},
            {"ignore_eos": True},
            {"lenience": "topk:2"},
            {"lenience": "topk:4"},
        ):
            answer = found.post(**{"prompt": [5], "max_tokens": 3, **body})
            assert answer.status_code == 400, body
            assert "certified" in answer.json()["error"]["message"]
        page = found.client.get("/").text
        assert "Certified:" in page and "95.00 %" in page
        # what changes on the disk changes nothing for a running server
        told = certified / "certificate.json"
        text = told.read_text()
        told.write_text("{}")
        wanted = found.complete(prompt=[5, 6], max_tokens=5)["token_ids"]
        told.write_text(text)
        out = llama.generate([5, 6], rule=name, max_new_tokens=5)
        assert wanted == out.tokens


def test_a_certified_decoder_takes_its_own_options_and_earlier_ends() -> None:
    bound = Binding("certified:run", {})
    certified = replace(
        Decoder(temperature=0.7, top_k=5, max_new_tokens=20, stop_strings=("w1",)),
        bound_to=bound,
    )
    assert narrowed(certified, {}) == certified
    asked = {"temperature": 0.7, "seed": 4, "max_new_tokens": 8, "stop_strings": ("a",)}
    found = narrowed(certified, asked)
    assert (found.temperature, found.top_k, found.seed) == (0.7, 5, 4)
    assert (found.max_new_tokens, found.answer_tokens) == (20, 8)
    assert found.answer_stops == ("w1", "a") and found.bound_to is bound
    for name, value in (
        ("temperature", 0.0),
        ("top_k", 6),
        ("top_p", 0.5),
        ("max_new_tokens", 21),
    ):
        with pytest.raises(InputError, match=f"certified with {name} "):
            narrowed(certified, {name: value})


def test_a_withdrawn_certificate_serves_nothing(
    certified: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told = json.loads((certified / "certificate.json").read_text())
    copy = tmp_path / "certificate.json"
    copy.write_text(json.dumps({**told, "withdrawn": "an audit found losses"}))
    with pytest.raises(SystemExit) as ended:
        main(["serve", "--rule", f"certified:{tmp_path}"])
    assert ended.value.code == 2
    assert "nothing is certified there (an audit" in capsys.readouterr().err
