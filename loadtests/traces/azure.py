"""Azure's LLM inference traces of 2023 and 2024: CSV with TIMESTAMP, ContextTokens, GeneratedTokens.

github.com/Azure/AzurePublicDataset; Patel et al., "Splitwise", ISCA 2024; CC-BY 4.0. Nothing of prompts is known but
their lengths.
"""

from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

from twostroke.loadtests.traces.rows import TraceRequest, csv_rows

COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


def read(path: Path) -> Iterator[TraceRequest]:
    """The file's requests. Raises LoadTestError."""
    for line, row in csv_rows(path, COLUMNS):
        try:
            # Seven digits of a second are written, of which Python takes six. 2024's have a zone, 2023's mean UTC.
            at = datetime.fromisoformat(row["TIMESTAMP"])
        except ValueError:
            line.wrong(f"TIMESTAMP is {row['TIMESTAMP']!r}, not a date and time like 2023-11-16 18:15:46.6805900")
        yield TraceRequest(
            at_s=(at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp(),
            input_tokens=line.count("ContextTokens", row["ContextTokens"]),
            output_tokens=line.count("GeneratedTokens", row["GeneratedTokens"]),
        )
