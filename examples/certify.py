"""Certify a judge on the built-in pair, and decode with the certificate."""

import shutil
import tempfile
from pathlib import Path

import lenience
from lenience.certification.certify import certify
from lenience.certification.question import CertifyConfig
from lenience.core.files import EMBEDDED


def main() -> None:
    pair, task = lenience.load_pair(), lenience.task("wordmath")
    with tempfile.TemporaryDirectory() as folder:
        run = (
            Path(folder) / "run"
        )  # yours comes from `lenience mine` and `lenience fit`
        shutil.copytree(EMBEDDED / "run", run)
        question = CertifyConfig(
            settings=(("exact; window=16", "judge@0.999; window=16"),),
            max_drop=0.2,  # two of ten answers may get worse; 0.01 takes many more prompts
            home=Path(folder) / "home",  # leave this out to count attempts across runs
        )
        certificate = certify(pair, task, run, question)
        assert certificate.certified is not None, certificate.reason
        print(
            "certified:",
            certificate.certified.rule,
            "window",
            certificate.certified.window,
        )
        print(f"loss at most {certificate.upper_bound:.1%}, {certificate.n} prompts")
        out = pair.generate(
            "Jack has 36 pears. Bob has 7 more. How many has Bob? Answer:",
            rule=f"certified:{run}",
        )
        print(out.text)


if __name__ == "__main__":
    main()
