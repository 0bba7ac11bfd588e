"""The few shapes that pictures are made of, as SVG elements of the standard library's tree."""

from __future__ import annotations

from xml.etree import ElementTree as ET

INK, SOFT, RULE, PALE, FAINT = "#1a1a1a", "#444444", "#9a9a9a", "#e4e4e4", "#f3f3f3"

STYLE = f"""
text {{ font-family: system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; fill: {INK}; }}
.title {{ font-size: 21px; font-weight: 600; }}
.text {{ font-size: 15px; }}
.value {{ font-size: 13px; }}
.strong {{ font-size: 17px; font-weight: 600; }}
.small {{ font-size: 13px; fill: {SOFT}; }}
"""


def document(width: int, height: int, title: str) -> ET.Element:
    """A white page as wide as its place allows; `title` is what a screen reader says."""
    svg = ET.Element(
        "svg",
        {
            "xmlns": "http://www.w3.org/2000/svg",
            "viewBox": f"0 0 {width} {height}",
            "style": "width: 100%; max-width: 960px; height: auto",
            "role": "img",
        },
    )
    ET.SubElement(svg, "title").text = title
    ET.SubElement(svg, "style").text = STYLE
    rectangle(svg, 0, 0, width, height, fill="white")
    return svg


def group(parent: ET.Element, x: float, y: float, kind: str | None = None) -> ET.Element:
    """A group whose origin is at (x, y)."""
    element = ET.SubElement(parent, "g", {"transform": f"translate({x:.2f} {y:.2f})"})
    return _of_kind(element, kind)


def rectangle(
    parent: ET.Element, x: float, y: float, width: float, height: float, *, fill: str, kind: str | None = None
) -> ET.Element:
    """A filled rectangle; `kind` becomes its class."""
    size = {"x": f"{x:.2f}", "y": f"{y:.2f}", "width": f"{width:.2f}", "height": f"{height:.2f}"}
    return _of_kind(ET.SubElement(parent, "rect", size | {"fill": fill}), kind)


def ring(parent: ET.Element, x: float, y: float, size: float) -> ET.Element:
    """A white circle with an ink border, inside the square at (x, y)."""
    half = size / 2
    place = {"cx": f"{x + half:.2f}", "cy": f"{y + half:.2f}", "r": f"{half - 0.75:.2f}"}
    return ET.SubElement(parent, "circle", place | {"fill": "white", "stroke": INK, "stroke-width": "1.5"})


def line(
    parent: ET.Element, x1: float, y1: float, x2: float, y2: float, *, colour: str, width: float = 1
) -> ET.Element:
    """A straight line."""
    ends = {"x1": f"{x1:.2f}", "y1": f"{y1:.2f}", "x2": f"{x2:.2f}", "y2": f"{y2:.2f}"}
    return ET.SubElement(parent, "line", ends | {"stroke": colour, "stroke-width": f"{width:g}"})


def cross(parent: ET.Element, x: float, y: float, size: float) -> ET.Element:
    """The two diagonals of the square at (x, y), in white."""
    right, bottom = x + size, y + size
    path = f"M{x:.2f} {y:.2f}L{right:.2f} {bottom:.2f}M{right:.2f} {y:.2f}L{x:.2f} {bottom:.2f}"
    return ET.SubElement(parent, "path", {"d": path, "stroke": "white", "stroke-width": "1.5"})


def arrow(
    parent: ET.Element, x1: float, y1: float, x2: float, y2: float, *, colour: str, width: float, kind: str
) -> ET.Element:
    """A line that goes down from (x1, y1) to the tip at (x2, y2)."""
    found = _of_kind(ET.SubElement(parent, "g"), kind)
    line(found, x1, y1, x2, y2 - 5, colour=colour, width=width)
    head = f"M{x2 - 3.5:.2f} {y2 - 7:.2f}L{x2 + 3.5:.2f} {y2 - 7:.2f}L{x2:.2f} {y2:.2f}Z"
    ET.SubElement(found, "path", {"d": head, "fill": colour})
    return found


def text(parent: ET.Element, x: float, y: float, words: str, kind: str, anchor: str = "start") -> ET.Element:
    """One line of text with its baseline at y."""
    place = {"x": f"{x:.2f}", "y": f"{y:.2f}", "text-anchor": anchor}
    element = _of_kind(ET.SubElement(parent, "text", place), kind)
    element.text = words
    return element


def hint(element: ET.Element, words: str) -> None:
    """What is shown when a reader points at it."""
    ET.SubElement(element, "title").text = words


def _of_kind(element: ET.Element, kind: str | None) -> ET.Element:
    if kind is not None:
        element.set("class", kind)
    return element
