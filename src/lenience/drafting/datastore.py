"""Drafting with continuations of the same tokens in a corpus (REST, He 2023)."""

from __future__ import annotations

import json
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from lenience.core.context import Context
from lenience.core.errors import InputError, first_line
from lenience.core.files import digest_bytes, replacing, stamp, write_json
from lenience.core.needs import Parts
from lenience.core.protocols import Drafter, TrainedPart
from lenience.core.types import Draft
from lenience.drafting.base import DrafterSetup, DrafterSpec
from lenience.drafting.lookup import check_dynamic, likeliest
from lenience.drafting.trees.growing import GrowingTree, as_draft
from lenience.drafting.trees.shapes import Tree
from lenience.models.lm import LM

ABOUT = "datastore.json"
TOKENS_FILE = "tokens.npy"
SUFFIXES_FILE = "suffixes.npy"
END = -1
"""Separator between documents."""
FEW = 16
"""Number of matches up to which continuations are grouped without sorting."""
FIX = "`lenience datastore CORPUS --out PATH` makes one"


@dataclass(frozen=True)
class Store:
    """A corpus in memory-mapped files, with a suffix array. The tokens are stored in reverse:
    suffixes of the reversed corpus that begin like a reversed text share the end of that text."""

    path: str
    tokens: NDArray[np.int32]
    suffixes: NDArray[np.int32]
    """Positions in `tokens` at which the suffixes begin, in sorted order."""
    about: Mapping[str, Any]
    prompts: tuple[str, ...] | None = None

    @property
    def fingerprint(self) -> str:
        """Return a hash that identifies the corpus."""
        return str(self.about["fingerprint"])

    def matches(self, text: Sequence[int], longest: int, shortest: int) -> range:
        """Return the range of suffixes that share the longest possible end with a text, of at most
        `longest` tokens. The range is empty if that end has fewer than `shortest` tokens."""
        wanted = list(text[: -longest - 1 : -1])
        at = bisect_left(self.suffixes, wanted, key=self._beginning(len(wanted)))
        beside = []
        for i in (at - 1, at):
            if 0 <= i < len(self.suffixes):
                beside.append(self._common(i, wanted))
        n = max(beside, default=0)
        if n < max(shortest, 1):
            return range(0)
        beginning = self._beginning(n)
        first = bisect_left(self.suffixes, wanted[:n], 0, at, key=beginning)
        return range(
            first,
            bisect_right(self.suffixes, wanted[:n], max(at - 1, 0), key=beginning),
        )

    def _beginning(self, n: int) -> Callable[[Any], list[int]]:
        """Return a function that returns the first n tokens of a suffix."""
        tokens = self.tokens
        return lambda start: tokens[start : start + n].tolist()

    def _common(self, i: int, wanted: list[int]) -> int:
        start = self.suffixes[i]
        held = self.tokens[start : start + len(wanted)].tolist()
        return next(
            (n for n, pair in enumerate(zip(held, wanted)) if pair[0] != pair[1]),
            len(held),
        )

    def followers(
        self, places: NDArray[np.int64]
    ) -> list[tuple[int, float, NDArray[np.int64]]]:
        """Return the tokens that follow at some positions of the corpus: each token, its share, and
        its positions."""
        after = places[places > 0] - 1
        found = self.tokens[after]
        if len(found) <= FEW:  # mostly; sorting costs several times more
            of: dict[int, list[int]] = {}
            for place, token in zip(after.tolist(), found.tolist()):
                of.setdefault(token, []).append(place)
            of.pop(END, None)
            total = sum(map(len, of.values()))
            made = list[tuple[int, float, NDArray[np.int64]]]()
            for token, at in sorted(of.items()):
                made.append((token, len(at) / total, np.array(at, np.int64)))
            return made
        after = after[found != END]
        found = found[found != END]
        values, which, counts = np.unique(
            found, return_inverse=True, return_counts=True
        )
        made = list[tuple[int, float, NDArray[np.int64]]]()
        for i, (token, n) in enumerate(zip(values, counts)):
            made.append((int(token), n / len(found), after[which == i]))
        return made


def build_store(documents: Iterator[list[int]], tokenizer: str, out: Path) -> Store:
    """Build and write a store of documents, given as token ids by the tokenizer with this
    fingerprint. Raises InputError if the documents have no tokens or pydivsufsort is not
    installed."""
    try:
        from pydivsufsort import divsufsort
    except ImportError:
        raise InputError(
            "building a datastore needs pydivsufsort: pip install 'lenience[datastore]'"
        ) from None
    parts: list[NDArray[np.int32]] = []
    for document in documents:
        parts += [np.array(document[::-1], np.int32), np.array([END], np.int32)]
    if not any(map(len, parts[::2])):
        raise InputError("the corpus has no tokens; name files with text")
    tokens = np.concatenate(parts[::-1])
    suffixes = divsufsort(tokens - END).astype(np.int32)  # numbers must be ≥ 0
    about = {
        "tokens": int((tokens != END).sum()),
        "documents": len(parts) // 2,
        "tokenizer": tokenizer,
        "fingerprint": digest_bytes(tokens.tobytes()),
    }
    for name, array in ((TOKENS_FILE, tokens), (SUFFIXES_FILE, suffixes)):
        with replacing(out / name) as new, new.open("wb") as file:
            np.save(file, array)
    write_json(out / ABOUT, about)
    return load_store(out)


def load_store(folder: str | Path) -> Store:
    """Return the store in a folder, memory-mapped. Raises InputError if it is missing or broken."""
    path = Path(folder)
    if not (path / ABOUT).is_file():
        raise InputError(f"datastore {folder}: there is no {ABOUT} in it; {FIX}")
    return _load(path, stamp(path / ABOUT))


@lru_cache(maxsize=2)
def _load(path: Path, changed: tuple[int, int]) -> Store:
    try:
        about = json.loads((path / ABOUT).read_text())
        # plain arrays on the mapped memory: slices of a memmap cost several times more
        arrays = []
        for name in (TOKENS_FILE, SUFFIXES_FILE):
            arrays.append(
                np.asarray(np.load(path / name, mmap_mode="r", allow_pickle=False))
            )
        if len({len(array) for array in arrays}) > 1 or len(arrays[0]) != _size(about):
            raise ValueError("its files come from different corpora")
        if any(array.ndim > 1 or array.dtype != np.int32 for array in arrays):
            raise ValueError("its files are no lists of 32-bit numbers")
        if not {"tokenizer", "fingerprint"} <= about.keys():
            raise ValueError(f"{ABOUT} names no tokenizer or no fingerprint")
        return Store(str(path), arrays[0], arrays[1], about)
    except (
        OSError,
        ValueError,
        LookupError,
        TypeError,
        AttributeError,
        EOFError,
    ) as error:
        why = f"{type(error).__name__}: {first_line(error)}"
        raise InputError(
            f"datastore {path}: is broken ({why}); build it again"
        ) from None


def _size(about: Mapping[str, Any]) -> int:
    return int(about["tokens"] + about["documents"])


@dataclass(frozen=True)
class Datastore(DrafterSpec):
    """Propose the most frequent continuation of the text's last tokens in a corpus (REST, He 2023).
    The longest match of `shortest` to `longest` tokens counts, at no more than `most` positions.
    The path to each proposed token makes up at least the share `least` of the continuations."""

    path: str
    longest: int = 16
    shortest: int = 2
    most: int = 256
    least: float = 0.1
    name = "datastore"
    offers = Parts.EARLY_ENDS | Parts.TREES

    def __post_init__(self) -> None:
        for what, number in (("longest", self.longest), ("most", self.most)):
            if number < 1:
                raise InputError(f"datastore's {what} {number}: must be 1 or more")
        if not 1 <= self.shortest <= self.longest:
            raise InputError(
                f"datastore's shortest {self.shortest}: must be from 1 to longest, "
                f"{self.longest}"
            )
        if not 0 <= self.least <= 1:
            raise InputError(f"datastore's least {self.least}: must be from 0 to 1")

    @cached_property
    def head(self) -> Store:
        return load_store(self.path)

    @property
    def fitted(self) -> tuple[TrainedPart, ...]:
        return (self,)

    def relocated(self, path: Callable[[str], str]) -> Self:
        return replace(self, path=path(self.path))

    def check(self, target: LM, fingerprints: Callable[[], Mapping[str, str]]) -> None:
        if self.head.about["tokenizer"] != target.tokenizer_fingerprint:
            raise InputError(
                f"datastore {self.path}: was built with another tokenizer "
                f"({self.head.about['tokenizer']}, this is "
                f"{target.tokenizer_fingerprint}); build "
                "it with this target"
            )

    def check_tree(self, tree: Tree) -> None:
        check_dynamic(self, tree)

    def build(self, setup: DrafterSetup) -> Drafter:
        return _DatastoreDrafter(self, setup)

    def look_up(
        self, text: Sequence[int], depth: int, tree: Tree, eos: frozenset[int]
    ) -> GrowingTree:
        """Return the most frequent continuation of a text's end, as a tree of at most `depth`
        levels."""
        store = self.head
        found = store.matches(text, self.longest, self.shortest)
        step = -(-len(found) // self.most) or 1
        places = store.suffixes[found.start : found.stop : step].astype(np.int64)
        return likeliest(
            store.followers, places, depth, tree, least=self.least, eos=eos
        )[0]


class _DatastoreDrafter(Drafter):
    def __init__(self, spec: Datastore, setup: DrafterSetup):
        self.spec = spec
        self.target = setup.target
        self.stop = setup.stop
        self.tree = setup.tree

    def propose(self, ctx: Context, room: Sequence[int]) -> Draft:
        grown = []
        for row, left in zip(ctx.rows, room):
            limit = max(0, min(self.stop.max_tokens(row, ctx.window), left - 1))
            asked = (row.prefix, limit, self.tree, self.target.eos_ids)
            grown.append(self.spec.look_up(*asked) if limit else GrowingTree())
        return as_draft(grown, self.target.device, trees=not self.tree.is_chain)
