"""vLLM's flags reach the settings that mean the same."""

import argparse
import json
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
    tenants = Tenants(keys, clock=lambda: 0.0)
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


def connector(name: str, **extra: object) -> str:
    return json.dumps({"kv_connector": name, "kv_role": "kv_both", "kv_connector_extra_config": extra})


LMCACHE = {
    "lmcache.max_local_cpu_size": 5.0,
    "lmcache.local_disk": "file:///data/kv",
    "lmcache.max_local_disk_size": 100,
    "lmcache.remote_url": "s3://bucket/kv",
}


@pytest.mark.parametrize(
    ("typed", "told"),
    [
        (connector("OffloadingConnector", cpu_bytes_to_use=2**30), {"host_bytes": 2**30}),
        (connector("SharedStorageConnector", shared_storage_path="/mnt/kv"), {"shared": {"path": "/mnt/kv"}}),
        (
            connector("LMCacheConnectorV1", **LMCACHE),
            {
                "host_bytes": "5.0GiB",
                "disk": {"path": "/data/kv", "bytes": "100GiB"},
                "shared": {"url": "s3://bucket/kv"},
            },
        ),
        (
            connector(
                "MultiConnector",
                connectors=[
                    {"kv_connector": "NixlConnector", "kv_role": "kv_both"},
                    json.loads(connector("OffloadingConnector", cpu_bytes_to_use=2**30)),
                    json.loads(connector("LMCacheMPConnector", **{"lmcache.remote_url": "fs://host:1/mnt/kv"})),
                ],
            ),
            {"host_bytes": 2**30, "shared": {"path": "/mnt/kv"}},
        ),
        (
            connector(
                "OffloadingConnector",
                cpu_bytes_to_use=2**30,
                secondary_tiers=[{"type": "fs", "root_dir": "/data/kv", "max_bytes": 2**31}],
            ),
            {"host_bytes": 2**30, "disk": {"path": "/data/kv", "bytes": 2**31}},
        ),
        (
            connector("OffloadingConnector", spec_name="SharedStorageOffloadingSpec", shared_storage_path="/mnt/kv"),
            {"shared": {"path": "/mnt/kv"}},
        ),
        (
            connector("OffloadingConnector", cpu_bytes_to_use=2**30, shared_storage_path="/mnt/kv"),
            {"host_bytes": 2**30, "shared": {"path": "/mnt/kv"}},
        ),
    ],
)
def test_vllms_connectors_to_memory_disks_and_stores_are_tiers(typed: str, told: dict[str, Any]) -> None:
    settings = settings_of("bundled", "--kv-transfer-config", typed)
    assert settings["kv_cache"] == {"tiers": told}
    assert read_config(settings).tiers.is_on


@pytest.mark.parametrize(
    ("typed", "told"),
    [
        (connector("NixlConnector"), "NixlConnector: KV transfer is built in, and kv_transfer.transport says how: lea"),
        (connector("HF3FSKVConnector"), "HF3FSKVConnector: there is no such store here: kv_cache.tiers keeps KV in h"),
        (connector("LMCacheConnectorV1"), "LMCacheConnectorV1: its settings lie in LMCACHE_CONFIG_FILE"),
        (
            connector("LMCacheConnectorV1", **{"lmcache.remote_url": "redis://h:1"}),
            "lmcache.remote_url: there is no tier of redis",
        ),
        (connector("OffloadingConnector"), "OffloadingConnector: give kv_connector_extra_config.cpu_bytes_to_use"),
        (connector("SharedStorageConnector"), "SharedStorageConnector: give kv_connector_extra_config.shared_storage"),
        (
            connector("OffloadingConnector", cpu_bytes_to_use=1, offload_path="/mnt/kv"),
            "OffloadingConnector: kv_connector_extra_config.offload_path: no tier is made of it: give kv_cache.tiers",
        ),
        (
            connector("LMCacheConnectorV1", **LMCACHE, shared_storage_path="/mnt/kv"),
            "LMCacheConnectorV1: kv_connector_extra_config.shared_storage_path: no tier is made of it",
        ),
        ("{}", "kv_connector: is required"),
        ("[]", "[]: expected an object with kv_connector"),
        ("{", "{: no JSON: "),
    ],
)
def test_a_connector_that_means_nothing_here_is_answered(
    typed: str, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["serve", "bundled", "--kv-transfer-config", typed])
    assert f"argument --kv-transfer-config: {told}" in capsys.readouterr().err.replace("\n", " ")


def test_flags_lie_over_what_a_file_says_of_tiers(tmp_path: Path) -> None:
    (file := tmp_path / "c.yaml").write_text("kv_cache: {tiers: {disk: {path: /data/kv, bytes: 1TiB}}}")
    config = read_config(settings_of("--config", str(file), "--kv-offloading-size", "0.5"))
    assert (config.tiers.host_bytes, config.tiers.disk.path) == (2**29, "/data/kv")


@pytest.mark.parametrize(
    ("typed", "told"),
    [
        ("--hicache-size 4", "SGLang's --hicache-size is --kv-offloading-size here"),
        ("--hicache-ratio 2", "SGLang's hicache_ratio: kv_cache.tiers.host_bytes takes bytes"),
        ("--enable-hierarchical-cache", "SGLang's enable_hierarchical_cache: kv_cache.tiers says where"),
        ("--hicache-storage-backend file", "SGLang's hicache_storage_backend: file is kv_cache.tiers.disk"),
        ("--kv-offloading-backend native", "vLLM's kv_offloading_backend: there is one, kv_cache.tiers: leave it out"),
    ],
)
def test_others_flags_of_tiers_are_answered(typed: str, told: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["serve", "bundled", *typed.split()])
    assert told in capsys.readouterr().err
