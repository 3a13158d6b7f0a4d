"""What the model and the machine are checked for before anything starts."""

from typing import Any

import pytest

from twostroke.cluster.config.config import read_config
from twostroke.cluster.local.preflight import check_model
from twostroke.model.bundled import BUNDLED_MODEL_DIR
from twostroke.protocol.errors import ConfigError


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        (
            {"model": {"max_context": 8192}, "decode": {"num_blocks": 64}},
            r"^decode workers: max_context: 8192 .* 64 blocks of 16 tokens: lower max_context, or raise num_blocks or ",
        ),
        ({"prefill": {"kv_cache_gib": 0.001, "block_size": 1024}}, "^prefill workers: a KV cache of .* not hold one "),
        ({"decode": {"tensor_parallel": 8}}, "^decode workers: tensor_parallel: 8 ranks can't share the model"),
    ],
)
def test_what_does_not_fit_is_told_with_the_role(settings: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        check_model(read_config(settings), BUNDLED_MODEL_DIR)
