"""The picture of the rooms, `docs/design/rooms.svg`: `python -m tests.rooms` draws it from the code's own imports.

Rooms, the smaller rooms inside them, and the arrows between rooms are read from the files; where a room stands on the
sheet, and the way of a request, are said here. An arrow that follows from others (A imports B, B imports C: A may
import C) is not drawn. A test holds the picture in the repository against a fresh one.
"""

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from html import escape
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PICTURE = ROOT / "docs" / "design" / "rooms.svg"

WIDTH, MARGIN, GAP = 1180, 20, 34
CELL_HEIGHT, CELL_GAP, TITLE_HEIGHT, PADDING = 24, 6, 26, 10
LETTER = 6.6  # the width of one, at the size of cells, a little too wide for all fonts

# room: (first column, columns that it spans) of 12, and its floor; the highest floor is drawn first.
PLACES = {
    "planning": (0, 4, 8),
    "benchmarks": (0, 12, 7),
    "simulator": (8, 4, 6),
    "cluster": (0, 12, 5),
    "prefill_worker": (0, 3, 4),
    "decode_worker": (3, 3, 4),
    "worker": (0, 6, 3),
    "kvtiers": (0, 6, 2),
    "kvtransfer": (0, 6, 1),
    "model": (0, 8, 0),
    "router": (8, 2, 4),
    "loadtests": (10, 2, 4),
    "protocol": (0, 12, -1),
}
TALL = {"router": 0, "loadtests": 0}  # these reach down to the floor that is named

WAY = (
    ("router/http", "a body of bounded size comes in and is authenticated"),
    ("router/openai", "it is checked, and becomes one job for each choice"),
    ("router/text", "text becomes token ids; on the way back, tokens become text"),
    ("router/slo", "what is promised is admitted, or refused at once"),
    ("router/routing", "a prefill worker P and a decode worker D are chosen by predicted time"),
    ("router/generate", "both are called, and called anew elsewhere if one is lost"),
    ("prefill_worker", "P computes the prompt and draws the first token"),
    ("kvtransfer", "its KV goes to D layer by layer while P computes"),
    ("decode_worker", "D writes the answer with all its other requests, a token a step"),
    ("router/token_channels", "tokens come back on one connection a worker, one frame a step"),
)


@dataclass
class Box:
    """A room on the sheet, in its pixels."""

    x: float
    y: float
    width: float
    height: float

    @property
    def middle(self) -> float:
        return self.x + self.width / 2


def rooms() -> list[str]:
    """The packages of the repository, by the folders that hold Python files with an `__init__.py`."""
    return sorted(path.parent.name for path in ROOT.glob("*/__init__.py") if path.parent.name != "tests")


def imported_by(room: str) -> set[str]:
    """The rooms that `room` imports, itself aside."""
    return {name.split(".")[1] for name in _imports(ROOT / room) if name.startswith("twostroke.")} - {room}


def arrows() -> list[tuple[str, str]]:
    """Return who imports whom, without what follows from other arrows. Raises ValueError where arrows run in a
    circle."""
    direct = {room: imported_by(room) for room in rooms()}
    reached = {room: _reached(room, direct) for room in direct}
    return [
        (room, other)
        for room, others in sorted(direct.items())
        for other in sorted(others)
        if not any(other in reached[between] for between in others - {other})
    ]


def inner_floors(room: str) -> list[list[str]]:
    """The smaller rooms of a room, from the top down: each stands above all that it imports."""
    inner = {path.parent.name for path in (ROOT / room).glob("*/__init__.py")}
    direct = {
        name: {
            parts[2]
            for imported in _imports(ROOT / room / name)
            if (parts := imported.split("."))[:2] == ["twostroke", room] and parts[2] in inner - {name}
        }
        for name in inner
    }

    def floor(name: str) -> int:
        return 1 + max((floor(other) for other in direct[name]), default=0)

    for name in inner:
        _reached(name, direct)
    floors = {name: floor(name) for name in inner}
    return [
        sorted(name for name in inner if floors[name] == level)
        for level in range(max(floors.values(), default=0), 0, -1)
    ]


def _reached(room: str, direct: dict[str, set[str]], above: tuple[str, ...] = ()) -> set[str]:
    if room in above:
        raise ValueError(f"these import each other: {', '.join(above)}")
    return direct[room].union(*(_reached(other, direct, (*above, room)) for other in direct[room]))


def _imports(folder: Path) -> Iterator[str]:
    for path in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                yield from (f"{node.module}.{alias.name}" for alias in node.names)


def cells(room: str) -> list[str]:
    """Return a room's smaller rooms, or the files of one without any."""
    inner = sorted(path.parent.name + "/" for path in (ROOT / room).glob("*/__init__.py"))
    return inner or sorted(path.stem for path in (ROOT / room).glob("*.py") if path.stem != "__init__")


def picture() -> str:
    """The whole SVG. Raises KeyError for a room without a place on the sheet."""
    boxes = _boxes()
    bottom = max(box.y + box.height for box in boxes.values())
    height = bottom + GAP + 22 * (len(WAY) // 2 + 1) + MARGIN
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:.0f}" font-family="sans-serif">',
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path d="M0 0 8 4 0 8z" fill="#667"/></marker></defs>',
        f'<rect width="{WIDTH}" height="{height:.0f}" fill="#fdfcf9"/>',
    ]
    for room, box in boxes.items():
        lines += _drawn(room, box)
    for start, end in arrows():
        lines.append(_arrow(boxes[start], boxes[end]))
    for number, (_, words) in enumerate(WAY):
        x = MARGIN + (number % 2) * WIDTH / 2
        y = bottom + GAP + 22 * (number // 2)
        lines += [_mark(x + 9, y, number + 1), f'<text x="{x + 26:.0f}" y="{y + 5:.0f}" font-size="13">{words}</text>']
    return "\n".join([*lines, "</svg>", ""])


def _boxes() -> dict[str, Box]:
    column = (WIDTH - 2 * MARGIN + GAP) / 12
    width = {room: PLACES[room][1] * column - GAP for room in rooms()}
    floors = sorted({PLACES[room][2] for room in rooms()}, reverse=True)
    tops: dict[int, float] = {}
    heights: dict[int, float] = {}
    y = float(MARGIN)
    for floor in floors:
        here = [room for room in rooms() if PLACES[room][2] == floor and room not in TALL]
        tops[floor], heights[floor] = y, max(_height(room, width[room]) for room in here)
        y += heights[floor] + GAP
    boxes = {}
    for room in rooms():
        first, _, floor = PLACES[room]
        lowest = TALL.get(room, floor)
        height = tops[lowest] + heights[lowest] - tops[floor]
        boxes[room] = Box(MARGIN + first * column, tops[floor], width[room], height)
    return boxes


def _rows(room: str, width: float) -> Iterator[list[str]]:
    """Yield the cells that stand side by side in a room of that width. A tall room shows its floors."""
    inner = inner_floors(room) if room in TALL else []
    floors = [[f"{name}/" for name in names] for names in inner] or [cells(room)]
    for floor in floors:
        row: list[str] = []
        used = 0.0
        for cell in floor:
            wide = len(cell) * LETTER + 2 * PADDING + CELL_GAP
            if row and used + wide > width - 2 * PADDING:
                yield row
                row, used = [], 0.0
            row.append(cell)
            used += wide
        yield row


def _height(room: str, width: float) -> float:
    rows = len(list(_rows(room, width)))
    return TITLE_HEIGHT + rows * (CELL_HEIGHT + CELL_GAP) + PADDING


def _drawn(room: str, box: Box) -> list[str]:
    places = {place: number + 1 for number, (place, _) in enumerate(WAY)}
    lines = [
        f'<rect x="{box.x:.1f}" y="{box.y:.1f}" width="{box.width:.1f}" height="{box.height:.1f}" rx="8" '
        'fill="#eef3f6" stroke="#456"/>',
        f'<text x="{box.x + PADDING:.1f}" y="{box.y + 19:.1f}" font-size="15" font-weight="bold">{room}</text>',
    ]
    if room in places:
        lines.append(_mark(box.x + box.width - 16, box.y + 14, places[room]))
    rows = list(_rows(room, box.width))
    step: float = CELL_HEIGHT + CELL_GAP
    if room in TALL:  # its cells take what height there is
        step = (box.height - TITLE_HEIGHT - PADDING) / len(rows)
    for index, row in enumerate(rows):
        x, y = box.x + PADDING, box.y + TITLE_HEIGHT + index * step
        for cell in row:
            width = len(cell) * LETTER + 2 * PADDING
            lines += [
                f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{CELL_HEIGHT}" rx="5" fill="#fff" '
                'stroke="#9ab"/>',
                f'<text x="{x + width / 2:.1f}" y="{y + 16:.1f}" font-size="12" text-anchor="middle">'
                f"{escape(cell)}</text>",
            ]
            if number := places.get(f"{room}/{cell.rstrip('/')}"):
                lines.append(_mark(x + width - 2, y, number))
            x += width + CELL_GAP
    return lines


def _arrow(start: Box, end: Box) -> str:
    """Draw an arrow from the bottom of a room to the top of the one that it imports, straight down where both have a
    column."""
    left, right = max(start.x, end.x), min(start.x + start.width, end.x + end.width)
    from_x = to_x = (left + right) / 2
    if left >= right:
        from_x, to_x = start.middle, end.middle
    return (
        f'<line x1="{from_x:.1f}" y1="{start.y + start.height:.1f}" x2="{to_x:.1f}" y2="{end.y - 1:.1f}" '
        'stroke="#667" stroke-width="1.6" marker-end="url(#tip)"/>'
    )


def _mark(x: float, y: float, number: int) -> str:
    return (
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="9" fill="#d9641c"/><text x="{x:.1f}" y="{y + 4:.1f}" font-size="11" '
        f'fill="#fff" text-anchor="middle">{number}</text>'
    )


def main() -> None:
    PICTURE.write_text(picture(), encoding="utf-8")
    print(f"Wrote {PICTURE.relative_to(ROOT)}", file=sys.stderr)


if __name__ == "__main__":
    main()
