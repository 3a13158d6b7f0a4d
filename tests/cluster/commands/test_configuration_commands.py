"""`twostroke key new` and `twostroke config schema`."""

import json

import pytest
import yaml

from twostroke.cluster.cli import main
from twostroke.cluster.config.config import ClusterConfig, read_config
from twostroke.router.http.tenants import Tenants


def test_a_new_key_is_shown_once_with_the_line_that_makes_it_known(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["key", "new", 'Zoë "Z"', "--slo-class", "standard", "--admin"]) == 0
    told = capsys.readouterr().out
    key = next(line.strip() for line in told.splitlines() if line.strip().startswith("ts-"))
    line = next(line for line in told.splitlines() if line.strip().startswith("- {"))
    assert key not in line
    config = read_config({"auth": {"keys": yaml.safe_load(line)}})
    tenant = Tenants(config.auth.keys, secret=b"s", clock=lambda: 0.0).of(f"Bearer {key}")
    assert (tenant.name, tenant.slo_class, tenant.is_admin) == ('Zoë "Z"', "standard", True)


def test_a_name_that_can_not_be_one_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["key", "new", "a\nb"]) == 2
    assert "printable" in capsys.readouterr().err


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
