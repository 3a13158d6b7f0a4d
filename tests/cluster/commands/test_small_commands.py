"""`twostroke await`, `key new`, `config check` and `config schema`."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from twostroke.cluster.cli import main
from twostroke.cluster.commands.application import await_application
from twostroke.cluster.config.config import ClusterConfig, read_config
from twostroke.router.http.tenants import Tenants


def waited(looks: Sequence[Mapping[str, Any] | None], patience_s: float = 60.0) -> tuple[str | None, float]:
    """(the failure, seconds) where Serve tells these one after another, the last again and again."""
    told, now = list(looks), 0.0

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds

    return await_application(lambda: told.pop(0) if len(told) > 1 else told[0], patience_s, lambda: now, sleep), now


def app(status: str, message: str = "", **deployments: str) -> dict[str, Any]:
    of_each = {name: {"status": "UNHEALTHY", "message": said} for name, said in deployments.items()}
    return {"status": status, "message": message, "deployments": of_each}


def test_an_application_that_comes_to_run_is_waited_for() -> None:
    failure, waited_s = waited([None, app("NOT_STARTED"), app("DEPLOYING"), app("RUNNING")])
    assert failure is None
    assert waited_s > 0


def test_one_that_failed_to_deploy_is_waited_for_no_longer_and_says_why() -> None:
    failure, waited_s = waited([app("DEPLOYING"), app("DEPLOY_FAILED", "no such model", Router="never started")])
    assert failure == "the application is DEPLOY_FAILED\nno such model\nRouter is UNHEALTHY: never started"
    assert waited_s < 10


@pytest.mark.parametrize(
    ("last", "status"), [(app("DEPLOYING", DecodeWorker="no room"), "DEPLOYING"), (None, "not known to Serve")]
)
def test_what_takes_longer_than_it_may_is_a_failure(last: Mapping[str, Any] | None, status: str) -> None:
    failure, waited_s = waited([last], patience_s=60.0)
    assert failure is not None
    assert failure.startswith(f"the application is {status}")
    assert 60 <= waited_s < 70


def test_an_address_that_is_none_is_told_with_its_option(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["await", "--address", "10.0.0.10:8265"]) == 2
    assert capsys.readouterr().err.startswith("twostroke: --address 10.0.0.10:8265: ")


def test_a_new_key_is_shown_once_with_the_line_that_makes_it_known(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["key", "new", 'Zoë "Z"', "--slo-class", "standard", "--admin"]) == 0
    told = capsys.readouterr().out
    key = next(line.strip() for line in told.splitlines() if line.strip().startswith("ts-"))
    line = next(line for line in told.splitlines() if line.strip().startswith("- {"))
    assert key not in line
    config = read_config({"auth": {"keys": yaml.safe_load(line)}})
    tenant = Tenants(config.auth.keys, clock=lambda: 0.0).of(f"Bearer {key}")
    assert (tenant.name, tenant.slo_class, tenant.is_admin) == ('Zoë "Z"', "standard", True)


def test_a_name_that_can_not_be_one_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["key", "new", "a\nb"]) == 2
    assert "printable" in capsys.readouterr().err


WRONG = """\
model:
  path: bundled
  max_contxt: 4
prefill:
  replicas: many
  kv_cache_gib: 1
kv_cache_gib: 2
decode:
  max_batch: 0
  token_channel: {lease_s: 20}
slo:
  classes:
  - name: fast
    ttft: 1
"""
TOLD = [
    (3, "model.max_contxt: there is no such setting; did you mean max_context?"),
    (5, "prefill.replicas: 'many' should be a valid integer"),
    (7, "kv_cache_gib: there is no such setting; it belongs elsewhere: prefill.kv_cache_gib or decode.kv_cache_gib"),
    (9, "decode.max_batch: 0 should be greater than or equal to 1"),
    (14, "slo.classes[0].ttft: there is no such setting; did you mean ttft_s?"),
]


@pytest.mark.parametrize("is_serves", [False, True])
def test_all_that_is_wrong_in_a_file_is_told_with_its_lines(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, is_serves: bool
) -> None:
    file, above, path = tmp_path / "file.yaml", 0, ""
    file.write_text(WRONG)
    if is_serves:
        head = "applications:\n- name: x\n  args:\n"
        file.write_text(head + "".join(f"    {line}\n" for line in WRONG.splitlines()))
        above, path = 3, "applications[0].args."
    assert main(["config", "check", str(file)]) == 2
    told = sorted(capsys.readouterr().out.splitlines(), key=lambda line: int(line.split(":")[1]))
    assert told == [f"{file}:{line + above}: {path}{text}" for line, text in TOLD]


def test_what_settings_say_together_is_told_where_the_first_of_them_stands(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "file.yaml"
    file.write_text("model: {path: bundled}\nprefill:\n  dtype: float32\n")
    assert main(["config", "check", str(file)]) == 2
    assert capsys.readouterr().out.startswith(f"{file}:3: prefill.dtype: float32 beside decode.dtype auto")


def test_a_file_without_faults_is_told_so_and_one_that_is_none_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["config", "check", "deploy/serve.yaml"]) == 0
    assert capsys.readouterr().out == "deploy/serve.yaml: nothing is wrong\n"
    file = tmp_path / "file.yaml"
    for text in ("model: [", "applications: []"):
        file.write_text(text)
        assert main(["config", "check", str(file)]) == 2
        assert str(file) in capsys.readouterr().err


def test_the_schema_has_every_section_with_its_bounds_and_says_what_settings_are(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["config", "schema"]) == 0
    schema = json.loads(capsys.readouterr().out)
    assert set(schema["properties"]) == set(ClusterConfig.model_fields)
    assert schema["additionalProperties"] is False
    decode = schema["$defs"]["DecodeSection"]["properties"]
    assert decode["replicas"] | {"minimum": 1, "maximum": 1024, "default": 1} == decode["replicas"]
    assert "promised" in decode["tpot_safety"]["description"]
    assert {"kv_cache_gib", "node_labels", "max_batch", "token_channel"} <= set(decode)
