r"""Make the built-in pair for the task `wordmath`.

    python tools/embedded/train.py tokenizer
    python tools/embedded/train.py narrow --tokens 36e6 --out narrow
    python tools/embedded/train.py narrow --tokens 40e6 --compare 5 --out narrow
    python tools/embedded/train.py target --tokens 26e6 --rate 1.5e-3 --decay 1 --compare 5 \
        --numeric 6 --batch 4096 --pool 3000 --widen narrow/narrow --work first --out first
    options="--numeric 6 --batch 4096 --pool 6000 --widen first/target --work lessons"
    python tools/embedded/train.py target --tokens 1.4e6 --rate 3e-3 --compare 3 --gifts 6 \
        --repeats 0.35 --recalls 0.25 $options --out at1.4
    python tools/embedded/train.py target --tokens 9e6 --rate 3e-3 --compare 3 --gifts 6 \
        --repeats 0.1 --recalls 0.5 $options --out at9
    python tools/embedded/train.py target --tokens 30e6 --rate 3e-3 --decay 0.45 --compare 6 \
        --gifts 6 --repeats 0.01 --recalls 0.1 $options --out at30
    for tokens in 40 50; do
        python tools/embedded/train.py target --tokens ${tokens}e6 --rate 2e-3 --decay 0.45 \
            --compare 2 --repeats 0.005 --recalls 0.03 --sums 0.25 $options --out at$tokens
    done
    python tools/embedded/train.py average --of 0.2 at30/target --of 0.3 at40/target \
        --of 0.5 at50/target
    python tools/embedded/train.py draft --tokens 5.2e6

What has no --out goes into src/lenience/embedded/; a training run keeps its state in --work and
goes on from there when it is started again. All models see right solutions only, each in the
wording of its own author.

These are the commands that made the models that are shipped, but for where lessons were changed on
the way: the first 16 M tokens of the narrow one were read under --tokens 40e6, and the shares of
lessons went down in more steps than are named here. The narrow ones and the draft were trained on
two cores of an AMD EPYC, the target on two that multiply bfloat16 in tiles.

- narrow, 8 layers x 128, 1.7 M parameters: 9,000 tokens/s with other work beside, 75 minutes in
  all. After 36 M tokens it was right on 94.0 % of 400 problems (share 100 %, work 98 %, shop 94 %,
  compare 85 %); the second command prolongs it with more problems of the family `compare`, entering
  the learning rate's way down at a quarter of its peak.
- target, 8 layers x 320, 10.7 M parameters: it begins as the narrow one, at the costs of a model
  of its size, which are more like a served one's. Right of the first 500 problems of the test
  split, of the next 500, of 500 from the millionth on and of 1,000 from the two-millionth:
      94.3 % of the last           as it begins
      97.8 % of the first          after 26 M tokens of problems, and 95.6 % of 1,500 others
      94.8 % of 1,000, 96.6, –     after 30 M with the lessons gifts, repeats, recalls and change
      96.4, 96.6, 98.4, 97.5 %     after 40 M, with sums
      97.8, 96.8, 98.0, 97.8 %     after 50 M
      98.0, 97.6, 98.6, 98.4 %     0.4 of that after 40 M, 0.6 of that after 50 M
      98.4, 98.4, 99.0, 98.9 %     the average that is shipped
  7,500 tokens/s alone, 5,000 with the lessons. What problems alone did not teach it is to look up
  by name: asked who has how many after a transfer, it said one of those who are named, at random,
  whatever the tokens (45 M more for the narrow one: 97.2 %, of 45 errors in 1,000 42 there), the
  share of such problems and the weight of numerals. It learned it in this order: to copy random
  tokens (after 1.4 M 9 % of them right, after 3 M 94 %), then who has how many, then who gives and
  who gets, then what each has afterwards. What is left is in the family `shop`: the numbers of two
  wares mixed up where they share one, and differences that are off by ten.
- draft, 2 layers x 128, 0.45 M parameters: 30,000 tokens/s, 3 minutes. With 6.5 M tokens it is
  right on 56 %, with 10 M on 69 %, and then too few of its mismatches are important.

tools/embedded/check.py measures what they come to.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import WordLevel
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from lenience.tasks import wordmath, wordmath_problems
from lenience.tasks.wordmath_problems import Problem, Story

EMBEDDED = Path(__file__).parents[2] / "src/lenience/embedded"
SHAPES: dict[str, dict[str, Any]] = {
    "narrow": dict(
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=8,
        num_attention_heads=2,
    ),
    "target": dict(
        hidden_size=320,
        intermediate_size=960,
        num_hidden_layers=8,
        num_attention_heads=5,
    ),
    "draft": dict(
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=2,
        num_attention_heads=2,
    ),
}
CONTEXT = 1024
EOS = "</s>"
WRITTEN = 0.25
"""How large new weights are, as a share of random ones, that write into the residual."""
# label of positions that the loss leaves out: the prompt and the padding
IGNORED = -100


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Return words, punctuation marks and single digits, each with and without a space before it;
    no token for the unknown."""
    pieces = r"▁?\d|▁?[A-Za-z]+|▁?[^\sA-Za-z\d▁]"
    split = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Metaspace(
                replacement="▁", prepend_scheme="always", split=True
            ),
            pre_tokenizers.Split(Regex(pieces), behavior="isolated"),
        ]
    )
    words = {f"{space}{digit}" for space in ("", "▁") for digit in range(10)}
    for i in range(20_000):
        made = wordmath.problem("vocabulary", i)
        for author in ("target", "draft"):
            text = f"{wordmath.prompt(made)} {wordmath.solution(made, author, random.Random(i))}"
            words |= {piece for piece, _ in split.pre_tokenize_str(text)}
    tokenizer = Tokenizer(
        WordLevel({word: i for i, word in enumerate([EOS, *sorted(words)])})
    )
    tokenizer.pre_tokenizer = split
    tokenizer.decoder = decoders.Metaspace(replacement="▁", prepend_scheme="always")
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=EOS, pad_token=EOS
    )


Text = tuple[list[int], list[int]]
"""The tokens of a question, and of the question with its solution."""


@dataclass(frozen=True)
class Training:
    """What is trained, and how."""

    role: str
    tokens: float
    """How many to train on."""
    rate: float
    """Peak learning rate."""
    decay: float
    """Over which last share of the tokens the rate goes down."""
    pool: int
    """The pool of problems to begin with: those before it were another training's."""
    widen: Path | None
    """The narrower model, of the same depth, whose function the new one begins with."""
    batch: int
    """Tokens in a batch."""
    compare: int
    """How often the hardest family comes for once of each other."""
    gifts: int
    """How often a lesson about gifts comes for once of each family."""
    repeats: float
    """The share of texts that are lessons in copying."""
    recalls: float
    """The share of texts that are lessons in looking up."""
    sums: float
    """The share of texts that are lessons in reckoning."""
    numeric: float
    """Weight of digits and operators in the loss, whose signal would drown in that of wording."""
    work: Path
    """Where the state is kept."""
    out: Path
    """Where the finished model goes."""
    device: str

    @property
    def author(self) -> str:
        return "draft" if self.role == "draft" else "target"


def repeat(tokenizer: PreTrainedTokenizerFast, rng: random.Random) -> Text:
    """Return random tokens, twice: a lesson in finding what stood after a token before."""
    once = [rng.randrange(1, len(tokenizer)) for _ in range(rng.randint(8, 40))]
    return once, once + once


def recall(rng: random.Random) -> tuple[str, str]:
    """Return a question and its answer that only say who has how many: a lesson in looking up. The
    shorter a way to say it the sooner it is learned; the task's own is among them."""
    people = rng.sample(wordmath_problems.NAMES, rng.randint(2, 5))
    unit = rng.choice(wordmath_problems.GOODS)
    have = {name: rng.randint(2, 120) for name in people}
    told, asked = (
        rng.choice(("{} {}.", "{} has {}.", f"{{}} has {{}} {unit}.")) for _ in range(2)
    )
    facts = [told.format(name, number) for name, number in have.items()]
    said = [asked.format(name, have[name]) for name in rng.choices(people, k=5)]
    return " ".join([*facts, "Answer:"]), " ".join(said)


def change(rng: random.Random) -> tuple[str, str]:
    """Return a question and its answer that only say what is to be reckoned after gifts: a lesson
    in signs, from the shortest way to say it to the task's own."""
    unit = rng.choice(wordmath_problems.GOODS)
    people = rng.sample(wordmath_problems.NAMES, 4)
    have = {name: rng.randint(6, 90) for name in people}
    told = [f"{name} has {number} {unit}." for name, number in have.items()]
    signed: dict[str, tuple[str, int]] = {}
    for giver, taker in zip(people[::2], people[1::2]):
        number = rng.randint(2, 30)
        gives = f"{giver} gives {number} {unit} to {taker}."
        gets = f"{taker} gets {number} {unit} from {giver}."
        told.append(f"Then {rng.choice((gives, gets))}")
        signed |= {giver: ("-", number), taker: ("+", number)}
    verb = rng.choice(wordmath_problems.HAS)
    forms = (
        "{0} {2} {3}.",
        "{0} {1} {2} {3}.",
        f"{{0}} {verb} {{1}} {{2}} {{3}} {unit}.",
    )
    form = rng.choice(forms)
    said = [
        form.format(name, have[name], *signed[name])
        for name in rng.choices(people, k=5)
    ]
    return " ".join([*told, "Answer:"]), " ".join(said)


def sums(rng: random.Random) -> tuple[str, str]:
    """Return a question and its answer that only say what purchases cost and what is left: a lesson
    in saying a result before its reason, as half of the task's sentences do."""
    wares = rng.sample(wordmath_problems.WARES, rng.randint(2, 3))
    numbers = rng.sample(range(2, 13), 3)  # few, so that wares share some
    bought = {ware: tuple(rng.choices(numbers, k=2)) for ware in wares}
    told = [f"{n} {ware} at {price} coins each." for ware, (n, price) in bought.items()]
    forms = (
        "{0} coins for {1}, since {2} = {0}.",
        "for {1} {0} coins, since {2} = {0}.",
    )
    said = []
    for ware in rng.choices(wares, k=3):
        n, price = rng.sample(bought[ware], 2)
        said.append(
            rng.choice(forms).format(n * price, f"the {ware}", f"{n} * {price}")
        )
    form = rng.choice(forms)
    for name in rng.sample(wordmath_problems.NAMES, 4):
        cost = rng.randint(8, 260)
        left = rng.randint(2, 91)
        told.append(f"{name} has {cost + left} coins, paying {cost}.")
        said.append(form.format(left, name, f"{cost + left} - {cost}"))
    return " ".join([*told, "Answer:"]), " ".join(said)


def gift(rng: random.Random) -> Problem:
    """Return the lesson that the family `compare` hides: who has what after a gift, asked of one of
    two people or of what the one has more than the other."""
    a, b = rng.sample(wordmath_problems.NAMES, 2)
    unit = rng.choice(wordmath_problems.GOODS)
    have = {a: rng.randint(6, 60), b: rng.randint(6, 60)}
    facts = [f"{a} has {have[a]} {unit}.", f"{b} has {have[b]} {unit}."]
    recaps = [f"at the start {a} had {have[a]} {unit}."]
    story = Story(a, facts, recaps, [])
    wordmath_problems.give(rng, story, have, unit)
    if rng.random() < 0.3 and have[a] != have[b]:
        wordmath_problems.ask_who_has_more(story, have, unit)
        return story.finish(rng)
    step = rng.choice(story.groups.pop())
    story.ask(f"How many {unit} does {step.subject} have?", step)
    return story.finish(rng)


def pool_of(
    training: Training,
    tokenizer: PreTrainedTokenizerFast,
    number: int,
    rng: random.Random,
) -> list[Text]:
    """Return 2,048 problems with their solutions, the shortest first."""
    author = training.author
    compare = training.compare
    gifts = training.gifts
    hardest, *others = wordmath_problems.FAMILIES
    families = [hardest] * compare + others + [gift] * gifts
    questions = list[str]()
    wholes = list[str]()
    repeats = list[Text]()
    for i in range(number * 2048, (number + 1) * 2048):
        lessons = training.repeats + training.recalls + training.sums
        lesson = rng.random() if lessons else 1.0
        if lesson < training.repeats:
            repeats.append(repeat(tokenizer, rng))
            continue
        if lesson < lessons:
            looking_up = lesson < lessons - training.sums
            question, answer = rng.choice(
                (recall, change, change) if looking_up else (sums,)
            )(rng)
            questions.append(question)
            wholes.append(f"{question} {answer}")
            continue
        made_up = wordmath.problem(f"pretrain-{author}", i, families)
        questions.append(wordmath.prompt(made_up))
        wholes.append(f"{questions[-1]} {wordmath.solution(made_up, author, rng)}")
    pairs = zip(tokenizer(questions)["input_ids"], tokenizer(wholes)["input_ids"])
    return sorted([*pairs, *repeats], key=lambda pair: len(pair[1]))


def chunks_of(texts: list[Text], size: int) -> list[list[Text]]:
    """Return texts of like length together, about `size` tokens each."""
    chunks: list[list[Text]] = [[]]
    for text in texts:
        if chunks[-1] and (len(chunks[-1]) + 1) * (len(text[1]) + 1) > size:
            chunks.append([])
        chunks[-1].append(text)
    return chunks


def padded(chunk: list[Text], eos: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the tokens [B, T] of a chunk and the labels [B, T] of its solutions, each with an
    EOS."""
    width = max(len(whole) for _, whole in chunk) + 1
    ids = torch.full((len(chunk), width), eos)
    labels = torch.full((len(chunk), width), IGNORED)
    for row, (question, whole) in enumerate(chunk):
        ids[row, : len(whole)] = torch.tensor(whole)
        labels[row, len(question) : len(whole)] = ids[row, len(question) : len(whole)]
        labels[row, len(whole)] = eos
    return ids, labels


def batches(
    training: Training, tokenizer: PreTrainedTokenizerFast, start: int
) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
    """Yield endless (next pool, ids [B, T], labels [B, T]); `start` is the pool to begin with."""
    number = start
    author = training.author
    while True:
        rng = random.Random(f"pool|{author}|{number}")
        texts = pool_of(training, tokenizer, number, rng)
        chunks = chunks_of(texts, training.batch)
        rng.shuffle(chunks)
        number += 1
        for chunk in chunks:
            yield number, *padded(chunk, tokenizer.eos_token_id)


def weighted_loss(
    logits: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """Return mean cross-entropy of logits [B, T, V] on labels [B, T], each position counted by its
    label's weight [V]."""
    kept = labels != IGNORED
    return torch.nn.functional.cross_entropy(logits[kept], labels[kept], weight=weights)


def schedule(done: float, decay: float) -> float:
    """Return share of the peak learning rate after a share `done` of the training: a short warm-up,
    then a linear way down over the last share `decay`."""
    return min(1.0, done / 0.01, max(0.02, (1 - done) / decay))


def save_state(
    path: Path, model: torch.nn.Module, optimizers: list, progress: tuple[int, int, int]
) -> None:
    """Save weights and optimizer states, whole or not at all; `progress` is (tokens seen, next
    pool, steps)."""
    tensors: dict[str, torch.Tensor] = {
        f"model/{name}": value for name, value in model.named_parameters()
    }
    for i, optimizer in enumerate(optimizers):
        for j, state in optimizer.state_dict()["state"].items():
            tensors |= {
                f"optimizer/{i}/{j}/{key}": value for key, value in state.items()
            }
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(
        tensors, path.with_suffix(".new"), metadata={"progress": json.dumps(progress)}
    )
    path.with_suffix(".new").replace(path)


def load_state(
    path: Path, model: torch.nn.Module, optimizers: list
) -> tuple[int, int, int]:
    parameters = dict(model.named_parameters())
    states: list[dict] = [{} for _ in optimizers]
    with safe_open(path, "pt") as file, torch.no_grad():
        for key in file.keys():  # noqa: SIM118
            kind, *rest = key.split("/")
            if kind == "model":
                parameters[rest[0]].copy_(file.get_tensor(key))
            else:
                states[int(rest[0])].setdefault(int(rest[1]), {})[rest[2]] = (
                    file.get_tensor(key)
                )
        progress = json.loads(file.metadata()["progress"])
    for optimizer, state in zip(optimizers, states):
        optimizer.load_state_dict(optimizer.state_dict() | {"state": state})
    return tuple(progress)


def new_model(
    training: Training, tokenizer: PreTrainedTokenizerFast
) -> LlamaForCausalLM:
    """Return random weights, the same ones each time."""
    torch.manual_seed({"narrow": 1, "draft": 2, "target": 3}[training.role])
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        head_dim=64,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.eos_token_id,
        **SHAPES[training.role],
    )
    # on a CPU the backward pass of bfloat16 attention is slower fused than plain
    model = LlamaForCausalLM._from_config(config, attn_implementation="eager")
    if training.widen:
        begin_with(
            model, LlamaForCausalLM.from_pretrained(training.widen, dtype="float32")
        )
    return model.to(training.device)


@torch.no_grad()
def begin_with(model: LlamaForCausalLM, narrow: LlamaForCausalLM) -> None:
    """Make `model` compute what a narrower one of its depth does: the narrow weights stand in the
    first rows and columns, and what is new in the residual is written, but not read yet (after
    Net2Net, Chen 2016)."""
    old = dict(narrow.named_parameters())
    share = (narrow.config.hidden_size / model.config.hidden_size) ** 0.5
    for name, value in model.named_parameters():
        if (
            value.ndim == 1
        ):  # a norm: the mean square is taken over more places, the new ones 0
            value.fill_(float(old[name].mean()) * share)
            value[: len(old[name])] = old[name] * share
            continue
        rows, columns = old[name].shape
        if "embed" in name:
            value[:, columns:] = 0
        elif name.endswith(("o_proj.weight", "down_proj.weight")):
            value.mul_(WRITTEN)
        value[:rows, columns:] = 0
        value[:rows, :columns] = old[name]


def optimizers_of(model: LlamaForCausalLM, rate: float) -> list[torch.optim.Optimizer]:
    """Return Muon for the matrices, AdamW for the rest."""
    matrices = [
        p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name
    ]
    others = [
        p for name, p in model.named_parameters() if p.ndim != 2 or "embed" in name
    ]
    muon = torch.optim.Muon(
        matrices,
        lr=rate,
        weight_decay=0.05,
        momentum=0.95,
        adjust_lr_fn="match_rms_adamw",
    )
    return [
        muon,
        torch.optim.AdamW(others, lr=rate, weight_decay=0.0, betas=(0.9, 0.95)),
    ]


def token_weights(
    tokenizer: PreTrainedTokenizerFast, of_numeric: float
) -> torch.Tensor:
    """Return [V]: of each token in the loss."""
    tokens = tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))
    numeric = [bool(re.fullmatch(r"▁?[\d+*/=-]", token)) for token in tokens]
    return torch.where(torch.tensor(numeric), of_numeric, 1.0)


class Trainer:
    """A model in training; its state is kept every 50 steps."""

    def __init__(self, training: Training):
        self.training = training
        folder = EMBEDDED / training.author
        self.tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
        self.model = new_model(training, self.tokenizer)
        self.optimizers = optimizers_of(self.model, training.rate)
        self.weights = token_weights(self.tokenizer, training.numeric).to(
            training.device
        )
        self.state = training.work / f"{training.role}.safetensors"
        self.forward = torch.compile(self.model, dynamic=True)
        self.seen = 0
        self.pool = training.pool
        self.step = 0
        if self.state.exists():
            progress = load_state(self.state, self.model, self.optimizers)
            self.seen, self.pool, self.step = progress

    def run(self) -> None:
        """Train until the tokens are reached, and save the model."""
        training = self.training
        if self.seen >= training.tokens:
            done = f"{training.role}: {self.seen / 1e6:.2f} M tokens are done already"
            print(f"{done}; --tokens for more, another --work to begin anew")
        began = time.time()
        first = self.seen
        losses = list[float]()
        for pool, ids, labels in batches(training, self.tokenizer, self.pool):
            if self.seen >= training.tokens:
                break
            losses = [*losses[-49:], self.update(ids.to(training.device), labels)]
            self.seen = self.seen + ids.numel()
            self.step = self.step + 1
            last = self.seen >= training.tokens
            if self.step % 20 == 0 or last:
                speed = (self.seen - first) / (time.time() - began)
                left = (training.tokens - self.seen) / speed / 60
                print(
                    f"{training.role} step {self.step} {self.seen / 1e6:.2f} M tokens loss "
                    f"{sum(losses) / len(losses):.4f} {speed:.0f} tokens/s {left:.1f} min left",
                    flush=True,
                )
            if self.step % 50 == 0 or last:
                save_state(
                    self.state,
                    self.model,
                    self.optimizers,
                    (self.seen, pool, self.step),
                )
        self.model.bfloat16().save_pretrained(training.out / training.role)

    def update(self, ids: torch.Tensor, labels: torch.Tensor) -> float:
        """Learn from a batch; returns its loss."""
        training = self.training
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                done = self.seen / training.tokens
                group["lr"] = training.rate * schedule(done, training.decay)
        with torch.autocast(training.device, dtype=torch.bfloat16):
            logits = self.forward(
                input_ids=ids, use_cache=False
            ).logits[  # [B, T-1, V]
                :, :-1
            ]
        loss = weighted_loss(logits.float(), labels[:, 1:].to(ids.device), self.weights)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return loss.item()


def average(of: list[tuple[float, Path]], out: Path) -> None:
    """Save the average of models' weights, each weighing so much (Izmailov 2018)."""
    total = sum(weight for weight, _ in of)
    models = [
        (weight / total, LlamaForCausalLM.from_pretrained(path)) for weight, path in of
    ]
    mean = LlamaForCausalLM(models[0][1].config)
    with torch.no_grad():
        for name, parameter in mean.named_parameters():
            parts = [
                weight * model.get_parameter(name).float() for weight, model in models
            ]
            parameter.copy_(torch.stack(parts).sum(0))
    mean.bfloat16().save_pretrained(out / "target")


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("tokenizer", "average", *SHAPES))
    parser.add_argument(
        "--tokens", type=float, default=12e6, help="how many tokens to train on"
    )
    parser.add_argument("--rate", type=float, default=3e-3, help="peak learning rate")
    decay_help = "over which last share of the tokens the rate goes down"
    parser.add_argument("--decay", type=float, default=0.4, help=decay_help)
    pool_help = "which pool of 2,048 problems to begin with"
    parser.add_argument("--pool", type=int, default=0, help=pool_help)
    widen_help = "a narrower model of the same depth to begin with"
    parser.add_argument("--widen", type=Path, help=widen_help)
    parser.add_argument("--batch", type=int, default=8192, help="tokens in a batch")
    compare_help = "how often the family `compare` comes for once of each other"
    parser.add_argument("--compare", type=int, default=2, help=compare_help)
    gifts_help = "how often a lesson about gifts comes for once of each other family"
    parser.add_argument("--gifts", type=int, default=0, help=gifts_help)
    repeats_help = "the share of texts that are lessons in copying"
    parser.add_argument("--repeats", type=float, default=0, help=repeats_help)
    recalls_help = (
        "the share of texts that are lessons in looking up who has and gets how many"
    )
    parser.add_argument("--recalls", type=float, default=0, help=recalls_help)
    sums_help = (
        "the share of texts that are lessons in what purchases cost and what is left"
    )
    parser.add_argument("--sums", type=float, default=0, help=sums_help)
    numeric_help = "weight of digits and operators in the loss"
    parser.add_argument("--numeric", type=float, default=3, help=numeric_help)
    of_help = "with average: how much a model weighs, and its folder"
    parser.add_argument("--of", nargs=2, action="append", default=[], help=of_help)
    work_help = "where the state of the training is kept"
    parser.add_argument("--work", type=Path, default=Path("training"), help=work_help)
    parser.add_argument(
        "--out", type=Path, default=EMBEDDED, help="where the finished models go"
    )
    parser.add_argument(
        "--device", default="cuda" if torch.cuda.is_available() else "cpu"
    )
    return parser


def main() -> None:
    given = vars((parser := options()).parse_args())
    what = given.pop("what")
    of = given.pop("of")
    if what == "average":
        if not of:
            parser.error("average: name each model with --of WEIGHT FOLDER")
        average([(float(weight), Path(path)) for weight, path in of], given["out"])
    elif what == "tokenizer":
        for role in ("target", "draft"):
            build_tokenizer().save_pretrained(given["out"] / role)
    else:
        Trainer(Training(what, **given)).run()


if __name__ == "__main__":
    main()
