"""The map of other servers' flags: complete, true to the settings, and equal to its page."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import pytest

from graft.cli.flag_map import ROWS, Origin, Row, Verdict
from graft.cli.flag_table import find, page
from graft.cli.main import main
from graft.cli.plan import UpSettings
from graft.common.config import Settings
from graft.common.errors import InvalidArgument
from graft.draft.loading import MODEL_PROPOSERS
from graft.draft.settings import DraftSettings
from graft.gateway.settings import GatewaySettings
from graft.verify.settings import VerifySettings

SERVICES: dict[str, type[Settings]] = {
    "draft": DraftSettings,
    "verify": VerifySettings,
    "gateway": GatewaySettings,
}
PAGE = Path(__file__).parents[2] / "docs" / "flag-map.md"

SGLANG_FLAGS = """
    --speculative-algorithm --speculative-draft-model-path --speculative-draft-model
    --speculative-draft-model-revision --speculative-draft-load-format
    --speculative-draft-model-quantization --speculative-num-steps --speculative-eagle-topk
    --speculative-num-draft-tokens --speculative-dflash-block-size
    --speculative-accept-threshold-single --speculative-accept-threshold-acc
    --speculative-use-rejection-sampling --speculative-use-block-verification
    --speculative-token-map --speculative-attention-mode --speculative-draft-attention-backend
    --speculative-draft-kv-cache-dtype --speculative-draft-window-size
    --speculative-draft-sink-size --enable-multi-layer-eagle --speculative-adaptive
    --speculative-adaptive-config --uno-lora-path --speculative-ngram-min-bfs-breadth
    --speculative-ngram-max-bfs-breadth --speculative-ngram-match-type
    --speculative-ngram-max-trie-depth --speculative-ngram-capacity
    --speculative-ngram-external-corpus-path --speculative-ngram-external-sam-budget
    --speculative-ngram-external-corpus-max-tokens --speculative-domino-candidate-pool-size
    --speculative-dspark-* --decoupled-spec-role --decoupled-spec-bind-endpoint
    --decoupled-spec-connect-endpoints --decoupled-spec-rank --spec-trace-dir
""".split()
ALGORITHMS = """
    EAGLE EAGLE3 NEXTN STANDALONE NGRAM DFLASH DSPARK UNO FROZEN_KV_MTP
""".split()
SGLANG_VARIABLES = """
    SGLANG_SIMULATE_ACC_LEN SGLANG_SIMULATE_ACC_METHOD SGLANG_SIMULATE_ACC_TOKEN_MODE
    SGLANG_SPEC_SKIP_ZERO_STEP_DRAFT_EXTEND SGLANG_ENABLE_OVERLAP_PLAN_STREAM
    SGLANG_OPT_USE_GUMBEL_SAMPLE SGLANG_ENABLE_MTP_BOUNDARY_KV_FIX SGLANG_RAGGED_VERIFY_MODE
""".split()
VLLM_KEYS = """
    method model num_speculative_tokens prompt_lookup_min prompt_lookup_max
    rejection_sample_method draft_sample_method suffix_decoding_max_tree_depth
    suffix_decoding_max_cached_requests suffix_decoding_max_spec_factor
    suffix_decoding_min_token_prob use_heterogeneous_vocab num_speculative_tokens_per_batch_size
""".split()


@pytest.mark.parametrize(
    ("origin", "names"),
    [
        (Origin.SGLANG, SGLANG_FLAGS),
        (Origin.SGLANG_VARIABLE, SGLANG_VARIABLES),
        (Origin.VLLM, VLLM_KEYS),
    ],
)
def test_every_flag_has_a_row(origin: Origin, names: list[str]) -> None:
    assert set(names) - {row.name for row in ROWS if row.origin is origin} == set()


def test_no_flag_has_two_rows() -> None:
    names = [(row.origin, row.name) for row in ROWS]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_a_row_is_honoured_by_a_setting_or_gives_a_reason(row: Row) -> None:
    assert bool(row.setting) == (row.verdict is Verdict.HONOURED)
    assert row.setting or row.note


@pytest.mark.parametrize("row", [row for row in ROWS if row.setting], ids=lambda row: row.name)
def test_an_honoured_flag_names_a_setting_that_exists(row: Row) -> None:
    service, field = row.setting.split(".")
    assert field in SERVICES[service].model_fields


def test_settings_that_are_named_in_notes_exist() -> None:
    named = [
        word.strip(",;:()")
        for row in ROWS
        for word in row.note.split()
        if word.partition(".")[0] in SERVICES and "." in word
    ]
    assert named
    for service, field in (word.split(".") for word in named):
        assert field in SERVICES[service].model_fields


@pytest.mark.parametrize("row", [row for row in ROWS if not row.setting], ids=lambda row: row.name)
def test_no_setting_has_the_name_of_a_flag_that_is_not_honoured(row: Row) -> None:
    words = row.name.removeprefix("--").replace("-", "_")
    names = {words, words.removeprefix("speculative_")}
    classes: list[type[Settings]] = [*SERVICES.values(), UpSettings]
    for settings in classes:
        assert names & set(settings.model_fields) == set()


def test_flags_that_share_a_setting_do_not_contradict_each_other() -> None:
    aliases = {"--speculative-draft-model": "--speculative-draft-model-path"}
    values = defaultdict(list)
    for row in ROWS:
        if row.setting and row.name not in aliases:
            values[row.origin, row.setting].append(row.value)
    for given in values.values():
        assert len(set(given)) == len(given)
        assert len(given) == 1 or "" not in given


def test_fixed_values_are_ones_the_setting_takes() -> None:
    fixed = [row for row in ROWS if row.setting == "verify.accept_rule"]
    assert len(fixed) == 3
    for row in fixed:
        for word in row.value.split(","):
            VerifySettings.load(flags={"accept_rule": word.split()[0]})


def test_algorithms_are_proposers_unless_they_are_refused() -> None:
    named = {algorithm.lower(): algorithm for algorithm in ALGORITHMS}
    named["mtp"] = named.pop("nextn")
    refused = {row.name.split()[1] for row in ROWS if " " in row.name}
    offered = {*MODEL_PROPOSERS, "ngram"}
    assert {there for here, there in named.items() if here not in offered} == refused
    assert offered <= set(named)


def test_the_page_is_the_generated_one() -> None:
    assert PAGE.read_text() == page(), "graft flags --markdown > docs/flag-map.md"


def test_a_flag_is_found_by_a_part_of_it_as_it_is_typed() -> None:
    assert [row.setting for row in find("--speculative-num-steps=5")] == ["draft.num_steps"]
    assert {row.origin for row in find("ngram_max_trie_depth")} == {Origin.SGLANG, Origin.VLLM}


def test_a_word_that_no_flag_holds_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="'--no-such'"):
        find("--no-such")


def test_the_command_prints_one_answer_for_each_flag(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["flags", "sink-size"])
    assert left.value.code in (0, None)
    said = capsys.readouterr().out
    assert said.startswith("--speculative-draft-sink-size\n    refused: ")
    assert len(said.splitlines()) == 2
