"""The pages of a comparison and of a sweep: whole, self-contained, complete, and safe against what they show."""

from __future__ import annotations

import base64
import hashlib
import re
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from reporting.pages import Page

from amusd.config import RunConfig
from amusd.reporting.columns import COLUMNS
from amusd.reporting.comparison import comparison_page
from amusd.reporting.page import DARK, LIGHT, Html, join, tag
from amusd.reporting.sweep import sweep_page
from amusd.settings import from_mapping
from amusd.tracing.accounting import DRAFT_PARTS, TARGET_PARTS

HOSTILE = """</script><script>alert('1')</script><img src=x onerror="alert(2)">&amp;"""
TIME = {
    "target": dict.fromkeys(TARGET_PARTS, 1 / 6),
    "draft": dict.fromkeys(DRAFT_PARTS, 1 / 6),
}


def row(mode: str, speed: float, **more: Any) -> dict[str, Any]:
    plain = mode == "autoregressive"
    return {
        "mode": mode,
        "policy": "chain" if mode == "asynchronous" else None,
        "drafter": None if plain else "embedded",
        "num_speculative_tokens": 2 if mode == "synchronous" else None,
        "tokens_per_second": speed,
        "speedup_vs_autoregressive": speed / 20,
        "speedup_quartiles": None if plain else [0.9 * speed / 20, 1.2 * speed / 20],
        "acceptance_rate": None if plain else 0.375,
        "acceptance_by_position": [] if plain else [0.5, 0.25, 0.125],
        "identical_to_autoregressive": {"num_prompts": 4, "num_identical": 3, "first_difference_gaps": [0.1]},
        **more,
    }


ROWS = [row("autoregressive", 20.0), row("synchronous", 31.4, tuned={"2": 31.4, "4": 30.0}), row("asynchronous", 42.5)]
ENVIRONMENT = {
    "amusd": "0.1.0",
    "cpu": {"model": "A Processor", "allowed_cores": 2},
    "gpus": [],
    "packages": {"torch": "2.13"},
    "date": "2026-01-02",
    "commit": "0123456789abcdef+changes",
}
RESULT = {"rows": ROWS, "environment": ENVIRONMENT, "num_refused_prompts": 1}
CONFIG = from_mapping(RunConfig, {"prompt": "my secret", "workload": {"path": "/home/me/questions.jsonl"}})


def comparison(rows: list[dict[str, Any]] = ROWS, timeline: str | None = None) -> str:
    return comparison_page({**RESULT, "rows": rows}, CONFIG, timeline=timeline)


def sweep(keys: dict[str, list[str]], rows: list[dict[str, Any]] = ROWS, **more: Any) -> str:
    names = list(keys)
    choices: list[list[str]] = [[]]
    for values in keys.values():
        choices = [[*choice, value] for choice in choices for value in values]
    jobs = [
        {"job": n, "swept": dict(zip(names, choice, strict=True)), "exit_code": 0, "rows": rows}
        for n, choice in enumerate(choices)
    ]
    given_ = {"command": "compare", "arguments": ["prompt=my secret", "max_lookahead=4,8"], "swept_keys": names}
    return sweep_page(**{**given_, "jobs": jobs, "config": CONFIG, "environment": ENVIRONMENT, **more})


PAGES = {
    "comparison": comparison(),
    "comparison with times": comparison([{**row_, "time": TIME} for row_ in ROWS], "<svg/>"),
    "one row": comparison(ROWS[:1]),
    "sweep": sweep({"max_lookahead": ["4", "8"], "drafter": ["ngram", "embedded"]}),
    "sweep of one job": sweep({}),
    "sweep without results": sweep({"max_lookahead": ["4", "8"]}, rows=[], environment={}),
}


@pytest.mark.parametrize("source", PAGES.values(), ids=PAGES.keys())
def test_a_page_is_whole_and_needs_nothing_else(source: str) -> None:
    page = Page(source)
    assert source.startswith("<!DOCTYPE html>\n<html lang=")
    assert not re.search(r"https?:|//[a-z]|@import|url\(", source)
    assert {"link", "iframe", "object", "form", "base"}.isdisjoint(name for name, _ in page.elements)
    assert all(value.startswith("data:image/svg+xml;base64,") for value in page.attributes("src"))
    assert page.attributes("href") == []


@pytest.mark.parametrize("source", PAGES.values(), ids=PAGES.keys())
def test_its_policy_allows_its_own_style_and_script_and_nothing_else(source: str) -> None:
    page = Page(source)
    (policy,) = (a["content"] for _, a in page.elements if a.get("http-equiv") == "Content-Security-Policy")
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    for name in ("style", "script"):
        digest = base64.b64encode(hashlib.sha256(page.raw[name].encode()).digest()).decode()
        assert rules[f"{name}-src"] == f"'sha256-{digest}'"
    assert rules["default-src"] == rules["base-uri"] == rules["form-action"] == "'none'"
    assert rules["img-src"] == "data:"
    assert page.attributes("style") == []  # the policy would drop them
    assert not [name for _, attributes in page.elements for name in attributes if name.startswith("on")]


def test_a_comparison_says_what_was_compared_where_and_how_and_shows_every_figure() -> None:
    page = Page(comparison([{**row_, "time": TIME} for row_ in ROWS]))
    for text in (
        "Plain, synchronous and asynchronous decoding compared",
        "Target SmolLM2-135M-Instruct (embedded), drafter embedded, on A Processor;",
        "; the first 4 (or fewer) prompts of questions.jsonl.",
        "commit 0123456789ab+changes",
        "1 prompt that did not fit",
        "amusd compare workload.path=/home/me/questions.jsonl",
        "2026-01-02",
        "synchronous (best: 2), embedded was the fastest of (tokens/s) 2: 31.4, 4: 30.0.",
        "plain = 1",
        "asynchronous (chain), embedded, position in the block 3: 12 %",
        "partial passes: 17 %",
    ):
        assert text in page.text
    header, *rows = page.rows[:4]
    shown = ["tokens/s", "identical", "x plain", "quartiles", "accepted"]
    assert header == ["mode", *shown]
    assert rows == [
        ["autoregressive", "20.0", "3/4", "1.00", "", ""],
        ["synchronous (best: 2), embedded", "31.4", "3/4", "1.57", "1.41-1.88", "38 %"],
        ["asynchronous (chain), embedded", "42.5", "3/4", "2.12", "1.91-2.55", "38 %"],
    ]
    meanings = {column.meaning for column in COLUMNS if column.heading in shown}
    assert meanings <= set(page.texts)
    assert ["asynchronous (chain), embedded", "draft", "17 %", *[""] * 3, "17 %", "17 %", *["17 %"] * 3] in page.rows


def test_whether_answers_are_identical_is_in_view_however_many_keys_are_swept() -> None:
    """A window of 1280 px shows the first figures; the table is wider and scrolls."""
    page = Page(sweep({"max_lookahead": ["4"], "drafter": ["ngram"], "sampling.temperature": ["0", "1"]}))
    assert page.rows[0].index("identical") == page.rows[0].index("tokens/s") + 1


def test_times_and_a_timeline_are_shown_where_there_are_some() -> None:
    bare = Page(comparison())
    assert "Timeline" not in bare.text
    assert "time went" not in bare.text
    picture = '<svg xmlns="http://www.w3.org/2000/svg"><script>1</script></svg>'
    full = Page(comparison([{**row_, "time": {**TIME, "draft": None}} for row_ in ROWS], picture))
    assert "Where the target's time went" in full.text
    assert "Where the draft's time went" not in full.text
    (source,) = full.attributes("src")
    assert base64.b64decode(source.partition(",")[2]).decode() == picture
    assert len([name for name, _ in full.elements if name == "script"]) == 1


def test_without_matplotlib_a_page_has_its_tables_and_says_what_its_figures_need(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    for page in (Page(comparison()), Page(sweep({"max_lookahead": ["4", "8"]}))):
        assert "figures need matplotlib: pip install 'amusd[plots]'" in page.texts
        assert "svg" not in {name for name, _ in page.elements}
        assert page.rows[3][-5:-2] == ["42.5", "3/4", "2.12"]


def test_every_part_of_the_time_is_explained() -> None:
    page = Page(comparison([{**row_, "time": TIME} for row_ in ROWS]))
    for worker, parts in (("target", TARGET_PARTS), ("draft", DRAFT_PARTS)):
        for part, meaning in parts.items():
            assert page.texts[page.texts.index(f"{worker}: {part.replace('_', ' ')}") + 1] == meaning


def test_a_sweep_shows_every_row_and_a_figure_for_each_choice_of_the_other_keys() -> None:
    page = Page(sweep({"max_lookahead": ["4", "8", "16"], "drafter": ["ngram", "embedded"]}))
    assert "Plain, synchronous and asynchronous decoding over max_lookahead, drafter" in page.text
    assert page.rows[0][:4] == ["job", "max_lookahead", "drafter", "mode"]
    assert len(page.rows) == 1 + 6 * len(ROWS)
    assert page.rows[-1][:5] == ["5", "16", "embedded", "asynchronous (chain), embedded", "42.5"]
    titles = [
        f"{name} over max_lookahead, drafter={drafter}"
        for drafter in ("ngram", "embedded")
        for name in ("Tokens per second", "Speed-up over plain decoding")
    ]
    assert [text for text in page.texts if " over max_lookahead, drafter=" in text] == titles
    assert [label for label in page.attributes("aria-label") if " over max_lookahead, drafter=" in label] == titles
    assert page.texts.count("asynchronous (chain), embedded, max_lookahead 16: 42.5") == 2
    assert page.texts.count("asynchronous (chain), embedded, max_lookahead 16: 2.12") == 2


def test_a_sweep_says_which_jobs_failed() -> None:
    jobs = [
        {"job": 0, "swept": {"seed": "0"}, "exit_code": 0, "rows": ROWS},
        {"job": 1, "swept": {"seed": "1"}, "exit_code": 1, "rows": []},
        {"job": 2, "swept": {"seed": "2"}, "exit_code": None, "rows": []},
    ]
    text = Page(sweep({"seed": ["0", "1", "2"]}, jobs=jobs)).text
    assert "1 of 3 jobs are done." in text
    assert "Not completed: job 1 (exit code 1)." in text


def test_no_prompt_is_shown() -> None:
    for source in PAGES.values():
        assert "my secret" not in source


def test_what_is_shown_is_never_markup() -> None:
    config = from_mapping(RunConfig, {"target": {"kind": "hf", "model": HOSTILE}, "workload": {"path": HOSTILE}})
    rows = [row("autoregressive", 20.0), row(HOSTILE, 1.0, time={"target": {HOSTILE: 1.0}})]
    environment = {
        **ENVIRONMENT,
        "cpu": {"model": HOSTILE, "allowed_cores": HOSTILE},
        "gpus": [HOSTILE],
        "date": HOSTILE,
    }
    single = comparison_page({"rows": rows, "environment": environment}, config, timeline=f"<svg>{HOSTILE}</svg>")
    many = sweep({HOSTILE: [HOSTILE, "2"]}, rows, config=config, environment=environment, arguments=[HOSTILE])
    for source in (single, many):
        page = Page(source)
        assert HOSTILE in page.text
        assert source.count("<script>") == 1
        assert "<img src=x" not in source


@given(st.text(st.characters(codec="utf-8", exclude_categories=["Cc"])))
def test_a_text_comes_back_as_it_went_in(text: str) -> None:
    page = Page(tag("p", text, title=text))
    assert "".join(page.texts) == text
    assert page.attributes("title") == [text]


def test_markup_is_escaped_once() -> None:
    assert join("<", Html("<b>"), ["&", tag("i", "x", class_="a", data_value=2.5)]) == (
        '&lt;<b>&amp;<i class="a" data-value="2.5">x</i>'
    )


def _luminance(colour: str) -> float:
    parts = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
    linear = [part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def _contrast(first: str, second: str) -> float:
    high, low = sorted((_luminance(first), _luminance(second)), reverse=True)
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("scheme", [LIGHT, DARK], ids=["light", "dark"])
def test_every_text_and_colour_stands_out(scheme: dict[str, str]) -> None:
    for name in ("text", "quiet"):
        assert min(_contrast(scheme[name], scheme[below]) for below in ("background", "panel")) >= 4.5
    for number in range(6):
        assert _contrast(scheme[f"s{number}"], scheme["background"]) >= 3
        assert _contrast(scheme["inside"], scheme[f"s{number}"]) >= 4.5
