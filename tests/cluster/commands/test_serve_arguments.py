"""What people type who come from vLLM reaches the settings that mean the same."""

import argparse
from typing import Any

import pytest

from twostroke.cluster.commands.serve import add_arguments, merged_settings
from twostroke.cluster.config.config import read_config
from twostroke.protocol.errors import ConfigError


def settings_of(*typed: str) -> dict[str, Any]:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return merged_settings(parser.parse_args(typed))


def test_vllms_flags_set_ours() -> None:
    typed = "bundled --served-model-name m --max-model-len 128 --max-num-seqs 4 --tensor-parallel-size 2"
    config = read_config(settings_of(*typed.split(), "--gpu-memory-utilization", "0.8", "--chat-template", "x.jinja"))
    assert (config.model.path, config.model.name, config.model.max_context) == ("bundled", "m", 128)
    assert config.model.chat_template == "x.jinja"
    for section in config.roles.values():
        assert (section.max_batch, section.tensor_parallel, section.gpu_memory_utilization) == (4, 2, 0.8)


def test_what_is_not_typed_is_not_set() -> None:
    assert settings_of("bundled") == {"model": {"path": "bundled"}}


def test_a_model_is_named_once() -> None:
    with pytest.raises(ConfigError, match="named twice"):
        settings_of("bundled", "--model", "bundled")
