"""The report as a whole: tables and figures put into Markdown and HTML."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import jinja2
import matplotlib

from evals.provenance import provenance
from evals.report import tables
from evals.report.figures import FIGURES, looks
from evals.report.runs import Run
from evals.report.style import SETTINGS, css_variables, for_file, for_page, to_svg

TEMPLATE = Path(__file__).with_name("page.html.jinja")


@dataclass(frozen=True)
class Picture:
    """A figure with its name, heading, explanation, and the SVG that style.to_svg gave."""

    name: str
    heading: str
    text: str
    svg: str


@dataclass(frozen=True)
class Report:
    """Everything that both pages show."""

    title: str
    results: tables.Table
    settings: tables.Table
    notes: list[str]
    pictures: list[Picture]
    made: str


def build(runs: list[Run], title: str) -> Report:
    """Draw and tabulate. Raises ValueError when no run has a single step."""
    if not any(run.rows for run in runs):
        raise ValueError(f"none of the runs has a step: {', '.join(run.name for run in runs)}")
    drawn = looks(runs)
    where = provenance()
    return Report(
        title,
        tables.results(runs, drawn),
        tables.settings(runs, drawn),
        tables.notes(runs, drawn),
        draw(runs),
        f"python -m evals.report, commit {where['commit']}, {where['date']}",
    )


def draw(runs: list[Run]) -> list[Picture]:
    """Every figure that the runs have data for."""
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    with_steps = [run for run in runs if run.rows]
    drawn = [look for run, look in zip(runs, looks(runs), strict=True) if run.rows]
    pictures = []
    with matplotlib.rc_context(SETTINGS):
        for name, heading, text, make in FIGURES:
            figure = make(with_steps, drawn)
            if figure is not None:
                pictures.append(Picture(name, heading, text, to_svg(figure, name)))
                plt.close(figure)
    return pictures


def to_html(report: Report) -> str:
    """The page, with everything in it."""
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    light, dark = css_variables()
    figures = [(p, for_page(p.svg, p.heading)) for p in report.pictures]
    return environment.from_string(TEMPLATE.read_text()).render(report=report, figures=figures, light=light, dark=dark)


def to_markdown(report: Report) -> str:
    """The page, with figures in files beside it."""
    parts = [f"# {report.title}", tables.markdown(report.results)]
    parts += ["\n".join(f"- {note}" for note in report.notes)] if report.notes else []
    for picture in report.pictures:
        parts += [f"## {picture.heading}", picture.text, f"![{picture.heading}](figures/{picture.name}.svg)"]
    parts += ["## Settings", tables.markdown(report.settings), report.made]
    return "\n\n".join(parts) + "\n"


def write(report: Report, folder: Path) -> None:
    """report.html, report.md and figures/, each written beside its name and then renamed."""
    (folder / "figures").mkdir(parents=True, exist_ok=True)
    files = {f"figures/{picture.name}.svg": for_file(picture.svg) for picture in report.pictures}
    for name, text in {**files, "report.md": to_markdown(report), "report.html": to_html(report)}.items():
        unfinished = folder / f"{name}.part"
        unfinished.write_text(text)
        unfinished.replace(folder / name)
