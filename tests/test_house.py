"""The budgets of rooms in CONTRIBUTING.md against what is there: `pytest -s tests/test_house.py` prints both.

Budgets are for people, in review: a room that is over its own fails no build.
"""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
_ROW = re.compile(r"^\| `(\w+)/` \| (\d+) \| (\d+) \|$", re.MULTILINE)


def lines_of_code(source: str) -> int:
    """Return how many lines are neither blank nor a comment, nor belong to a docstring."""
    standing_alone = {
        number
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        for number in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    lines = enumerate(map(str.strip, source.splitlines()), 1)
    return sum(bool(line) and not line.startswith("#") and number not in standing_alone for number, line in lines)


def room_size(room: str) -> tuple[int, int]:
    """Return the lines of code and the number of files of a room."""
    files = sorted((ROOT / room).rglob("*.py"))
    return sum(lines_of_code(path.read_text(encoding="utf-8")) for path in files), len(files)


def test_lines_of_code_are_neither_blank_nor_comments_nor_docstrings() -> None:
    source = (
        '"""A docstring\nof two lines."""\n\n# a comment\nx = (\n    1,  # one\n)\n\n\ndef f():\n    """Says so."""\n'
    )
    assert lines_of_code(source) == 4


def test_every_room_has_a_budget() -> None:
    budgets = {name: (int(code), int(files)) for name, code, files in _ROW.findall(CONTRIBUTING)}
    rooms = {path.parent.name for path in ROOT.glob("*/*.py")} - {"build"}
    rooms |= {"tools", "tests"}
    assert budgets.keys() == rooms
    for room, (code, files) in budgets.items():
        has_code, has_files = room_size(room)
        over = "  over its budget" if has_code > code or has_files > files else ""
        print(f"{room:15} {has_code:6} of {code:6} lines, {has_files:4} of {files:4} files{over}")


CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
