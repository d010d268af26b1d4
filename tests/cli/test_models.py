"""`graft models` on tiny models: what is listed, and what a damaged file is told."""

from __future__ import annotations

from pathlib import Path

import pytest
import typer

from graft.cli import models
from graft.common.errors import InvalidArgument, Mismatch, ModelNotFound
from graft.common.projection import read_projection
from graft.testing.checkpoints import write_eagle3
from graft.testing.models import write_tiny_model


def run(*words: str) -> None:
    typer.main.get_command(models.command("models"))(list(words), standalone_mode=False)


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("GRAFT_CACHE", str(tmp_path / "cache"))
    return write_tiny_model(tmp_path / "tiny")


def test_a_good_folder_is_ok(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run("check", str(tiny))
    said = capsys.readouterr().out
    assert "model      tiny" in said
    assert said.splitlines()[-1] == "ok"


def test_a_file_cut_short_is_told_with_both_lengths(tiny: Path) -> None:
    weights = tiny / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-1])
    expected = f"is damaged: expected {len(whole)} bytes, got {len(whole) - 1}"
    with pytest.raises(ModelNotFound, match=expected):
        run("check", str(tiny))


def test_a_file_of_something_else_is_told(tiny: Path) -> None:
    (tiny / "model.safetensors").write_bytes(b"\xff" * 64)
    with pytest.raises(ModelNotFound, match="header does not fit"):
        run("check", str(tiny))


def test_missing_weights_are_told(tiny: Path) -> None:
    (tiny / "model.safetensors").unlink()
    with pytest.raises(ModelNotFound, match=r"has no model\.safetensors"):
        run("check", str(tiny))


def test_the_embedded_model_is_listed_before_it_is_fetched(
    tiny: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run("list")
    assert "smollm2-135m-instruct  embedded  not fetched yet" in capsys.readouterr().out


def test_a_drafters_projection_is_written_for_verify(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = write_tiny_model(tmp_path / "target", layers=6)
    out = tmp_path / "fused.safetensors"
    run("fuse", str(write_eagle3(tmp_path / "draft", target)), str(out), "--target", str(target))
    projection = read_projection(out)
    said = capsys.readouterr().out
    assert f"id {projection.fused_id}" in said
    assert "makes 64 values of hidden states 2, 3, 3" in said
    assert f"--fused-features={out}" in said


def test_a_drafter_is_checked_against_its_target(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = write_tiny_model(tmp_path / "target", layers=6)
    head = write_eagle3(tmp_path / "head", target)
    run("check", str(head), f"--target={target}")
    said = capsys.readouterr().out
    assert "proposer   eagle3: head for target" in said
    assert "hidden states 2, 3, 3 of the target, before its final norm" in said
    assert f"graft up --model {target} --proposers eagle3={head}" in said
    assert said.splitlines()[-1] == "ok"
    other = write_tiny_model(tmp_path / "other", layers=6, hidden=32)
    with pytest.raises(Mismatch, match="target_hidden_size 64, the target other has 32"):
        run("check", str(head), f"--target={other}")


def test_a_drafter_without_its_target_is_told_what_to_add(tmp_path: Path) -> None:
    head = write_eagle3(tmp_path / "head", write_tiny_model(tmp_path / "target", layers=6))
    with pytest.raises(
        InvalidArgument, match=r"is a drafter \(eagle3\).* --target MODEL"
    ) as raised:
        run("check", str(head))
    assert raised.value.field == "target"


def test_a_small_decoder_is_checked_as_a_drafter(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = write_tiny_model(tmp_path / "target")
    run("check", str(write_tiny_model(tmp_path / "small", layers=1)), f"--target={target}")
    said = capsys.readouterr().out
    assert "proposer   standalone: small, a decoder of 1 layers" in said
    assert "no hidden states" in said
