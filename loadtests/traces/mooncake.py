"""Mooncake's traces: JSONL with timestamp (ms), input_length, output_length and hash_ids of 512-token blocks.

github.com/kvcache-ai/Mooncake; Qin et al., "Mooncake: Trading More Storage for Less Computation", FAST 2025;
Apache-2.0.
"""

from collections.abc import Iterator
from pathlib import Path

from twostroke.loadtests.traces.rows import TraceRequest, block_numbers, json_rows

FIELDS = ("timestamp", "input_length", "output_length", "hash_ids")
BLOCK_TOKENS = 512


def read(path: Path) -> Iterator[TraceRequest]:
    """The file's requests. Raises LoadTestError."""
    for line, row in json_rows(path, FIELDS):
        yield TraceRequest(
            at_s=line.seconds("timestamp", row["timestamp"]) / 1000,
            input_tokens=line.count("input_length", row["input_length"]),
            output_tokens=line.count("output_length", row["output_length"]),
            blocks=block_numbers(line, row["hash_ids"]),
        )
