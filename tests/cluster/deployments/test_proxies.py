"""One `X-Request-Id` an answer, and what is said of open endpoints and forgotten switches."""

import asyncio
from pathlib import Path

import pytest
from ray.serve._private.http_util import _apply_middlewares
from starlette.types import Message, Receive, Scope, Send

from twostroke.cluster.deployments.proxies import (
    HAPROXY_SWITCHES,
    SWITCHES,
    exposure_warning,
    forgotten_switches,
    http_middlewares,
    is_loopback,
)
from twostroke.cluster.local.ray import ray_environment
from twostroke.router.http.config import HttpConfig
from twostroke.router.http.middleware import RequestIds


def ids_of_answer(given: list[bytes]) -> tuple[list[bytes], list[bytes]]:
    """The ids (inside, in the answer) of a request with these `X-Request-Id`s, through Serve's middleware and ours."""
    inside: list[bytes] = []
    answer: list[bytes] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        inside.extend(value for name, value in scope["headers"] if name == b"x-request-id")
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def receive() -> Message:
        raise AssertionError("nobody asks for a body")

    async def send(message: Message) -> None:
        answer.extend(value for name, value in message["headers"] if name == b"x-request-id")

    served = _apply_middlewares(RequestIds(app), http_middlewares())
    scope = {"type": "http", "path": "/v1/models", "headers": [(b"x-request-id", one) for one in given]}
    asyncio.run(served(scope, receive, send))
    return inside, answer


@pytest.mark.parametrize("given", [[], [b"my id \xe9"], [b"x" * 129], [b"a b", b"c"]])
def test_an_answer_through_serve_has_one_sound_id_that_serve_knows_too(given: list[bytes]) -> None:
    inside, answer = ids_of_answer(given)
    assert inside == answer
    assert len(answer) == 1
    assert answer[0] not in given
    assert answer[0].isalnum()


def test_a_sound_id_is_kept_and_comes_once() -> None:
    assert ids_of_answer([b"abc-1.2:3"]) == ([b"abc-1.2:3"], [b"abc-1.2:3"])


@pytest.mark.parametrize("host", ["127.0.0.1", "127.3.2.1", "::1", "localhost"])
def test_this_machine_alone_is_no_concern(host: str) -> None:
    assert is_loopback(host)
    assert exposure_warning(host, has_keys=False) is None


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.5", "server.example", ""])
def test_others_are_unless_they_need_a_key(host: str) -> None:
    assert "NO API KEYS" in str(exposure_warning(host, has_keys=False))
    assert exposure_warning(host, has_keys=True) is None


@pytest.mark.parametrize("haproxy", [True, False])
def test_a_server_of_ours_forgets_no_switch_whatever_the_shell_has(haproxy: bool, tmp_path: Path) -> None:
    environment = ray_environment(tmp_path, haproxy=haproxy)
    assert forgotten_switches(environment) is None
    assert environment["RAY_SERVE_ENABLE_HA_PROXY"] == str(int(haproxy))
    assert environment["RAY_worker_niceness"] == "0"  # no lower priority than other processes have


def test_a_bare_ray_is_told_what_it_lacks_and_where_that_is() -> None:
    said = forgotten_switches({"PATH": "/bin"})
    assert said is not None
    assert "RAY_SERVE_THROUGHPUT_OPTIMIZED=1" in said
    assert "deploy/ray.env" in said


def test_a_wrong_value_is_as_good_as_none() -> None:
    environment = {**SWITCHES, **HAPROXY_SWITCHES, "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S": "120"}
    said = forgotten_switches(environment)
    assert said is not None
    assert "without RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S=600:" in said


def test_the_router_refuses_a_late_body_before_haproxy_gives_its_client_up() -> None:
    """HAProxy would answer 400, which blames the request; the router's 408 says what was late."""
    timeout_s = float(HAPROXY_SWITCHES["RAY_SERVE_HAPROXY_TIMEOUT_CLIENT_S"])
    assert timeout_s >= HttpConfig().body_timeout_s + 30
