"""Breaks places of the product at random and tells which breaks no test notices: `python -m tests.mutations`.

A place is a comparison, a sum, a choice or a small number in a file of `--rooms`. Each is broken by itself in a copy of
the working tree, where the tests of its folder run, then those of its room, then the simulation, until one fails. The
last line is JSON. The same seed breaks the same places as long as the files are the same.
"""

import argparse
import ast
import copy
import json
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("protocol", "router", "worker", "kvtransfer", "kvtiers", "planning", "cluster")
LIMIT_S = 1800.0
"""Seconds that the tests of one break may take. A break that makes them hang is caught."""
_SWAPPED: dict[type[ast.AST], type[ast.AST]] = {
    **{ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq},
    **{ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In},
    **{ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.And: ast.Or, ast.Or: ast.And},
}


def broken(node: ast.AST) -> ast.AST | None:
    """Return the node with one thing wrong; None where it is of no kind that is broken."""
    wrong = copy.deepcopy(node)
    match wrong:
        case ast.Compare(ops=[op]) if type(op) in _SWAPPED:
            wrong.ops = [_SWAPPED[type(op)]()]  # type: ignore[list-item]
        case ast.BinOp(op=op, left=left) | ast.BoolOp(op=op, values=[left, *_]) if type(op) in _SWAPPED:
            if isinstance(left, ast.Constant | ast.JoinedStr):
                return None  # most are texts
            wrong.op = _SWAPPED[type(op)]()  # type: ignore[assignment]
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return operand
        case ast.Constant(value=int() as number) if not isinstance(number, bool) and number < 1000:
            wrong.value = number + 1
        case _:
            return None
    return wrong


def places(path: Path) -> Iterator[tuple[ast.expr, ast.AST]]:
    """Yield the expressions of a file that can be broken, inside functions, each with what stands for it."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            for statement in function.body:
                for node in ast.walk(statement):
                    if isinstance(node, ast.expr) and (wrong := broken(node)) is not None:
                        yield node, wrong


def with_break(source: str, node: ast.expr, wrong: ast.AST) -> str:
    """Return the source with the node's text replaced."""
    lines = source.splitlines(keepends=True)
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line.encode()))
    assert node.end_lineno is not None
    assert node.end_col_offset is not None
    begin, end = starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset
    whole = source.encode()
    return (whole[:begin] + f"({ast.unparse(wrong)})".encode() + whole[end:]).decode()


def nearest_tests(file: Path) -> list[list[str]]:
    """Return the tests to run, the nearest first."""
    room, *inner = file.parent.parts
    near = Path("tests", room, *inner)
    stages = [[str(near)]] if inner and (ROOT / near).is_dir() else []
    return [*stages, [f"tests/{room}"], ["tests/simulation/scenarios", "tests/simulation/transfers"]]


def is_caught(copied: Path, file: Path) -> bool:
    """Return whether a test of the broken copy fails."""
    options = ("-q", "-x", "--no-header", "-p", "no:cacheprovider", "--numprocesses", "2")
    environment = {
        "PATH": f"{copied}/.venv/bin:/usr/bin:/bin",
        "PYTHONPATH": f"{copied}/build/types",
        "HOME": str(copied),
    }
    for folders in nearest_tests(file):
        command = [f"{copied}/.venv/bin/python", "-m", "pytest", *options, *folders]
        try:
            done = subprocess.run(command, cwd=copied, env=environment, capture_output=True, timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            return True
        if done.returncode not in (0, 5):  # 5: none were collected
            return True
    return False


def copy_tree(target: Path) -> None:
    """Copy the tracked files, with links to what setting up has made."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout
    for name in filter(None, listed.decode().split("\0")):
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, target / name)
    (target / ".venv").symlink_to((ROOT / ".venv").resolve())
    (target / "build" / "types").mkdir(parents=True)
    (target / "build" / "types" / "twostroke").symlink_to("../..")


def main() -> int:
    """Break, run, tell."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--rooms", nargs="+", default=ROOMS)
    asked = parser.parse_args()
    draw = random.Random(asked.seed)
    files = [path for room in asked.rooms for path in sorted((ROOT / room).rglob("*.py"))]
    found = [(path, node, wrong) for path in files for node, wrong in places(path)]
    caught = 0
    with tempfile.TemporaryDirectory() as folder:
        copied = Path(folder)
        copy_tree(copied)
        for path, node, wrong in draw.sample(found, asked.count):
            file = path.relative_to(ROOT)
            source = path.read_text(encoding="utf-8")
            (copied / file).write_text(with_break(source, node, wrong), encoding="utf-8")
            is_seen = is_caught(copied, file)
            (copied / file).write_text(source, encoding="utf-8")
            caught += is_seen
            told = f"{file}:{node.lineno}: {ast.unparse(node)}  ->  {ast.unparse(wrong)}"
            print(f"{'caught  ' if is_seen else 'SURVIVED'}  {told}", flush=True)
    print(json.dumps({"seed": asked.seed, "breaks": asked.count, "caught": caught}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
