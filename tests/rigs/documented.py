"""Commands as the pages show them: where each stands, what it prints there, and what a mark says of running it.

A block of commands is indented by four spaces or fenced as `sh`, and a block of Python is fenced as `python`. A mark is
an HTML comment before the block, which readers do not see; each of its lines is one of

    dry: REASON                     none of the block's commands can run here: they are parsed
    dry `TEXT`: REASON              those that contain TEXT
    with `TEXT` as `OTHER`          TEXT stands for OTHER when a test runs it: smaller arguments, names of files
    file NAME                       the block is no command, but the file NAME that the page's commands read

Headers of files below deploy/ have commands, too, in comments that begin with `#   `.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
_PROGRAMS = (
    "twostroke|make|curl|locust|python3?|pip|git|kubectl|helm|docker|ray|serve|haproxy|nginx|systemctl|useradd|install"
    "|printf|promtool|sed|bash|cp|tests/gpu/wheels.sh"
)
_COMMAND = re.compile(rf"(?:\$ )?(?:(?:\.venv/bin/)?(?:{_PROGRAMS}) |(?:PATH|CLUSTER)=|\(umask )")
_COMMENT = re.compile(r"(^|\s+)#( .*)?$")
_MARK = re.compile(r"<!-- commands: ?(.*?)-->", re.DOTALL)
_DRY = re.compile(r"dry(?: `(?P<text>[^`]+)`)?: (?P<reason>.+)")
_WITH = re.compile(r"with `(?P<text>[^`]+)` as `(?P<other>[^`]*)`")
_FILE = re.compile(r"file (?P<name>\S+)")


@dataclass
class Mark:
    """A page's word on the block that follows it."""

    dry: dict[str, str] = field(default_factory=dict)  # text of commands, and why they can't run; "" for all
    smaller: dict[str, str] = field(default_factory=dict)  # text, and what stands for it
    file: str | None = None


@dataclass(frozen=True)
class Command:
    """One command of a page."""

    page: Path
    line: int
    text: str  # lines that end in a backslash are joined
    dry: str | None  # why it can't run here
    smaller: tuple[tuple[str, str], ...]
    output: str | None = None  # what the page says that it prints, where it has a prompt

    @property
    def place(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


@dataclass(frozen=True)
class Block:
    """Lines of a page that are code, without their indent."""

    page: Path
    line: int  # of the first
    language: str  # "" for indented ones
    text: str
    mark: Mark


def read_mark(text: str, place: str) -> Mark:
    """Return what a mark says. Raises ValueError for a line that it does not know."""
    mark = Mark()
    for line in filter(None, (line.strip() for line in text.splitlines())):
        if found := _DRY.fullmatch(line):
            mark.dry[found["text"] or ""] = found["reason"]
        elif found := _WITH.fullmatch(line):
            mark.smaller[found["text"]] = found["other"]
        elif found := _FILE.fullmatch(line):
            mark.file = found["name"]
        else:
            raise ValueError(f"{place}: a mark of commands does not say {line!r}")
    return mark


def blocks(page: Path) -> Iterator[Block]:
    """Yield the blocks of a page, in their order."""
    lines = page.read_text(encoding="utf-8").splitlines()
    mark = Mark()
    number = 0
    while number < len(lines):
        line = lines[number]
        start = number
        if line.lstrip().startswith("<!-- commands:"):
            while "-->" not in lines[number]:
                number += 1
            found = _MARK.search("\n".join(lines[start : number + 1]))
            assert found is not None, f"{page}:{start + 1}"
            mark = read_mark(found[1], f"{page.name}:{start + 1}")
            number += 1
            continue
        if fence := re.match(r"( *)```(\w*)$", line):
            number += 1
            while lines[number].strip() != "```":
                number += 1
            text = "\n".join(one.removeprefix(fence[1]) for one in lines[start + 1 : number])
            yield Block(page, start + 2, fence[2], text, mark)
            mark = Mark()
        elif line.startswith("    ") and (start == 0 or not lines[start - 1].strip()):
            while number < len(lines) and (lines[number].startswith("    ") or not lines[number].strip()):
                if lines[number].lstrip().startswith("<!--"):
                    break
                number += 1
            indent = len(line) - len(line.lstrip())
            yield Block(page, start + 1, "", "\n".join(one[indent:] for one in lines[start:number]).rstrip(), mark)
            mark = Mark()
            continue
        elif line.strip() and not line.lstrip().startswith("<!--") and mark != Mark():
            raise ValueError(f"{page.name}:{start + 1}: a mark of commands stands before no block")
        number += 1


def commands_of(block: Block) -> Iterator[Command]:
    """Yield the commands of a block that has any; lines that go on are joined."""
    if block.language not in ("", "sh") or block.mark.file:
        return
    lines = block.text.splitlines()
    if not any(_COMMAND.match(line) for line in lines[:1]):
        return
    number = 0
    while number < len(lines):
        start = number
        text = _COMMENT.sub("", lines[number])
        number += 1
        while _goes_on(text) and number < len(lines):
            text = f"{text}\n{_COMMENT.sub('', lines[number])}"
            number += 1
        output: list[str] = []
        if text.startswith("$ "):
            while number < len(lines) and lines[number].strip() and not lines[number].startswith("$ "):
                output.append(lines[number])
                number += 1
        if not text.strip():
            continue
        dry = next((reason for part, reason in block.mark.dry.items() if part in text), None)
        smaller = tuple((part, other) for part, other in block.mark.smaller.items() if part in text)
        shown = "\n".join(output) if output else None
        yield Command(block.page, block.line + start, text.removeprefix("$ "), dry, smaller, shown)


def _goes_on(text: str) -> bool:
    """Return whether the next line belongs to the command: a backslash, an open quotation or an open bracket."""
    return text.endswith("\\") or text.count("'") % 2 == 1 or (text.startswith("(") and not text.endswith(")"))


def headers() -> Iterator[Command]:
    """Yield the commands in the headers of deploy/'s files."""
    for path in sorted((ROOT / "deploy").rglob("*")):
        if not path.is_file() or path.suffix in (".png", ".json"):
            continue
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
            text = re.split(r" {3,}|\s+#", line.removeprefix("#   "))[0]
            if line.startswith("#   ") and _COMMAND.match(text):
                yield Command(path, number, text, "a host or a cluster is needed", ())


def page_commands(page: Path) -> list[Command]:
    """Return the commands of a page, in their order."""
    return [command for block in blocks(page) for command in commands_of(block)]


def page_python(page: Path) -> list[Block]:
    """Return the Python of a page that is to run, in its order."""
    return [one for one in blocks(page) if one.language == "python" and not one.mark.dry and not one.mark.file]
