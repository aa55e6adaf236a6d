"""Logits processors from a model's generation_config, and its settings that are not supported."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from transformers import (
    LogitsProcessorList,
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensLogitsProcessor,
)

from lenience.core.errors import InputError

if TYPE_CHECKING:
    from lenience.models.lm import LM

REFUSED: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(
        (
            "forced_bos_token_id",
            "watermarking_config",
            "constraints",
        ),
        (None,),
    ),
    **dict.fromkeys(
        ("begin_suppress_tokens", "force_words_ids", "dola_layers"), (None, [])
    ),
    **dict.fromkeys(
        ("encoder_repetition_penalty", "exponential_decay_length_penalty"), (None, 1.0)
    ),
    **dict.fromkeys(("guidance_scale", "num_beams"), (None, 1)),
    **dict.fromkeys(
        (
            "encoder_no_repeat_ngram_size",
            "min_length",
            "min_new_tokens",
            "penalty_alpha",
        ),
        (None, 0),
    ),
    **dict.fromkeys(("remove_invalid_values", "token_healing"), (None, False)),
}
"""Unsupported settings of a generation_config that change the output, each with its values that
have no effect."""
REFUSED_WHEN_SAMPLING: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("min_p", "epsilon_cutoff", "eta_cutoff", "top_h"), (None, 0.0)),
    "typical_p": (None, 1.0),
}


def processors_of(lm: LM, sampling: bool) -> LogitsProcessorList:
    """Return the logits processors of a model's generation_config, except temperature, top-k and
    top-p. Raises InputError for an unsupported setting."""
    config = lm.model.generation_config
    chain = LogitsProcessorList()
    if config is None:
        return chain
    for key, neutral in (REFUSED | (REFUSED_WHEN_SAMPLING if sampling else {})).items():
        value = getattr(config, key, None)
        if value not in neutral:
            fix = f"set pair.{lm.role}.model.generation_config.{key} = {neutral[-1]}"
            raise InputError(
                f"{lm.role} {lm.name!r}: {key}={value!r} of its generation_config is not "
                f"supported; {fix}"
            )
    device = str(lm.device)
    # in the order in which transformers applies them
    if config.sequence_bias:
        chain.append(SequenceBiasLogitsProcessor(config.sequence_bias))
    if config.repetition_penalty not in (None, 1.0):
        chain.append(RepetitionPenaltyLogitsProcessor(config.repetition_penalty))
    if config.no_repeat_ngram_size:
        chain.append(NoRepeatNGramLogitsProcessor(config.no_repeat_ngram_size))
    if config.bad_words_ids:
        chain.append(
            NoBadWordsLogitsProcessor(config.bad_words_ids, sorted(lm.eos_ids) or None)
        )
    if config.suppress_tokens:
        chain.append(
            SuppressTokensLogitsProcessor(config.suppress_tokens, device=device)
        )
    return chain
