"""Training of EAGLE-3's draft model on the target's own answers (Li 2025, section 3)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor
from transformers import DynamicCache, LlamaConfig

from lenience.drafting.eagle_model import EagleModel, EagleWeights
from lenience.models.lm import LM
from lenience.models.pass_cache import States
from lenience.models.session import Session
from lenience.models.vocabulary import ranks
from lenience.training.trainer import (
    ANSWERS_PER_STEP,
    Answer,
    batches,
    by_length,
    mean_cross_entropy,
)

STEPS = 5
"""Number of successive drafted tokens in training, where drafting continues from the model's own
states."""
FURTHER_WEIGHT = 0.8
"""Factor of each further token's loss."""
LEARNING_RATE = 1e-3
WIDTH = 320
"""Hidden size up to which the first learning rate is LEARNING_RATE; for wider models it falls in
inverse proportion."""
INITIAL = 0.02
"""Standard deviation of the initial weights."""
VOCABULARY_TENSORS = ("d2t", "t2d")
"""Tensors that list a draft vocabulary, as EAGLE-3 publishes it."""
OUTSIDE = -1
"""Label of a token outside the draft vocabulary, which is never drafted."""
NOT_ASKED = -100
"""Label of a position without a loss: in the prompt, or beyond the end of the answer."""


class EagleFit:
    """Training of a model with one layer on the target's answers. The target's features are
    computed anew in each epoch, since keeping all of them would use too much memory."""

    def __init__(
        self,
        target: LM,
        answers: Sequence[Answer],
        held_out: Sequence[Answer],
        seed: int,
        tokens: Tensor | None = None,
    ):
        """Take `tokens` [N], a draft vocabulary; None for the whole vocabulary."""
        self.target = target
        self.held_out = held_out
        self.seed = seed
        self.answers = by_length(answers)
        self.fitted = first_weights(target, seed, tokens)
        self.model = EagleModel(self.fitted, target)
        self.states = States(features=self.fitted.layers_of(target))
        self.rate = LEARNING_RATE * min(1.0, WIDTH / target.hidden_size)
        named = dict(self.model.named_parameters())
        self.weights: dict[str, Tensor] = {
            name: named[name] if name in named else named[f"model.{name}"]
            for name in self.fitted.tensors
            if name not in VOCABULARY_TENSORS
        }
        self.ranks: Tensor | None = None
        """[V]: row of the LM head for each of the target's tokens."""
        if tokens is not None:
            size = target.output_matrix.shape[0]
            self.ranks = ranks(tokens, size, OUTSIDE).to(target.device)

    def epoch(self, number: int, step: Callable[[Tensor], None]) -> None:
        for batch in batches(self.answers, self.seed + 1000 * number):
            loss = torch.zeros((), device=self.target.device)
            for k, (logits, wanted) in enumerate(self._steps(batch)):
                learned = wanted[:, k:].flatten()
                learned = learned.masked_fill(learned == OUTSIDE, NOT_ASKED)
                cross = mean_cross_entropy(
                    logits[:, k:].flatten(0, 1), learned, NOT_ASKED
                )
                loss = loss + FURTHER_WEIGHT**k * cross
            step(loss)

    def measure(self) -> float:
        return self._measured()[0]

    def result(self) -> tuple[EagleWeights, dict[str, object]]:
        """Return the trained model and its metrics."""
        half = {}
        for name, part in self.fitted.tensors.items():
            half[name] = part.cpu() if name in VOCABULARY_TENSORS else part.half().cpu()
        with torch.no_grad():
            for name, part in self.weights.items():
                part.copy_(half[name])
        kept, accuracy = self._measured()
        return replace(self.fitted, tensors=half), {
            "tokens_per_pass": kept,
            "accuracy": accuracy,
        }

    @torch.no_grad()
    def _measured(self) -> tuple[float, list[float]]:
        """Return the tokens per pass under the strict rule, the target's own token included, and
        the share of correct tokens at each draft depth."""
        kept = 0.0
        right_at = torch.zeros(STEPS)
        places = torch.zeros(STEPS)
        for i in range(0, len(self.held_out), ANSWERS_PER_STEP):
            chain = torch.ones(())
            for k, (logits, wanted) in enumerate(
                self._steps(self.held_out[i : i + ANSWERS_PER_STEP])
            ):
                asked = (wanted != NOT_ASKED)[:, k:]
                right = (logits.argmax(-1) == wanted)[:, k:] & asked
                right_at[k] += right.sum().cpu()
                places[k] += asked.sum().cpu()
                # a chain of k + 1 tokens is right if its first k tokens are right too
                chain = right if k == 0 else chain[:, : right.shape[1]] & right
                kept += float(chain.sum())
        return 1 + kept / float(places[0]), (right_at / places).tolist()

    def _steps(self, batch: Sequence[Answer]) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield, for each draft depth, the logits [B, T, V] and the tokens to predict [B, T] after
        every prefix of the texts. As in decoding, the first token is drafted from the target's
        features, and later tokens from the model's own earlier states (training-time test)."""
        tokens, features, wanted = self._read(batch)
        t = tokens.shape[1]
        places = torch.arange(t, device=tokens.device)
        before = places[None] - places[:, None]  # [T, T]
        cache = DynamicCache(config=self.fitted.config)
        inputs = self.model.model.combine(features)
        for k in range(STEPS):
            masks = [before <= -k, *(before == j - k for j in range(1, k + 1))]
            state = self.model.model(
                tokens,
                inputs,
                position_ids=places[None],
                attention_mask=torch.cat(masks, 1)[None, None].expand(
                    len(tokens), 1, -1, -1
                ),
                past_key_values=cache,
            ).last_hidden_state
            yield self._logits(state), wanted
            inputs = torch.nn.functional.pad(state, (0, 0, 1, 0))[:, :-1]

    def _logits(self, state: Tensor) -> Tensor:
        """Return the logits [..., V], or [..., N] of the rows of a draft vocabulary."""
        if self.ranks is None:
            return self.model.logits(state)
        norm = self.model.norm
        return cast(Tensor, self.model.lm_head(norm(state) if norm else state))

    def _read(self, batch: Sequence[Answer]) -> tuple[Tensor, Tensor, Tensor]:
        """Return the tokens [B, T], the target's features [B, T, F] at the token before each, and
        the LM head's row [B, T] of the token after each."""
        sequences = [prompt + answer for prompt, answer in batch]
        longest = max(map(len, sequences))
        session = Session(self.target, len(batch), longest, states=self.states)
        session.read(sequences)
        device = self.target.device
        t = longest - 2
        tokens = torch.zeros(len(batch), t, dtype=torch.long, device=device)
        wanted = torch.full((len(batch), t), NOT_ASKED, device=device)
        features = torch.zeros(len(batch), t, self.fitted.feature_size, device=device)
        for b, (sequence, (prompt, _)) in enumerate(zip(sequences, batch)):
            n = len(sequence) - 2
            whole = torch.tensor(sequence, device=device)
            tokens[b, :n] = whole[1:-1]
            first = max(len(prompt) - 2, 0)
            following = whole[first + 2 :]
            wanted[b, first:n] = (
                following if self.ranks is None else self.ranks[following]
            )
            features[b, :n] = session.features(b, sequence, 0)[:n].clone()
        return tokens, features, wanted


def first_weights(target: LM, seed: int, tokens: Tensor | None = None) -> EagleWeights:
    """Return random weights for a model with one layer, as wide as the target. Only the LM head is
    copied from the target, or its rows of a draft vocabulary `tokens` [N]."""
    generator = torch.Generator().manual_seed(seed)
    said = target.model.config.get_text_config()
    size = target.hidden_size
    heads = said.num_attention_heads
    per_head = size // heads
    key_values = getattr(said, "num_key_value_heads", None) or heads
    inner = getattr(said, "intermediate_size", None) or 4 * size
    shapes = {
        "fc": (size, 3 * size),
        "layers.0.self_attn.q_proj": (heads * per_head, 2 * size),
        "layers.0.self_attn.k_proj": (key_values * per_head, 2 * size),
        "layers.0.self_attn.v_proj": (key_values * per_head, 2 * size),
        "layers.0.self_attn.o_proj": (size, heads * per_head),
        "layers.0.mlp.gate_proj": (inner, size),
        "layers.0.mlp.up_proj": (inner, size),
        "layers.0.mlp.down_proj": (size, inner),
    }
    weights = {}
    for name, shape in shapes.items():
        weights[f"{name}.weight"] = torch.randn(*shape, generator=generator) * INITIAL
    norms = ("hidden_norm", "input_layernorm", "post_attention_layernorm")
    for name in ("norm", *(f"layers.0.{norm}" for norm in norms)):
        weights[f"{name}.weight"] = torch.ones(size)
    weights |= _first_lm_head(target, tokens)
    config = LlamaConfig(
        hidden_size=size,
        intermediate_size=inner,
        num_hidden_layers=1,
        num_attention_heads=heads,
        num_key_value_heads=key_values,
        head_dim=per_head,
        rms_norm_eps=1e-5,
        max_position_embeddings=target.context_length or 1 << 20,
    )
    weights = {name: part.to(target.device) for name, part in weights.items()}
    return EagleWeights("", config, weights, features=None)


def _first_lm_head(target: LM, tokens: Tensor | None) -> dict[str, Tensor]:
    """Return the target's LM head, or its rows of a draft vocabulary `tokens` [N] with the tensors
    that list the vocabulary in EAGLE-3's layout: d2t [N], the offset from a row's index to its
    token, and t2d [V], True for tokens with a row."""
    matrix = target.output_matrix.detach().float().cpu()
    if tokens is None:
        return {"lm_head.weight": matrix.clone()}
    known = torch.zeros(len(matrix), dtype=torch.bool)
    known[tokens] = True
    return {
        "lm_head.weight": matrix[tokens].clone(),
        "d2t": tokens - torch.arange(len(tokens)),
        "t2d": known,
    }
