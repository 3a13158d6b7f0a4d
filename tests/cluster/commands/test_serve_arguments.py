"""vLLM's flags reach the settings that mean the same."""

import argparse
from pathlib import Path
from typing import Any

import pytest

from twostroke.cluster.cli import main
from twostroke.cluster.commands import serve
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


@pytest.mark.parametrize(
    ("typed", "is_served"),
    [
        ("--host 0.0.0.0", False),
        ("--host 10.0.0.5", False),
        ("--host 127.0.0.1", True),
        ("--host 0.0.0.0 --api-key KEY", True),
        ("--host 0.0.0.0 --without-keys", True),
    ],
)
def test_the_image_serves_nobody_beyond_the_machine_without_keys_unless_it_is_told_to(
    typed: str, is_served: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    served: list[str] = []
    monkeypatch.setenv(serve.REQUIRE_KEYS, "1")
    monkeypatch.setattr(serve, "check_port", lambda host, port: None)
    monkeypatch.setattr(serve, "_look_after", lambda order, console, log: served.append(order.host))
    code = main(["serve", "bundled", "--port", "18125", *typed.split()])
    assert (code, len(served)) == ((0, 1) if is_served else (2, 0))
    if not is_served:
        assert "--without-keys to serve everybody" in capsys.readouterr().err


def test_elsewhere_a_server_without_keys_is_warned_of(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv(serve.REQUIRE_KEYS, raising=False)
    monkeypatch.setattr(serve, "check_port", lambda host, port: None)
    monkeypatch.setattr(serve, "_look_after", lambda order, console, log: None)
    assert main(["serve", "bundled", "--port", "18125", "--host", "0.0.0.0"]) == 0
    assert "NO API KEYS" in capsys.readouterr().out
