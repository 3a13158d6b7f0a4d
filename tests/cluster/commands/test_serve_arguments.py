"""vLLM's commands and flags reach the settings that mean the same, or say what to type instead."""

import argparse
import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from twostroke.cluster.cli import main
from twostroke.cluster.commands import serve
from twostroke.cluster.commands.serve import add_arguments, merged_settings
from twostroke.cluster.config.config import read_config
from twostroke.cluster.config.other_servers import BENCH_SERVE, COMMANDS
from twostroke.protocol.errors import ConfigError
from twostroke.router.http.tenants import Tenants

ROOT = Path(__file__).resolve().parents[3]

BOTH = ("prefill", "decode")

WORKS: list[tuple[str, dict[str, Any]]] = [
    ("serve m --port 8001 --host 0.0.0.0", {}),
    (
        "serve m --max-model-len=8K --max-num-batched-tokens 4k",
        {"model": {"max_context": 8192}} | {role: {"max_step_tokens": 4000} for role in BOTH},
    ),
    ("serve m --max-model-len auto", {}),
    ("serve m --tensor-parallel-size 2 -pp 2", {role: {"tensor_parallel": 2, "pipeline_parallel": 2} for role in BOTH}),
    (
        """serve m --speculative-config '{"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 5}'""",
        {role: {"speculation": {"method": "ngram", "num_speculative_tokens": 4}} for role in BOTH},
    ),
    (
        """serve m --speculative-config '{"method": "deepseek_mtp", "num_speculative_tokens": 1}'""",
        {role: {"speculation": {"method": "mtp"}} for role in BOTH},
    ),
    ("serve m --speculative-config off", {role: {"speculation": {"method": "off"}} for role in BOTH}),
]

TOLD = [
    ("serve m --enable-prefix-caching", "prefixes are always cached: leave it out"),
    ("serve m --no-enable-prefix-caching", "prefixes are always cached: leave it out"),
    ("serve m --speculative-model x", "drafts come from the text or an MTP head"),
    ("serve m --enable-lora --lora-modules sql=/x", "vLLM's enable_lora: adapters are not served: merge them"),
    ("serve m --enable-lora --lora-modules sql=/x", "vLLM's lora_modules: adapters are not served: merge them"),
    (
        """serve m --kv-transfer-config '{"kv_role": "kv_both"}'""",
        "kv_connector: is required; between prefill and decode workers KV transfer is built in: leave it out",
    ),
    ("serve m -dp 2", "prefill.replicas and decode.replicas say how many workers there are (--prefill, --decode)"),
    ("serve m -O3", "there is nothing to compile ahead: leave it out"),
    ("serve m --enable-prefix-cachin", "prefixes are always cached: leave it out"),
    ("serve --model-path m", "SGLang's --model-path is --model here"),
    ("serve m --tp 2", "SGLang's --tp is --tensor-parallel-size here"),
    ("serve m --tp-size=2", "SGLang's --tp-size is --tensor-parallel-size here"),
    ("serve m --dp-size 2", "SGLang's dp_size: prefill.replicas and decode.replicas say how many workers there are"),
    ("serve m --disaggregation-mode prefill", "prefill and decode workers are apart unless --prefill 0"),
    (
        "serve m --schedule-policy lpm",
        "SGLang's schedule_policy is prefill.queue and decode.queue here, in the file of --config",
    ),
    ("serve m --max-model-length 8192", "did you mean --max-model-len?"),
    ("serve m --max_model_len 8x", "'8x' is no number of tokens: write 8192, 8k or 8K"),
    ("serve m --tool-call-parser hermes", "is model.response_template here, in the file of --config"),
    ("serve m --served-model-name a b", "one model is served, and a flag has one value"),
    ("serve m --tensor-parallel-size 3", "3 is none of 1, 2, 4, 8 (--tensor-parallel-size)"),
    ("serve m --max-num-seqs 1024", "must be at least max_batch (1024)"),
    ("serve m --max-num-seqs 1024", "(--max-num-batched-tokens)"),
    ("serve m --dtype half", "no kernel computes in fp16: leave it out (--dtype)"),
    ("serve m --quantization awq", "a checkpoint that is quantised so tells of it: leave it out"),
    ("serve m --kv-cache-dtype fp8_e5m2", "fp8 is e4m3 here"),
    ("serve m --generation-config vllm", "vLLM's vllm is none here"),
    ("serve m --hicache-size 4", "SGLang's --hicache-size is --kv-offloading-size here"),
    (
        "serve m --kv-offloading-backend native",
        "vLLM's kv_offloading_backend: there is one, kv_cache.tiers: leave it out",
    ),
    ("server m", "did you mean serve?"),
    ("bench serve --model m --num-prompts 100", "`twostroke loadtest run`"),
    ("bench throughput", "`twostroke bench engine`"),
    ("collect-env", "`twostroke doctor`"),
    ("loadtest run --base-url http://127.0.0.1:1 --num-prompts 10", "vLLM's --base-url: --url"),
    ("loadtest run --url http://127.0.0.1:1 --max-concurrency 10", "--arrivals closed --users"),
]


def settings_of(typed: str) -> dict[str, Any]:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return merged_settings(parser.parse_args(shlex.split(typed)[1:]))


@pytest.mark.parametrize(("typed", "settings"), WORKS)
def test_a_command_of_vllms_sets_what_it_sets_there(typed: str, settings: dict[str, Any]) -> None:
    found = settings_of(typed)
    assert found["model"].pop("path") == "m"
    assert {name: section for name, section in found.items() if section} == settings


@pytest.mark.parametrize(("typed", "told"), TOLD)
def test_what_is_otherwise_here_is_told_with_what_to_type(
    capsys: pytest.CaptureFixture[str], typed: str, told: str
) -> None:
    assert exit_code_of(typed) == 2
    assert told in capsys.readouterr().err


def test_a_flag_with_a_letter_missing_is_known_again_short_forms_notwithstanding(
    capsys: pytest.CaptureFixture[str],
) -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    flags = [flag for flag in parser._option_string_actions if len(flag) > len("--name")]
    assert {"--served-model-name", "--tensor-parallel-size", "--pipeline-parallel-size", "--quantization"} <= set(flags)
    for flag in flags:
        typo = flag[:5] + flag[6:]
        assert exit_code_of(f"serve m {typo} 1") == 2
        assert capsys.readouterr().err.splitlines()[-2] == f"did you mean {flag}?"


def exit_code_of(typed: str) -> object:
    """Return the exit code of a command that returns it or raises SystemExit."""
    try:
        return main(shlex.split(typed))
    except SystemExit as ended:
        return ended.code


def test_a_file_of_vllms_form_is_told_line_by_line_what_it_is_here(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    theirs = {"model": "m", "port": 8000, "max-model-len": 8192, "tensor_parallel_size": 2, "trust-remote-code": True}
    hints = [
        "'m' stands where a section should: write `name: value` lines under it (vLLM's model is model.path here)",
        "vLLM's port: a flag of `twostroke serve`, and no setting",
        "vLLM's max_model_len is model.max_context here",
        "vLLM's tensor_parallel_size is prefill.tensor_parallel and decode.tensor_parallel here",
        "vLLM's trust_remote_code: code of checkpoints is never run: leave it out",
    ]
    file = tmp_path / "vllm.yaml"
    file.write_text(yaml.safe_dump(theirs, sort_keys=False))
    assert main(["config", "check", str(file)]) == 2
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[1] for line in lines] == ["1", "2", "3", "4", "5"]
    assert all(line.endswith(hint) for line, hint in zip(lines, hints, strict=True))
    assert main(["serve", "--config", str(file)]) == 2
    assert capsys.readouterr().err.splitlines() == [f"twostroke: {lines[0]}", *lines[1:]]


def test_a_file_for_ray_up_is_told_from_the_servers(capsys: pytest.CaptureFixture[str]) -> None:
    file = ROOT / "deploy" / "ray-cluster.yaml"
    for command in ("config check", "serve --config"):
        assert main([*command.split(), str(file)]) == 2
        told = capsys.readouterr().err
        assert told == (
            f"twostroke: {file}: describes a cluster for `ray up`; settings are in the file for `serve deploy`\n"
        )


def test_a_flag_that_resembles_another_little_is_not_taken_for_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code_of("serve m --replicas 2") == 2
    assert "--revision" not in capsys.readouterr().err


@pytest.mark.parametrize("typed", ["help serve", "serve --help=all", "serve -h"])
def test_help_is_had_however_it_is_asked_for(typed: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code_of(typed) == 0
    assert capsys.readouterr().out.startswith("usage: twostroke serve ")


def test_no_command_or_flag_that_hints_are_for_is_one_of_ours(capsys: pytest.CaptureFixture[str]) -> None:
    for name in COMMANDS:
        with pytest.raises(SystemExit, match="2"):
            main([*name.split(), "--help"])
    with pytest.raises(SystemExit, match="0"):
        main(["loadtest", "run", "--help"])
    told = capsys.readouterr().out.replace(",", " ").split()
    assert {f"--{name.replace('_', '-')}" for name in BENCH_SERVE} & set(told) == set()


def test_a_key_is_typed_beside_those_of_the_file_and_only_its_hash_is_kept(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(f"auth: {{keys: [{{name: alice, sha256: {'ab' * 32}}}]}}")
    settings = settings_of(f"serve --config {file} --api-key secret-word")
    assert "secret-word" not in str(settings)
    keys = read_config(settings).auth.keys
    assert [key.name for key in keys] == ["alice", "api-key"]
    tenants = Tenants(keys, clock=lambda: 0.0)
    assert tenants.of("Bearer secret-word").is_admin


def test_a_model_is_named_once() -> None:
    with pytest.raises(ConfigError, match="named twice"):
        settings_of("serve bundled --model bundled")


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
    settings = settings_of(f"serve bundled --kv-transfer-config {shlex.quote(typed)}")
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
    assert exit_code_of(f"serve bundled --kv-transfer-config {shlex.quote(typed)}") == 2
    assert f"argument --kv-transfer-config: {told}" in capsys.readouterr().err.replace("\n", " ")


def test_flags_lie_over_what_a_file_says_of_tiers(tmp_path: Path) -> None:
    (file := tmp_path / "c.yaml").write_text("kv_cache: {tiers: {disk: {path: /data/kv, bytes: 1TiB}}}")
    config = read_config(settings_of(f"serve --config {file} --kv-offloading-size 0.5"))
    assert (config.tiers.host_bytes, config.tiers.disk.path) == (2**29, "/data/kv")
