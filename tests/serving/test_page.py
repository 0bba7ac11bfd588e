"""The page, in a headless Chromium and with the keyboard alone: the same answer in every mode, coloured by its sources.

The target is a table, and the draft knows its answer only in part, so that every kind of token is there. Nothing waits
for a time: what is to be seen is waited for, with a deadline.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the server is an extra: pip install 'amusd[serve]'")

from runtime.pair import PROMPT, VOCAB_SIZE, pair, reference
from runtime.table_tree import TableTreeDrafter, spread
from serving.browser import NAMES, Browser, browsing, find_browser
from serving.running import TEXT, Running, serving
from table_model import TableTokenizer

FOUND = find_browser()
needs_browser = pytest.mark.skipif(FOUND is None, reason=f"no browser is installed: one of {', '.join(NAMES)}")
NUM_TOKENS = 60
ANSWER = TableTokenizer(VOCAB_SIZE).decode(reference(NUM_TOKENS)[len(PROMPT) :])
IS_ANSWERED = "document.querySelector('.again button:not(:disabled), .verdict:not([hidden])') && !running"


@contextmanager
def server(browser: Browser | None = None, *, pass_seconds: float = 0.002, **settings: Any) -> Iterator[Running]:
    """A server whose draft guesses chains and trees, right six times in ten. The browser leaves it before it ends."""
    drafters = {"half": lambda: TableTreeDrafter(places=spread(1))}
    with (
        pair(drafters, pass_seconds=pass_seconds, max_num_seqs=2) as (engine, _),
        serving(engine, **settings) as running,
    ):
        yield running
        if browser is not None:
            browser.show("about:blank")


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    assert FOUND is not None
    with browsing(FOUND, tmp_path_factory.mktemp("profile")) as browser:
        yield browser


@pytest.fixture
def browser(chromium: Browser) -> Iterator[Browser]:
    chromium.problems.clear()
    chromium.requested.clear()
    yield chromium
    assert chromium.problems == []


def open_page(browser: Browser, running: Running) -> None:
    browser.show(f"{running.url}/")
    browser.wait_for("document.querySelector('#about').textContent === 'table'")


def tab_to(browser: Browser, selector: str, *, back: bool = False) -> None:
    for _ in range(60):
        if browser.evaluate(f"document.activeElement.matches({selector!r})"):
            return
        browser.press("Tab", shift=back)
    raise AssertionError(f"{selector} cannot be reached with the keyboard")


def ask(browser: Browser, num_tokens: int = NUM_TOKENS) -> None:
    tab_to(browser, "#temperature")
    browser.press("Home")
    tab_to(browser, "#tokens")
    browser.evaluate("document.activeElement.select()")  # as Ctrl+A, which is another key on some systems
    browser.write(str(num_tokens))
    tab_to(browser, "#prompt")
    browser.write(TEXT)
    browser.press("Enter")


def texts(browser: Browser) -> list[str]:
    found: list[str] = browser.evaluate("[...document.querySelectorAll('.text')].map((each) => each.textContent)")
    return found


def text_of(browser: Browser, selector: str) -> str:
    return str(browser.evaluate(f"document.querySelector({selector!r}).textContent"))


@needs_browser
def test_the_same_answer_in_every_mode_is_coloured_by_its_sources(browser: Browser) -> None:
    with server(browser) as running:
        open_page(browser, running)
        assert browser.evaluate("document.activeElement.id") == "prompt"
        ask(browser)
        browser.wait_for(IS_ANSWERED)
        assert texts(browser) == [ANSWER]
        styles = browser.evaluate(
            "Object.fromEntries([...document.querySelectorAll('.text span')].map((token) => [token.className,"
            "[getComputedStyle(token).color, getComputedStyle(token).textDecorationStyle,"
            " getComputedStyle(token).textDecorationColor]]))"
        )
        assert set(styles) == {"target", "candidate", "alternative"}
        assert len({colour for colour, _, _ in styles.values()}) == 3
        assert styles["candidate"][1] == "solid"
        assert styles["alternative"][1] == "double"
        assert styles["target"][2] == "rgba(0, 0, 0, 0)"  # no line
        assert text_of(browser, "#welcome + .turn .speed").endswith(" tokens/s")  # nothing to compare with

        for number, (mode, key) in enumerate([("autoregressive", "Enter"), ("synchronous", " ")], start=2):
            tab_to(browser, f"[data-again={mode}]", back=True)
            browser.press(key)
            browser.wait_for(f"document.querySelectorAll('.speeds tr').length === {number} && {IS_ANSWERED}")
            assert texts(browser) == [ANSWER] * number
            assert text_of(browser, ".verdict").startswith("✓ Same seed, same text.")
        modes = browser.evaluate("[...document.querySelectorAll('.run')].map((run) => run.dataset.mode)")
        assert modes == ["asynchronous", "autoregressive", "synchronous"]
        plain = (
            "[...document.querySelectorAll('[data-mode=autoregressive] .text span')].map((token) => token.className)"
        )
        assert browser.evaluate(plain) == ["target"] * NUM_TOKENS
        beside = browser.evaluate("[...document.querySelectorAll('.speeds tr')].map((row) => row.cells[3].textContent)")
        assert beside[1] == ""
        assert all(text.endswith(" plain") for text in (beside[0], beside[2]))
        assert "Synchronous answer finished" in text_of(browser, "#news")  # for who does not see it
        assert all(url.startswith((running.url, "data:")) for url in browser.requested)
        assert f"{running.url}/timeline" in browser.requested


def test_the_page_may_load_nothing_else_and_asks_for_no_key() -> None:
    with server(api_key="open sesame") as running:
        response = running.get("/")
        assert response.status_code == 200
        policy = response.headers["content-security-policy"]
        assert policy.startswith("default-src 'none'; style-src 'sha256-")
        assert "unsafe" not in policy
        assert "http" not in policy
        assert running.get("/timeline").status_code == 401
