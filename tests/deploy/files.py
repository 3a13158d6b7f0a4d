"""What the tests of deploy/ read, and where the files there expect things on a node."""

from pathlib import Path
from typing import Any

import yaml

DEPLOY = Path(__file__).resolve().parent.parent.parent / "deploy"
INSTALLED = Path("/opt/twostroke")  # the virtual environment
SETTINGS = Path("/etc/twostroke")  # ray.env, secret.env, keys.yaml, node.env
ROLES = ("prefill", "decode")
LABEL = "twostroke-role"


def ray_env() -> dict[str, str]:
    """The lines of deploy/ray.env."""
    lines = (DEPLOY / "ray.env").read_text(encoding="utf-8").splitlines()
    return dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))


def serve_config() -> dict[str, Any]:
    config: dict[str, Any] = yaml.safe_load((DEPLOY / "serve.yaml").read_text(encoding="utf-8"))
    return config
