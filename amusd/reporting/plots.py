"""Pictures by matplotlib, as SVG that loads nothing. The only file of the package that imports matplotlib.

Places and sizes are in pixels from the upper left corner. The same drawing gives the same text. An artist that is
marked becomes a group with a class, and with words that are shown when a reader points at it.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias
from xml.etree import ElementTree as ET

from amusd.errors import ConfigError

INK, QUIET, RULE, PALE = "#1b1f24", "#57606a", "#d0d7de", "#e4e4e4"
FONTS = '"DejaVu Sans", Verdana, system-ui, -apple-system, "Segoe UI", Roboto, sans-serif'

Figure: TypeAlias = Any
Axes: TypeAlias = Any
Artist: TypeAlias = Any

_STYLE: dict[Any, Any] = {
    "font.size": 11.0,
    "legend.fontsize": 12.0,
    "text.color": INK,
    "text.parse_math": False,
    "axes.edgecolor": RULE,
    "axes.labelcolor": QUIET,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "grid.color": RULE,
    "xtick.color": RULE,
    "ytick.color": RULE,
    "xtick.labelcolor": QUIET,
    "ytick.labelcolor": QUIET,
    "legend.frameon": False,
    "legend.borderpad": 0.0,
    "legend.borderaxespad": 0.0,
    "svg.fonttype": "none",
    "svg.hashsalt": "amusd",
}
_DOTS_PER_INCH = 72
"""matplotlib's SVG has 72 dots per inch, so a point is a pixel."""
_XLINK = "http://www.w3.org/1999/xlink"


@contextmanager
def canvas(width: float, height: float) -> Iterator[Figure]:
    """An empty figure, to be drawn on and made SVG of inside. Raises `ConfigError` without matplotlib."""
    try:
        import matplotlib as mpl
    except ImportError:
        raise ConfigError("figures need matplotlib: pip install 'amusd[plots]'") from None
    from matplotlib.figure import Figure as Canvas

    with mpl.rc_context(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph")  # the reader's fonts count, not those that are measured with here
        mpl.rcdefaults()  # not the user's settings
        mpl.rcParams.update(_STYLE)
        yield Canvas(figsize=(width / _DOTS_PER_INCH, height / _DOTS_PER_INCH), dpi=_DOTS_PER_INCH)


def axes_at(figure: Figure, left: float, top: float, width: float, height: float) -> Axes:
    """Axes in a part of the figure."""
    full_width, full_height = _size(figure)
    return figure.add_axes(
        (left / full_width, 1 - (top + height) / full_height, width / full_width, height / full_height)
    )


def text_at(figure: Figure, x: float, y: float, words: str, **look: Any) -> None:
    """A text with its baseline at y."""
    width, height = _size(figure)
    figure.text(x / width, 1 - y / height, words, **look)


def legend_at(
    figure: Figure, left: float, top: float, handles: Sequence[Artist], names: Sequence[str], **look: Any
) -> None:
    """A legend of artists and their names, in rows of 18 pixels unless `look` says otherwise."""
    width, height = _size(figure)
    look = {"labelspacing": 0.42, "handlelength": 2.2, **look}
    figure.legend(handles, names, loc="upper left", bbox_to_anchor=(left / width, 1 - top / height), **look)


def box_at(axes: Axes, left: float, bottom: float, width: float, height: float, colour: str) -> Artist:
    """A filled box without a border, in the units of the axes."""
    from matplotlib.patches import Rectangle

    return axes.add_artist(Rectangle((left, bottom), width, height, facecolor=colour, linewidth=0))  # keeps the limits


def mark(artist: Artist, kind: str, words: str = "") -> None:
    """Name what an artist is, and say what a reader sees who points at it."""
    artist.set_gid(f"{kind}|{words}")


def inline_svg(figure: Figure, label: str, colours: Mapping[str, str]) -> str:
    """The figure as an element of a page; `colours` takes the place of those that were drawn with."""
    return ET.tostring(_svg(figure, label, colours), encoding="unicode")


def svg_document(figure: Figure, label: str) -> str:
    """The figure as a file of its own, as wide as its place allows."""
    svg = _svg(figure, label, {})
    svg.set("xmlns", "http://www.w3.org/2000/svg")
    svg.set("xmlns:xlink", _XLINK)
    svg.set("style", "width: 100%; max-width: 960px; height: auto")
    svg.set("font-family", FONTS)
    return ET.tostring(svg, encoding="unicode") + "\n"


def _svg(figure: Figure, label: str, colours: Mapping[str, str]) -> ET.Element:
    """The figure without what a page's policy drops (styles) and what another figure on it may have too (names)."""
    for artist in figure.findobj():
        artist.set_clip_on(False)
    file = io.StringIO()
    figure.savefig(file, format="svg", facecolor="none", edgecolor="none", metadata={"Date": None})
    root = ET.fromstring(file.getvalue())  # noqa: S314  # matplotlib wrote it
    for parent in list(root.iter()):
        for child in list(parent):
            if child.tag.endswith(("}metadata", "}style")):
                parent.remove(child)
    for element in list(root.iter()):
        element.tag = element.tag.partition("}")[2]
        reference = element.attrib.pop(f"{{{_XLINK}}}href", None)
        if reference is not None:
            element.set("xlink:href", reference)
        for declaration in element.attrib.pop("style", "").split(";"):
            name, _, value = (part.strip() for part in declaration.partition(":"))
            if name and name != "font-family":
                element.set(name, colours.get(value, value))
        if element.tag == "g":
            kind, is_marked, words = element.attrib.pop("id", "").partition("|")
            if is_marked:
                element.set("class", kind)
                if words:
                    title = ET.Element("title")
                    title.text = words
                    element.insert(0, title)
    shape = {"stroke-linejoin": "round", "stroke-linecap": "butt", "role": "img", "aria-label": label}
    root.attrib = {"viewBox": root.attrib["viewBox"]} | shape
    return root


def _size(figure: Figure) -> tuple[float, float]:
    width, height = figure.get_size_inches() * _DOTS_PER_INCH
    return float(width), float(height)
