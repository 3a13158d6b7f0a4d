"""What people type who come from vLLM reaches the settings that mean the same."""

import argparse
from pathlib import Path
from typing import Any

import pytest

from twostroke.cluster.commands.serve import add_arguments, merged_settings
from twostroke.cluster.config.config import read_config
from twostroke.protocol.errors import ConfigError
from twostroke.router.http.tenants import Tenants


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


def test_a_key_is_typed_beside_those_of_the_file_and_only_its_hash_is_kept(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(f"auth: {{keys: [{{name: alice, sha256: {'ab' * 32}}}]}}")
    settings = settings_of("--config", str(file), "--api-key", "secret-word")
    assert "secret-word" not in str(settings)
    keys = read_config(settings).auth.keys
    assert [key.name for key in keys] == ["alice", "api-key"]
    tenants = Tenants(keys, secret=b"s", clock=lambda: 0.0)
    assert tenants.of("Bearer secret-word").is_admin


def test_what_is_not_typed_is_not_set() -> None:
    assert settings_of("bundled") == {"model": {"path": "bundled"}}


def test_a_model_is_named_once() -> None:
    with pytest.raises(ConfigError, match="named twice"):
        settings_of("bundled", "--model", "bundled")
