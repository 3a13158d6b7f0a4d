"""Reports as one HTML file each, which asks nothing of any network: style and pictures are inside it.

How reports are written.
"""

import base64
from pathlib import Path
from typing import Any

import jinja2

from twostroke.loadtests.report import words
from twostroke.loadtests.report.chart import Plot
from twostroke.loadtests.run_folder import write


def render(template: str, **what: Any) -> str:
    """The page of `templates/TEMPLATE.html.jinja`. All text from servers and plans is escaped."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(
        duration=words.duration,
        number=words.number,
        percent=words.percent,
        duration_estimate=words.duration_estimate,
        number_estimate=words.number_estimate,
        percent_estimate=words.percent_estimate,
        data_uri=_data_uri,
    )
    return environment.get_template(f"{template}.html.jinja").render(**what)


def write_plots(folder: Path, plots: list[Plot]) -> None:
    """One PNG each, beside the page."""
    for plot in plots:
        write(folder / f"{plot.name}.png", plot.png)


def _data_uri(plot: Plot) -> str:
    return "data:image/png;base64," + base64.b64encode(plot.png).decode("ascii")
