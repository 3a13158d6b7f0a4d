"""What `twostroke serve` hands to Ray Serve where Serve is to build the application by itself."""

from pathlib import Path

import pytest

from twostroke.cluster.config.api_keys import OWN_KEY
from twostroke.cluster.config.config import read_config, with_keys_of_file
from twostroke.cluster.local.deploy import arguments_of
from twostroke.protocol.errors import ConfigError
from twostroke.router.http.tenants import AuthConfig, KeyConfig


def test_all_keys_go_along_those_of_the_file_and_the_servers_own(tmp_path: Path) -> None:
    keys = tmp_path / "keys.yaml"
    keys.write_text(f"keys: [{{name: bob, sha256: {'cd' * 32}, requests_per_minute: 60}}]")
    settings = {
        "decode": {"replicas": 2},
        "auth": {"keys": [{"name": "alice", "sha256": "ab" * 32}], "keys_file": str(keys)},
    }
    config = with_keys_of_file(read_config(settings))
    own = KeyConfig(name=OWN_KEY, sha256="ef" * 32, admin=True)
    config = config.model_copy(update={"auth": AuthConfig(keys=(*config.auth.keys, own))})
    arguments = arguments_of(config, settings)
    assert read_config(arguments, has_own_key=True) == config
    with pytest.raises(ConfigError, match="the server's own key"):
        read_config(arguments)  # people may not name theirs so


def test_settings_without_keys_go_as_they_are() -> None:
    settings = {"prefill": {"replicas": 0}}
    assert arguments_of(read_config(settings), settings) == settings
