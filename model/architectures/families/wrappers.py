"""Checkpoints that see images, too: the part that reads and writes text is served, by the decoder of its own family.

Their config.json has the text's fields as `text_config`, or among its own, and their text's tensors have other names
(`TEXT_PREFIXES` in model/config.py). Positions that such models count in three dimensions are all alike in text.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from twostroke.model.architectures.families.deepseek import DEEPSEEK_V3, MISTRAL4
from twostroke.model.architectures.families.family import ConfigFields, Family
from twostroke.model.architectures.families.gemma import GEMMA3, GEMMA4, GEMMA4_UNIFIED
from twostroke.model.architectures.families.llama import LLAMA4, MINISTRAL3, MISTRAL
from twostroke.model.architectures.families.qwen import QWEN2_5_VL_TEXT, QWEN3_VL_TEXT, QWEN35, QWEN35_MOE
from twostroke.model.config import ModelConfig


def text_of(
    architecture: str,
    model_type: str,
    *texts: Family,
    is_tied: bool,
    may_be_flat: bool = False,
    defaults: Mapping[str, Any] | None = None,
) -> Family:
    """Return the family of checkpoints whose text is of one of the families `texts`, the first unless it says another.

    `is_tied`: the LM head is the embedding where nothing is said of it. `may_be_flat`: files may have no `text_config`,
    and its fields among their own. `defaults` are fields of `text_config`.
    """

    def read_config(fields: ConfigFields) -> ModelConfig:
        """Raises ConfigError."""
        family, text = texts[0], fields
        if fields.has("text_config") or not may_be_flat:
            text = fields.object("text_config").over(defaults or {})
            family = _text_family(text, texts)
        config = family.read_config(text)
        spec = replace(config.spec, family=f"{config.spec.family} (text alone)", is_wrapped=True)
        return replace(config, spec=spec, tie_word_embeddings=_is_tied(fields, text, is_tied))

    always = {field: values for family in texts for field, values in family.always.items()}
    return Family(architecture, model_type, read_config, always=always)


def _text_family(text: ConfigFields, texts: tuple[Family, ...]) -> Family:
    kind = text.text("model_type", default=texts[0].model_type)
    for family in texts:
        if kind in (family.model_type, *family.other_types):
            return family
    are = ", ".join(family.model_type for family in texts)
    raise text.error("model_type", f"{kind!r} is no text that is served of these checkpoints, only {are}")


def _is_tied(fields: ConfigFields, text: ConfigFields, default: bool) -> bool:
    """Return True if the file or its text's part says so: either of them may be silent, or older than the other."""
    of_text = text.boolean("tie_word_embeddings", default=default)
    return fields.boolean("tie_word_embeddings", default=of_text) or (text.is_set("tie_word_embeddings") and of_text)


GEMMA3_OF_IMAGES = text_of(
    "Gemma3ForConditionalGeneration",
    "gemma3",
    GEMMA3,
    is_tied=True,
    defaults={"vocab_size": 262_208, "num_attention_heads": 8, "num_key_value_heads": 4},  # transformers'
)
GEMMA4_OF_IMAGES = text_of("Gemma4ForConditionalGeneration", "gemma4", GEMMA4, is_tied=True)
GEMMA4_UNIFIED_OF_IMAGES = text_of(
    "Gemma4UnifiedForConditionalGeneration", "gemma4_unified", GEMMA4_UNIFIED, is_tied=True
)
QWEN2_5_VL = text_of(
    "Qwen2_5_VLForConditionalGeneration",
    "qwen2_5_vl",
    QWEN2_5_VL_TEXT,
    is_tied=False,
    may_be_flat=True,
)
QWEN3_VL = text_of("Qwen3VLForConditionalGeneration", "qwen3_vl", QWEN3_VL_TEXT, is_tied=False)
QWEN35_OF_IMAGES = text_of("Qwen3_5ForConditionalGeneration", "qwen3_5", QWEN35, is_tied=False)
QWEN35_MOE_OF_IMAGES = text_of("Qwen3_5MoeForConditionalGeneration", "qwen3_5_moe", QWEN35_MOE, is_tied=False)
MISTRAL3 = text_of("Mistral3ForConditionalGeneration", "mistral3", MISTRAL, MINISTRAL3, MISTRAL4, is_tied=False)
LLAMA4_OF_IMAGES = text_of("Llama4ForConditionalGeneration", "llama4", LLAMA4, is_tied=False)
KIMI_K25 = text_of("KimiK25ForConditionalGeneration", "kimi_k25", DEEPSEEK_V3, is_tied=False)
KIMI_K25_OF_TRANSFORMERS = replace(KIMI_K25, architecture="Kimi_K25ForConditionalGeneration")

WRAPPERS = (
    *(GEMMA3_OF_IMAGES, GEMMA4_OF_IMAGES, GEMMA4_UNIFIED_OF_IMAGES, QWEN2_5_VL, QWEN3_VL, MISTRAL3, LLAMA4_OF_IMAGES),
    *(KIMI_K25, KIMI_K25_OF_TRANSFORMERS, QWEN35_OF_IMAGES, QWEN35_MOE_OF_IMAGES),
)
