r"""A draft with another tokenizer than its target: trained from nothing on the target's answers.

    python benchmarks/other_tokenizer.py --answers WORK/answers --target WORK/target --work FOLDER

ANSWERS is a run of `lenience mine --answers-only`, such as that of benchmarks/real.py. The draft is
a small Llama with a unigram tokenizer over words, as SentencePiece makes. Its proposals are
translated (docs/models.md). Training keeps its last epoch and goes on from it.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from recording import write_results
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import lenience
from lenience.decoding.pair import Pair

RESULTS = Path(__file__).parent / "results" / "other-tokenizer.json"
VOCABULARY = 2000
LENGTH = 192
EPOCHS = 8
ROWS = 16
RATE = 1e-3
TEST = 40
"""Number of answers kept out of training, on whose prompts the draft is timed."""


def tokenizer_of(texts: Sequence[str]) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["</s>", "<unk>"],
        unk_token="<unk>",
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="</s>", unk_token="<unk>"
    )


def batches(rows: list[list[int]], seed: int) -> Iterator[torch.Tensor]:
    """Yield batches of token ids, padded with the EOS."""
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))
    for first in range(0, len(rows), ROWS):
        part = [rows[i] for i in order[first : first + ROWS].tolist()]
        width = max(map(len, part))
        yield torch.tensor([row + [0] * (width - len(row)) for row in part])


def train(texts: Sequence[str], folder: Path) -> None:
    """Train the draft, epoch by epoch, and save it after each."""
    done = folder / "epochs.json"
    epochs = json.loads(done.read_text()) if done.exists() else 0
    if epochs:
        tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
        model = LlamaForCausalLM.from_pretrained(folder)
    else:
        tokenizer = tokenizer_of(texts)
        torch.manual_seed(0)
        model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=len(tokenizer),
                hidden_size=256,
                intermediate_size=768,
                num_hidden_layers=4,
                num_attention_heads=4,
                num_key_value_heads=4,
                max_position_embeddings=1024,
                eos_token_id=tokenizer.eos_token_id,
                bos_token_id=None,
            )
        )
    rows = [[*tokenizer(text)["input_ids"][: LENGTH - 1], 0] for text in texts]
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.01)
    for epoch in range(epochs, EPOCHS):
        for rate in optimizer.param_groups:
            rate["lr"] = RATE * (1 - epoch / EPOCHS)
        losses = []
        for ids in batches(rows, epoch):
            with torch.autocast("cpu", torch.bfloat16):
                logits = model(ids[:, :-1]).logits
            loss = torch.nn.functional.cross_entropy(
                logits.float().flatten(0, 1), ids[:, 1:].flatten()
            )
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        done.write_text(json.dumps(epoch + 1))
        print(f"epoch {epoch + 1}: loss {sum(losses) / len(losses):.3f}", flush=True)


def measured(pair: Pair, prompts: Sequence[list[int]]) -> list[dict[str, float]]:
    """Return tokens per second and per pass, alone and strictly at several windows."""
    wanted = [
        out.tokens
        for out in pair.generate_batch(
            prompts, rule="target", max_new_tokens=128, batch_size=1
        )
    ]
    rows = []
    for window in (0, 2, 4, 6):
        rule = "exact" if window else "target"
        began = time.perf_counter()
        outs = pair.generate_batch(
            prompts, rule=rule, window=window, max_new_tokens=128, batch_size=1
        )
        seconds = time.perf_counter() - began
        tokens = sum(len(out.tokens) for out in outs)
        passes = sum(out.target_passes for out in outs)
        rows.append(
            {
                "window": window,
                "tokens_per_second": tokens / seconds,
                "tokens_per_pass": tokens / passes,
                "same": sum(o.tokens == w for o, w in zip(outs, wanted)),
                "prompts": len(prompts),
            }
        )
        print(rows[-1], flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--answers", type=Path, required=True)
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True)
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    lines = (args.answers / "journal.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    target = lenience.load_pair(str(args.target), dtype="float32", compile=False).target
    texts = [
        str(target.tokenizer.decode(record["prompt_ids"] + record["response_ids"]))
        for record in records
    ]
    train(texts[:-TEST], args.work)
    pair = lenience.load_pair(
        str(args.target), str(args.work), dtype="float32", compile=True
    )
    prompts = [record["prompt_ids"] for record in records[-TEST:]]
    rows = measured(pair, prompts)
    for row in rows:
        row["times"] = row["tokens_per_second"] / rows[0]["tokens_per_second"]
    write_results(RESULTS, {"rows": rows})


if __name__ == "__main__":
    main()
