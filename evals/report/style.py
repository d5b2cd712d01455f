"""How the report's figures look: colours that colour-blind readers tell apart, on a light and on a dark page.

Figures are SVG with text as text. Each colour of the light page has a twin for the dark one; in HTML both become a CSS
variable, so one figure serves both.
"""

from __future__ import annotations

import io
import re
from typing import Any

INK, FAINT, GRID = "#1f2328", "#59636e", "#d8dee4"
# after Okabe and Ito, "Color Universal Design" (2008), light page and dark page
SERIES = {
    "#0072b2": "#5cb3e8",
    "#d55e00": "#f28b4b",
    "#009e73": "#3fc79a",
    "#b0568c": "#dd8fc0",
    "#8a6d00": "#d8b53c",
    "#4a5568": "#b3bdcc",
}
# parts of a step: computing in grey, the optimizer's own work in orange, waiting for the network in blue
PARTS = {
    "#9aa4af": "#7d8794",
    "#6b7580": "#a3adb8",
    "#f6c9a3": "#8a4a1c",
    "#eb9a5c": "#b9662b",
    "#c9621a": "#e58c4d",
    "#b9d9ee": "#1f4e6e",
    "#6fb1dc": "#2f78a8",
    "#1f77b4": "#62b0e2",
    "#eceff2": "#30363d",
}
DARK = {INK: "#e6edf3", FAINT: "#9aa4af", GRID: "#30363d", **SERIES, **PARTS}
DASHES = ("-", (0, (4, 1.5)), (0, (1.2, 1.2)), (0, (5, 1.2, 1.2, 1.2)))

SETTINGS = {
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans", "Arial", "Helvetica"],
    "font.size": 10,
    "axes.edgecolor": FAINT,
    "axes.labelcolor": INK,
    "axes.titlecolor": INK,
    "axes.titlesize": 10.5,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "text.color": INK,
    "xtick.color": FAINT,
    "ytick.color": FAINT,
    "legend.frameon": False,
    "lines.linewidth": 1.7,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "savefig.facecolor": "none",
    "figure.constrained_layout.use": True,
}


def to_svg(figure: Any, name: str) -> str:
    """The figure as an SVG text, the same for the same data; ids carry `name`, so that many fit in one page."""
    import matplotlib

    text = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": name}):
        figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    svg = text.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r'\bid="([^"]+)"', rf'id="{name}-\1"', svg)
    return re.sub(r'(href="#|url\(#)', rf"\g<1>{name}-", svg)


def for_page(svg: str, title: str) -> str:
    """An SVG for the HTML page: colours from the page's variables, the width from its column, a title for readers."""
    for colour in DARK:
        svg = svg.replace(colour, f"var(--c{colour[1:]})")
    svg = re.sub(r'(<svg[^>]*?) width="[^"]+"', r"\1", svg, count=1)
    svg = re.sub(r'(<svg[^>]*?) height="[^"]+"', r"\1", svg, count=1)
    return svg.replace("<svg", f'<svg role="img" aria-label="{title}"', 1)


def for_file(svg: str) -> str:
    """An SVG that stands alone, on white, for the Markdown page."""
    box = re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', svg)
    size = f'width="{box[1]}" height="{box[2]}"' if box else 'width="100%" height="100%"'
    return svg.replace(">", f'><rect {size} fill="#ffffff"/>', 1) + "\n"


def css_variables() -> tuple[str, str]:
    """The variables for the light and for the dark page."""
    light = "".join(f"--c{c[1:]}:{c};" for c in DARK)
    return light, "".join(f"--c{c[1:]}:{dark};" for c, dark in DARK.items())
