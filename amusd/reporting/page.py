"""The frame of a page: what it may load (nothing), its style and script, its tables and figures."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Sequence

from amusd.reporting.columns import Column
from amusd.reporting.markup import Content, Html, join, tag
from amusd.reporting.style import SCRIPT, STYLE

Cell = tuple[str, str]
"""What a cell shows, and what it is sorted by (empty: always last)."""


def page(title: str, *content: Content) -> Html:
    """A whole document. Its policy lets a browser run this style and this script and load nothing else."""
    policy = (
        f"default-src 'none'; style-src {_source(STYLE)}; script-src {_source(SCRIPT)}; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    head = (
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=policy),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="referrer", content="no-referrer"),
        tag("title", title),
        tag("style", Html(STYLE)),
    )
    body = (tag("main", tag("h1", title), *content), tag("script", Html(SCRIPT)))
    html = tag("html", tag("head", *head), tag("body", *body), lang="en")
    return Html(f"<!DOCTYPE html>\n{html}\n")


def section(title: str, *content: Content) -> Html:
    """Content under a heading."""
    return tag("section", tag("h2", title), *content)


def facts(pairs: Iterable[tuple[str, Content]]) -> Html:
    """Names and what they stand for."""
    return tag("dl", (join(tag("dt", name), tag("dd", value)) for name, value in pairs))


def sortable(label: str, header: Sequence[str], num_texts: int, rows: Iterable[Sequence[Cell]]) -> Html:
    """A table that scrolls inside its box and sorts by its headings. Its first `num_texts` columns are texts."""

    def kind(index: int) -> str | None:
        return "text" if index < num_texts else None

    heads = (
        tag("th", tag("button", name, type="button"), scope="col", class_=kind(index))
        for index, name in enumerate(header)
    )
    lines = (
        tag(
            "tr",
            tag("th", row[0][0], scope="row", class_="text", data_value=row[0][1]),
            (tag("td", text, class_=kind(index), data_value=value) for index, (text, value) in enumerate(row[1:], 1)),
        )
        for row in rows
    )
    table = tag("table", tag("thead", tag("tr", heads)), tag("tbody", lines))
    return tag("div", table, class_="scroll", role="region", aria_label=label, tabindex=0)


def figures(drawn: Iterable[tuple[str, Html, str]]) -> Html:
    """Title, drawing and caption of each, side by side where there is room."""
    return tag(
        "div",
        (tag("figure", tag("h3", title), drawing, tag("figcaption", caption)) for title, drawing, caption in drawn),
        class_="figures",
    )


def definitions(columns: Iterable[Column]) -> Html:
    """What the columns mean."""
    return facts((column.heading, column.meaning) for column in columns)


def _source(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
