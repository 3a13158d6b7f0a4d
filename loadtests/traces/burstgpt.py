"""BurstGPT: CSV with Timestamp (whole seconds), Request tokens and Response tokens among its columns.

github.com/HPMLL/BurstGPT; Wang et al., "BurstGPT: A Real-World Workload Dataset", KDD 2025; CC-BY 4.0. Rows without
response tokens are requests that failed there: they are left out, as the authors' own file "without fails" does.
"""

from collections.abc import Iterator
from pathlib import Path

from twostroke.loadtests.traces.rows import TraceRequest, csv_rows

COLUMNS = ("Timestamp", "Request tokens", "Response tokens")


def read(path: Path) -> Iterator[TraceRequest]:
    """The file's requests that were answered. Raises LoadTestError."""
    for line, row in csv_rows(path, COLUMNS):
        request = TraceRequest(
            at_s=line.seconds("Timestamp", row["Timestamp"]),
            input_tokens=line.count("Request tokens", row["Request tokens"]),
            output_tokens=line.count("Response tokens", row["Response tokens"]),
        )
        if request.output_tokens:
            yield request
