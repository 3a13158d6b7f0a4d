"""Training text of the bundled model: the standard library's sources and docstrings, as the running CPython has them.

Everything is a pure function of the interpreter's version and SEED: the same CPython gives the same documents in the
same order. Whole files go to one side of the train / held-out split, and the conversations made from a file's
docstrings follow it, so that nothing held out is seen in another form.

Short conversations are made from the docstrings, so that the chat template means something to the model: "Document
`os.path.join`." answered by the docstring, and "Write a function ..." answered by the source. The docstrings come from
the library's syntax trees and, for what is written in C, from the running interpreter.
"""

import ast
import hashlib
import importlib
import importlib.machinery
import importlib.util
import inspect
import re
import sys
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


SHARE = 0.15  # of the plain documents' characters, that conversations have at most
MAX_ANSWER_CHARACTERS = 1600

DOCUMENT_PROMPTS = ("Document `{0}`.", "What does `{0}` do?", "Explain `{0}`.", "How do I use `{0}`?")
WRITE_PROMPTS = (
    "Write a function `{0}`. {1}",
    "Write a Python function `{0}({2})`. {1}",
    "Implement `{0}({2})` in Python.",
    "Show me the code of `{0}`.",
)
SYSTEM_PROMPTS = ("You are a helpful assistant.", "You answer questions about Python.", "You are a Python programmer.")

# "($self, x, /)": the first argument as C code marks it, which a caller does not write.
IMPLICIT_ARGUMENT = re.compile(r"\(\$\w+(, /)?(, )?")


@dataclass(frozen=True)
class DialogueTurn:
    role: str  # "system", "user" or "assistant"; "" for plain text outside a conversation
    text: str


@dataclass(frozen=True)
class Document:
    name: str  # what it was made from: "os.py", "chat:os.path.join"
    held_out: bool
    turns: tuple[DialogueTurn, ...]

    @property
    def characters(self) -> int:
        return sum(len(turn.text) for turn in self.turns)


def load_corpus() -> tuple[list[Document], list[Document]]:
    """(training, held-out) documents."""
    plain = plain_documents()
    documents = plain + chat_documents(sum(document.characters for document in plain))
    return [d for d in documents if not d.held_out], [d for d in documents if d.held_out]


def plain_documents() -> list[Document]:
    """Every source file and help topic, each as one document."""
    documents = [Document(name, is_held_out(name), (DialogueTurn("", text),)) for name, text in source_files()]
    for topic, text in topics().items():
        name = f"topic:{topic}"
        documents.append(Document(name, is_held_out(name), (DialogueTurn("", text + "\n"),)))
    return documents


def chat_documents(plain_characters: int) -> list[Document]:
    """A seeded choice of conversations, at most SHARE of `plain_characters` in all."""
    candidates = [*from_sources(), *from_extensions()]
    candidates.sort(key=lambda document: seeded("choice", document.name, document.turns[-2].text))
    chosen: list[Document] = []
    budget = SHARE * plain_characters
    for document in candidates:
        budget -= document.characters
        if budget < 0:
            break
        chosen.append(document)
    return chosen


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


Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def conversation(subject: str, prompt: str, answer: str, held_out: bool) -> Document:
    turns = [DialogueTurn("user", prompt), DialogueTurn("assistant", answer)]
    pick = seeded("system", subject, prompt)
    if pick % 4 == 0:
        turns.insert(0, DialogueTurn("system", SYSTEM_PROMPTS[pick // 4 % len(SYSTEM_PROMPTS)]))
    return Document(f"chat:{subject}", held_out, tuple(turns))


def document_conversation(subject: str, docstring: str, held_out: bool) -> Document:
    prompt = DOCUMENT_PROMPTS[seeded("prompt", subject) % len(DOCUMENT_PROMPTS)].format(subject)
    return conversation(subject, prompt, docstring, held_out)


def write_conversation(subject: str, node: Definition, docstring: str, source: str, held_out: bool) -> Document:
    first_paragraph = " ".join(docstring.split("\n\n")[0].split())
    arguments = ast.unparse(node.args) if not isinstance(node, ast.ClassDef) else ""
    template = WRITE_PROMPTS[seeded("prompt", subject) % len(WRITE_PROMPTS)]
    prompt = template.format(node.name, first_paragraph, arguments)
    return conversation(subject, prompt, f"```python\n{source}\n```", held_out)


def module_name(relative: str) -> str:
    """ "json/__init__.py" -> "json"."""
    parts = relative.removesuffix(".py").split("/")
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def definitions(body: list[ast.stmt], prefix: str) -> Iterator[tuple[str, Definition]]:
    """(dotted name, node) of the public functions, classes and methods of a module's body."""
    for node in body:
        if isinstance(node, Definition) and not node.name.startswith("_"):
            name = f"{prefix}.{node.name}"
            yield name, node
            if isinstance(node, ast.ClassDef):
                yield from definitions(node.body, name)


def from_sources() -> Iterator[Document]:
    for relative, text in source_files():
        module = module_name(relative)
        held_out = is_held_out(relative)
        lines = text.split("\n")
        for subject, node in definitions(ast.parse(text).body, module):
            docstring = ast.get_docstring(node)
            if docstring is None or len(docstring) < 20:
                continue
            if len(docstring) <= MAX_ANSWER_CHARACTERS:
                yield document_conversation(subject, docstring.strip(), held_out)
            source = "\n".join(lines[node.lineno - 1 : node.end_lineno])
            if node.col_offset == 0 and len(source) <= MAX_ANSWER_CHARACTERS:
                yield write_conversation(subject, node, docstring, source, held_out)


def extension_modules() -> list[str]:
    """The library's modules that are written in C, except those made for CPython's own tests."""
    names = []
    for name in sorted(sys.stdlib_module_names):
        if name.startswith(("_test", "_xx", "xx")):
            continue
        spec = importlib.util.find_spec(name)
        if spec is None or spec.origin is None:
            continue
        if spec.origin == "built-in" or spec.origin.endswith(tuple(importlib.machinery.EXTENSION_SUFFIXES)):
            names.append(name)
    return names


def from_extensions() -> Iterator[Document]:
    """The docstrings of what is written in C: `str.join`, `math.sqrt`, `itertools.chain`."""
    seen: set[str] = set()
    for module in extension_modules():
        try:
            namespace = vars(importlib.import_module(module))
        except ImportError:
            continue  # built without its library
        for name, value in sorted(namespace.items()):
            if name.startswith("_") or not callable(value):
                continue
            subject = name if module == "builtins" else f"{module.lstrip('_')}.{name}"
            members = [(subject, value)]
            if inspect.isclass(value):
                members += [(f"{subject}.{key}", item) for key, item in sorted(vars(value).items()) if key[0] != "_"]
            for dotted, item in members:
                docstring = inspect.cleandoc(item.__doc__) if isinstance(item.__doc__, str) else ""
                # An object without a docstring of its own shows its type's: the same text under many names.
                if not 20 <= len(docstring) <= MAX_ANSWER_CHARACTERS or docstring in seen:
                    continue
                seen.add(docstring)
                signature = getattr(item, "__text_signature__", None)
                answer = f"{dotted}{IMPLICIT_ARGUMENT.sub('(', signature)}\n\n{docstring}" if signature else docstring
                yield document_conversation(dotted, answer, is_held_out(f"extension:{dotted}"))
