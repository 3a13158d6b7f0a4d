"""docs/observability.md tells of every series that a scrape has, and of no other."""

import re
from pathlib import Path

PAGE = Path(__file__).parents[3] / "docs" / "observability.md"


def names_on_the_page():
    """The first cells of the rows whose second cell is a type."""
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) > 2 and cells[1] in ("counter", "gauge", "histogram"):
            for name in re.findall("`([^`]+)`", cells[0]):
                head, brace, rest = name.partition("{")
                several, _, tail = rest.partition("}")
                yield from (f"{head}{one}{tail}" for one in (several.split(",") if brace else [""]))


async def test_every_series_is_on_the_page_and_no_other(site_of):
    async with site_of(1, 1) as site:
        text = (await site.http.get("/metrics")).text
    told = re.findall(r"^# TYPE twostroke:(\w+) (counter|gauge|histogram)$", text, re.MULTILINE)
    series = {name.removesuffix("_total") if kind == "counter" else name for name, kind in told}
    assert sorted(names_on_the_page()) == sorted(name for name in series if not name.endswith("_created"))
