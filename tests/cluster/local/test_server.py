"""`twostroke serve` checks before anything starts, hands the right settings to Ray Serve, and reports workers that
go and come."""

import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import ray
import ray.serve
from ray.exceptions import RayError

from twostroke.cluster.config.config import api_keys, check_keys, read_config
from twostroke.cluster.deployments.router import RouterSettings
from twostroke.cluster.local import ray as local
from twostroke.cluster.local.ray import StartFailed, portable_arguments
from twostroke.cluster.local.server import FleetWatch, check_model, with_own_key
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


def test_memory_of_tiers_is_counted_for_every_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("twostroke.model.cache.memory.available_bytes", lambda _: 40 * 2**30)
    settings: dict[str, Any] = {role: {"num_blocks": 64} for role in ("prefill", "decode")}
    check_model(read_config({**settings, "kv_cache": {"tiers": {"host_bytes": "15GiB"}}}), BUNDLED_MODEL_DIR)
    with pytest.raises(ConfigError, match=r"^too little memory: .* KV tiers 20\.00 GiB.*kv_cache\.tiers\.host_bytes"):
        check_model(read_config({**settings, "kv_cache": {"tiers": {"host_bytes": "20GiB"}}}), BUNDLED_MODEL_DIR)


def test_how_large_caches_of_no_said_size_get_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("twostroke.model.cache.memory.available_bytes", lambda _: 40 * 2**30)
    config = read_config({"model": {"dtype": "bfloat16"}, "prefill": {"num_blocks": 1024}, "decode": {"replicas": 3}})
    assert check_model(config, BUNDLED_MODEL_DIR)[1:] == [
        "KV cache of each worker, of 40.00 GiB of free memory: decode 1024.0 MiB (kv_cache_gib sets it)"
    ]
    said = read_config({role: {"kv_cache_gib": 1} for role in ("prefill", "decode")})
    assert len(check_model(said, BUNDLED_MODEL_DIR)) == 1


def test_how_each_role_holds_the_model_is_told() -> None:
    sizes = {"num_blocks": 64}
    config = read_config({"model": {"dtype": "float32"}, "prefill": sizes, "decode": sizes | {"quantization": "int8"}})
    (told,) = check_model(config, BUNDLED_MODEL_DIR)
    assert told.endswith(
        "parameters, float32 at prefill workers and float32 with int8 weights at decode workers on cpu"
    )
    alike = read_config({"model": {"dtype": "float32"}, "prefill": sizes, "decode": sizes})
    assert check_model(alike, BUNDLED_MODEL_DIR)[0].endswith("parameters, float32 on cpu")


def test_the_file_of_keys_and_the_servers_own_key_go_along(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = tmp_path / "keys.yaml"
    keys.write_text(f"keys: [{{name: bob, sha256: {'cd' * 32}, requests_per_minute: 60}}]")
    monkeypatch.chdir(tmp_path)
    settings = {
        "decode": {"replicas": 2},
        "auth": {"keys": [{"name": "alice", "sha256": "ab" * 32}], "keys_file": "keys.yaml"},
    }
    config, _ = with_own_key(check_keys(read_config(settings)))
    monkeypatch.chdir("/")  # as routers are elsewhere
    assert [key.name for key in api_keys(config)] == ["alice", "twostroke serve", "bob"]
    assert read_config(portable_arguments(config, settings)) == config
    assert RouterSettings.of(config).auth == config.auth
    with pytest.raises(ConfigError, match="keys: name twostroke serve is there twice"):
        with_own_key(config)
    keys.write_text(f"keys: [{{name: twostroke serve, sha256: {'cd' * 32}}}]")
    with pytest.raises(ConfigError, match="keys: name twostroke serve is there twice"):
        with_own_key(check_keys(read_config({"auth": {"keys_file": str(keys)}})))


def test_a_chat_template_goes_along_as_text_and_is_tried_before_anything_starts(tmp_path: Path) -> None:
    path, text = tmp_path / "template.jinja", "{{ messages[0].content }}"
    for chat_template in (str(path), text):
        settings = {"model": {"path": "bundled", "chat_template": chat_template}}
        path.write_text(text)
        config = read_config(settings)
        assert RouterSettings.of(config).chat_template == text
        sent = read_config(portable_arguments(config, settings))
        assert sent.model.chat_template == text
        assert sent.model.path == "bundled"
    for content, complaint in ((None, "can't be read"), ("static", "is no chat template"), ("{% if %}", "is broken")):
        if content is None:
            path.unlink()
        else:
            path.write_text(content)
        with pytest.raises(ConfigError, match=rf"^model\.chat_template: .*{complaint}"):
            check_model(read_config({"model": {"chat_template": str(path)}}), BUNDLED_MODEL_DIR)


def test_the_models_sampling_defaults_are_told_and_can_be_turned_off(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(BUNDLED_MODEL_DIR, folder)
    (folder / "generation_config.json").write_text('{"temperature": 0.6, "top_k": 20}')
    told = "Sampling where a request says nothing, by generation_config.json: temperature 0.6, top_k 20"
    assert told in check_model(read_config({}), folder)
    assert told not in check_model(read_config({"model": {"generation_config": "none"}}), folder)
    (folder / "generation_config.json").write_text('{"temperature": 6}')
    with pytest.raises(ConfigError, match=r"generation_config\.json: temperature: .* set model.generation_config to n"):
        check_model(read_config({}), folder)


def test_settings_without_keys_go_as_they_are() -> None:
    settings = {"prefill": {"replicas": 0}}
    assert portable_arguments(read_config(settings), settings) == settings


def status(*workers: str, unreachable: str = "") -> dict[str, Any]:
    """Workers as `role id epoch`."""
    told = [one.split() for one in workers]
    return {
        "workers": [
            {"role": role, "worker_id": worker_id, "epoch": epoch, "reachable": worker_id != unreachable}
            for role, worker_id, epoch in told
        ]
    }


def test_a_worker_that_is_lost_and_the_one_in_its_place_are_told_once() -> None:
    watch = FleetWatch({"decode": 2})
    assert watch.news(status("decode a 1", "decode b 2")) == []
    assert watch.news(status("decode b 2")) == ["Decode worker a is lost: 1 of 2 decode workers are there"]
    assert watch.news(status("decode b 2")) == []
    assert watch.news(status("decode b 2", "decode c 3")) == ["Decode worker c is up: 2 of 2 decode workers are there"]


def test_a_worker_that_nobody_reaches_is_lost_and_one_that_started_anew_is_another() -> None:
    watch = FleetWatch({"prefill": 1})
    watch.news(status("prefill a 1"))
    assert len(watch.news(status("prefill a 1", unreachable="a"))) == 1
    assert watch.news(status("prefill a 1")) == ["Prefill worker a is up: 1 of 1 prefill workers are there"]
    assert [line.split(":")[0] for line in watch.news(status("prefill a 2"))] == [
        "Prefill worker a is lost",
        "Prefill worker a is up",
    ]


def test_a_server_that_does_not_answer_is_told_once_and_so_is_its_return() -> None:
    watch = FleetWatch({"decode": 1})
    watch.news(status("decode a 1"))
    assert watch.no_answer("refused") == ["The server does not answer: refused"]
    assert watch.no_answer("refused") == []
    assert watch.news(status("decode a 1")) == ["The server answers again"]


def scaled(status: dict[str, Any], target: int, change: str | None = None) -> dict[str, Any]:
    return status | {"autoscaling": {"roles": {"decode": {"target": target, "last_change": change}}}}


def test_a_worker_that_the_autoscaler_took_has_left_and_one_that_is_missing_is_lost() -> None:
    watch = FleetWatch({"decode": 1})
    assert watch.news(scaled(status("decode a 1"), 1)) == []
    assert watch.news(scaled(status("decode a 1"), 2, "demand")) == [
        "The autoscaler asks for 2 decode workers instead of 1 (demand)"
    ]
    assert watch.news(scaled(status("decode a 1", "decode b 2"), 2, "demand")) == [
        "Decode worker b is up: 2 of 2 decode workers are there"
    ]
    assert watch.news(scaled(status("decode a 1"), 2, "demand")) == [
        "Decode worker b is lost: 1 of 2 decode workers are there"
    ]
    watch.news(scaled(status("decode a 1", "decode c 3"), 2, "demand"))
    assert watch.news(scaled(status("decode a 1", "decode c 3"), 1, "spare")) == [
        "The autoscaler asks for 1 decode worker instead of 2 (spare)"
    ]
    assert watch.news(scaled(status("decode c 3"), 1, "spare")) == [
        "Decode worker a has left: 1 of 1 decode workers are there"
    ]


def test_why_serve_does_not_start_is_told_though_it_does_not_end_either(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray would end this process if it were shut down while a thread still asks it for something."""
    ended: list[str] = []
    is_over = threading.Event()

    def fail(**_: object) -> None:
        raise RayError("the proxy was killed")

    monkeypatch.setattr(local, "ray_environment", lambda *_, **__: {})
    monkeypatch.setattr(local, "SERVE_SHUTDOWN_S", 0.01)
    monkeypatch.setattr(ray, "init", lambda **_: None)
    monkeypatch.setattr(ray, "shutdown", lambda: ended.append("ray"))
    monkeypatch.setattr(ray.serve, "start", fail)
    monkeypatch.setattr(ray.serve, "shutdown", is_over.wait)
    start = local.local_ray(host="127.0.0.1", port=1, num_cpus=1, haproxy=False)
    with pytest.raises(StartFailed, match=r"Ray Serve does not start: .*the proxy was killed"), start:
        raise AssertionError("nothing is to be served")
    assert ended == []
    is_over.set()
    monkeypatch.setattr(local, "SERVE_SHUTDOWN_S", 60.0)
    with pytest.raises(StartFailed), local.local_ray(host="127.0.0.1", port=1, num_cpus=1, haproxy=False):
        raise AssertionError("nothing is to be served")
    assert ended == ["ray"]


def test_each_run_draws_a_token_of_its_own_whatever_the_shell_has(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    monkeypatch.setenv("RAY_AUTH_TOKEN", "the cluster's")
    first, second = (local.ray_environment(tmp_path, haproxy=False) for _ in range(2))
    assert first["RAY_AUTH_MODE"] == second["RAY_AUTH_MODE"] == "token"
    assert len({"the cluster's", first["RAY_AUTH_TOKEN"], second["RAY_AUTH_TOKEN"]}) == 3
    assert len(first["RAY_AUTH_TOKEN"]) == 64


def test_rays_sockets_and_logs_are_in_a_folder_of_the_user_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(local, "LONGEST_FOLDER", 1000)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    folder = local.private_ray_folder().parent
    assert (folder.parent, folder.stat().st_mode & 0o777) == (tmp_path, 0o700)
    assert local.private_ray_folder().parent == folder
    folder.chmod(0o755)
    with pytest.raises(StartFailed, match="yours alone"):
        local.private_ray_folder()
    folder.rmdir()
    (tmp_path / "another's").mkdir(mode=0o700)
    folder.symlink_to(tmp_path / "another's")
    with pytest.raises(StartFailed, match="yours alone"):
        local.private_ray_folder()


def test_a_path_that_is_too_long_for_a_socket_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", "/somewhere/" + "x" * 50)
    assert str(local.ray_folder()).startswith("/tmp/twostroke-")
