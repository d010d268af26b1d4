"""The page in a real browser against a real cluster: what it shows, and what it never does.

Needs Chromium and playwright; axe-core is read from node_modules where it is installed.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from graft.testing import scripted
from graft.testing.baseline import plain_tokens
from graft.testing.cluster import Cluster, running_cluster
from graft.testing.front import running_front
from graft.testing.models import IM_END, write_tiny_model
from graft.testing.scripted_verify import Script

playwright = pytest.importorskip("playwright.async_api")

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), None)
AXE = Path(os.environ.get("GRAFT_AXE", "node_modules/axe-core/axe.min.js"))
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-default-apps",
    "--disable-sync",
    "--no-first-run",
]
DESK = {"width": 1280, "height": 860}
PHONE = {"width": 390, "height": 844}
WORDS = "Say it twice."
NUM_TOKENS = 40
ALL_ROUNDS_ARE_DRAWN = """(() => {
    // The prompt's own pass, number 0, is none of the rounds that are told.
    const told = / in (\\d+) rounds/.exec(document.querySelector('#announce').textContent);
    const at = document.querySelector('#at');
    return told === null || at.max === told[1] && at.value === at.max;
})()"""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium here"),
]


@pytest.fixture
async def browser() -> AsyncIterator[Any]:
    async with playwright.async_playwright() as driver:
        running = await driver.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield running
        await running.close()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
async def cluster(model: Path) -> AsyncIterator[Cluster]:
    """A drafter that guesses three tokens ahead, and is right for a while."""
    async with running_cluster(model, num_draft=0) as plain:
        messages = [{"role": "user", "content": WORDS}]
        asked = await plain.client.post("/tokenize", json={"messages": messages})
        prompt = asked.json()["tokens"]
        truth = prompt + await plain_tokens(plain.verify_addresses[0], prompt, NUM_TOKENS)
    truth[-13:] = [0] * 13
    proposers = [scripted.perfect(scripted.replay([truth]), 3)]
    patience = {"tree_deadline_ms": 10_000}
    async with running_cluster(model, proposers=proposers, gateway=patience) as running:
        yield running


@asynccontextmanager
async def opened(browser: Any, url: str, expected: str = "", **options: Any) -> AsyncIterator[Any]:
    """The page in a window of its own; what the console complains of fails the test.

    With `expected`, complaints that hold it are part of the test, and the page may not be ready.
    """
    options = {"viewport": DESK, **options}
    context = await browser.new_context(**options)
    page = await context.new_page()
    complaints: list[str] = []
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on(
        "console",
        lambda said: complaints.append(said.text) if said.type in ("error", "warning") else None,
    )
    await page.goto(url)
    if not expected:
        await page.wait_for_selector("#health[data-state=ready]")
    yield page
    await context.close()
    assert [text for text in complaints if not expected or expected not in text] == []


async def until(page: Any, what: str) -> None:
    """Looks at every frame until an expression is true; the page's policy forbids it to itself."""
    async with asyncio.timeout(90):
        while not await page.evaluate(what):
            await page.evaluate("new Promise(requestAnimationFrame)")


async def ask(page: Any, words: str = WORDS, **fields: str) -> None:
    """Fills the form and sends it by keyboard; waits for the end."""
    await page.evaluate("document.querySelector('.parameters').open = true")
    for name, value in {"temperature": "0", "max-tokens": str(NUM_TOKENS), **fields}.items():
        await page.fill(f"#{name}", value)
    await page.fill("#words", words)
    await page.press("#words", "Enter")
    await until(page, "document.querySelector('#announce').textContent !== ''")
    await until(page, ALL_ROUNDS_ARE_DRAWN)


async def origins(page: Any) -> list[str]:
    found = await page.eval_on_selector_all(
        ".message.assistant .token", "all => all.map(one => one.classList[1])"
    )
    return list(found)


async def text(page: Any) -> str:
    return str(await page.text_content(".message.assistant:last-of-type .words"))


async def to_round(page: Any, number: int) -> None:
    await page.evaluate(
        "n => { const at = document.getElementById('at'); at.value = n;"
        " at.dispatchEvent(new Event('input')); }",
        number,
    )


async def test_a_chat_completes_and_a_tree_appears_with_its_accepted_path(
    browser: Any, cluster: Cluster
) -> None:
    async with opened(browser, cluster.url) as page:
        await ask(page)
        told = await cluster.chat(WORDS, temperature=0, max_tokens=NUM_TOKENS)
        assert await text(page) == told["choices"][0]["message"]["content"]
        assert {"accepted", "bonus"} <= set(await origins(page))
        await to_round(page, 1)
        assert await page.locator("#tree .node.accepted").count() == 3
        assert await page.locator("#tree .node.bonus").count() == 1
        title = await page.text_content("#round-title")
        assert title == "Round 1: 3 accepted of 3 drafted + 1 of its own"
        assert await page.locator(".token.now").count() == 4
        assert "forward" in await page.get_attribute("#waterfall svg", "aria-label")
        assert "100%" in await page.text_content("#depths")
        assert "verify" in await page.text_content("#cluster")


async def test_rejected_branches_are_shown_as_such(browser: Any, cluster: Cluster) -> None:
    async with opened(browser, cluster.url) as page:
        await ask(page)
        last = int(await page.get_attribute("#at", "max"))
        kinds = set()
        for number in range(last + 1):
            await to_round(page, number)
            kinds |= {
                kind
                for kind in ("accepted", "rejected", "bonus", "plain")
                if await page.locator(f"#tree .node.{kind}").count()
            }
        assert kinds == {"accepted", "rejected", "bonus", "plain"}


async def test_speculation_off_shows_plain_tokens_only_and_the_same_text(
    browser: Any, cluster: Cluster
) -> None:
    async with opened(browser, cluster.url) as page:
        await ask(page)
        drafted = await text(page)
        await page.click("#clear")
        await page.evaluate("document.querySelector('#announce').textContent = ''")
        await page.uncheck("#speculate")
        await ask(page)
        assert set(await origins(page)) == {"plain"}
        assert await text(page) == drafted
        await until(page, "document.querySelector('#tiers').textContent.includes('is off')")


async def test_replay_goes_through_the_answer_again(browser: Any, cluster: Cluster) -> None:
    async with opened(browser, cluster.url) as page:
        await ask(page)
        await to_round(page, 1)
        await page.select_option("#speed", "0.01")
        await page.click("#play")
        await until(page, "document.querySelectorAll('.token.later').length > 5")
        await until(page, "document.querySelectorAll('#tree .node.proposed').length > 0")
        assert await page.text_content("#play") == "Pause"
        await page.select_option("#speed", "1")
        await until(page, "document.querySelector('#play').textContent === 'Replay'")
        assert await page.locator(".token.later").count() == 0
        assert await page.input_value("#at") == await page.get_attribute("#at", "max")


async def test_rounds_are_stepped_through_by_keyboard(browser: Any, cluster: Cluster) -> None:
    async with opened(browser, cluster.url) as page:
        await ask(page)
        await page.focus("#at")
        await page.keyboard.press("Home")
        assert (
            await page.text_content("#round-title") == "The prompt: no tree, the prompt's own pass"
        )
        await page.keyboard.press("ArrowRight")
        assert str(await page.text_content("#round-title")).startswith("Round 1:")


async def test_an_answer_is_written_again_in_its_place(browser: Any, cluster: Cluster) -> None:
    async with opened(browser, cluster.url) as page:
        await ask(page)
        before = await text(page)
        await page.evaluate("document.querySelector('#announce').textContent = ''")
        await page.click("#again")
        await until(page, "document.querySelector('#announce').textContent !== ''")
        assert await text(page) == before
        assert await page.locator(".message.assistant").count() == 1
        assert await page.locator("#recording option").count() == 2


async def test_a_saved_recording_opens_again(
    browser: Any, cluster: Cluster, tmp_path: Path
) -> None:
    async with opened(browser, cluster.url) as page:
        await ask(page)
        await to_round(page, 1)
        said = await text(page)
        async with page.expect_download() as coming:
            await page.click("#save-json")
        saved = tmp_path / "saved.json"
        await (await coming.value).save_as(saved)
        async with page.expect_download() as coming:
            await page.click("#save-svg")
        drawing = tmp_path / "tree.svg"
        await (await coming.value).save_as(drawing)
    root = ElementTree.parse(drawing).getroot()
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    assert all(one.get("class") is None and one.get("fill") for one in root.iter())
    assert json.loads(saved.read_text())["words"] == WORDS
    async with opened(browser, cluster.url) as page:
        await page.set_input_files("#file", saved)
        await page.wait_for_selector("#tree svg")
        assert await text(page) == said
        broken = {"name": "x.json", "mimeType": "application/json", "buffer": b"{}"}
        await page.set_input_files("#file", broken)
        assert "not a recording" in await page.text_content("#error")


async def test_a_tier_by_hand_is_what_is_asked_for(browser: Any, cluster: Cluster) -> None:
    async with opened(browser, cluster.url) as page:
        await page.wait_for_selector("#tier option[value='hand:perfect']", state="attached")
        await page.select_option("#tier", "hand:perfect")
        await page.fill("#num-steps", "2")
        await ask(page)
        shown = "perfect 2\u00d72, 12 nodes"
        await until(page, f"document.querySelector('#tiers').textContent.includes('{shown}')")
        await to_round(page, 1)
        assert await page.locator("#tree .node.accepted").count() == 2


async def test_reasoning_stands_apart_and_is_not_said_again(browser: Any, tmp_path: Path) -> None:
    script = Script([*b"<think>\nWhy?\n</think>\nSo.", IM_END], widths=(1,))
    async with (
        running_front(tmp_path, [script], reasoning_parser="think") as front,
        opened(browser, str(front.client.base_url)) as page,
    ):
        await ask(page)
        thoughts = await page.locator(".token.thought").all_text_contents()
        assert "".join(thoughts).strip() == "<think>\nWhy?\n</think>"
        assert (await page.locator(".token").all_text_contents())[-3:] == ["S", "o", "."]
        await ask(page, "And?")
        await until(page, "document.querySelectorAll('.message.assistant').length === 2")
        tokens = list(front.verify.opened[-1].prompt_tokens)
        asked = front.server.gateway.tokenizer.decode(tokens)
        assert "So." in asked and "Why?" not in asked


async def test_a_stop_ends_the_answer_at_once(browser: Any, tmp_path: Path) -> None:
    script = Script(list(b"abcdefgh" * 60))
    async with running_front(tmp_path, [script]) as front:

        async def hold(done: int) -> None:
            if done >= 5:
                await front.verify.until(lambda: bool(front.verify.cancelled))

        script.before_commit = hold
        async with opened(browser, str(front.client.base_url)) as page:
            await page.fill("#words", "Go on.")
            await page.click("#send")
            await until(page, "document.querySelectorAll('.message .token').length >= 5")
            await page.keyboard.press("Escape")
            await until(page, "document.querySelector('#stop').disabled")
            assert await text(page) == "abcde"
            assert str(await page.text_content("#announce")).startswith("stopped")
            await front.verify.until(lambda: front.verify.num_open == 0)


async def test_what_the_model_writes_never_becomes_markup(browser: Any, tmp_path: Path) -> None:
    hostile = '<img src=x onerror="alert(1)"><script>alert(2)</script>'
    async with running_front(tmp_path, [Script([*hostile.encode(), 258])]) as front:
        async with opened(browser, str(front.client.base_url)) as page:
            await ask(page, "<b>bold</b>", **{"max-tokens": "200"})
            assert await text(page) == hostile
            assert await page.locator("#messages :is(img, script, b)").count() == 0


async def test_a_refusal_is_told_and_the_page_goes_on(browser: Any, tmp_path: Path) -> None:
    async with running_front(tmp_path, [Script([*b"fine", 258])]) as front:
        async with opened(browser, str(front.client.base_url), expected="401") as page:
            await page.route("**/v1/chat/completions", _refuse_once())
            await page.wait_for_selector("#health[data-state=ready]")
            await ask(page)
            assert await page.text_content("#error") == "no room (401)"
            await page.click("#key-cancel")
            await page.evaluate("document.querySelector('#announce').textContent = ''")
            await page.click("#again")
            await until(page, "document.querySelector('#announce').textContent !== ''")
            assert await text(page) == "fine"
            assert await page.is_hidden("#error")


def _refuse_once() -> Any:
    refused: list[bool] = []

    async def handle(route: Any) -> None:
        if refused:
            await route.continue_()
            return
        refused.append(True)
        await route.fulfill(status=401, json={"error": {"message": "no room (401)"}})

    return handle


async def test_a_key_is_asked_for_and_kept_for_the_tab(browser: Any, tmp_path: Path) -> None:
    async with running_front(tmp_path, [Script([*b"hello", 258])], api_keys=["sesame"]) as front:
        async with opened(browser, str(front.client.base_url), expected="401") as page:
            await page.wait_for_selector("#key-dialog[open]")
            await page.fill("#key", "wrong")
            await page.press("#key", "Enter")
            await page.wait_for_selector("#key-dialog[open]")
            await page.fill("#key", "sesame")
            await page.press("#key", "Enter")
            await until(page, "document.querySelector('#cluster svg') !== null")
            await ask(page)
            assert await text(page) == "hello"
            assert await page.evaluate("localStorage.length") == 0
            await page.reload()
            await until(page, "document.querySelector('#cluster svg') !== null")
            assert await page.is_hidden("#key-dialog")


@pytest.mark.skipif(not AXE.exists(), reason="axe-core is not installed")
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [DESK, PHONE], ids=["desk", "phone"])
async def test_axe_finds_no_serious_fault(
    browser: Any, cluster: Cluster, scheme: str, size: dict[str, int]
) -> None:
    async with opened(browser, cluster.url, color_scheme=scheme, viewport=size) as page:
        await ask(page)
        await page.evaluate(_axe())
        for view in ("chat", "rounds"):
            if size is PHONE:
                await page.click(f"#view-{view}")
            await to_round(page, 1)
            await page.evaluate("document.querySelector('#outline-box').open = true")
            found = await page.evaluate("axe.run().then(result => result.violations)")
            grave = [one for one in found if one["impact"] in ("serious", "critical")]
            assert not grave, json.dumps(grave, indent=1)


def _axe() -> str:
    return AXE.read_text()


async def test_nothing_is_wider_than_a_phone(browser: Any, cluster: Cluster) -> None:
    async with opened(browser, cluster.url, viewport={"width": 340, "height": 700}) as page:
        await ask(page)
        for view in ("chat", "rounds"):
            # In one turn of the page: its figures are as they were drawn out of sight.
            wide = await page.evaluate(
                f"document.querySelector('#view-{view}').click(),"
                " document.documentElement.scrollWidth"
            )
            assert wide <= 340, view


async def test_the_tiers_of_a_long_answer_fit_a_phone(browser: Any, tmp_path: Path) -> None:
    script = Script([*b"abcdefgh" * 50, IM_END])
    async with running_front(tmp_path, [script]) as front:
        size = {"width": 340, "height": 700}
        async with opened(browser, str(front.client.base_url), viewport=size) as page:
            await ask(page, **{"max-tokens": "401"})
            await page.click("#view-rounds")
            await until(page, "document.querySelector('#tiers svg').getAttribute('width') < 340")
            assert await page.evaluate("document.documentElement.scrollWidth") <= 340
