"""Break the source in one place at a time, and see that the tests notice.

    python tools/mutants.py                          the default level on all mutations
    python tools/mutants.py --level all              every test but vLLM's
    python tools/mutants.py --only guarded-kl-swapped …   some mutations, by name
    python tools/mutants.py --named                  only the test modules that each mutation names

Each mutation of tools/mutants.json changes one line of a copy of the tree. The test modules that it
names run first, then the rest of the level; the first failure ends the run. An unchanged copy is
tried first, as its tests must pass. Results are printed as they come, and kept in --out, from which
a second call resumes. The exit status is 1 if a mutation survives, 2 if the unchanged copy fails.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
MUTATIONS = Path(__file__).with_suffix(".json")
COPIED: tuple[str, ...] = (
    "src",
    "tests",
    "docs",
    "benchmarks",
    "studies",
    "tools",
    "examples",
    "SECURITY.md",
    "CITATION.cff",
    "CODE_OF_CONDUCT.md",
    "mkdocs.yml",
    "README.md",
    "CONTRIBUTING.md",
)
COPIED += (
    "pyproject.toml",
    "constraints.txt",
    "CHANGELOG.md",
    "Makefile",
    "LICENSE",
    ".gitignore",
)
CONTROL = "unchanged"
LEVELS = {"default": "not slow", "all": ""}
SECONDS = 1800
"""Time limit of a run; a mutation that hangs the tests counts as caught."""


@dataclass(frozen=True)
class Mutation:
    """One changed line."""

    name: str
    file: str
    old: str
    new: str
    why: str
    """What breaks."""
    numerics: bool
    first: tuple[str, ...] = ()
    """Test modules that run before the others."""

    def apply(self, root: Path) -> None:
        """Change the line in a tree. Raises ValueError if it is not there exactly once."""
        path = root / self.file
        text = path.read_text(encoding="utf-8")
        if text.count(self.old) != 1:
            raise ValueError(
                f"{self.name}: {self.file} has {text.count(self.old)} times {self.old!r}"
            )
        path.write_text(text.replace(self.old, self.new), encoding="utf-8")


def mutations() -> list[Mutation]:
    """Read tools/mutants.json."""
    rows = json.loads(MUTATIONS.read_text(encoding="utf-8"))
    return [Mutation(**{**row, "first": tuple(row.get("first", ()))}) for row in rows]


def try_mutation(
    mutation: Mutation | None, level: str, named: bool
) -> dict[str, object]:
    """Run a level of the tests, or only the `named` modules of it, on a copy of the tree, changed
    unless `mutation` is None. Returns the first failing test, if any."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="lenience-mutant-") as folder:
        tree = Path(folder)
        for name in COPIED:
            source = ROOT / name
            if source.is_dir():
                shutil.copytree(
                    source, tree / name, ignore=shutil.ignore_patterns("__pycache__")
                )
            elif source.exists():
                shutil.copy(source, tree / name)
        first: list[str] = []
        if mutation is not None:
            mutation.apply(tree)
            first = [f"tests/{name}" for name in mutation.first]
        failed = _first_failure(tree, level, first) if first else None
        if not named:
            failed = failed or _first_failure(tree, level, [])
    seconds = round(time.monotonic() - began)
    name = CONTROL if mutation is None else mutation.name
    level = f"{level}, named" if named else level
    return {"name": name, "level": level, "caught_by": failed, "seconds": seconds}


def _first_failure(tree: Path, level: str, paths: list[str]) -> str | None:
    """Return the id of the first test that fails in a tree; None if all pass."""
    command = [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider"]
    command += ["-m", LEVELS[level], *paths]
    env = {
        **os.environ,
        "PYTHONPATH": str(tree / "src"),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    try:
        done = subprocess.run(
            command, cwd=tree, env=env, capture_output=True, text=True, timeout=SECONDS
        )
    except subprocess.TimeoutExpired:
        return "time limit"
    if done.returncode == 0:
        return None
    failures = [
        line
        for line in done.stdout.splitlines()
        if line.startswith(("FAILED", "ERROR"))
    ]
    return failures[0].split(" - ")[0] if failures else f"exit status {done.returncode}"


def kept(path: Path | None, level: str) -> list[dict[str, object]]:
    """Return the results of an earlier call at a level."""
    if path is None or not path.exists():
        return []
    results = [
        json.loads(line)
        for line in path.read_text(encoding="utf-8").split("\n")
        if line
    ]
    return [result for result in results if result["level"] == level]


def run(wanted: list[Mutation], args: argparse.Namespace) -> list[dict[str, object]]:
    """Try the unchanged tree and mutations, some in parallel, and print and keep each result as it
    comes."""
    results = kept(args.out, f"{args.level}, named" if args.named else args.level)
    done = {result["name"] for result in results}
    left: list[Mutation | None] = [
        mutation for mutation in wanted if mutation.name not in done
    ]
    if CONTROL not in done and not args.named:
        left.insert(0, None)
    with ThreadPoolExecutor(args.at_once) as pool:
        for result in pool.map(
            lambda mutation: try_mutation(mutation, args.level, args.named), left
        ):
            results.append(result)
            passed = "all tests pass" if result["name"] == CONTROL else "SURVIVED"
            by = result["caught_by"] or passed
            print(f"{result['name']:36} {result['seconds']:5} s  {by}", flush=True)
            if args.out:
                with args.out.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(result) + "\n")
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--level", choices=list(LEVELS), default="default")
    parser.add_argument("--only", nargs="*", help="names of mutations")
    parser.add_argument(
        "--named", action="store_true", help="only the modules a mutation names"
    )
    parser.add_argument(
        "--out", type=Path, help="JSON lines of results; a second call resumes"
    )
    parser.add_argument(
        "--at-once", type=int, default=2, help="mutations tried in parallel"
    )
    args = parser.parse_args()
    known = mutations()
    if unknown := set(args.only or ()) - {mutation.name for mutation in known}:
        parser.error(
            f"--only {sorted(unknown)[0]}: no such mutation in {MUTATIONS.name}"
        )
    wanted = [
        mutation for mutation in known if not args.only or mutation.name in args.only
    ]
    results = run(wanted, args)
    control = next((result for result in results if result["name"] == CONTROL), None)
    if control and control["caught_by"]:
        print(f"the tests fail without a mutation: {control['caught_by']}")
        raise SystemExit(2)
    tried = [result for result in results if result["name"] != CONTROL]
    survived = [result["name"] for result in tried if not result["caught_by"]]
    print(f"{len(tried) - len(survived)} of {len(tried)} caught")
    raise SystemExit(1 if survived else 0)


if __name__ == "__main__":
    main()
