"""Reads a picture back: its marked artists, their boxes and places, its texts."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple
from xml.etree import ElementTree as ET

NUMBER = re.compile(r"-?[\d.]+(?:e-?\d+)?")


class Box(NamedTuple):
    """What a path covers, in pixels from the upper left corner."""

    left: float
    top: float
    right: float
    bottom: float

    @property
    def centre(self) -> tuple[float, float]:
        return (self.left + self.right) / 2, (self.top + self.bottom) / 2


def parse(picture: str) -> ET.Element:
    """An SVG document, or the SVG of a page, without namespaces."""
    root = ET.fromstring(picture.replace("xlink:href", "href"))
    for element in root.iter():
        element.tag = element.tag.rpartition("}")[2]
    return root


def marked(root: ET.Element, kind: str) -> list[ET.Element]:
    """The artists of a kind, whatever else their class says."""
    return [group for group in root.iter("g") if group.get("class", "").split(" ")[0] == kind]


def points(element: ET.Element) -> list[tuple[float, float]]:
    """Where its markers stand, or the corners of its path."""
    if uses := list(element.iter("use")):
        return [(float(use.get("x", "")), float(use.get("y", ""))) for use in uses]
    path = element.find("path")
    assert path is not None
    numbers = [float(number) for number in NUMBER.findall(path.get("d", ""))]
    return list(zip(numbers[::2], numbers[1::2], strict=True))


def box(element: ET.Element) -> Box:
    """What its path covers."""
    across, down = zip(*points(element), strict=True)
    return Box(min(across), min(down), max(across), max(down))


def fill(element: ET.Element) -> str:
    """The colour of its path or marker."""
    fills = [shape.get("fill", "none") for shape in element.iter() if shape.tag in ("path", "use")]
    return next((colour for colour in fills if colour != "none"), "none")


def placed(root: ET.Element) -> Iterator[tuple[str, float, float]]:
    """Every text, with x (of its middle, where it is centred) and y."""
    for text in root.iter("text"):
        x, y = (text.get("x"), text.get("y"))
        if x is None or y is None:
            x, y = NUMBER.findall(text.get("transform", ""))[:2]
        yield text.text or "", float(x), float(y)


def texts(root: ET.Element) -> list[str]:
    """What is written on it, in the order of drawing."""
    return [words for words, _, _ in placed(root)]


def hints(elements: Iterable[ET.Element]) -> list[str]:
    """What is said of each."""
    return [element.findtext("title", "") for element in elements]
