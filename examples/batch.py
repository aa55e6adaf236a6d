"""Answer many prompts in a batch, and stream one answer as it is decoded."""

import lenience
from lenience.tasks import WordMath, take


def main() -> None:
    pair = lenience.load_pair()
    samples = take(WordMath(), "test", 8)
    prompts = [sample.prompt for sample in samples]

    # answers arrive as they are finished, each the same as if decoded alone
    for number, out in pair.as_completed(prompts, rule="exact", batch_size=4):
        right = WordMath().correct(out.text, samples[number])
        print(
            f"prompt {number}: {out.tokens_per_pass:.2f} tokens per pass, right: {right}"
        )

    print("\nstreaming:")
    for step in pair.stream(prompts[0], rule="judge@0.99", window=16):
        print(step.text, end="|", flush=True)
    print()


if __name__ == "__main__":
    main()
