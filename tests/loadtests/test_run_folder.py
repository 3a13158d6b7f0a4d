"""Lines of records: whole ones, or none."""

import resource
from collections.abc import Iterator
from pathlib import Path

import pytest

from twostroke.loadtests import LoadTestError
from twostroke.loadtests.run_folder import Record, append, read_records, record_line

RECORD = Record(0, 0, 1.0, 1.01, 3.0, "ok", output_tokens=5, token_s=(1.5, 2.0, 2.5))


@pytest.fixture
def room_for_a_line_and_a_half() -> Iterator[None]:
    """Files can't grow beyond it, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(record_line(RECORD)) * 3 // 2, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.usefixtures("room_for_a_line_and_a_half")
def test_a_record_that_the_disk_has_no_room_for_is_told_and_leaves_no_half_line(tmp_path: Path) -> None:
    path = tmp_path / "records-0.jsonl"
    with path.open("ab", buffering=0) as file:
        append(file, RECORD)
        for _ in range(2):
            with pytest.raises(LoadTestError, match=r"records-0\.jsonl: .*make room"):
                append(file, RECORD)
    assert path.read_bytes() == record_line(RECORD)


def test_a_line_that_was_cut_off_at_the_end_is_no_record_and_a_broken_one_before_it_is_named(tmp_path: Path) -> None:
    path = tmp_path / "records-0.jsonl"
    path.write_bytes(record_line(RECORD) + record_line(RECORD)[:-5])
    assert list(read_records(path)) == [RECORD]
    path.write_bytes(record_line(RECORD)[:-5] + b"\n" + record_line(RECORD))
    with pytest.raises(LoadTestError, match="line 1: no record"):
        list(read_records(path))
