"""A corpus's datastore: what it finds, and that drafting with it changes no strict answer."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
from conftest import make_tokenizer, prompt_lists, quick
from hypothesis import given
from hypothesis import strategies as st
from test_cli import documented

from lenience.cli import main
from lenience.core.errors import InputError
from lenience.decoding.pair import Pair
from lenience.drafting.corpus import documents
from lenience.drafting.datastore import END, Datastore, Store, build_store, load_store
from lenience.drafting.parsing import parse_tree
from lenience.tasks import WordMath

CORPUS = st.lists(st.lists(st.integers(1, 4), max_size=12), min_size=1, max_size=5)


def scanned(
    corpus: list[list[int]], text: list[int], longest: int
) -> tuple[int, list[tuple]]:
    """The length of the longest end of a text that stands in a corpus, and where."""
    for n in range(min(longest, len(text)), 0, -1):
        found = [
            (d, i + n)
            for d, document in enumerate(corpus)
            for i in range(len(document) - n + 1)
            if document[i : i + n] == text[-n:]
        ]
        if found:
            return n, found
    return 0, []


@given(
    corpus=CORPUS.filter(any),
    text=st.lists(st.integers(1, 5), min_size=1, max_size=10),
    longest=st.integers(1, 6),
    shortest=st.integers(1, 3),
)
def test_a_store_finds_what_a_scan_does(
    tmp_path_factory: pytest.TempPathFactory,
    corpus: list[list[int]],
    text: list[int],
    longest: int,
    shortest: int,
) -> None:
    folder = tmp_path_factory.mktemp("store")
    store = build_store(iter(corpus), "tokenizer", folder)
    n, found = scanned(corpus, text, longest)
    matches = store.matches(text, longest, shortest)
    if n < shortest:
        assert not matches
        return
    assert len(matches) == len(found)
    places = store.suffixes[matches.start : matches.stop].astype(np.int64)
    after = Counter(corpus[d][i] for d, i in found if i < len(corpus[d]))
    given = {token: (share, len(at)) for token, share, at in store.followers(places)}
    assert {token: n for token, (_, n) in given.items()} == after
    assert {token: share for token, (share, _) in given.items()} == pytest.approx(
        {token: n / after.total() for token, n in after.items()}
    )
    # and once more behind each
    for token, _, at in store.followers(places):
        behind = [
            (d, i) for d, i in found if i < len(corpus[d]) and corpus[d][i] == token
        ]
        then = Counter(corpus[d][i + 1] for d, i in behind if i + 1 < len(corpus[d]))
        assert {t: len(p) for t, _, p in store.followers(at)} == then


def test_tokens_have_32_bits(tmp_path: Path) -> None:
    """REST's own store cuts them to 16."""
    store = build_store(
        iter([[70_001, 4_465, 90_000, 7], [4_465, 5]]), "tokenizer", tmp_path
    )
    (place,) = store.matches([70_001, 4_465], 4, 2)
    ((token, share, _),) = store.followers(
        store.suffixes[place : place + 1].astype(np.int64)
    )
    assert (token, share) == (90_000, 1.0)


@given(
    corpus=CORPUS.filter(any),
    text=st.lists(st.integers(1, 4), min_size=1, max_size=6),
    depth=st.integers(1, 5),
    least=st.floats(0, 1),
    most=st.integers(1, 30),
    nodes=st.integers(0, 6),
)
def test_what_mostly_followed_is_proposed(
    tmp_path_factory: pytest.TempPathFactory,
    corpus: list[list[int]],
    text: list[int],
    depth: int,
    least: float,
    most: int,
    nodes: int,
) -> None:
    """Against counting in the corpus: a chain of what followed most, or the likeliest paths."""
    folder = tmp_path_factory.mktemp("store")
    store = build_store(iter(corpus), "tokenizer", folder)
    spec = Datastore(str(folder), longest=3, shortest=1, most=most, least=least)
    tree = parse_tree(f"dynamic:{nodes}" if nodes else "chain")
    grown = spec.look_up(text, depth, tree, frozenset())
    matches = store.matches(text, 3, 1)
    looked_at = [*matches][:: -(-len(matches) // most) or 1]
    assert len(looked_at) <= most
    after = []  # what stands behind each place that is looked at
    for i in looked_at:
        place = int(store.suffixes[i])
        before = store.tokens[:place][::-1].tolist()
        after.append(before[: before.index(END)] if END in before else before)
    shares = {}  # of each path, one token's share of what followed the path before it, multiplied

    def count(path: tuple[int, ...], share: float) -> None:
        following = [text[len(path)] for text in after if tuple(text[: len(path)]) == path
                     and len(text) > len(path)]  # fmt: skip
        for token in set(following):
            part = share * following.count(token) / len(following)
            if part >= least and len(path) < depth:
                shares[*path, token] = part
                count((*path, token), part)

    count((), 1.0)
    paths = {-1: ()}
    for i, (token, parent) in enumerate(zip(grown.tokens, grown.parents)):
        paths[i] = (*paths[parent], token)
    del paths[-1]
    found = [*paths.values()]
    assert all(path in shares for path in found)
    if nodes:
        best = sorted(shares.values(), reverse=True)[:nodes]
        assert sorted((shares[path] for path in found), reverse=True) == pytest.approx(
            best
        )
        return
    for n in range(depth):
        beside = {
            p: s
            for p, s in shares.items()
            if len(p) == n + 1 and p[:-1] == ((), *found)[n]
        }
        assert len(found) > n if beside else len(found) == n
        if not beside:
            break
        assert shares[found[n]] == pytest.approx(max(beside.values()))


@pytest.fixture(scope="module")
def store(llama: Pair, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One of what the target itself says, which is worth looking up."""
    folder = tmp_path_factory.mktemp("answers")
    outs = llama.generate_batch(
        [[i] for i in range(1, 30)], rule="target", max_new_tokens=30
    )
    corpus = (out.prompt_tokens + out.tokens for out in outs)
    build_store(corpus, llama.target.tokenizer_fingerprint, folder)
    return folder


@pytest.mark.parametrize("tree", ["chain", "dynamic:6"])
@quick(5)
@given(prompts=prompt_lists(3))
def test_a_datastore_changes_no_strict_answer(
    llama: Pair, store: Path, tree: str, prompts: list[list[int]]
) -> None:
    drafter = f"datastore:{store},shortest=1"
    for temperature in (0.0, 0.8):
        options = {"max_new_tokens": 24, "temperature": temperature, "seed": 3}
        alone = llama.generate_batch(prompts, rule="target", **options)
        outs = llama.generate_batch(
            prompts, drafter=drafter, tree=tree, batch_size=2, rule="exact", **options
        )
        assert [out.tokens for out in outs] == [out.tokens for out in alone]
    for joined in (f"{drafter}>model", f"model:2+{drafter}", f"ngram|{drafter}"):
        out = llama.generate(prompts[0], drafter=joined, max_new_tokens=24)
        assert (
            out.tokens
            == llama.generate(prompts[0], rule="target", max_new_tokens=24).tokens
        )


def test_a_datastore_of_the_targets_answers_is_right(llama: Pair, store: Path) -> None:
    out = llama.generate([5], drafter=f"datastore:{store}", window=8, max_new_tokens=30)
    alone = llama.generate([5], rule="target", max_new_tokens=30)
    assert out.tokens == alone.tokens
    # from the second token on, where the match is long enough, all is found
    assert out.target_passes <= 2 + len(alone.tokens) / 4
    decoder = llama.decoder({"drafter": f"datastore:{store}"})
    assert llama.binding(decoder)["heads"] == [load_store(store).fingerprint]


def test_documents_of_files(tmp_path: Path) -> None:
    tokenizer = make_tokenizer()
    rows = [{"text": "w1 w2"}, {"text": "w3"}]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    with gzip.open(tmp_path / "b.jsonl.gz", "wt") as file:
        file.write(json.dumps({"body": "w4 w5 w6"}))
    (tmp_path / "c.txt").write_text("w7 w8")

    def read(*names: str, field: str = "text") -> list[list[int]]:
        seen: list[int] = []
        found = documents(
            [tmp_path / name for name in names], tokenizer, "m", field,
            lambda what, done, total: seen.append(done / total),
        )  # fmt: skip
        whole = [*found]
        assert seen == sorted(seen) and 0 < seen[-1] <= 1
        return whole

    assert read("a.jsonl", "c.txt") == [[1, 2], [3], [7, 8]]
    assert read("b.jsonl.gz", field="body") == [[4, 5, 6]]
    with pytest.raises(InputError, match=r"b.jsonl.gz, line 1: has no text in 'text'"):
        read("b.jsonl.gz")
    (tmp_path / "bad.jsonl").write_text("{")
    with pytest.raises(InputError, match="line 1: is not JSON"):
        read("bad.jsonl")
    (tmp_path / "bad.txt").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match="cannot be read as text"):
        read("bad.txt")
    with pytest.raises(InputError, match="no such file"):
        read("none.txt")


def test_the_command_and_its_refusals(
    tmp_path: Path, llama: Pair, capsys: pytest.CaptureFixture[str]
) -> None:
    (sample,) = islice(WordMath().samples("test"), 1)
    (tmp_path / "corpus.txt").write_text(str(sample.prompt))
    out = tmp_path / "store"

    def status(*arguments: str) -> int:
        try:
            main(["datastore", *arguments, "--out", str(out)])
        except SystemExit as ended:
            return int(ended.code or 0)
        return 0

    assert status(str(tmp_path / "corpus.txt"), "--json") == 0
    about = json.loads(capsys.readouterr().out)
    assert set(about) == documented(["datastore"])[0]
    assert about["documents"] == 1 and about["drafter"] == f"datastore:{out}"
    with pytest.raises(InputError, match="with another tokenizer"):
        llama.generate("w1", drafter=f"datastore:{out}")
    assert status(str(tmp_path / "none.txt")) == 2
    (tmp_path / "empty.txt").write_text("")
    assert status(str(tmp_path / "empty.txt")) == 2
    for spec, match in {
        f"datastore:{tmp_path / 'x'}": "no datastore.json",
        f"datastore:{out},shortest=0": "shortest 0",
        f"datastore:{out},most=0": "most 0",
    }.items():
        with pytest.raises(InputError, match=match):
            llama.generate("w1", drafter=spec)
    np.save(out / "suffixes.npy", np.zeros(1, np.int32))
    (out / "datastore.json").touch()
    with pytest.raises(InputError, match="come from different corpora"):
        llama.generate("w1", drafter=f"datastore:{out}")


def test_a_store_is_read_from_its_files(tmp_path: Path) -> None:
    built = build_store(iter([[1, 2, 3]]), "t", tmp_path)
    assert isinstance(built, Store) and built.about["tokens"] == 3
    assert not built.tokens.flags.writeable  # mapped for reading
