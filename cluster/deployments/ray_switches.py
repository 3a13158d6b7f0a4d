"""Ray's switches that exist as environment variables alone, and that our replicas count on.

`twostroke serve` sets them itself. On a cluster they are in the environment of Ray's processes on every node, from
`deploy/ray.env`, which says why each is there; a test compares the two. Who forgets them is told so in the log of
each router.
"""

from collections.abc import Mapping

SWITCHES: Mapping[str, str] = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_worker_niceness": "0",
    "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
    "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": "twostroke.cluster.deployments.proxies:http_middlewares",
    "RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S": "1",
    "RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S": "5",
}
"""On whichever machine, with whichever proxy."""

HAPROXY_SWITCHES: Mapping[str, str] = {
    "RAY_SERVE_ENABLE_HA_PROXY": "1",
    "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S": "600",
}
"""Where HAProxy is the proxy: everywhere that Ray brings one for."""

NO_HAPROXY_SWITCHES: Mapping[str, str] = {
    "RAY_SERVE_ENABLE_HA_PROXY": "0",
    "RAY_SERVE_ENABLE_DIRECT_INGRESS": "0",  # else the option for throughput would start no proxy at all
}
"""Where Serve's own proxy is."""


def forgotten_switches(environment: Mapping[str, str]) -> str | None:
    """What to say of an environment that lacks switches, or has others; None where it is as it should be.

    Serve's own proxy in place of HAProxy is a choice, and not complained of.
    """
    with_haproxy = environment.get("RAY_SERVE_ENABLE_HA_PROXY") == "1"
    expected = {**SWITCHES, **HAPROXY_SWITCHES} if with_haproxy else SWITCHES
    forgotten = [f"{name}={value}" for name, value in expected.items() if environment.get(name) != value]
    if not forgotten:
        return None
    return (
        f"Ray runs on this node without {', '.join(forgotten)}: start Ray with deploy/ray.env in its environment, on "
        "every node (docs/deploy.md)"
    )
