"""Sessions and their drafters over real gRPC."""

from __future__ import annotations

import asyncio
import socket
from contextlib import closing
from pathlib import Path
from typing import Any

from graft.testing.front import PROMPT, Front, running_front
from graft.testing.scripted_draft import ScriptedDraft
from graft.testing.scripted_verify import Script

SAY = list(b"abcdefghijklmnopqrstuvwxyz" * 20)


class Gate:
    """Holds sessions at their third token until it is opened."""

    def __init__(self) -> None:
        self.go = asyncio.Event()

    async def __call__(self, num_committed: int) -> None:
        if num_committed >= 3:
            await self.go.wait()


def start(front: Front, **fields: Any) -> asyncio.Task[Any]:
    return asyncio.create_task(front.complete(max_tokens=6, **fields))


async def test_a_drafter_attends_with_ticket_tier_and_address(tmp_path: Path) -> None:
    draft, gate = ScriptedDraft("ngram"), Gate()
    async with running_front(tmp_path, [Script(SAY, before_commit=gate)], [draft]) as front:
        task = start(front)
        await draft.until(lambda: len(draft.attended) == 1)
        (attended,) = draft.attended.values()
        assert attended.ticket == b"ticket"
        assert attended.verify_address == front.verify.address
        assert (attended.tier.proposer, attended.tier.num_steps) == ("ngram", 4)
        opened = front.verify.opened[0]
        assert opened.speculate and opened.tree_deadline_micros == 50_000
        gate.go.set()
        assert (await task).status_code == 200
        await draft.until(lambda: draft.released == [attended.session_id])


async def test_off_tells_no_drafter(tmp_path: Path) -> None:
    draft = ScriptedDraft("ngram")
    async with running_front(tmp_path, [Script(SAY)], [draft]) as front:
        for wish in ("off", {"num_draft_tokens": 1}, {"num_steps": 0}):
            body = (await front.complete(max_tokens=3, speculation=wish)).json()
            record = body["metrics"]["speculative_decoding"]
            assert (record["active"], record["tier"]) == (False, None)
            assert not front.verify.opened[-1].speculate
        assert not draft.attended


async def test_a_tier_by_hand_is_cut_to_what_verify_takes(tmp_path: Path) -> None:
    draft, gate = ScriptedDraft("ngram"), Gate()
    script = Script(SAY, before_commit=gate, describe={"max_nodes": 8, "max_depth": 3})
    async with running_front(tmp_path, [script], [draft]) as front:
        wish = {"proposer": "ngram", "num_steps": 9, "topk": 3, "num_draft_tokens": 32}
        task = start(front, speculation=wish)
        await draft.until(lambda: len(draft.attended) == 1)
        (attended,) = draft.attended.values()
        tier = attended.tier
        assert (tier.num_steps, tier.topk, tier.num_draft_tokens) == (3, 3, 8)
        gate.go.set()
        await task


async def test_an_unknown_proposer_is_refused(tmp_path: Path) -> None:
    async with running_front(tmp_path, [Script(SAY)], [ScriptedDraft("ngram")]) as front:
        for wish in ("eagle", {"proposer": "eagle"}):
            response = await front.complete(speculation=wish)
            error = response.json()["error"]
            assert (response.status_code, error["code"]) == (400, "unknown_proposer")
            assert "ngram" in error["message"]


async def test_sessions_of_a_dead_drafter_move_and_come_back(tmp_path: Path) -> None:
    first, second, gate = ScriptedDraft("ngram"), ScriptedDraft("ngram"), Gate()
    second.changed = first.changed
    script = Script(SAY, before_commit=gate)
    async with running_front(tmp_path, [script], [first, second]) as front:
        tasks = [start(front) for _ in range(4)]
        await front.verify.until(lambda: len(front.verify.opened) == 4)
        await first.until(lambda: len(first.attended) + len(second.attended) == 4)
        port = first.port
        await first.stop()
        await second.until(lambda: len(second.attended) == 4)
        await second.stop()
        first.attended.clear()
        await first.start(port)
        await first.until(lambda: len(first.attended) == 4)
        gate.go.set()
        assert {task.status_code for task in await asyncio.gather(*tasks)} == {200}


async def test_a_drafter_that_refuses_is_passed_by(tmp_path: Path) -> None:
    unwilling, willing = ScriptedDraft("ngram", refuse=True), ScriptedDraft("ngram")
    gate = Gate()
    script = Script(SAY, before_commit=gate)
    async with running_front(tmp_path, [script], [unwilling, willing]) as front:
        tasks = [start(front) for _ in range(2)]
        await willing.until(lambda: len(willing.attended) == 2)
        gate.go.set()
        await asyncio.gather(*tasks)


async def test_a_silent_drafter_is_given_up(tmp_path: Path) -> None:
    silent, good, gate = ScriptedDraft("ngram", silent=True), ScriptedDraft("ngram"), Gate()
    script = Script(SAY, before_commit=gate)
    async with running_front(tmp_path, [script], [silent, good], silent_s=0.3) as front:
        tasks = [start(front) for _ in range(2)]
        await good.until(lambda: len(good.attended) == 2)
        gate.go.set()
        await asyncio.gather(*tasks)


async def test_a_drafter_for_another_tokenizer_is_refused_with_a_sentence(tmp_path: Path) -> None:
    draft = ScriptedDraft("ngram")
    draft.described = {"tokenizer_digest": "ab" * 32}
    async with running_front(tmp_path, [Script(SAY)], [draft], wait=False) as front:
        await front.until(True)
        while (await front.client.get("/health")).json()["status"] != "degraded":
            await front.server.gateway.drafts.changed.wait(0.05)
        body = (await front.complete(max_tokens=3)).json()
        reason = body["metrics"]["speculative_decoding"]["inactive_reason"]
        assert "its tokenizer is abababababab" in reason
        assert body["choices"][0]["text"] == "abc"


async def test_twenty_restarts_of_the_drafter_fail_no_request(tmp_path: Path) -> None:
    draft = ScriptedDraft("ngram")
    async with running_front(tmp_path, [Script(SAY)], [draft]) as front:
        port = draft.port
        statuses = set()
        for _ in range(20):
            tasks = [start(front) for _ in range(3)]
            await draft.stop()
            statuses |= {task.status_code for task in await asyncio.gather(*tasks)}
            await draft.start(port)
        assert statuses == {200}
        assert PROMPT


async def test_a_session_that_was_there_before_any_drafter_is_attended_when_one_comes(
    tmp_path: Path,
) -> None:
    with closing(socket.socket()) as held:
        held.bind(("127.0.0.1", 0))
        port = held.getsockname()[1]
    draft, gate = ScriptedDraft("ngram"), Gate()
    scripts = [Script(SAY, before_commit=gate)]
    async with running_front(tmp_path, scripts, draft=[f"127.0.0.1:{port}"]) as front:
        wished, unwished = start(front), start(front, speculation="off")
        await front.verify.until(lambda: len(front.verify.opened) == 2)
        assert not any(opened.speculate for opened in front.verify.opened)
        await draft.start(port)
        try:
            while not front.server.gateway.attendants.connected:
                await front.server.gateway.drafts.changed.wait(0.05)
            gate.go.set()
            await draft.until(lambda: len(draft.attended) == 1)
            answers = [(await task).json() for task in (wished, unwished)]
            assert [answer["choices"][0]["text"] for answer in answers] == ["abcdef"] * 2
            await draft.until(lambda: draft.released == list(draft.attended))
        finally:
            await draft.stop()
