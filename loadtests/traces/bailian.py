"""Qwen-Bailian's traces: JSONL with chat_id, parent_chat_id, timestamp (s), input_length, output_length, hash_ids of
16-token blocks.

github.com/alibaba-edu/qwen-bailian-usagetraces-anon; Apache-2.0. A turn's prompt has its conversation's blocks at its
beginning, so the hashes carry what parent_chat_id says; each turn is sent at the trace's time, as it was there.
"""

from collections.abc import Iterator
from pathlib import Path

from twostroke.loadtests.traces.rows import TraceRequest, block_numbers, json_rows

FIELDS = ("chat_id", "timestamp", "input_length", "output_length", "hash_ids")
BLOCK_TOKENS = 16


def read(path: Path) -> Iterator[TraceRequest]:
    """The file's requests. Raises LoadTestError."""
    for line, row in json_rows(path, FIELDS):
        yield TraceRequest(
            at_s=line.seconds("timestamp", row["timestamp"]),
            input_tokens=line.count("input_length", row["input_length"]),
            output_tokens=line.count("output_length", row["output_length"]),
            blocks=block_numbers(line, row["hash_ids"]),
        )
