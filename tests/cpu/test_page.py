"""The live page in a real browser, over a real server with the model that ships."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.browser import Page, browsing, find_chromium
from tests.cpu.test_serve import Process, serving

pytestmark = [pytest.mark.browser, pytest.mark.timeout(240)]

SERVING = "document.querySelector('.card.current h3')?.firstChild.textContent"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text("user\nboss admin\n")
    with serving("ranks=2", f"api_key_file={keys}") as running:
        yield running


@pytest.fixture
def page(server: Process) -> Iterator[Page]:
    program = find_chromium()
    assert program is not None
    with browsing(program) as tab:
        tab.resize(1400, 900)
        tab.open(server.url)
        yield tab


def sign_in(page: Page, key: str) -> None:
    """Answer the dialog that asks for a key."""
    page.wait("document.querySelector('#key-dialog').open")
    page.value(f"document.querySelector('#key-value').value = '{key}'")
    page.click("#key-dialog button.primary")
    page.wait("document.querySelectorAll('.card').length === 5 && document.querySelectorAll('.rank').length === 2")


def test_an_admin_watches_prompts_and_switches(page: Page) -> None:
    sign_in(page, "boss")
    assert page.value(SERVING) == "tp"
    assert page.value("[...document.querySelectorAll('.heads div')].every(row => row.children.length === 2)")
    assert page.value("document.querySelectorAll('.heads .held').length") == 6  # 3 modules, a head group on each rank

    page.click("#play button.primary")
    page.wait("document.querySelector('#answer').textContent === 'The number of Moses is 57213.'")
    page.wait("document.querySelector('#answer-note').textContent.includes('ended by stop')")
    page.wait("document.querySelector('#charts .series').getAttribute('d').includes('L')")

    page.wait("!document.querySelector('#controls').hidden")
    page.value("[...document.querySelectorAll('.card button')].find(b => b.textContent === 'Switch to dp').click()")
    page.wait(f"{SERVING} === 'dp'")
    page.wait("document.querySelectorAll('.heads .held').length === 12")
    page.wait("document.querySelector('#decision').textContent.startsWith('dp was chosen by hand')")
    page.wait("document.querySelector('#events').textContent.includes('tp → dp')")

    page.value("document.querySelector('#auto').focus()")  # and the rest by keyboard
    page.press("Enter")
    page.wait("document.querySelector('#decision').textContent.startsWith('The policy is static')")
    assert len(page.problems) == 1 and "401" in page.problems[0], page.problems  # before there was a key


def test_running_requests_are_drawn_where_they_are(page: Page) -> None:
    sign_in(page, "user")
    page.value("document.querySelector('#tokens').value = 400; document.querySelector('#mode').value = 'text'")
    page.value("document.querySelector('#copies').value = 3")
    page.click("#play button.primary")
    page.wait("document.querySelectorAll('#running tr[tabindex]').length === 3")
    page.value("document.querySelector('#running tr').focus()")
    page.wait("document.body.classList.contains('picked')")
    drawn = "new Set([...document.querySelectorAll('.arena')].flatMap(a => [...a.querySelectorAll('.request')].map("
    page.wait(f"{drawn}c => c.dataset.request))).size === 3")
    page.click("#stop")
    page.wait("document.querySelector('#answer-note').textContent === 'Stopped.'")
    page.wait("document.querySelector('#running').textContent.startsWith('Nothing runs')")


def test_who_may_not_switch_has_no_buttons_for_it(page: Page) -> None:
    sign_in(page, "user")
    assert page.value("document.querySelector('#controls').hidden")
    assert page.value("[...document.querySelectorAll('.card button')].every(button => button.hidden)")


@pytest.mark.parametrize("dark", [True, False], ids=["dark", "light"])
@pytest.mark.parametrize("width", [1400, 390])
def test_it_fits_and_can_be_read(page: Page, width: int, dark: bool, tmp_path: Path) -> None:
    page.resize(width, 844, dark)
    sign_in(page, "user")
    assert page.value("document.documentElement.scrollWidth") <= width
    colours = page.value(
        "[getComputedStyle(document.body).color, getComputedStyle(document.body).backgroundColor]"
        ".map(c => c.match(/[\\d.]+/g).slice(0, 3).map(Number))"
    )
    text, ground = (0.2126 * r + 0.7152 * g + 0.0722 * b for r, g, b in colours)
    assert (text > 180 and ground < 60) if dark else (text < 60 and ground > 180)
    unnamed = page.value(
        "[...document.querySelectorAll('button, select, input, textarea, [role=img]')].filter(e => !("
        "e.textContent.trim() || e.getAttribute('aria-label') || e.labels?.length)).map(e => e.outerHTML)"
    )
    assert unnamed == []
    page.press("Tab")
    assert page.value("document.activeElement.className") == "skip"
    picture = page.screenshot()
    assert picture.startswith(b"\x89PNG") and len(picture) > 10_000
