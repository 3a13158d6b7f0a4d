"""A class name stands once in the product."""

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PRODUCT = sorted(path.parent.name for path in ROOT.glob("*/__init__.py") if path.parent.name not in ("tests", "tools"))


def sources(folder: str) -> Iterator[tuple[Path, ast.Module]]:
    for path in sorted((ROOT / folder).rglob("*.py")):
        yield path.relative_to(ROOT), ast.parse(path.read_text(encoding="utf-8"))


def test_a_class_name_stands_once_in_the_product() -> None:
    found: dict[str, list[str]] = defaultdict(list)
    for folder in PRODUCT:
        for path, tree in sources(folder):
            for node in ast.walk(tree):
                if isinstance(node, ast.ClassDef):
                    found[node.name].append(f"{path}:{node.lineno}")
    assert len(found) > 500
    assert {name: places for name, places in found.items() if len(places) > 1} == {}
