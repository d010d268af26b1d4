"""Flags made from settings classes: every field, lists, booleans, help, and errors that help."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar, Literal

import pytest
import typer
from pydantic import Field

from graft.cli.flags import arguments_of, command_of
from graft.common.config import Settings
from graft.common.errors import InvalidArgument


class ShopSettings(Settings):
    section: ClassVar[str] = "shop"

    host: str = Field("127.0.0.1", description="Where it listens.")
    max_guests: int = Field(4, ge=1, description="How many fit in.")
    peers: list[str] = Field(default_factory=list, description="The other shops.")
    open: bool = Field(True, description="Whether it is open.")
    mode: Literal["quick", "slow"] = Field("quick", description="How it works.")
    folder: Path | None = Field(None, description="Where it keeps things.")


def read(*words: str) -> ShopSettings:
    """What the command hands to `run` for these words."""
    seen: list[Any] = []
    app = command_of(ShopSettings, lambda settings, config: seen.append(settings), "A shop.")
    typer.main.get_command(app)(list(words), prog_name="shop", standalone_mode=False)
    assert len(seen) == 1
    shop: ShopSettings = seen[0]
    return shop


def test_no_flag_gives_the_defaults() -> None:
    assert read() == ShopSettings.load()


def test_each_kind_of_field_has_a_flag() -> None:
    shop = read("--max-guests", "7", "--no-open", "--mode=slow", "--folder", "/tmp/x")
    assert (shop.max_guests, shop.open, shop.mode, shop.folder) == (
        7,
        False,
        "slow",
        Path("/tmp/x"),
    )


def test_a_list_is_repeated_or_joined_by_commas() -> None:
    assert read("--peers", "a,b", "--peers", "c").peers == ["a", "b", "c"]


def test_an_empty_word_empties_a_list(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRAFT_SHOP_PEERS", "a,b")
    assert read().peers == ["a", "b"]
    assert read("--peers=").peers == []


def test_flag_beats_variable_beats_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "graft.yaml"
    file.write_text("shop: {max_guests: 2, host: 10.0.0.1, mode: slow}\n")
    monkeypatch.setenv("GRAFT_SHOP_MAX_GUESTS", "3")
    monkeypatch.setenv("GRAFT_SHOP_HOST", "10.0.0.2")
    shop = read("--config", str(file), "--max-guests", "9")
    assert (shop.max_guests, shop.host, shop.mode) == (9, "10.0.0.2", "slow")


def test_a_wrong_value_names_the_setting() -> None:
    with pytest.raises(InvalidArgument, match=r"shop\.max_guests: .*integer.*'many'"):
        read("--max-guests", "many")


def test_help_shows_descriptions_and_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    app = command_of(ShopSettings, lambda settings, config: None, "A shop.")
    typer.main.get_command(app)(["--help"], prog_name="shop", standalone_mode=False)
    text = " ".join(capsys.readouterr().out.split())
    assert "--max-guests INTEGER How many fit in. [default: 4]" in text
    assert "--open / --no-open Whether it is open. [default: on]" in text
    assert "--mode quick|slow How it works. [default: quick]" in text
    assert "GRAFT_SHOP_<NAME>" in text


def test_words_and_values_are_two_ways_to_say_the_same() -> None:
    values = {"max_guests": 2, "open": False, "peers": ["a", "b"], "mode": "slow"}
    shop = read(*arguments_of(values))
    assert {name: getattr(shop, name) for name in values} == values
