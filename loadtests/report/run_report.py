"""The report of one run: report.json."""

import msgspec

from loadtests.report.figures import Summary, summarise
from loadtests.run_folder import RunFolder

REPORT_FILE = "report.json"


def write_report(folder: RunFolder) -> Summary:
    """Make the report from what the run has left, again if there is one. Raises LoadTestError for a wrong folder."""
    summary = summarise(folder)
    (folder.path / REPORT_FILE).write_bytes(msgspec.json.format(msgspec.json.encode(summary), indent=2))
    return summary
