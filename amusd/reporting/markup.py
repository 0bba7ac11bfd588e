"""HTML and SVG built from the inside out: every text is escaped exactly once, because only `tag` makes `Html`."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from typing import TypeAlias

VOID = frozenset({"meta", "img", "br"})
"""Elements without content or end tag."""


class Html(str):
    """Markup that is finished: it is not escaped again."""

    __slots__ = ()


Content: TypeAlias = "str | Iterable[str]"
"""A text, markup, or several of them."""


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
