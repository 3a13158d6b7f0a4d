"""What the bundled model reads: the standard library's sources and docstrings, as the running CPython has them.

Everything is a pure function of the interpreter's version and SEED: the same CPython gives the same documents in the
same order. Whole files go to one side of the train / held-out split, and the conversations made from a file's
docstrings follow it, so that nothing held out is seen in another form.
"""

import ast
import hashlib
import sysconfig
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

SEED = "twostroke-1"
HELD_OUT_PERCENT = 5

# Test suites teach assertions about odd inputs rather than Python; site-packages is not the standard library.
EXCLUDED_FOLDERS = frozenset({"test", "tests", "idle_test", "site-packages", "_bundled", "__pycache__", "lib-dynload"})
# A build's own settings: they differ from one machine to the next and say nothing about Python.
EXCLUDED_PREFIXES = ("config-", "_sysconfigdata")
# Generated tables: the charmap codecs, the HTML entities. The topics are read as text instead (see `topics`).
TABLE_MARKS = ("decoding_table", "decoding_map")
EXCLUDED_FILES = frozenset({"html/entities.py", "pydoc_data/topics.py"})


@dataclass(frozen=True)
class Turn:
    role: str  # "system", "user" or "assistant"; "" for plain text outside a conversation
    text: str


@dataclass(frozen=True)
class Document:
    name: str  # what it was made from: "os.py", "chat:os.path.join"
    held_out: bool
    turns: tuple[Turn, ...]

    @property
    def characters(self) -> int:
        return sum(len(turn.text) for turn in self.turns)


def seeded(*parts: str) -> int:
    """A number in [0, 2**64) that depends on SEED and the parts alone (Python's own hash differs in each process)."""
    digest = hashlib.sha256("\0".join((SEED, *parts)).encode()).digest()
    return int.from_bytes(digest[:8], "big")


def is_held_out(name: str) -> bool:
    return seeded("split", name) % 100 < HELD_OUT_PERCENT


def stdlib_folder() -> Path:
    return Path(sysconfig.get_paths()["stdlib"])


def source_files() -> Iterator[tuple[str, str]]:
    """(path relative to the library's folder, text) of every kept source file, sorted by path."""
    root = stdlib_folder()
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if EXCLUDED_FOLDERS.intersection(relative.parts) or relative.as_posix() in EXCLUDED_FILES:
            continue
        if any(part.startswith(EXCLUDED_PREFIXES) for part in relative.parts):
            continue
        try:
            with tokenize.open(path) as file:  # honours a coding line
                text = file.read()
            ast.parse(text)
        except (SyntaxError, UnicodeDecodeError):
            continue  # files that are broken on purpose
        if any(mark in text for mark in TABLE_MARKS) or not text.strip():
            continue
        yield relative.as_posix(), text.rstrip() + "\n"


def topics() -> dict[str, str]:
    """The language reference that `help()` prints, by topic. It is read from the file's syntax tree, not imported."""
    tree = ast.parse((stdlib_folder() / "pydoc_data" / "topics.py").read_text(encoding="utf-8"))
    for node in tree.body:
        if isinstance(node, ast.Assign):
            value = ast.literal_eval(node.value)
            return {str(key): str(text).strip() for key, text in value.items()}
    return {}


def plain_documents() -> list[Document]:
    """Every source file and help topic, each as one document."""
    documents = [Document(name, is_held_out(name), (Turn("", text),)) for name, text in source_files()]
    for topic, text in topics().items():
        name = f"topic:{topic}"
        documents.append(Document(name, is_held_out(name), (Turn("", text + "\n"),)))
    return documents
