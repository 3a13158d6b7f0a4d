"""Docstrings begin with a sentence or a noun phrase that stands alone, and a class name stands once in the product."""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PRODUCT = sorted(path.parent.name for path in ROOT.glob("*/__init__.py") if path.parent.name not in ("tests", "tools"))
FRAGMENTS = re.compile(
    r"\W*(?:Of|That|Whether|Who|Whom|Whose|What|Which|Where|How|Why|As|So|By|From|For|Until|And|Or|But|Because|Since|Than"
    r"|Per|Else|Also|Through|Like|In|On|At|To|With|Without|Before|After|Between|Under)\b"
)
"""A docstring that begins with one of these hangs on the name above it, or turns its sentence around."""


def sources(folder: str) -> Iterator[tuple[Path, ast.Module]]:
    for path in sorted((ROOT / folder).rglob("*.py")):
        yield path.relative_to(ROOT), ast.parse(path.read_text(encoding="utf-8"))


def docstrings(tree: ast.Module) -> Iterator[ast.Constant]:
    """Yield the strings that stand alone in a module, a class or a function: its docstring, and those of its fields."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            for one in node.body:
                if (
                    isinstance(one, ast.Expr)
                    and isinstance(one.value, ast.Constant)
                    and isinstance(one.value.value, str)
                ):
                    yield one.value


@pytest.mark.parametrize("folder", [*PRODUCT, "tests", "tools"])
def test_no_docstring_begins_as_a_fragment(folder: str) -> None:
    found = [(f"{path}:{text.lineno}", str(text.value)) for path, tree in sources(folder) for text in docstrings(tree)]
    assert found
    assert [place for place, text in found if FRAGMENTS.match(text)] == []


def test_a_class_name_stands_once_in_the_product() -> None:
    found: dict[str, list[str]] = defaultdict(list)
    for folder in PRODUCT:
        for path, tree in sources(folder):
            for node in ast.walk(tree):
                if isinstance(node, ast.ClassDef):
                    found[node.name].append(f"{path}:{node.lineno}")
    assert len(found) > 500
    assert {name: places for name, places in found.items() if len(places) > 1} == {}
