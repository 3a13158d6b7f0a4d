"""tests/gpu/first.sh without a GPU: whatever it imports, selects and names is there, on a host that lacks our packages.

A machine with a GPU is had for minutes: a name that has changed since must not cost one of them.
"""

import argparse
import ast
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.gpu.first import environment, kernel_times, start
from tests.gpu.first.facts import facts_of, shown
from tests.model.conftest import write_checkpoint
from twostroke.benchmarks.gpu import command
from twostroke.benchmarks.gpu.command import KINDS, GpuReport
from twostroke.benchmarks.gpu.limits import LimitRow
from twostroke.benchmarks.transfers import transfer

__all__ = ["write_checkpoint"]

ROOT = Path(__file__).resolve().parent.parent
PROGRAMS = sorted(path.stem for path in (ROOT / "tests/gpu/first").glob("*.py"))
# What can be imported on a GPU host with torch and pytest, of what we use: by the names of the packages.
THERE = (
    *("torch", "triton", "numba", "llvmlite", "numpy", "safetensors", "tokenizers", "transformers", "huggingface-hub"),
    *("pytest", "pluggy", "iniconfig", "packaging", "pygments", "execnet", "pytest-xdist", "pytest-timeout"),
    *("filelock", "fsspec", "networkx", "sympy", "mpmath", "jinja2", "markupsafe", "typing-extensions", "hypothesis"),
    *("pyyaml", "regex", "requests", "httpx", "xxhash", "prometheus-client", "rich", "psutil", "tqdm", "setuptools"),
    *(
        "anyio",
        "certifi",
        "h11",
        "httpcore",
        "idna",
        "protobuf",
        "sortedcontainers",
        "attrs",
        "markdown-it-py",
        "mdurl",
    ),
)
IMPORTED_AS = {  # where that is not the package's own name
    "pytest": ("pytest", "_pytest", "py"),
    "pytest-xdist": ("xdist",),
    "pyyaml": ("yaml", "_yaml"),
    "attrs": ("attr", "attrs"),
    "setuptools": ("setuptools", "pkg_resources", "_distutils_hack"),
    "torch": ("torch", "torchgen", "functorch"),
}


def packed() -> list[str]:
    """The packages whose wheels tests/gpu/wheels.sh takes along."""
    listed = re.search(r"^PACKED=\((.*?)^\)", (ROOT / "tests/gpu/wheels.sh").read_text(), re.M | re.S)
    assert listed is not None
    return [re.split("[=<>]", name)[0] for name in shlex.split(listed[1])]


def importable() -> list[str]:
    names = (*THERE, *packed())
    return [module for name in names for module in IMPORTED_AS.get(name, (name.replace("-", "_"),))]


# Replaces the finder of installed packages, imports what is asked for, and collects what each expression selects.
ON_THE_HOST = """
import importlib, json, sys
from importlib.machinery import PathFinder

asked = json.loads(sys.stdin.read())
known = {*sys.stdlib_module_names, *asked["importable"], "tests", "twostroke"}

class HostFinder:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if path is None and name not in known and not name.startswith("_sysconfigdata"):
            return None
        return PathFinder.find_spec(name, path, target)

    find_distributions = PathFinder.find_distributions

sys.meta_path[sys.meta_path.index(PathFinder)] = HostFinder
sys.path.insert(0, ".")
broken = {}
for statement in asked["imports"]:
    try:
        exec(statement, {})
    except Exception as error:
        broken[statement] = f"{type(error).__name__}: {error}"

import pytest

class Collected:
    def pytest_collection_finish(self, session):
        self.names = [item.nodeid for item in session.items]

options = ["tests/gpu", "-m", "gpu", "--collect-only", "-q", "-W", "default", "-p", "no:cacheprovider"]
selected = {}
for name, expression in asked["selections"].items():
    collected = Collected()
    code = pytest.main([*options, "-p", "pytest_asyncio.plugin", "-k", expression], plugins=[collected])
    selected[name] = collected.names if code == 0 else f"pytest exits with {code}"
print()
print(json.dumps({"broken": broken, "selected": selected}))
"""


CHOICE = ("-k", "fp8 or greedy_tokens", "--only", "fp8,gated", "--transfer")  # what part T runs


@cache
def steps(part: str) -> dict[str, list[str]]:
    """The commands of a part, by the names of their steps."""
    told = run_script(part, *CHOICE, "--dry-run")
    return {f"{part} {name}": words for name, *words in map(shlex.split, told.stdout.splitlines())}


def run_script(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = ["bash", "tests/gpu/first.sh", *arguments]
    environment = {**os.environ, **environment}
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=60, check=False)


def all_steps() -> dict[str, list[str]]:
    return {name: command for part in "ABCT" for name, command in steps(part).items()}


def selections() -> dict[str, str]:
    """The expressions by which steps select tests."""
    return {name: words[words.index("-k") + 1] for name, words in all_steps().items() if "pytest" in words}


def kinds_of_rows() -> dict[str, list[str]]:
    benches = {name: words for name, words in all_steps().items() if "--only" in words}
    return {name: words[words.index("--only") + 1].split(",") for name, words in benches.items()}


def imports_of(path: Path) -> set[str]:
    """Every import in a file, those inside functions included, as statements."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import | ast.ImportFrom):
            found.add(ast.unparse(node))
    return found


@pytest.fixture(scope="module")
def on_the_host() -> dict[str, Any]:
    """Return what breaks, and what is selected, where only the host's packages and the packed wheels can be
    imported."""
    files = [*(ROOT / "tests/gpu").rglob("*.py"), *(ROOT / "benchmarks/gpu").glob("*.py")]
    asked = {
        "importable": importable(),
        "imports": sorted(
            {f"import tests.gpu.first.{program}" for program in PROGRAMS}
            | {f"import {module}" for module in environment.OURS}
            | set[str]().union(*map(imports_of, files))
        ),
        "selections": {**selections(), "all": ""},
    }
    ran = subprocess.run(
        [sys.executable, "-c", ON_THE_HOST],
        input=json.dumps(asked),
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        timeout=120,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    found: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    return found


def test_nothing_is_imported_that_such_a_host_lacks_and_no_wheel_brings(on_the_host: dict[str, Any]) -> None:
    assert on_the_host["broken"] == {}


@pytest.mark.parametrize("name", selections())
def test_each_part_of_an_expression_selects_tests(name: str, on_the_host: dict[str, Any]) -> None:
    assert isinstance(on_the_host["selected"][name], list), on_the_host["selected"][name]
    assert on_the_host["selected"][name]
    for word in set(re.findall(r"\w+", selections()[name])) - {"and", "or", "not"}:
        assert any(word in test for test in on_the_host["selected"]["all"]), word


def test_parts_a_and_b_run_all_tests_but_some_of_fp16s(on_the_host: dict[str, Any]) -> None:
    parts = [on_the_host["selected"][name] for name in ("A smoke", "B share", "B tests")]
    chosen = [test for part in parts for test in part]
    assert len(chosen) == len(set(chosen))
    left_out = set(on_the_host["selected"]["all"]) - set(chosen)
    assert all("dtype1" in test for test in left_out)


def test_each_kind_of_rows_is_the_benchs_and_all_but_a_start_are_measured() -> None:
    named = [kind for kinds in kinds_of_rows().values() for kind in kinds]
    assert set(named) <= KINDS.keys()
    assert KINDS.keys() - {"start"} == set(named), "start.py measures a start"


@pytest.mark.parametrize("name", all_steps())
def test_each_program_is_there_and_each_bench_takes_its_options(name: str) -> None:
    python, dash_m, module, *arguments = all_steps()[name]
    assert (python, dash_m) == ("python3", "-m")
    if module == "pytest":
        return
    assert module.removeprefix("tests.gpu.first.") in PROGRAMS
    if module.endswith(".bench"):
        bench = {"gpu": command, "transfer": transfer}[arguments[0]]
        parser = argparse.ArgumentParser()
        bench.add_arguments(parser)
        parser.parse_args(arguments[1:])


PYTHON = """#!/bin/sh
case "$*" in
*first.facts*) exec {python} "$@" ;;
*"pip install"*--target*a.whl) touch {installed} ;;
*long_contexts*) echo "FAILED tests/gpu/test_a.py::test_long_contexts[1] - no"; exit 1 ;;
*) echo '{{"kernels": "'$TRITON_CACHE_DIR'"}}' ;;
esac
"""


@pytest.mark.parametrize("part", "ABCT")
def test_every_step_leaves_its_facts(part: str, tmp_path: Path) -> None:
    """Steps run with a python3 that does nothing but note them."""
    python = tmp_path / "python3"
    installed, wheels = tmp_path / "installed", tmp_path / "wheels"
    python.write_text(PYTHON.format(python=sys.executable, installed=installed))
    python.chmod(0o755)
    wheels.mkdir()
    (wheels / "a.whl").touch()
    path = f"{tmp_path}:{os.environ['PATH']}"
    ran = run_script(part, *CHOICE, PATH=path, TMPDIR=str(tmp_path), OUT=str(tmp_path / "facts"), WHEELS=str(wheels))
    assert ran.returncode == 0
    assert installed.exists()
    noted = [json.loads(line) for line in (tmp_path / "facts" / f"{part}.jsonl").read_text().splitlines()]
    assert [f"{part} {fact['step']}" for fact in noted] == list(steps(part))
    assert all(f"{fact['step']}: rc {fact['rc']}" in ran.stdout for fact in noted)
    if part == "A":
        assert noted[1]["not_passed"] == {"test_long_contexts[1]": "FAILED"}
    if part == "C":
        assert [Path(fact["kernels"]).name for fact in noted] == ["cold", "cold", "kernels", "kernels"]


@pytest.mark.parametrize("arguments", [(), ("D",), ("A", "soon"), ("T", "60"), ("T", "-k")])
def test_what_the_script_does_not_know_is_told_before_anything_runs(arguments: tuple[str, ...]) -> None:
    ran = run_script(*arguments)
    assert ran.returncode != 0
    assert ran.stdout == ""
    assert "usage: bash tests/gpu/first.sh A|B|C|T" in ran.stderr


LOG = """
[gw1] [ 50%] FAILED tests/gpu/test_a.py::test_one[{'window': 3}-8]
tests/gpu/test_a.py::test_two PASSED
[gw1] [100%] SKIPPED tests/gpu/test_a.py::test_three
worker 'gw0' crashed while running 'tests/gpu/test_a.py::test_four'
____________________ test_one[{'window': 3}-8] ____________________
[gw1] linux -- Python
tests/gpu/test_a.py:12: in test_one
    assert is_close(found, expected)
tests/rigs/close.py:7: in is_close
    assert 3 <= 2
E   AssertionError: assert 3 <= 2
E    +  where 3 = a
=== short test summary info ===
FAILED tests/gpu/test_a.py::test_one[{'window': 3}-8] - AssertionError: assert 3 <= 2
"""


def test_every_failing_test_is_told_with_its_error_and_place() -> None:
    found = facts_of(LOG, 1)
    assert found["tests"] == {"CRASHED": 1, "FAILED": 1, "PASSED": 1, "SKIPPED": 1}
    assert found["skipped"] == ["test_three"]
    assert found["not_passed"] == {
        "test_four": "CRASHED",
        "test_one[{'window': 3}-8]": "FAILED: tests/rigs/close.py:7; AssertionError: assert 3 <= 2; +  where 3 = a",
    }


def test_rows_are_told_whose_names_overflow_their_column(capsys: pytest.CaptureFixture[str]) -> None:
    report, long = GpuReport(), "decode attention over FP8, batch 128, context 4096, peer"
    for name, ratio in (("short", 0.5), ("short, peer", 0.25), (long, 0.75)):
        report.add(LimitRow(name, ratio, 1.0, "2 us", "torch", predicted=0.8))
    report.finish()
    found = facts_of(capsys.readouterr().out, 0)
    assert found["rows"] == {
        "short": "0.50 of torch (aim 1) 2 us, predicted 0.8",
        "short, peer": "0.25 of torch (aim 1) 2 us, predicted 0.8",
        long: "0.75 of torch (aim 1) 2 us, predicted 0.8",
    }
    assert f"    {long}: {found['rows'][long]}" in shown({"step": "rows", "rc": 0, "s": 3, **found})


def test_a_start_is_timed_on_a_cpu_too(write_checkpoint: Callable[..., Path]) -> None:
    folder = str(write_checkpoint())
    found = start.measure(start.engine_config([folder, "--device", "cpu", "--blocks", "128"]), prompts=(5, 70), steps=2)
    assert found["blocks"] == 128
    assert start.engine_config([folder]).device == "cuda"
    assert all(found[name] > 0 for name in ("prompt_5_ms", "prompt_70_ms", "step_1_ms", "step_32_ms"))


def test_a_profile_tells_how_long_the_gpu_was_busy_and_with_what() -> None:
    layers = kernel_times.SIZES.model.num_layers
    spans = [("gemm_kernel", 10.0 * at, 10.0 * at + 4) for at in range(4 * layers + 1)] + [("norm", 2.0, 6.0)]
    found = kernel_times.summary(spans, 1)
    assert found["busy_ms"] == round((4 * (4 * layers + 1) + 2) / 1e3, 3)
    assert [row[0] for row in found["top"]] == ["gemm_kernel", "norm"]
    assert found["down"] == [4.0, round(4096 * 14336 * 2 / 4 / 1e3)]
    assert "down" not in kernel_times.summary(spans[1:], 1)
