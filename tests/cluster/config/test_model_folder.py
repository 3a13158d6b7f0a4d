"""A path names the right model, and the hub is asked for no more than is needed."""

from pathlib import Path
from typing import Any

import huggingface_hub
import pytest

from twostroke.cluster.config.model_folder import check_model_path, resolve_model_folder
from twostroke.protocol.errors import ConfigError


@pytest.fixture
def fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str | None]]:
    """Record requests to the hub, which answers with an empty folder."""
    asked: list[tuple[str, str | None]] = []

    def download(hub_id: str, *, revision: str | None, allow_patterns: Any) -> str:
        asked.append((hub_id, revision))
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    monkeypatch.chdir(tmp_path)
    return asked


def test_the_revision_of_a_hub_id_is_what_is_fetched(fetched: list[tuple[str, str | None]], tmp_path: Path) -> None:
    assert resolve_model_folder("someone/model", revision="v1.2") == tmp_path
    assert resolve_model_folder("someone/model") == tmp_path
    assert fetched == [("someone/model", "v1.2"), ("someone/model", None)]


def test_a_missing_folder_is_not_looked_for_on_the_hub_where_its_place_is_here(
    fetched: list[tuple[str, str | None]], tmp_path: Path
) -> None:
    (tmp_path / "models" / "llama").mkdir(parents=True)
    assert check_model_path("models/llama") == tmp_path / "models" / "llama"
    with pytest.raises(ConfigError, match=r"no folder models/lama, though models is here.*hub:models/lama"):
        resolve_model_folder("models/lama")
    assert fetched == []
    resolve_model_folder("hub:models/lama")
    assert fetched == [("models/lama", None)]


@pytest.mark.parametrize("path", ["hub:", "hub:models", "hub:./a/b", "hub:/a/b", "hub:a/b/c"])
def test_what_is_no_hub_id_is_refused(path: str) -> None:
    with pytest.raises(ConfigError, match="names no model of the hub"):
        check_model_path(path)


def test_a_folder_has_no_revision(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^model\.revision: "):
        check_model_path(str(tmp_path), "main")
    with pytest.raises(ConfigError, match=r"^model\.revision: "):
        check_model_path("bundled", "main")
