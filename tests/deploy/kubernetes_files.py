"""Files for Kubernetes that follow from others in deploy/, and what Kustomize makes of all of them.

    python -m tests.deploy.kubernetes_files      writes the first anew: the balancer's configuration and the alert rules

The balancer's is deploy/haproxy.cfg with the routers' pods for servers, as their Service's name tells.
"""

import re
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from tests.deploy.monitoring import RULES
from tests.deploy.programs import DEPLOY, of_pip, run

KUBERNETES = DEPLOY / "kubernetes"
OVERLAYS = tuple(sorted(path.name for path in (KUBERNETES / "overlays").iterdir()))
HAPROXY = KUBERNETES / "components/load-balancer/haproxy.cfg"
PROMETHEUS_RULE = DEPLOY / "monitoring/prometheus-rule.yaml"
MOST_ROUTERS = 16
_RESOLVER = """
# The cluster's own DNS: a router's pod that comes or goes is noticed within seconds.
resolvers kubernetes
    parse-resolv-conf
    hold valid 2s
    hold obsolete 5s
"""
_SERVERS = (
    "    # HAProxy's resolvers know nothing of search domains: the whole name.\n"
    f'    server-template router {MOST_ROUTERS} "twostroke-router-pods.${{POD_NAMESPACE}}.svc.cluster.local:8000"'
    " resolvers kubernetes resolve-prefer ipv4 init-addr none"
)


_TLS = re.compile(
    r"^(    bind :8080\n)    # TLS instead of the line above:\n"
    r"    #(bind) :443 (ssl crt) \S+( .*\n    )#(http-response .*\n)",
    flags=re.MULTILINE,
)
_EITHER = (
    r"    .if defined(TWOSTROKE_TLS)\n    \2 :8443 \3 /etc/twostroke-tls/twostroke.pem\4\5"
    r"    .else\n\1    .endif\n"
)


def kubernetes_haproxy() -> str:
    """The configuration of the pods in front. An environment variable, which components/tls sets, turns TLS on."""
    config = (DEPLOY / "haproxy.cfg").read_text(encoding="utf-8")
    servers = re.compile(r"^    server \w+ \S+:8000$\n?", flags=re.MULTILINE)
    if len(servers.findall(config)) < 2:
        raise AssertionError("deploy/haproxy.cfg has no two servers that could be replaced")
    config, found = _TLS.subn(_EITHER, config)
    if found != 1:
        raise AssertionError("deploy/haproxy.cfg says no longer how TLS is turned on")
    return servers.sub("", config).rstrip("\n") + f"\n{_SERVERS}\n{_RESOLVER}"


_ABOUT_RULES = """# Made from alerts.yml, for the Prometheus operator: python -m tests.deploy.kubernetes_files
apiVersion: monitoring.coreos.com/v1
kind: PrometheusRule
metadata:
  name: twostroke
  labels: {release: kube-prometheus-stack}
spec:
"""


def prometheus_rule() -> str:
    """alerts.yml as the operator takes it."""
    rules = RULES.read_text(encoding="utf-8")
    lines = rules[rules.index("groups:\n") :].splitlines()
    return _ABOUT_RULES + "".join(f"  {line}\n" if line else "\n" for line in lines)


@cache
def rendered(overlay: str) -> tuple[dict[str, Any], ...]:
    """Return what `kubectl apply -k` would send."""
    return of_folder(KUBERNETES / "overlays" / overlay)


def of_folder(folder: Path) -> tuple[dict[str, Any], ...]:
    """Return the manifests that Kustomize makes of a folder."""
    done = run(of_pip("kubectl"), "kustomize", str(folder))
    assert (done.returncode, done.stderr) == (0, "")
    return tuple(yaml.safe_load_all(done.stdout))


def main() -> None:
    HAPROXY.write_text(kubernetes_haproxy(), encoding="utf-8")
    PROMETHEUS_RULE.write_text(prometheus_rule(), encoding="utf-8")


if __name__ == "__main__":
    main()
