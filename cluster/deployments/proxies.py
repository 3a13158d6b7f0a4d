"""The parts of Serve's HTTP entry that are ours: one middleware, a warning, and the Ray switches that replicas need.

The middleware goes around Serve's own, in its proxies and in router replicas that take requests themselves. Serve
appends an `X-Request-Id` of its own to every answer, and echoes whatever the client sent. `RequestIds` outside of it
shows it valid ids alone, and answers with one id.

The switches exist as environment variables alone. `twostroke serve` sets them itself. On a cluster they come from
`deploy/ray.env`, which says why each is there; a test compares the two. Each router logs a switch that is missing.
"""

import ipaddress
from collections.abc import Mapping

from starlette.middleware import Middleware

from twostroke.router.http.middleware import RequestIds


def http_middlewares() -> list[Middleware]:
    """Return Serve's middlewares. `RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH` names this function."""
    return [Middleware(RequestIds)]


def is_loopback(host: str) -> bool:
    """Return whether only this machine reaches a listener on `host`. A name that is not an address counts as
    reachable."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def exposure_warning(host: str, *, has_keys: bool) -> str | None:
    """Return the warning about an endpoint on `host`, or None."""
    if has_keys or is_loopback(host):
        return None
    return (
        f"NO API KEYS: the endpoint listens on {host}, so whoever reaches this machine may use it, and see and load "
        "its workers. Add keys (`twostroke key new NAME`), or listen on 127.0.0.1"
    )


SWITCHES: Mapping[str, str] = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_worker_niceness": "0",
    "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
    "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": "twostroke.cluster.deployments.proxies:http_middlewares",
    "RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S": "1",
    "RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S": "5",
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "30",
    "RAY_SERVE_CONTROL_LOOP_INTERVAL_S": "0.4",
}
"""Ray switches that are needed with any proxy."""

HAPROXY_SWITCHES: Mapping[str, str] = {
    "RAY_SERVE_ENABLE_HA_PROXY": "1",
    "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S": "600",
    "RAY_SERVE_HAPROXY_TIMEOUT_CLIENT_S": "90",  # longer than router.body_timeout_s, so that its 408 comes
}
"""Ray switches with HAProxy as the proxy."""

NO_HAPROXY_SWITCHES: Mapping[str, str] = {
    "RAY_SERVE_ENABLE_HA_PROXY": "0",
    "RAY_SERVE_ENABLE_DIRECT_INGRESS": "0",  # else the option for throughput would start no proxy at all
}
"""Ray switches with Serve's own proxy."""


def forgotten_switches(environment: Mapping[str, str]) -> str | None:
    """Return what is wrong with Ray's environment, or None. Serve's own proxy in place of HAProxy is a choice and not
    reported."""
    with_haproxy = environment.get("RAY_SERVE_ENABLE_HA_PROXY") == "1"
    expected = {**SWITCHES, **HAPROXY_SWITCHES} if with_haproxy else SWITCHES
    forgotten = [f"{name}={value}" for name, value in expected.items() if environment.get(name) != value]
    if not forgotten:
        return None
    return (
        f"Ray runs on this node without {', '.join(forgotten)}: start Ray with deploy/ray.env in its environment, on "
        "every node (docs/hosts.md)"
    )
