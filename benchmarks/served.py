r"""Certificates of real servers over OpenAI's API, on loopback.

    python -m venv LLAMA && LLAMA/bin/pip install xllamacpp
    python benchmarks/served.py llama --python LLAMA/bin/python --gguf BASE.gguf \
        --target TARGET --rows ROWS.jsonl --work WORK
    python benchmarks/served.py vllm --python .venv-vllm/bin/python --judge RUN/judge --work WORK

`llama` serves one fine-tuned model with llama.cpp: in float32, and with weights in 8 and 4 bits.
`vllm` serves the built-in pair with the plugin, and its target with weights rounded to 8 bits.
Each question has a ledger of its own. Finished questions are kept in WORK and not asked again.
The results go into benchmarks/results/served.json.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from llama_server import write_gguf
from recording import write_results
from safetensors.torch import load_file, save_file

from lenience.core.files import EMBEDDED, write_json
from lenience.decoding.loading import load_pair

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "served.json"
START_SECONDS = 300
"""Seconds after which a server that does not answer counts as broken."""
IN_FLIGHT = "16"
WINDOW = 4
"""Number of drafted tokens of vLLM's draft model."""
LOSSES = {
    "disagreement": ("--loss", "disagreement", "--max-drop", "0.05"),
    "paired": ("--max-drop", "0.03", "--allow-weak-target"),
}
"""Flags of the questions about quantised weights. The fine-tuned model is right on few problems."""
KEPT = (
    "certified",
    "max_drop",
    "n",
    "losses",
    "upper_bound",
    "noise",
    "reason",
    "seconds",
)
"""Fields of a certificate that go into the results."""


@dataclass(frozen=True)
class Question:
    """A certificate to ask for."""

    name: str
    reference: str
    candidate: str
    flags: Sequence[str]


@contextmanager
def server(argv: Sequence[str], port: int, log: Path, **env: str) -> Iterator[str]:
    """Run a server. Yields its address once it answers. Raises SystemExit if it does not start, or
    another server has the port."""
    url = f"http://127.0.0.1:{port}/v1"
    if _answers(url):
        raise SystemExit(f"{url}: another server is there; name another --port")
    with log.open("ab") as file:
        process = subprocess.Popen(
            argv, stdout=file, stderr=file, env={**os.environ, **env}
        )
    try:
        until = time.monotonic() + START_SECONDS
        while not _answers(url):
            if process.poll() is not None or time.monotonic() > until:
                raise SystemExit(f"{argv[0]}: does not serve; see {log}")
            time.sleep(0.5)
        yield url
    finally:
        process.terminate()
        process.wait(timeout=60)


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/models", timeout=5) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def ask(question: Question, work: Path) -> dict[str, Any]:
    """Return the certificate of a question, with the number of requests that it took."""
    folder = work / question.name
    done = folder / "served.json"
    if done.exists():
        found: dict[str, Any] = json.loads(done.read_text(encoding="utf-8"))
        return found
    command = [sys.executable, "-m", "lenience", "certify", str(folder / "run")]
    servers = ["--reference", question.reference, "--candidate", question.candidate]
    asked = [*command, *servers, "--in-flight", IN_FLIGHT, *question.flags, "--json"]
    env = {**os.environ, "LENIENCE_HOME": str(folder / "home")}
    began = time.perf_counter()
    told = subprocess.run(asked, stdout=subprocess.PIPE, env=env, check=True).stdout
    certificate = json.loads(told.decode().strip().split("\n")[-1])
    seconds = time.perf_counter() - began
    replies = (folder / "run" / "requests.jsonl").read_text(encoding="utf-8")
    found = {name: certificate[name] for name in KEPT}
    found["certified"] = found["certified"] is not None
    found["tried"] = [
        {"n": row["n"], "losses": row["losses"]} for row in certificate["tried"]
    ]
    found |= {"seconds": round(seconds, 1), "requests": replies.count('"reply"')}
    write_json(done, found)
    return found


def llama(args: argparse.Namespace) -> dict[str, Any]:
    """Return the certificates of llama.cpp's quantised weights."""
    files = {kind: args.work / f"{kind}.gguf" for kind in ("F32", "Q8_0", "Q4_0")}
    for kind, path in files.items():
        if not path.exists():
            write_gguf(args.gguf, args.target, path, kind)
    fields = ("--prompt-field", "question", "--reference-field", "answer")
    task = ["--task", str(args.rows), *fields, "--answer", "last-number"]
    task += ["--max-new-tokens", "128", "--split", "test"]
    found = {}
    with llama_server(args, files["F32"], args.port) as reference:
        again = f"{reference}; name=again"
        flags = (*task, "--max-drop", "0.01")
        found["llama.cpp, float32 again"] = ask(
            Question("llama-again", reference, again, flags), args.work
        )
        for number, kind in enumerate(("Q8_0", "Q4_0"), 1):
            with llama_server(args, files[kind], args.port + number) as url:
                for loss, flags in LOSSES.items():
                    name = f"llama-{kind}-{loss}"
                    candidate = f"{url}; name={kind}"
                    asked = Question(name, reference, candidate, (*task, *flags))
                    found[f"llama.cpp, {kind}, {loss}"] = ask(asked, args.work)
    return found | published(args, task)


def published(args: argparse.Namespace, task: Sequence[str]) -> dict[str, Any]:
    """Return the certificate of the GGUF file as it was published, against its weights in
    float32."""
    whole = args.work / "published-F32.gguf"
    if not whole.exists():
        write_gguf(args.gguf, dequantised(args.gguf, args.work / "base"), whole, "F32")
    with (
        llama_server(args, whole, args.port) as reference,
        llama_server(args, args.gguf, args.port + 1) as url,
    ):
        flags = (*task, *LOSSES["disagreement"])
        asked = Question("llama-Q4_1", reference, f"{url}; name=Q4_1", flags)
        return {"llama.cpp, Q4_1 as published, disagreement": ask(asked, args.work)}


def llama_server(
    args: argparse.Namespace, file: Path, port: int
) -> AbstractContextManager[str]:
    """Return a llama.cpp server of a GGUF file."""
    argv = [str(args.python), str(HERE / "llama_server.py"), str(file), str(port)]
    return server(argv, port, args.work / f"{file.stem}.log")


def dequantised(file: Path, folder: Path) -> Path:
    """Return a folder with the model of a GGUF file in float32."""
    if not folder.exists():
        model = load_pair(str(file), dtype="float32", compile=False).target.model
        model.save_pretrained(folder)
    return folder


def vllm(args: argparse.Namespace) -> dict[str, Any]:
    """Return the certificates of lenience's rules in vLLM, and of rounded weights."""
    judges = f"judge:{args.judge.resolve()}@recall="
    judge = f"{judges}{args.recall}"
    setting = {"lenience": {"rule": judge, "allow": ["topk:3"]}}
    draft = {
        "method": "draft_model",
        "model": str(EMBEDDED / "draft"),
        "num_speculative_tokens": WINDOW,
    }
    flags = ["--speculative-config", json.dumps(draft), "--no-async-scheduling"]
    flags += ["--additional-config", json.dumps(setting)]
    rounded = args.work / "rounded"
    if not rounded.exists():
        round_weights(EMBEDDED / "target", rounded)
    found = {}
    with vllm_server(args, EMBEDDED / "target", args.port, flags) as url:
        exact = dial(url, "exact", "exact")
        for label, (name, rule, drop) in {
            "vLLM, exact again": ("again", "exact", "0.01"),
            "vLLM, judge at recall 0.98": ("strict-judge", f"{judges}0.98", "0.03"),
            f"vLLM, judge at recall {args.recall}": ("judge", judge, "0.03"),
            "vLLM, topk:3": ("topk", "topk:3", "0.03"),
        }.items():
            asked = ("--task", "wordmath", "--max-drop", drop)
            question = Question(f"vllm-{name}", exact, dial(url, rule, name), asked)
            found[label] = ask(question, args.work)
        with vllm_server(args, rounded, args.port + 1, []) as other:
            asked = ("--task", "wordmath", "--max-drop", "0.03")
            candidate = f"{other}; name=rounded; api=completions"
            question = Question("vllm-rounded", exact, candidate, asked)
            found["vLLM, weights in 8 bits"] = ask(question, args.work)
    return found


def vllm_server(
    args: argparse.Namespace, model: Path, port: int, flags: Sequence[str]
) -> AbstractContextManager[str]:
    """Return a vLLM server of a model."""
    argv = [str(args.python), "-m", "vllm.entrypoints.openai.api_server"]
    argv += ["--model", str(model), "--served-model-name", model.name]
    argv += ["--dtype", "float32", "--max-model-len", "1024"]
    argv += ["--host", "127.0.0.1", "--port", str(port), *flags]
    log = args.work / f"vllm-{model.name}.log"
    return server(argv, port, log, VLLM_CPU_KVCACHE_SPACE="1")


def dial(url: str, rule: str, name: str) -> str:
    """Return the endpoint of a rule in a server with the plugin."""
    body = json.dumps({"vllm_xargs": {"lenience": rule}})
    return f"{url}; body={body}; name={name}; api=completions"


def round_weights(source: Path, folder: Path) -> None:
    """Write a copy of a model whose matrices are rounded to 8 bits, with a scale for each row."""
    shutil.copytree(source, folder)
    path = folder / "model.safetensors"
    weights = load_file(path)
    for name, weight in weights.items():
        if weight.ndim == 2:
            scale = weight.abs().amax(1, keepdim=True).clamp(min=1e-12) / 127
            weights[name] = torch.round(weight / scale) * scale
    save_file(weights, path, {"format": "pt"})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("which", choices=["llama", "vllm"])
    parser.add_argument("--python", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--gguf", type=Path)
    parser.add_argument("--target", type=Path)
    parser.add_argument("--rows")
    parser.add_argument("--judge", type=Path)
    parser.add_argument("--recall", default="0.95")
    parser.add_argument("--port", type=int, default=8110)
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    which: Mapping[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
        "llama": llama,
        "vllm": vllm,
    }
    found = which[args.which](args)
    kept = json.loads(RESULTS.read_text("utf-8")) if RESULTS.exists() else {}
    kept.pop("record", None)
    write_results(RESULTS, {**kept, **found})
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
