"""
Figures as SVG that stands in a page: no colour of its own, no address, and the same bytes for the same data.

matplotlib draws; what it writes is then made to fit. Colours are names of the page's style, so that light and dark need one drawing.
Identifiers get the figure's name before them, since a page holds many figures.
"""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from markupsafe import Markup, escape

from sparkwright.bench.report import words

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: Names of the page's style, and colours that stand for them while matplotlib draws.
NAMES = (
    "ink",
    "muted",
    "grid",
    "surface",
    "one",
    "two",
    "three",
    "four",
    "five",
    "six",
    "good",
    "bad",
    "unsure",
    "void",
    "idle",
)
COLOURS = {name: f"#0101{index:02x}" for index, name in enumerate(NAMES, 1)}
#: Of columns, in order; colours that people with any kind of colour blindness tell apart (Okabe and Ito), each with a mark of its own.
SERIES = ("one", "two", "three", "four", "five", "six")
MARKS = ("o", "s", "^", "D", "v", "P")

#: In points, of which the page shows one as a pixel or a little more: the width of a telephone.
WIDTH = 405

#: The keys' type differs between versions of matplotlib.
_STYLE: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "sparkwright",
    "text.parse_math": False,
    "text.usetex": False,
    "axes.formatter.use_mathtext": False,
    "axes.unicode_minus": True,
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 11,
    "axes.labelsize": 11,
    "xtick.labelsize": 10,
    "ytick.labelsize": 10,
    "legend.fontsize": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "grid.linewidth": 0.8,
    "axes.linewidth": 0.8,
    "lines.linewidth": 1.8,
    "lines.markersize": 6,
    "legend.frameon": False,
    "legend.handlelength": 1.6,
    "legend.borderaxespad": 0.0,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "savefig.facecolor": "none",
    "axes.labelcolor": COLOURS["muted"],
    "axes.edgecolor": COLOURS["muted"],
    "xtick.color": COLOURS["muted"],
    "ytick.color": COLOURS["muted"],
    "grid.color": COLOURS["grid"],
    "text.color": COLOURS["ink"],
    "legend.labelcolor": COLOURS["ink"],
}


@contextmanager
def drawing(
    height: float, rows: int = 1, columns: int = 1, **layout: Any
) -> Iterator[tuple[Figure, list[Axes]]]:
    """Yield a figure that is *height* points high, and its axes, in the style of the page; no display and no global state is used."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context(_STYLE), warnings.catch_warnings():
        # The fonts that are missing are those of the machine that draws; the page's reader has their own.
        warnings.simplefilter("ignore", UserWarning)
        figure = Figure(figsize=(WIDTH / 72, height / 72), layout="constrained")
        made = figure.subplots(rows, columns, squeeze=False, **layout)
        yield figure, list(made.flat)


def svg(figure: Figure, name: str, title: str, says: str) -> Markup:
    """
    Return *figure* as an element for a page.

    Args:
        name: Unique in the page.
        title: For those who cannot see it: what it is. *says*: what it shows, in a sentence or two.
    """
    from matplotlib.backends.backend_svg import FigureCanvasSVG

    out = io.StringIO()
    # savefig draws everything twice, the first time for nothing.
    canvas: Any = FigureCanvasSVG(figure)
    canvas.print_svg(out, metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    drawn = out.getvalue()
    body = drawn[drawn.index("<svg") :]
    box = re.search(r'viewBox="([^"]*)"', body)
    body = body[body.index(">") + 1 :]
    body = re.sub(r"<metadata>.*?</metadata>|<style\b.*?</style>|<!--.*?-->", "", body, flags=re.S)
    body = re.sub(r' xmlns(:\w+)?="[^"]*"', "", body)
    body = re.sub(r"(\bid=\"|href=\"#|url\(#)", rf"\g<1>{name}-", body)
    body = re.sub(
        r"#0101([0-9a-f]{2})\b", lambda found: f"var(--{NAMES[int(found[1], 16) - 1]})", body
    )
    body = body.replace("'DejaVu Sans', sans-serif", "var(--sans)").replace(
        "'DejaVu Sans'", "var(--sans)"
    )
    body = re.sub(r"\n\s*", "\n", body)
    head = f'<svg class="plot" viewBox="{box[1] if box else ""}" role="img" aria-labelledby="{name}-t {name}-d">'
    told = f'<title id="{name}-t">{escape(words.clean(title))}</title><desc id="{name}-d">{escape(words.clean(says))}</desc>'
    # All text in it passed through matplotlib's own escaping of XML.
    return Markup(head + told + body)  # noqa: S704


def label(text: str, longest: int = 34) -> str:
    """Return *text* as it may stand in a figure."""
    return words.clean(text, longest)


def plain(axis: Any) -> None:
    """Write the numbers of a logarithmic *axis* as people do: 1, 10, 1,000."""
    from matplotlib.ticker import FuncFormatter, NullLocator

    axis.set_major_formatter(
        FuncFormatter(
            lambda value, _: f"{value:g}" if 1e-4 < value < 10000 else f"1e{round(_log(value))}"
        )
    )
    axis.set_minor_locator(NullLocator())


def doubling(axes: Axes) -> None:
    """Let the upright axis of *axes* double from mark to mark, where it spans enough for more than two of them."""
    low, high = axes.dataLim.y0, axes.dataLim.y1
    if low > 0 and high > 4 * low:
        axes.set_yscale("log", base=2)
        plain(axes.yaxis)
    else:
        axes.set_ylim(bottom=0)


def _log(value: float) -> float:
    import math

    return math.log10(value) if value > 0 else 0.0


def over(axes: Axes, columns: int = 3) -> None:
    """Put the legend above *axes*, where no line is."""
    handles, labels = axes.get_legend_handles_labels()
    if handles:
        axes.legend(
            handles,
            labels,
            loc="lower left",
            bbox_to_anchor=(0, 1.02),
            ncols=columns,
            columnspacing=1.2,
            handletextpad=0.5,
        )
