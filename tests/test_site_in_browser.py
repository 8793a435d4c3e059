"""The site as it is opened from its files, without a network: nothing is complained of, it is found
in, its sections are visible without a menu button, and a telephone shows it.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.report.test_page_in_browser import BROWSER, QUIET

ROOT = Path(__file__).parents[1]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        BROWSER is None, reason="no Chromium here: install the distribution's package chromium"
    ),
]


@pytest.mark.slow
def test_the_site_is_searched_from_its_files(tmp_path):
    sync_api = pytest.importorskip(
        "playwright.sync_api", reason="no playwright here: pip install 'ctrans[test]'"
    )
    pytest.importorskip("mkdocs", reason="no mkdocs here: pip install 'ctrans[docs]'")
    site = tmp_path / "site"
    build = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(site)]
    done = subprocess.run(
        build,
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    complaints = []
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=BROWSER, args=QUIET)
        page = browser.new_context(viewport={"width": 1200, "height": 800}, offline=True).new_page()
        page.set_default_timeout(120_000)  # of a machine that is busy
        page.on(
            "console",
            lambda message: (
                complaints.append(message.text) if message.type in ("error", "warning") else None
            ),
        )
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.goto((site / "howto" / "gate.html").as_uri())
        assert page.locator(".md-tabs__link", has_text="Commands").is_visible()
        assert page.locator(".md-sidebar--primary").get_by_text("Install it").is_visible()
        assert not page.locator("label[for=__drawer].md-header__button").is_visible()
        page.goto((site / "index.html").as_uri())
        query = page.locator("input[name=query]")
        query.click()
        query.press_sequentially("placement")
        page.wait_for_selector(".md-search-result__item", state="attached")
        assert page.locator(".md-search-result__link", has_text="placement").count() > 0
        page.set_viewport_size({"width": 400, "height": 800})
        for name in ("index", "tutorial", "howto/placement", "why/theorems"):
            page.goto((site / f"{name}.html").as_uri())
            assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), name
        browser.close()
    assert complaints == []
