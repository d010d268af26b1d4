"""The page's pure modules under Node: where nodes stand, what is counted, where a replay is."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
from typing import Any

import pytest

from graft.gateway.rest.page import FOLDER

NODE = shutil.which("node")
pytestmark = pytest.mark.skipif(NODE is None, reason="there is no Node here")


def run(names: str, module: str, expression: str, given: Any) -> Any:
    """The value of an expression over `given`, with names of a module in reach."""
    source = f"""
        import {{ {names} }} from {json.dumps((FOLDER / module).as_uri())};
        import {{ readFileSync }} from "node:fs";
        const given = JSON.parse(readFileSync(0, "utf8"));
        console.log(JSON.stringify({expression}));
    """
    assert NODE is not None
    done = subprocess.run(
        [NODE, "--input-type=module", "--eval", source],
        input=json.dumps(given),
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def random_tree(rng: random.Random) -> dict[str, Any]:
    """Parents in preorder, and a path from the root as the accepted one."""
    parents = [-1]
    spine = [0]
    for node in range(1, rng.randint(1, 40)):
        del spine[rng.randint(1, len(spine)) :]
        parents.append(spine[-1])
        spine.append(node)
    path, node = [], 0
    while children := [child for child, parent in enumerate(parents) if parent == node]:
        if rng.random() < 0.3:
            break
        node = rng.choice(children)
        path.append(node)
    return {"parents": parents, "accepted": path}


def test_no_two_nodes_of_a_tree_stand_in_one_place() -> None:
    trees = [random_tree(random.Random(seed)) for seed in range(200)]
    for tree, spot in zip(trees, run("place", "layout.js", "given.map(place)", trees), strict=True):
        nodes = [(one["x"], one["y"]) for one in [*spot["nodes"], spot["bonus"]]]
        assert len(set(nodes)) == len(nodes)
        for node, parent in enumerate(tree["parents"]):
            if parent >= 0:
                assert nodes[node][0] > nodes[parent][0] and nodes[node][1] >= nodes[parent][1]
        assert max(x for x, _ in nodes) < spot["width"]
        assert max(y for _, y in nodes) < spot["height"]


def round_of(
    parents: list[int], accepted: int, at_ms: float = 0.0, **fields: Any
) -> dict[str, Any]:
    return {
        "tokens": [0] * (accepted + 1),
        "texts": [""] * (accepted + 1),
        "num_accepted": accepted,
        "num_drafted": len(parents) - 1,
        "plain_reason": None if len(parents) > 1 else "late",
        "at_ms": at_ms,
        "timing_us": {"draft": 0, "tree_wait": 0, "queue": 0, "forward": 4000, "choice": 1000},
        "tree": {"parents": parents},
        **fields,
    }


def test_acceptance_by_depth_counts_rounds_that_were_that_deep() -> None:
    rounds = [round_of([-1, 0, 1, 0], 2), round_of([-1, 0], 0), round_of([-1], 0)]
    found = run("acceptanceByDepth", "stats.js", "acceptanceByDepth(given)", rounds)
    assert found == [
        {"depth": 1, "offered": 2, "accepted": 1},
        {"depth": 2, "offered": 1, "accepted": 1},
    ]


def test_totals_leave_the_prompt_out() -> None:
    prompt = round_of([-1], 0, 0.0, plain_reason="prefill")
    rounds = [prompt, round_of([-1, 0, 1], 2, 500.0), round_of([-1], 0, 2000.0)]
    found = run("totals", "stats.js", "totals(given)", rounds)
    assert (found["tokens"], found["rounds"], found["accepted"]) == (5, 2, 2)
    assert (found["perRound"], found["perSecond"]) == (2, 2)


@pytest.mark.parametrize(
    ("millis", "number", "decided"),
    [
        (0, 0, False),
        (10, 0, True),
        (14.9, 0, True),
        (15.1, 1, False),
        (20, 1, True),
        (26, 1, True),
        (30, 2, True),
        (99, 2, True),
    ],
)
def test_a_replay_shows_a_tree_from_its_arrival_to_its_commit(
    millis: float, number: int, decided: bool
) -> None:
    prompt = round_of([-1], 0, 10.0, plain_reason="prefill")
    rounds = [prompt, round_of([-1, 0], 1, 20.0), round_of([-1], 0, 30.0)]
    found = run("momentAt", "player.js", f"momentAt(given, {millis})", rounds)
    assert found == {"number": number, "decided": decided}


def test_reasoning_is_marked_and_not_said_again() -> None:
    chunks = [
        ({}, ["<think>"]),
        ({"reasoning_content": "Why"}, ["Why"]),
        ({"reasoning_content": "?"}, ["?"]),
        ({}, ["</think>"]),
        ({"content": "So."}, ["So."]),
    ]
    given = [
        {"delta": delta, "token_texts": texts, "token_origins": ["plain"]}
        for delta, texts in chunks
    ]
    taken = """(() => {
        const recording = new Recording("", "", {});
        for (const choice of given) recording.take({ choices: [choice] });
        return [recording.text, recording.thoughts];
    })()"""
    text, thoughts = run("Recording", "recording.js", taken, given)
    assert text == "So."
    assert thoughts == 4


def test_tokens_and_rounds_find_each_other() -> None:
    taken = """(() => {
        const recording = new Recording("", "", {});
        recording.take({ choices: [{ speculation_trace: given }] });
        return [[0, 1, 3, 4].map((place) => recording.roundOfToken(place)),
                [0, 1, 2].map((number) => recording.tokensOfRound(number))];
    })()"""
    rounds = [round_of([-1], 0), round_of([-1, 0, 1], 2), round_of([-1], 0)]
    places, spans = run("Recording", "recording.js", taken, rounds)
    assert places == [0, 1, 1, 2]
    assert spans == [[0, 1], [1, 4], [4, 5]]


@pytest.mark.parametrize(
    "saved",
    [
        "{",
        "[]",
        "{}",
        '{"format": "graft-recording-1", "tokens": [], "rounds": [{}]}',
        '{"format": "graft-recording-1", "tokens": [{"text": 5}], "rounds": []}',
        '{"format": "graft-recording-2", "tokens": [], "rounds": []}',
    ],
)
def test_a_file_that_is_no_recording_is_refused_by_a_sentence(saved: str) -> None:
    tried = "(() => { try { return reopen(given); } catch (error) { return error.message; } })()"
    assert str(run("reopen", "recording.js", tried, saved)).startswith("this file is not")
