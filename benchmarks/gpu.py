"""Measure everything that only a GPU can tell, within minutes.

    python benchmarks/gpu.py                      all steps, at most 9 minutes, into gpu/
    python benchmarks/gpu.py --only right fast    some steps: right, windows, fast, scale
    python benchmarks/gpu.py --toy                a dry run at toy size, also on a CPU

Each result is appended to OUT/results.jsonl as soon as it is measured. A second call skips what is
there and retries what failed. `tools/gpu_wheels.sh` collects the wheels for a machine that has
PyTorch and transformers but no package index.

- right: greedy answers against transformers' own, for plain and recorded passes, batches, trees,
  sliding windows and drafters, in float32 without TF32 and in bfloat16. In bfloat16 answers that
  part at a near-tie are counted apart.
- windows: seconds of a forward pass over 1 to 64 tokens and over trees, for targets of 0.1, 1 and 8
  billion parameters, with the bound that the memory's bandwidth sets.
- fast: tokens per second on the built-in pair, plain and recorded, by batch size, next to
  transformers' assisted generation and prompt lookup.
- scale: a larger target trained on the built-in task, then mined, judged, compared and certified.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from scale import SHAPES, bandwidth, random_model, weight_bytes
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import (
    Gemma2Config,
    GPT2Config,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    PretrainedConfig,
    PreTrainedTokenizerFast,
    Qwen3Config,
)
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from lenience.core.errors import InputError, first_line
from lenience.core.profile import Profile
from lenience.decoding.loading import load_pair
from lenience.decoding.pair import Pair
from lenience.mining.drafters import DrafterPlan, fit_to_answers
from lenience.models.cuda_graphs import CudaGraphs
from lenience.models.lm import LM
from lenience.models.session import Session, reads_together_as_alone
from lenience.tasks import WordMath, take

SHARES = {"right": 2.0, "windows": 1.0, "fast": 2.0, "scale": 4.0}
"""Shares of the time, in the order of the steps' worth."""
PARTS, PART = 8, 16 << 20
"""Number and bytes of the files that weights may come back in."""
Result = dict[str, Any]
Item = tuple[str, Callable[[], Result]]
"""A measurement: its key and the function that makes it."""


@dataclass
class Bench:
    """The settings of a call, and the results so far."""

    out: Path
    device: torch.device
    toy: bool
    done: dict[str, Result] = field(default_factory=dict)

    @classmethod
    def begin(cls, out: Path, device: torch.device, toy: bool) -> Bench:
        """Read the results of earlier calls, and add a line about this machine."""
        out.mkdir(parents=True, exist_ok=True)
        bench = cls(out, device, toy)
        if bench.path.exists():
            rows = [json.loads(line) for line in bench.path.read_text().split("\n") if line]
            bench.done = {row["key"]: row for row in rows if "failed" not in row}
        bench.write("machine", about_machine(device))
        return bench

    @property
    def path(self) -> Path:
        return self.out / "results.jsonl"

    def write(self, key: str, result: Result) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"key": key, **result}) + "\n")

    def run(self, step: str, items: Iterator[Item], until: float) -> None:
        """Make a step's measurements until the time is over; a failure is written and does not end
        the step."""
        for key, measure in items:
            key = f"{step}/{key}"
            if key in self.done:
                continue
            if time.monotonic() > until:
                print(f"{step}: no time left at {key}", flush=True)
                return
            began = time.monotonic()
            try:
                result = measure()
            except torch.cuda.OutOfMemoryError as error:
                torch.cuda.empty_cache()
                result = {"skipped": first_line(error)}
            except Exception as error:  # whatever a GPU raises is a result
                result = {"failed": f"{type(error).__name__}: {first_line(error)}"}
            result["seconds"] = round(time.monotonic() - began, 2)
            self.write(key, result)
            print(key, json.dumps(result)[:160], flush=True)


def about_machine(device: torch.device) -> Result:
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=Path(__file__).parent, capture_output=True, text=True
    ).stdout.strip()
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "commit": commit,
        "date": time.strftime("%Y-%m-%d %H:%M"),
        "command": " ".join(sys.argv),
    }


def synchronised(run: Callable[[], object], device: torch.device) -> float:
    """Return the seconds of a call, up to the end of what it left on the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    began = time.perf_counter()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - began


# ---- right


VOCABULARY = 512
COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "eos_token_id": 0,
    "bos_token_id": None,
    "pad_token_id": 0,
    "initializer_range": 0.3,
}
SMALL: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
}
CONFIGS: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**COMMON, **SMALL, num_key_value_heads=2),
    "qwen3": Qwen3Config(**COMMON, **SMALL, num_key_value_heads=2, head_dim=16),
    "gemma2, sliding window": Gemma2Config(
        **COMMON,
        **SMALL,
        num_key_value_heads=2,
        head_dim=16,
        sliding_window=24,
        query_pre_attn_scalar=16,
    ),
    "mistral, sliding window": MistralConfig(
        **COMMON, **SMALL, num_key_value_heads=2, sliding_window=24
    ),
    "gpt2": GPT2Config(**COMMON, n_embd=64, n_layer=3, n_head=4, n_positions=512),
}
DECODED: dict[str, dict[str, Any]] = {
    "chain": {},
    "batch of 4": {"batch_size": 4},
    "tree": {"tree": "dynamic:8"},
    "trees in a batch": {"tree": "dynamic:8", "batch_size": 4},
    "ngram": {"drafter": "ngram"},
    "suffix": {"drafter": "suffix"},
    "exit": {"drafter": "exit:1"},
    "skip": {"drafter": "skip:2"},
}
FITTED = ("medusa", "blockwise", "eagle")
PROMPTS = [[5, 6, 7], [*range(1, 40)], [9], [3, 3, 3, 3, 8, 8], [*range(100, 120)], [42, 17]]
NEW = 48


def random_pair(config: PretrainedConfig, dtype: torch.dtype, device: torch.device) -> Pair:
    """Return a target with random weights, and a draft that is the target with some noise."""
    torch.manual_seed(1)
    target = AutoModelForCausalLM.from_config(config)
    draft = AutoModelForCausalLM.from_config(config)
    draft.load_state_dict(target.state_dict())
    with torch.no_grad():
        for weight in draft.parameters():
            weight.add_(torch.randn_like(weight) * 0.1 * weight.std().nan_to_num())
    words = {"<eos>": 0, **{f"w{i}": i for i in range(1, VOCABULARY)}}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, unk_token="<eos>")), eos_token="<eos>"
    )
    on_device = [
        LM(model.to(device, dtype), tokenizer, f"random {role}", role)
        for role, model in (("target", target), ("draft", draft))
    ]
    return Pair(on_device[0], on_device[1], "random")


@torch.inference_mode()
def near_tie(lm: LM, prompt: list[int], ours: list[int], theirs: list[int]) -> bool:
    """True if two answers part at two tokens whose logits differ by rounding alone."""
    at = next(i for i, (a, b) in enumerate(zip(ours, theirs)) if a != b)
    logits = lm.model(torch.tensor([prompt + theirs[:at]], device=lm.device)).logits[0, -1].float()
    ulps = 2 * torch.finfo(lm.model.dtype).eps * float(logits.abs().max())
    gap = abs(float(logits[ours[at]] - logits[theirs[at]]))
    return gap <= 4 * ulps


def compared(pair: Pair, wanted: Sequence[list[int]], options: Mapping[str, Any]) -> Result:
    outs = pair.generate_batch(PROMPTS, **{"batch_size": 1, "window": 6, **options}, **LIMIT)
    found: Result = {"prompts": len(outs), "same": 0, "near_ties": 0, "different": 0}
    for prompt, out, own in zip(PROMPTS, outs, wanted):
        if out.tokens == own:
            found["same"] += 1
        else:
            tie = near_tie(pair.target, prompt, out.tokens, own)
            found["near_ties" if tie else "different"] += 1
    return found | {"accepted": sum(out.accepted_exact for out in outs)}


LIMIT = {"max_new_tokens": NEW, "rule": "exact"}


def right(bench: Bench) -> Iterator[Item]:
    """Compare answers with transformers' own."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    for dtype in (torch.float32, torch.bfloat16):
        for name, config in CONFIGS.items():
            pair = random_pair(config, dtype, bench.device)
            wanted = [own_greedy(pair.target, prompt) for prompt in PROMPTS]
            kind = f"{name}, {str(dtype).removeprefix('torch.')}"
            variants = dict(DECODED)
            if name == "llama":
                variants |= fitted(pair, wanted)
            for how in ("plain", "recorded"):
                if how == "recorded" and (why := record(pair)):
                    yield f"{kind}, recorded", partial(failing, why)
                    break
                for variant, options in variants.items():
                    yield (
                        f"{kind}, {how}, {variant}",
                        partial(compared, pair, wanted, options),
                    )


def record(pair: Pair) -> str | None:
    """Read a pair through recorded passes; on a CPU they are made anew each time, with the same
    shapes. Returns what is wrong with them, if anything is."""
    for lm in pair.models.values():
        backend = CudaGraphs()
        try:
            if not reads_together_as_alone(lm, backend.cache(lm, 3, 256)):
                return f"{lm.role}: recorded passes differ from its own"
        except Exception as error:  # whatever a GPU raises
            return f"{lm.role}: {type(error).__name__}: {first_line(error)}"
        lm.use(backend)
    return None


def failing(why: str) -> Result:
    raise RuntimeError(why)


@torch.inference_mode()
def own_greedy(lm: LM, prompt: list[int]) -> list[int]:
    ids = torch.tensor([prompt], device=lm.device)
    out = lm.model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=NEW
    )
    return out[0, len(prompt) :].tolist()


def fitted(pair: Pair, answers: Sequence[list[int]]) -> dict[str, dict[str, Any]]:
    """Return drafters that are trained for a moment on the target's answers; what cannot be trained
    is left out with a word."""
    found: dict[str, dict[str, Any]] = {}
    texts = [(prompt, answer) for prompt, answer in zip(PROMPTS, answers)] * 3
    for kind in FITTED:
        folder = Path(tempfile.mkdtemp()) / kind
        try:
            fit_to_answers(pair, texts, DrafterPlan(kind, folder, heads=2, epochs=1))
        except (InputError, RuntimeError) as error:
            print(f"right: no {kind} ({first_line(error)})", flush=True)
            continue
        found[kind] = {"drafter": f"{kind}:{folder}"}
    return found


# ---- windows


BILLIONS: dict[str, dict[str, Any]] = {
    "0.1b": {
        "vocab_size": 49152,
        "num_hidden_layers": 30,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
    },
    "1b": SHAPES["8b"][1],
    "8b": SHAPES["8b"][0],
}
TOY: dict[str, Any] = {
    "vocab_size": 512,
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
TOKENS, NODES = (1, 2, 4, 8, 16, 32, 64), (16, 32, 64)


def windows(bench: Bench) -> Iterator[Item]:
    """Time forward passes by the number of tokens, rows and tokens before."""
    shapes = {"toy": TOY} if bench.toy else BILLIONS
    rows = (1, 2) if bench.toy else (1, 8, 32)
    before = (20, 50) if bench.toy else (100, 1000, 8000)
    peak = bandwidth(bench.device) if not bench.toy else 1e9
    for name, shape in shapes.items():
        lm = random_model({**shape, "max_position_embeddings": 16384}, str(bench.device), "target")
        for past in before:
            for batch in rows:
                yield (
                    f"{name}, {batch} rows, {past} tokens before",
                    partial(pass_times, lm, batch, past, peak),
                )
        del lm
        if bench.device.type == "cuda":
            torch.cuda.empty_cache()


def pass_times(lm: LM, rows: int, past: int, peak: float) -> Result:
    """Return the milliseconds of passes over windows and trees after `past` tokens, whose keys are
    zeros: they take as long as others. The bound is of reading the weights and the keys once."""
    session = Session(lm, rows, past + 2 * max(TOKENS))
    session.read([[1]] * rows)  # makes the cache
    prefix = [1] * past
    for row in session.tokens():
        row[:] = prefix
    told: Result = {"milliseconds": {}, "trees": {}}
    for n in TOKENS:
        told["milliseconds"][n] = _pass_ms(session, prefix, n, None)
    for n in NODES:
        chains = [i - 4 if i >= 4 else -1 for i in range(n)]  # four paths side by side
        told["trees"][n] = _pass_ms(session, prefix, n, chains)
    config = lm.model.config
    key_bytes = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    key_bytes *= lm.model.dtype.itemsize * rows * past
    told["bound, milliseconds"] = round(1e3 * (weight_bytes(lm) + key_bytes) / peak, 4)
    return told


def _pass_ms(session: Session, prefix: list[int], n: int, parents: list[int] | None) -> float:
    rows = len(session.tokens())
    taken = []
    for turn in range(6):
        tokens = [2 + turn] * n  # others than the last turn's, so that nothing is reused
        given = {} if parents is None else {"parents": [parents] * rows}
        sequences = [prefix + tokens] * rows
        read = partial(session.read, sequences, n, **given)
        taken.append(synchronised(read, session.lm.device))
    return round(1e3 * statistics.median(taken[1:]), 4)


# ---- fast


def fast(bench: Bench) -> Iterator[Item]:
    """Time decoders of the built-in pair, plain and recorded."""
    options = {"device": str(bench.device), "dtype": "float32"}
    pairs = {"plain": load_pair(compile=False, **options)}
    pairs["compiled"] = load_pair(compile=True, **options)
    samples = take(WordMath(), "test", 8 if bench.toy else 128)
    prompts = [pairs["plain"].target.encode(sample.prompt) for sample in samples]
    decoders = {
        "target alone": {"rule": "target"},
        "strict": {"window": 8},
        "strict, ngram": {"drafter": "ngram", "window": 8},
        "strict, suffix": {"drafter": "suffix", "window": 8},
        "strict, medusa": {"drafter": "medusa", "window": 3},
        "strict, tree": {"tree": "dynamic:16", "window": 8},
        "judge": {"rule": "judge@0.9985", "window": 8},
    }
    for batch in (1, 2) if bench.toy else (1, 8, 32, 128):
        for how, pair in pairs.items():
            for name, given in decoders.items():
                asked = prompts[: 4 if bench.toy else max(8, batch)]
                yield (
                    f"{name}, {how}, batch {batch}",
                    partial(speed, pair, asked, batch, given),
                )
    for name, given in {
        "transformers, greedy": {},
        "transformers, assisted": {"assistant_model": pairs["plain"].draft},
        "transformers, prompt lookup": {"prompt_lookup_num_tokens": 8},
    }.items():
        yield name, partial(their_speed, pairs["plain"], prompts[:8], given)


def speed(pair: Pair, prompts: list[list[int]], batch: int, options: Mapping[str, Any]) -> Result:
    """Return tokens per second, the median of three turns after a warm-up, and from a turn with a
    profile the share of the time outside the models and the milliseconds of the rule."""
    given = {"max_new_tokens": 128, "batch_size": batch, **options}
    speeds = []
    for _ in range(4):
        began = time.perf_counter()
        outs = pair.generate_batch(prompts, **given)
        speeds.append(sum(len(out.tokens) for out in outs) / (time.perf_counter() - began))
    profile = Profile()
    pair.generate_batch(prompts, profile=profile, **given)
    in_models = sum(profile.seconds.get(name, 0.0) for name in ("target", "draft"))
    tokens, passes = (sum(len(out.tokens) for out in outs), sum(out.target_passes for out in outs))
    return {
        "tokens_per_second": round(statistics.median(speeds[1:]), 1),
        "turns": [round(one, 1) for one in speeds[1:]],
        "tokens_per_pass": round(tokens / passes, 3),
        "outside_the_models": round(1 - in_models / sum(profile.seconds.values()), 4),
        "rule_ms": round(1e3 * profile.seconds.get("rule", 0.0) / max(profile.cycles, 1), 4),
    }


def their_speed(pair: Pair, prompts: list[list[int]], options: Mapping[str, Any]) -> Result:
    """Return the tokens per second of transformers' own generation, one prompt at a time."""
    lm = options.get("assistant_model")
    given = {**options, **({"assistant_model": lm.model} if lm else {})}
    speeds = []
    for _ in range(3):
        began, tokens = time.perf_counter(), 0
        for prompt in prompts:
            ids = torch.tensor([prompt], device=pair.target.device)
            out = pair.target.model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=128,
                **given,
            )
            tokens += out.shape[1] - len(prompt)
        speeds.append(tokens / (time.perf_counter() - began))
    return {"tokens_per_second": round(statistics.median(speeds[1:]), 1)}


# ---- scale


LARGE: dict[str, Any] = {
    "hidden_size": 768,
    "intermediate_size": 2304,
    "num_hidden_layers": 10,
    "num_attention_heads": 12,
}
"""About 65 million parameters, which come back as bfloat16 in eight files."""


def scale(bench: Bench) -> Iterator[Item]:
    """Train a larger target on the built-in task, then use it as a user would."""
    run, target = bench.out / "run", bench.out / "target"
    minutes = 0.05 if bench.toy else 2.0
    yield "train", partial(train, bench, target, minutes)
    models = ["--target", str(target), "--draft", built_in_draft(), "--task", "wordmath"]
    limit = "8" if bench.toy else "400"
    judge = f"judge:{run / 'judge'}"
    commands = {
        "mine": ["mine", *models, "--limit", limit, "--out", str(run)],
        "fit": ["fit", str(run)],
        "compare": [
            "compare",
            *("--run", str(run), "--rule", "exact", "--rule", judge, "--limit", limit),
            *("--out", str(run / "compare")),
        ],
        "certify": ["certify", str(run), "--max-drop", "0.02", "--limit", limit],
    }
    for name, arguments in commands.items():
        yield name, partial(by_command, arguments)
    yield "weights", partial(in_parts, target / "model.safetensors", bench.out / "weights")


def built_in_draft() -> str:
    from lenience.core.files import EMBEDDED

    return str(EMBEDDED / "draft")


def train(bench: Bench, out: Path, minutes: float) -> Result:
    """Train for some minutes in bfloat16 autocast with AdamW and a linear decay, and save."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "recipes"))
    import train_embedded as recipe

    pair = load_pair(compile=False)
    tokenizer = pair.target.tokenizer
    shape = {**TOY, "num_key_value_heads": 4} if bench.toy else LARGE
    config = LlamaConfig(
        **{**shape, "vocab_size": len(tokenizer), "max_position_embeddings": recipe.CONTEXT},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.eos_token_id,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).to(bench.device)
    weights = torch.ones(len(tokenizer), device=bench.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95))
    training = recipe.Training(
        role="target", tokens=0, rate=0, decay=0, pool=0, widen=None, batch=1024 if bench.toy
        else 32768, compare=2, gifts=2, repeats=0.05, recalls=0.1, sums=0.1, numeric=3,
        work=out, out=out, device=str(bench.device),
    )  # fmt: skip
    began, steps, seen, loss = time.monotonic(), 0, 0, torch.zeros(())
    for _, ids, labels in recipe.batches(training, tokenizer, 0):
        share = (time.monotonic() - began) / (60 * minutes)
        if share >= 1:
            break
        optimizer.param_groups[0]["lr"] = 1e-3 * min(
            1.0, (steps + 1) / 50, max(0.02, 2 - 2 * share)
        )
        ids, labels = ids.to(bench.device), labels.to(bench.device)
        with torch.autocast(bench.device.type, torch.bfloat16):
            logits = model(ids).logits
        loss = recipe.weighted_loss(logits.float(), labels, weights)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        steps, seen = steps + 1, seen + ids.numel()
    dtype = torch.float32 if bench.device.type == "cpu" else torch.bfloat16
    model.to(dtype).save_pretrained(out)
    tokenizer.save_pretrained(out)
    millions = sum(weight.numel() for weight in model.parameters()) / 1e6
    return {"steps": steps, "tokens": seen, "loss": float(loss), "parameters_millions": millions}


def by_command(arguments: list[str]) -> Result:
    """Run a command of the package; raises RuntimeError with its last line if it fails."""
    done = subprocess.run(
        [sys.executable, "-m", "lenience", *arguments], capture_output=True, text=True
    )
    said = (done.stderr or done.stdout).strip().split("\n")
    if done.returncode:
        raise RuntimeError(said[-1])
    return {"said": done.stdout.strip().split("\n")[-6:]}


def in_parts(path: Path, folder: Path) -> Result:
    """Cut a file into parts that a machine may send back; joined they are the file again."""
    folder.mkdir(parents=True, exist_ok=True)
    data = path.read_bytes()
    if len(data) > PARTS * PART:
        return {"skipped": f"{len(data) >> 20} MiB are more than {PARTS * PART >> 20}"}
    for number, start in enumerate(range(0, len(data), PART)):
        (folder / f"part-{number}").write_bytes(data[start : start + PART])
    return {"bytes": len(data)}


STEPS: dict[str, Callable[[Bench], Iterator[Item]]] = {
    "right": right,
    "windows": windows,
    "fast": fast,
    "scale": scale,
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=9.0, help="minutes of all steps")
    parser.add_argument("--out", type=Path, default=Path("gpu"), help="folder of the results")
    parser.add_argument("--only", nargs="+", choices=list(STEPS), default=list(STEPS))
    parser.add_argument("--toy", action="store_true", help="toy sizes, also on a CPU")
    given = parser.parse_args()
    if not torch.cuda.is_available() and not given.toy:
        parser.error("no CUDA device is available; --toy runs all steps at toy size on a CPU")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    bench = Bench.begin(given.out, device, given.toy)
    total = sum(SHARES[step] for step in given.only)
    until = time.monotonic()
    for step in given.only:
        until = max(until, time.monotonic()) + 60 * given.minutes * SHARES[step] / total
        bench.run(step, STEPS[step](bench), until)


if __name__ == "__main__":
    main()
