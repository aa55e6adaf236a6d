"""Decode one prompt strictly and leniently, and show where each token came from."""

import lenience

PROMPT = (
    "Jack has 36 pears. Bob has twice as many pears as Jack. How many has Bob? Answer:"
)


def main() -> None:
    pair = lenience.load_pair()  # or load_pair("Qwen/Qwen3-8B", "Qwen/Qwen3-0.6B")
    for rule, window in (("target", 0), ("exact", 8), ("judge@0.99", 16)):
        out = pair.generate(PROMPT, rule=rule, window=window)
        print(
            f"{rule}: {out.target_passes} passes of the target for {len(out.tokens)} tokens"
        )
        print(out.text)
        accepted = [
            pair.tokenizer.decode(entry.token)
            for entry in out.trace
            if entry.origin == "draft-lenient"
        ]
        print("accepted only by the judge:", accepted, end="\n\n")


if __name__ == "__main__":
    main()
