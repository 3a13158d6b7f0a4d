"""Everything that the documentation names exists: files, folders, links, make targets, commands and their options."""

import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from twostroke.cluster.cli import main

ROOT = Path(__file__).resolve().parent.parent
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
FILE = re.compile(
    r"(?<![\w./-])(?:protocol|model|kvtransfer|kvtiers|worker|benchmarks|tools|prefill_worker|decode_worker|router|cluster|deploy|loadtests|planner|advisor|tests|docs)"
    r"/(?:[\w./*-]*(?:\.\w+|/))?(?![\w/])"
)
COMMAND = re.compile(r"(?:^|bin/|\(|: )twostroke ((?:bench |cache |loadtest |key |config )?[a-z][a-z-]*)([^|#;&)]*)")
MODULE = re.compile(r"python -m (?:twostroke\.)?((?:cluster|loadtests|benchmarks|tools|tests)[\w.]*)")
OPTION = re.compile(r"(?<![\w-])--[a-z][\w-]*")


def code(page: Path) -> Iterator[str]:
    """Yield what stands between backticks, and the lines of blocks without their indent."""
    for line in page.read_text(encoding="utf-8").replace("\\\n", " ").splitlines():
        yield from re.findall(r"`([^`]+)`", line)
        yield line.strip()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_file_and_link_is_there(page: Path) -> None:
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8"))
    assert [link for link in links if not (page.parent / link).exists()] == []
    files = {file for line in code(page) for file in FILE.findall(line)}
    modules = {module for line in code(page) for module in MODULE.findall(line)}
    files |= {f"{module.replace('.', '/')}*" for module in modules}  # a file or a folder
    assert [file for file in sorted(files) if not any(ROOT.glob(file))] == []


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them, and those that are set by hand."""
    text = page.read_text(encoding="utf-8")
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    by_hand = re.findall(r'<a id="([^"]+)">', text)
    return {*by_hand, *(re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings)}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_place_that_a_link_leads_to_is_there(page: Path) -> None:
    links = re.findall(r"\]\(([\w./-]*)#([^)]+)\)", page.read_text(encoding="utf-8"))
    assert [f"{to}#{anchor}" for to, anchor in links if anchor not in anchors(page.parent / to if to else page)] == []


def test_every_make_target_is_there() -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    named = {target for page in PAGES for line in code(page) for target in re.findall(r"^make ([a-z][\w-]*)", line)}
    assert named - targets == set()


def commands() -> dict[str, set[str]]:
    """Every command that a page names, with the options that it is given anywhere."""
    found: dict[str, set[str]] = defaultdict(set)
    for line in (line for page in PAGES for line in code(page)):
        for command, rest in COMMAND.findall(line):
            own, _, of_serve = rest.partition(" -- ")
            found[command].update(OPTION.findall(own))
            found["serve"].update(OPTION.findall(of_serve))
    return found


@pytest.mark.parametrize(("command", "options"), sorted(commands().items()))
def test_every_command_is_there_and_knows_its_options(
    command: str, options: set[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="0"):
        main([*command.split(), "--help"])
    assert options - set(OPTION.findall(capsys.readouterr().out)) == set()


NAMED_TEST = re.compile(r"`(tests/[\w/]+\.py)::(test_\w+)`")


def test_every_test_that_a_page_names_is_there() -> None:
    named = {named for page in PAGES for named in NAMED_TEST.findall(page.read_text(encoding="utf-8"))}
    missing = [
        f"{file}::{test}"
        for file, test in sorted(named)
        if not re.search(rf"^(?:async )?def {test}\(", (ROOT / file).read_text(encoding="utf-8"), re.MULTILINE)
    ]
    assert named
    assert missing == []


def test_every_promise_of_security_has_a_test_that_holds_it() -> None:
    promised = (
        (ROOT / "SECURITY.md")
        .read_text(encoding="utf-8")
        .partition("## What is promised")[2]
        .partition("## What is not")[0]
    )
    rows = [line for line in promised.splitlines() if line.startswith("| ") and "held by" not in line]
    assert len(rows) > 20
    assert [row for row in rows if not NAMED_TEST.search(row)] == []
    assert [line for line in promised.splitlines() if line.startswith("- ")] == []  # a promise is a row
