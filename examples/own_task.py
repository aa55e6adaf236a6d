"""Load a task of your own from JSON rows, and compare two rules on it."""

import json
import tempfile
from pathlib import Path

import lenience
from lenience.tasks import WordMath, take

RULES = ("exact", "topk:2", "judge@0.99")


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        rows = Path(folder) / "rows.jsonl"  # yours: one JSON object per line
        with rows.open("w") as file:
            for sample in take(WordMath(), "test", 20):
                row = {"question": sample.prompt, "answer": sample.reference}
                file.write(json.dumps(row) + "\n")
        task = lenience.task(
            str(rows),
            answer="last-number",
            prompt_field="question",
            reference_field="answer",
        )
        pair = lenience.load_pair()
        samples = list(task.samples("test"))
        prompts = [sample.prompt for sample in samples]
        for rule in RULES:
            outs = pair.generate_batch(prompts, rule=rule, window=8)
            right = sum(
                task.correct(out.text, sample) for out, sample in zip(outs, samples)
            )
            passes = sum(out.target_passes for out in outs)
            print(
                f"{rule}: {right} of {len(outs)} right, {passes} passes of the target"
            )


if __name__ == "__main__":
    main()
