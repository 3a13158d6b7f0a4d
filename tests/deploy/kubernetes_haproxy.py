"""deploy/haproxy.cfg for Kubernetes: the routers' pods for servers, as their Service's name tells.

python -m tests.deploy.kubernetes_haproxy      writes it into deploy/kubernetes-load-balancer.yaml
"""

import re

from tests.deploy.programs import DEPLOY

MANIFEST = DEPLOY / "kubernetes-load-balancer.yaml"
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
    f'    server-template router {MOST_ROUTERS} "twostroke-routers.${{POD_NAMESPACE}}.svc.cluster.local:8000"'
    " resolvers kubernetes resolve-prefer ipv4 init-addr none"
)


def kubernetes_haproxy() -> str:
    """The configuration that is in the ConfigMap."""
    config = (DEPLOY / "haproxy.cfg").read_text(encoding="utf-8")
    servers = re.compile(r"^    server \w+ \S+:8000$\n?", flags=re.MULTILINE)
    if len(servers.findall(config)) < 2:
        raise AssertionError("deploy/haproxy.cfg has no two servers that could be replaced")
    return servers.sub("", config).rstrip("\n") + f"\n{_SERVERS}\n{_RESOLVER}"


def main() -> None:
    manifest = MANIFEST.read_text(encoding="utf-8")
    lines = "".join(f"    {line}\n" if line else "\n" for line in kubernetes_haproxy().splitlines())
    begin = manifest.index("  haproxy.cfg: |\n") + len("  haproxy.cfg: |\n")
    MANIFEST.write_text(manifest[:begin] + lines + manifest[manifest.index("---\n", begin) :], encoding="utf-8")


if __name__ == "__main__":
    main()
