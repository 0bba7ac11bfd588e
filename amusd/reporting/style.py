"""How the page looks and how its tables sort."""

from __future__ import annotations

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


_SERIES = "\n".join(f".s{i}{{fill:var(--s{i})}} .line.s{i}{{stroke:var(--s{i})}}" for i in range(6))
_DASHES = "\n".join(
    f".line.s{i}{{stroke-dasharray:{dash}}}" for i, dash in enumerate(("2 3", "none", "7 3", "1 4", "9 3 2 3", "4 4"))
)

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
th button:focus-visible,summary:focus-visible,.scroll:focus-visible{{outline:2px solid var(--s1);outline-offset:-2px}}
th button::after{{content:"\\2195";margin-left:.35em;color:var(--quiet);font-weight:400}}
th[aria-sort=ascending] button::after{{content:"\\2191";color:var(--text)}}
th[aria-sort=descending] button::after{{content:"\\2193";color:var(--text)}}
.figures{{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,21rem),1fr));gap:1rem;align-items:start}}
figure{{margin:0;padding:.9rem;border:1px solid var(--rule);border-radius:6px}}
figcaption{{margin-top:.6rem;font-size:.85rem;color:var(--quiet)}}
svg{{display:block;width:100%;max-width:30rem;height:auto}}
svg text{{fill:var(--text);font-size:12px}}
svg .note{{fill:var(--quiet);font-size:11px}}
svg .value{{font-weight:600}}
svg .inside{{fill:var(--inside);font-size:11px}}
.grid{{stroke:var(--rule);stroke-width:1}}
.reference{{stroke:var(--text);stroke-width:1.25;stroke-dasharray:4 3}}
{_SERIES}
.line{{fill:none;stroke-width:2}}
{_DASHES}
.mark{{stroke:var(--background);stroke-width:1}}
img{{display:block;width:100%;min-width:34rem;max-width:52rem;background:#fff}}
summary{{cursor:pointer;padding:.3rem 0}}
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
