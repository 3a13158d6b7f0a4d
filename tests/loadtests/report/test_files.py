"""What is written and read, where it can't be."""

from pathlib import Path

import pytest

from twostroke.loadtests.errors import LoadTestError
from twostroke.loadtests.run_folder import RunFolder, write


def test_text_and_bytes_are_written_and_what_can_t_be_is_named(tmp_path: Path) -> None:
    write(tmp_path / "text", "90 %–99 %")
    assert (tmp_path / "text").read_text(encoding="utf-8") == "90 %–99 %"
    with pytest.raises(LoadTestError, match=r"text/under: Not a directory; name another folder"):
        write(tmp_path / "text" / "under", b"")


def test_a_file_that_is_no_run_s_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(LoadTestError, match=r"file/plan\.json: Not a directory"):
        RunFolder(tmp_path / "file").plan()


def test_broken_samples_are_named(tmp_path: Path) -> None:
    (tmp_path / "samples.jsonl").write_text('{"at_s": 1}\n')
    with pytest.raises(LoadTestError, match=r"samples\.jsonl: .*role"):
        RunFolder(tmp_path).samples()
