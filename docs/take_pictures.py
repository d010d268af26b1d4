"""Takes the pictures of the page in docs/img from a running gateway.

Usage: python docs/take_pictures.py [URL]. Needs playwright and Chromium; the text is greedy, so the
pictures show the same answer each time.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, Page, sync_playwright

FOLDER = Path(__file__).parent / "img"
WORDS = "Write a short poem about rain with a repeated line."
DESK = {"width": 1360, "height": 960}
PHONE = {"width": 390, "height": 800}
ANSWER_MS = 120_000
# The round whose tree has most to show: some nodes accepted, and most branches beside them.
BEST_ROUND = """() => {
  const at = document.getElementById("at");
  const go = (number) => { at.value = number; at.dispatchEvent(new Event("input")); };
  const count = (kind) => document.querySelectorAll(`#tree .node.${kind}`).length;
  let best = [0, -1];
  for (let number = 0; number <= Number(at.max); number += 1) {
    go(number);
    const { height } = document.querySelector("#tree svg").viewBox.baseVal;
    const found = count("accepted");
    const value = found > 5 || !count("rejected") ? 0 : found && height + found;
    if (value > best[1]) best = [number, value];
  }
  go(best[0]);
}"""


def ask(page: Page) -> None:
    """One answer, and its most telling round."""
    page.wait_for_selector("#health[data-state=ready]")
    page.click(".parameters summary")
    page.fill("#temperature", "0")
    page.fill("#max-tokens", "90")
    page.click(".parameters summary")
    page.fill("#words", WORDS)
    page.press("#words", "Enter")
    page.wait_for_selector("#again:enabled", timeout=ANSWER_MS)
    page.evaluate(BEST_ROUND)
    page.evaluate("document.activeElement.blur()")
    page.mouse.move(2, 2)


def picture(browser: Browser, url: str, name: str, **options: Any) -> None:
    """The page on one screen in one scheme; on a phone, both of its views."""
    context = browser.new_context(**options)
    page = context.new_page()
    page.goto(url)
    ask(page)
    phone = options["viewport"] is PHONE
    for view in ("chat", "rounds") if phone else ("",):
        if view:
            page.click(f"#view-{view}")
            page.evaluate("new Promise(requestAnimationFrame)")
        page.screenshot(path=FOLDER / f"{'-'.join(filter(None, (name, view)))}.png")
    context.close()


def main() -> None:
    """All pictures."""
    url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000/"
    FOLDER.mkdir(exist_ok=True)
    with sync_playwright() as driver:
        browser = driver.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox", "--disable-gpu"]
        )
        for scheme in ("light", "dark"):
            picture(browser, url, f"page-{scheme}", viewport=DESK, color_scheme=scheme)
            picture(browser, url, f"phone-{scheme}", viewport=PHONE, color_scheme=scheme)
        browser.close()


if __name__ == "__main__":
    main()
