"""A page of HTML: what it may load (nothing), its style and script, its tables and figures.

Markup is built from the inside out: every text is escaped exactly once, because only `tag` makes `Html`.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Sequence
from html import escape
from typing import TypeAlias

from amusd.errors import ConfigError
from amusd.reporting.columns import Column

VOID = frozenset({"meta", "img", "br"})
"""Elements without content or end tag."""


class Html(str):
    """Markup that is finished: it is not escaped again."""

    __slots__ = ()


Content: TypeAlias = "str | Iterable[str]"
"""A text, markup, or several of them."""
Cell = tuple[str, str]
"""Text of a cell, and the value that it is sorted by (empty: always last)."""

LIGHT = {
    "background": "#ffffff",
    "text": "#1b1f24",
    "quiet": "#57606a",
    "rule": "#d0d7de",
    "panel": "#f6f8fa",
    "inside": "#ffffff",
    "s0": "#56606b",
    "s1": "#0b62a8",
    "s2": "#b93c0a",
    "s3": "#00735a",
    "s4": "#7a4fa3",
    "s5": "#836500",
}
DARK = {
    "background": "#0f1318",
    "text": "#e6edf3",
    "quiet": "#9aa7b4",
    "rule": "#333c47",
    "panel": "#171d24",
    "inside": "#0f1318",
    "s0": "#a9b4bf",
    "s1": "#63b3ff",
    "s2": "#ff9a5c",
    "s3": "#4fd1a5",
    "s4": "#cda4f4",
    "s5": "#e3c34a",
}
"""Colours of both schemes. `s0` ... are series: they differ in lightness too, and stand out from the background."""


def _colours(scheme: dict[str, str]) -> str:
    return ";".join(f"--{name}:{value}" for name, value in scheme.items())


STYLE = f"""
:root{{color-scheme:light dark;{_colours(LIGHT)}}}
@media (prefers-color-scheme:dark){{:root{{{_colours(DARK)}}}}}
*{{box-sizing:border-box}}
body{{margin:0 auto;padding:1.25rem 1rem 4rem;max-width:76rem;background:var(--background);color:var(--text);
 font:1rem/1.5 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif;overflow-wrap:anywhere}}
h1{{font-size:1.5rem;line-height:1.25;margin:.5rem 0}}
h2{{font-size:1.15rem;margin:2.25rem 0 .5rem}}
h3{{font-size:.95rem;margin:0 0 .6rem}}
p{{margin:.5rem 0;max-width:46rem}}
.quiet{{color:var(--quiet)}}
dl{{display:grid;grid-template-columns:minmax(7rem,max-content) 1fr;gap:.25rem 1rem;margin:.75rem 0}}
dt{{color:var(--quiet)}}
dd{{margin:0}}
pre{{margin:.5rem 0;padding:.75rem;background:var(--panel);border:1px solid var(--rule);border-radius:6px;
 white-space:pre-wrap;font:.85rem/1.5 ui-monospace,Menlo,Consolas,monospace}}
.scroll{{overflow-x:auto;border:1px solid var(--rule);border-radius:6px;margin:.5rem 0}}
table{{border-collapse:collapse;width:100%;font-size:.9rem;font-variant-numeric:tabular-nums}}
th,td{{padding:.4rem .7rem;text-align:right;white-space:nowrap;border-top:1px solid var(--rule)}}
thead th{{border-top:0;background:var(--panel);padding:0}}
th.text,td.text{{text-align:left}}
th[scope=row]{{font-weight:600;background:var(--background)}}
th:first-child{{position:sticky;left:0}}
@media (max-width:40rem){{th[scope=row]{{white-space:normal;overflow-wrap:normal}}}}
th button{{all:unset;box-sizing:border-box;width:100%;padding:.45rem .7rem;cursor:pointer;
 font-weight:600;color:var(--text)}}
th button:hover{{text-decoration:underline}}
th button:focus-visible,.scroll:focus-visible{{outline:2px solid var(--s1);outline-offset:-2px}}
th button::after{{content:"\\2195";margin-left:.35em;color:var(--quiet);font-weight:400}}
th[aria-sort=ascending] button::after{{content:"\\2191";color:var(--text)}}
th[aria-sort=descending] button::after{{content:"\\2193";color:var(--text)}}
.figures{{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,21rem),1fr));gap:1rem;align-items:start}}
figure{{margin:0;padding:.9rem;border:1px solid var(--rule);border-radius:6px}}
figcaption{{margin-top:.6rem;font-size:.85rem;color:var(--quiet)}}
svg{{display:block;width:100%;max-width:30rem;height:auto}}
img{{display:block;width:100%;min-width:34rem;max-width:52rem;background:#fff}}
"""

SCRIPT = """
"use strict";
for (const table of document.querySelectorAll("table")) {
  const heads = [...table.tHead.rows[0].cells];
  const body = table.tBodies[0];
  heads.forEach((head, column) => head.querySelector("button").addEventListener("click", () => {
    const isText = head.classList.contains("text");
    const down = head.ariaSort ? head.ariaSort === "ascending" : !isText;
    const key = (row) => row.cells[column].dataset.value;
    const compare = (a, b) => isText
      ? a.localeCompare(b, undefined, { numeric: true })
      : Number(a) - Number(b);
    const rows = [...body.rows].sort((first, second) => {
      const a = key(first), b = key(second);
      if (a === "" || b === "") return (a === "") - (b === "");
      return down ? compare(b, a) : compare(a, b);
    });
    heads.forEach((other) => other.removeAttribute("aria-sort"));
    head.setAttribute("aria-sort", down ? "descending" : "ascending");
    body.append(...rows);
  }));
}
"""


def tag(name: str, /, *content: Content, **attributes: object) -> Html:
    """An element. Attributes lose a trailing `_` (`class_`) and write `_` as `-`; None leaves one out."""
    shown = (
        f' {key.rstrip("_").replace("_", "-")}="{escape(_number(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    start = f"<{name}{''.join(shown)}>"
    return Html(start if name in VOID else f"{start}{join(*content)}</{name}>")


def join(*content: Content) -> Html:
    """One after another; what is not yet markup is escaped."""
    parts = (part for item in content for part in ((item,) if isinstance(item, str) else item))
    return Html("".join(part if isinstance(part, Html) else escape(part) for part in parts))


def _number(value: object) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)


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
    """Title, drawing and caption of each, side by side where there is room; else why there is none."""
    try:
        each = [tag("figure", tag("h3", title), drawing, tag("figcaption", text)) for title, drawing, text in drawn]
    except ConfigError as lack:
        return tag("p", str(lack))
    return tag("div", each, class_="figures")


def definitions(columns: Iterable[Column]) -> Html:
    """The meanings of the columns."""
    return facts((column.heading, column.meaning) for column in columns)


def _source(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
