"""Settings: precedence, unknown keys, and errors that name the field."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import pytest
from pydantic import Field

from graft.common.config import Settings
from graft.common.errors import InvalidArgument


class Demo(Settings):
    """A service's settings."""

    section: ClassVar[str] = "demo"
    port: int = Field(7000, ge=0, le=65_535)
    peers: list[str] = Field([])


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "graft.yaml"
    path.write_text("demo:\n  port: 1\n  peers: [a]\nother: {}\n")
    return path


def test_flag_beats_variable_beats_file_beats_default(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert Demo.load().port == 7000
    assert Demo.load(file).port == 1
    monkeypatch.setenv("GRAFT_DEMO_PORT", "2")
    assert Demo.load(file).port == 2
    assert Demo.load(file, {"port": 3, "peers": None}).port == 3
    assert Demo.load(file, {"port": 3, "peers": None}).peers == ["a"]


def test_a_list_in_a_variable_is_written_with_commas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRAFT_DEMO_PEERS", "a:1, dns:///b:2")
    assert Demo.load().peers == ["a:1", "dns:///b:2"]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("demo:\n  prot: 1\n", "did you mean port"),
        ("demo:\n  port: 70000\n", "demo.port.*65535.*70000"),
        ("demo:\n  port: many\n", "demo.port"),
        ("demo: 3\n", "must be a section"),
        ("[1, 2]\n", "must hold sections"),
        ("demo: {port: ", "cannot read"),
    ],
)
def test_what_is_wrong_in_a_file_is_named(tmp_path: Path, text: str, sentence: str) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(InvalidArgument, match=sentence):
        Demo.load(path)


def test_a_misspelt_variable_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRAFT_DEMO_PROT", "2")
    with pytest.raises(InvalidArgument, match=r"GRAFT_DEMO_PROT.*did you mean port"):
        Demo.load()


def test_a_missing_file_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="cannot read"):
        Demo.load(tmp_path / "none.yaml")


def test_settings_are_frozen() -> None:
    with pytest.raises(Exception, match="frozen"):
        Demo.load().port = 3  # type: ignore[misc]


def test_the_own_fields_of_a_service_are_shown_before_shared_ones() -> None:
    class More(Demo):
        threads: int = 1

    assert list(More.listed()) == ["threads", "port", "peers"]
    assert More.listed().keys() == More.model_fields.keys()
