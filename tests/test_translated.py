"""A draft of another tokenizer: proposals are translated, and strict answers stay the target's."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path

import pytest
import torch
from conftest import COMMON, SMALL
from test_decode import plain_greedy
from test_mining import lines
from test_serve import serves_as_alone
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

import lenience
from lenience import InputError
from lenience.core.context import Context
from lenience.decoding.decoder import Decoder
from lenience.decoding.pair import Pair
from lenience.drafting.translated import TranslatedDrafter
from lenience.heads.head import Inputs
from lenience.mining.search import MineConfig, mine
from lenience.models.lm import LM
from lenience.models.translation import Translation, shares_vocabulary
from lenience.tasks.base import Sample
from lenience.training.fit import HeadPlan, fit_run
from lenience.training.fit_drafter import DrafterPlan, fit_drafter

README = (Path(__file__).parents[1] / "README.md").read_text()
TEXTS = [README[at : at + 60] for at in range(200, 1400, 90)]


def byte_level() -> PreTrainedTokenizerFast:
    """A byte-level BPE, as GPT-2, Llama 3 and Qwen have."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        README.split("\n"),
        trainers.BpeTrainer(
            vocab_size=500,
            special_tokens=["<|end|>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>")


def sentence_piece() -> PreTrainedTokenizerFast:
    """A unigram model over words with "▁", as SentencePiece makes for Llama 2 and Gemma."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.train_from_iterator(
        README.split("\n"),
        trainers.UnigramTrainer(
            vocab_size=400,
            special_tokens=["</s>", "<unk>"],
            unk_token="<unk>",
            show_progress=False,
        ),
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="</s>", unk_token="<unk>"
    )


TOKENIZERS = {"byte-level": byte_level, "sentence-piece": sentence_piece}


def save(folder: Path, kind: str, seed: int) -> str:
    tokenizer = TOKENIZERS[kind]()
    config = LlamaConfig(
        **{**COMMON, **SMALL, "vocab_size": len(tokenizer)}, num_key_value_heads=2
    )
    config.eos_token_id = tokenizer.eos_token_id
    torch.manual_seed(seed)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def translated(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Pair]:
    """Pairs whose draft has the other tokenizer, by the target's tokenizer."""
    folder = tmp_path_factory.mktemp("translated")
    made = {}
    for target, draft in (TOKENIZERS, reversed(TOKENIZERS)):
        made[target] = lenience.load_pair(
            save(folder / f"{target}-target", target, 1),
            save(folder / f"{draft}-draft", draft, 2),
            dtype="float32",
            compile=False,
        )
    return made


@pytest.mark.parametrize("target", TOKENIZERS)
@pytest.mark.parametrize("window", [1, 4, 8])
def test_strict_answers_are_the_targets_own(
    translated: dict[str, Pair], target: str, window: int
) -> None:
    pair = translated[target]
    outs = pair.generate_batch(TEXTS, window=window, max_new_tokens=20, batch_size=3)
    for out, text in zip(outs, TEXTS):
        assert out.tokens == plain_greedy(pair, pair.target.encode(text), 20)
    assert sum(out.drafted for out in outs) > 0


@pytest.mark.parametrize("target", TOKENIZERS)
def test_the_text_that_the_draft_continues_with_is_proposed(
    translated: dict[str, Pair], target: str
) -> None:
    """Against plain generation of the draft on the text alone."""
    pair = translated[target]
    draft = pair.draft
    assert draft is not None
    said = 0
    for text in TEXTS:
        ids = pair.target.encode(text)
        whole = pair.target.tokenizer.decode(ids)
        own = draft.tokenizer(whole, add_special_tokens=False)["input_ids"]
        more = plain_greedy(Pair(draft, None, "draft"), own, 4)
        translation = Translation(pair.target, draft)
        proposed = translation.to_target(ids, translation.to_draft(ids), more)
        before = draft.tokenizer.decode(own)
        continued = draft.tokenizer.decode(own + more)
        if proposed and continued.startswith(before):
            assert (
                pair.target.tokenizer.decode(ids + proposed)
                == whole + continued[len(before) :].split("�")[0]
            )
            said += 1
    assert said >= 5


@pytest.mark.parametrize("target", TOKENIZERS)
def test_shared_tokens_stand_for_the_same_text(
    translated: dict[str, Pair], target: str
) -> None:
    pair = translated[target]
    draft = pair.draft
    assert draft is not None
    shared = Translation(pair.target, draft).shared
    known = [(t, int(d)) for t, d in enumerate(shared) if d >= 0]
    assert len(known) > 100
    space = {"Ġ": " ", "▁": " "}
    for ours, theirs in known:
        if ours in pair.target.eos_ids:
            assert theirs in draft.eos_ids
            continue
        a = pair.target.tokenizer.convert_ids_to_tokens(ours)
        b = draft.tokenizer.convert_ids_to_tokens(theirs)
        if a.isascii() and b.isascii():
            assert a == b
        elif a[0] in space and b[0] in space and (a + b)[1:].count("Ġ") < 2:
            assert space[a[0]] + a[1:] == space[b[0]] + b[1:]


@pytest.mark.parametrize("lossless", ["speculative", "block"])
def test_sampling_keeps_the_targets_distribution(
    translated: dict[str, Pair], lossless: str
) -> None:
    """The first two tokens over many seeds, against the target alone."""
    pair = translated["byte-level"]
    ids = pair.target.encode(TEXTS[0])
    counts = []
    for rule, first in ((lossless, 0), ("target", 10_000)):
        options = {"rule": rule, "window": 2, "temperature": 0.4, "max_new_tokens": 2}
        outs = [
            pair.generate(ids, seed=seed, **options)
            for seed in range(first, first + 400)
        ]
        counts.append(Counter(tuple(out.tokens) for out in outs))
    often = [pair for pair in counts[0] | counts[1] if sum(c[pair] for c in counts) > 7]
    assert len(often) > 3
    # two samples of the same distribution: a chi-square of as many degrees
    chi = sum(
        (counts[0][pair] - counts[1][pair]) ** 2 / (counts[0][pair] + counts[1][pair])
        for pair in often
    )
    assert chi < len(often) + 4 * math.sqrt(2 * len(often))


def test_a_rule_that_looks_ahead_gets_fresh_draws_for_each_window(
    translated: dict[str, Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A draw that has decided on an earlier window must not draw a token of the next."""
    fresh: list[bool] = []
    noise_keys = Context.noise_keys

    def noted(ctx: Context, *args: object, **named: object) -> torch.Tensor:
        fresh.append(ctx.fresh_noise_per_window)
        return noise_keys(ctx, *args, **named)

    monkeypatch.setattr(Context, "noise_keys", noted)
    options = {"temperature": 1.0, "seed": 1, "window": 3, "max_new_tokens": 9}
    translated["byte-level"].generate(TEXTS[0], rule="block", **options)
    assert fresh and all(fresh)


def test_where_all_tokens_are_shared_it_drafts_as_the_model_does(
    translated: dict[str, Pair],
) -> None:
    """A tokenizer that differs by one word that nobody says."""
    pair = translated["byte-level"]
    assert pair.draft is not None
    backend = pair.target.tokenizer.backend_tokenizer.to_str()
    other = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(backend), eos_token="<|end|>"
    )
    other.add_tokens(["never said"])
    same = Pair(pair.target, LM(pair.target.model, byte_level(), "t", "draft"), "same")
    apart = Pair(pair.target, LM(pair.target.model, other, "t", "draft"), "apart")
    options = {"rule": "speculative", "temperature": 0.3, "seed": 3, "window": 4}
    for text in TEXTS:
        # later cycles read the answer's text, which may be tokenised otherwise than it was written
        steps = [
            next(iter(p.stream(text, max_new_tokens=16, **options)))
            for p in (same, apart)
        ]
        assert steps[0].tokens == steps[1].tokens
        assert steps[0].accepted_exact == steps[1].accepted_exact


class Letters:
    """Whether the answer's text has an even number of letters."""

    name, version, max_new_tokens, stop_strings = "letters", 1, 12, ()

    def samples(self, split: str):
        yield from (Sample(f"{split}-{i}", text, None) for i, text in enumerate(TEXTS))

    def answer(self, text: str, sample: Sample | None = None) -> str:
        return str(sum(map(str.isalpha, text)) % 2)

    def same(self, a: str | None, b: str | None) -> bool:
        return a == b


def test_judges_of_the_targets_states_are_mined_and_fitted(
    translated: dict[str, Pair], tmp_path: Path
) -> None:
    pair = translated["byte-level"]
    mine(pair, Letters(), tmp_path, MineConfig(limit=12, max_new_tokens=12))
    swaps = [swap for record in lines(tmp_path) for swap in record["mismatches"]]
    assert {swap["important"] for swap in swaps} == {True, False}
    with pytest.raises(InputError, match="take --models target"):
        fit_run(pair, tmp_path, HeadPlan(Inputs(), tmp_path / "judge"))
    plan = HeadPlan(Inputs(("target",)), tmp_path / "judge")
    fit_run(pair, tmp_path, plan)
    rule = f"judge:{tmp_path / 'judge'}@0.5"
    assert pair.generate(TEXTS[0], rule=rule, window=4, max_new_tokens=12).tokens
    with pytest.raises(InputError, match="take --layers"):
        fit_drafter(pair, tmp_path, DrafterPlan("model", tmp_path / "model"))


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"rule": "draft"}, "rule draft"),
        ({"tree": "dynamic:8"}, "tree dynamic:8"),
        ({"rule": "fuzzy:js@0.3"}, "rule fuzzy:js@0.3"),
        ({"stop": "confidence:0.5"}, "stop confidence:0.5"),
        ({"drafter": "ngram:1+model"}, "drafter ngram:1"),
        ({"drafter": "ngram>model"}, "drafter ngram>model"),
        ({"temperature": 1.0, "draft_temperature": 0.5}, "draft_temperature"),
    ],
)
def test_what_needs_the_draft_itself_is_refused_by_name(
    translated: dict[str, Pair], options: dict[str, str], what: str
) -> None:
    with pytest.raises(InputError, match=f"{what}.*another tokenizer"):
        translated["byte-level"].generate(TEXTS[0], **options)


def test_what_the_draft_reads_is_counted(
    translated: dict[str, Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = translated["byte-level"]
    assert pair.draft is not None
    pair.generate(TEXTS[0], max_new_tokens=2)  # measures memory
    read: list[int] = []
    forward = pair.draft.model.forward

    def counted(input_ids: torch.Tensor, **options: object) -> object:
        read.append(input_ids.shape[1])
        return forward(input_ids, **options)

    monkeypatch.setattr(pair.draft.model, "forward", counted)
    out = pair.generate(TEXTS[0], window=4, max_new_tokens=12)
    assert (out.draft_tokens, out.draft_passes) == (sum(read), len(read))


def test_another_draft_in_the_same_place_is_another_draft(
    translated: dict[str, Pair],
) -> None:
    """Python may give a new object the id of a deleted one."""
    target = translated["byte-level"].target
    own, other = byte_level(), sentence_piece()
    for i in range(60):
        tokenizer = (own, other)[i % 2]
        draft = LM(target.model, tokenizer, "draft", "draft")
        assert shares_vocabulary(target, draft) == (i % 2 == 0)
        del draft


def test_the_drafter_is_used(translated: dict[str, Pair]) -> None:
    pair = translated["byte-level"]
    _, drafter = pair.engine(Decoder.parse("exact"), 1, 64)
    assert isinstance(drafter, TranslatedDrafter)


def test_a_sampling_neighbour_changes_no_greedy_proposal(
    translated: dict[str, Pair],
) -> None:
    """Greedy rows are drafted through text, others through shared tokens, also in one batch."""
    for pair in translated.values():
        serves_as_alone(pair, {"window": 4}, "topk:3")
