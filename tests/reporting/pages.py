"""Reads a page back: its elements, its texts, what it would load."""

from __future__ import annotations

from html.parser import HTMLParser

from amusd.reporting.page import VOID


class Page(HTMLParser):
    """A parsed document. Raises `AssertionError` for an element that is not closed where it should be."""

    def __init__(self, source: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.texts: list[str] = []
        self.rows: list[list[str]] = []
        self.raw: dict[str, str] = {}
        self._open: list[str] = []
        self.feed(source)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, {name: value or "" for name, value in attrs}))
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")
        if tag not in VOID:
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self._open and self._open[-1] in ("style", "script"):
            self.raw[self._open[-1]] = data
            return
        self.texts.append(data)
        if "td" in self._open or "th" in self._open:
            self.rows[-1][-1] += data

    @property
    def text(self) -> str:
        """All that is shown or spoken."""
        return "\n".join(self.texts)

    def attributes(self, name: str) -> list[str]:
        """The values of one attribute, wherever it stands."""
        return [attributes[name] for _, attributes in self.elements if name in attributes]
