"""Facts that a server reports of its model are read."""

import json

import pytest

from tests.cluster.command_line import answering
from twostroke.loadtests import LoadTestError
from twostroke.loadtests.generator.run_facts import AdvertisedModel, api_key, served_model


def test_our_server_tells_its_vocabulary() -> None:
    models = {"data": [{"id": "m", "owned_by": "twostroke", "max_model_len": 8192, "vocab_size": 4097}]}
    with answering({"/v1/models": json.dumps(models).encode()}) as url:
        assert served_model(url) == AdvertisedModel("m", 8192, 4097)


def test_another_server_is_asked_for_its_models_alone() -> None:
    models = {"data": [{"id": "llama", "owned_by": "vllm", "max_model_len": 4096}]}
    with answering({"/v1/models": json.dumps(models).encode()}) as url:
        assert served_model(url, "llama") == AdvertisedModel("llama", 4096, 0)


@pytest.mark.parametrize(
    ("body", "status", "fault"),
    [
        (b"{}", 200, "no list of models"),
        (b"<html>", 200, "no list of models"),
        (b'{"data": []}', 200, "serves no model"),
        (b"{}", 401, "OPENAI_API_KEY"),
        (b"{}", 404, "answers 404"),
        (b'{"data": [{"id": "m", "owned_by": "twostroke", "max_model_len": null}]}', 200, "no decode worker"),
    ],
)
def test_a_server_that_is_none_is_refused(body: bytes, status: int, fault: str) -> None:
    with answering({"/v1/models": body}, status) as url, pytest.raises(LoadTestError, match=fault):
        served_model(url)


@pytest.mark.parametrize(
    ("url", "fault"),
    [
        ("ftp://127.0.0.1", "write http://HOST:PORT"),
        ("http://", "write http://HOST:PORT"),
        ("http://127.0.0.1:80x", "nonnumeric port"),
        ("http://127.0.0.1:9/v1/", "leave /v1 away"),
        ("http://127.0.0.1:9", "Connection refused; is it started"),
    ],
)
def test_a_url_at_which_no_server_can_be_is_told_with_the_way_out(url: str, fault: str) -> None:
    with pytest.raises(LoadTestError, match=fault):
        served_model(url)


def test_a_key_of_ours_wins_over_openai_s(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TWOSTROKE_API_KEY", raising=False)
    monkeypatch.setenv("OPENAI_API_KEY", "theirs")
    assert api_key() == "theirs"
    monkeypatch.setenv("TWOSTROKE_API_KEY", "ours")
    assert api_key() == "ours"
