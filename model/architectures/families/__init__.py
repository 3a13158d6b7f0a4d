"""The families of models that can be served: one small file each, listed in FAMILIES.

A family's file says how its `config.json` is read (family.py has what all have in common), what its checkpoints call
their tensors, and what its layers are made of, as data. ../decoder.py computes any of them.
"""

from collections.abc import Mapping

from twostroke.model.architectures.families.deepseek import (
    DEEPSEEK_V2,
    DEEPSEEK_V3,
    DEEPSEEK_V32,
    GLM4_MOE_LITE,
    GLM_MOE_DSA,
    MISTRAL4,
)
from twostroke.model.architectures.families.family import Family
from twostroke.model.architectures.families.gemma import GEMMA2, GEMMA3, GEMMA4, GEMMA4_UNIFIED
from twostroke.model.architectures.families.glm import GLM, GLM4, GLM4_MOE
from twostroke.model.architectures.families.gpt_oss import GPT_OSS
from twostroke.model.architectures.families.granite import BAMBA, GRANITE_HYBRID
from twostroke.model.architectures.families.lfm2 import LFM2, LFM2_MOE
from twostroke.model.architectures.families.llama import (
    GRANITE,
    LLAMA,
    LLAMA4,
    MINIMAX_M2,
    MINISTRAL,
    MINISTRAL3,
    MISTRAL,
    MIXTRAL,
    PHI3,
    SMOLLM3,
)
from twostroke.model.architectures.families.nemotron_h import NEMOTRON_H
from twostroke.model.architectures.families.olmo import OLMO2, OLMO3, OLMOE
from twostroke.model.architectures.families.qwen import (
    QWEN2,
    QWEN2_MOE,
    QWEN3,
    QWEN3_MOE,
    QWEN3_NEXT,
    QWEN35,
    QWEN35_MOE,
)
from twostroke.model.architectures.families.wrappers import WRAPPERS

_ALL = (
    *(LLAMA, MISTRAL, MINISTRAL, MINISTRAL3, QWEN2, QWEN3, PHI3, GEMMA2, GEMMA3, GEMMA4, GEMMA4_UNIFIED),
    *(GLM, GLM4, SMOLLM3, GRANITE, OLMO2, OLMO3),
    *(MIXTRAL, QWEN2_MOE, QWEN3_MOE, OLMOE, GLM4_MOE, GPT_OSS, LLAMA4, MINIMAX_M2),
    *(DEEPSEEK_V2, DEEPSEEK_V3, GLM4_MOE_LITE, MISTRAL4, DEEPSEEK_V32, GLM_MOE_DSA),
    *(QWEN3_NEXT, QWEN35, QWEN35_MOE, GRANITE_HYBRID, BAMBA, LFM2, LFM2_MOE, NEMOTRON_H),
    *WRAPPERS,
)
FAMILIES: Mapping[str, Family] = {family.architecture: family for family in _ALL}
"""Families by the name in the `architectures` of config.json."""
