"""`graft models`: list, fetch and check models. Knows files, and runs no model."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from graft.cli.models_card import run_card
from graft.common.errors import GraftError, InvalidArgument, ModelNotFound
from graft.common.model_cache import Progress
from graft.common.model_files import (
    EMBEDDED,
    ModelFiles,
    default_cache,
    list_models,
    read_json,
    resolve,
    tokenizer_digest,
    weight_files,
)
from graft.draft.shipped import all_shipped

Model = Annotated[str, typer.Argument(help="Embedded name, Hugging Face id, folder or GGUF file.")]


def command(_name: str) -> typer.Typer:
    """The group of commands."""
    app = typer.Typer(
        help="List, fetch and check models on this machine.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
    )
    app.command("list", help="List the models that lie on this machine.")(_list)
    app.command("fetch", help="Fetch or convert a model, so that serving it starts quickly.")(
        _fetch
    )
    app.command("check", help="Check that a model's files are there, readable and of one piece.")(
        _check
    )
    app.command(
        "fuse", help="Write a drafter's projection of hidden states, for verify --fused-features."
    )(_fuse)
    app.command("card")(run_card)
    return app


def is_here(model: str) -> bool:
    """True for a path, and for the embedded model once it has been converted."""
    if model.strip().lower() == EMBEDDED:
        folder = default_cache() / EMBEDDED
        return (folder / "graft.json").is_file() and bool(weight_files(folder))
    return Path(model).expanduser().exists()


def _list() -> None:
    for entry in list_models():
        size = f"{entry.num_bytes / 1e6:,.0f} MB" if entry.num_bytes else "not fetched yet"
        print(f"{entry.name}  {entry.origin}  {size}  {entry.folder or ''}".rstrip())
    for drafter in all_shipped():
        size = f"{drafter.num_bytes / 1e6:,.1f} MB"
        length = f"  accepts {drafter.accept_length:.2f} ({drafter.way})" if drafter.way else ""
        name = f"{drafter.target}/{drafter.proposer}"
        print(f"{name}  drafter, comes with Graft  {size}  {drafter.folder}{length}")


def _fetch(model: Model = EMBEDDED) -> None:
    files = resolve(model, weights=True, progress=_progress())
    print(f"{files.name} is in {files.folder}")


def _check(
    model: Model = EMBEDDED,
    target: Annotated[str, typer.Option(help="Check it as a drafter of this model.")] = "",
    allow_pickle: Annotated[bool, typer.Option(help="Read .bin and .pt files.")] = False,
) -> None:
    if target:
        _check_drafter(model, target, allow_pickle)
        return
    _not_a_drafter(model, allow_pickle)
    files = resolve(model, weights=True, progress=_progress())
    config = read_json(files.folder / "config.json")
    kind = (config.get("architectures") or [config.get("model_type", "unknown")])[0]
    print(f"model      {files.name}")
    print(f"folder     {files.folder}")
    print(f"kind       {kind}")
    print(f"layers     {config.get('num_hidden_layers')} of width {config.get('hidden_size')}")
    print(f"vocabulary {config.get('vocab_size')}, digest {tokenizer_digest(files.folder)[:16]}")
    print(f"weights    {_weights(files)}")
    print("ok")


def _not_a_drafter(model: str, allow_pickle: bool) -> None:
    """Says how a drafter is checked, in place of what it lacks to be a model of its own.

    Raises:
        InvalidArgument: the folder holds a drafter.
    """
    from graft.draft.checkpoints.detect import Kind, open_checkpoint

    folder = Path(model).expanduser()
    if not folder.is_dir():
        return
    try:
        kind = open_checkpoint(folder, allow_pickle=allow_pickle).kind
    except GraftError:
        return
    if kind is not Kind.STANDALONE:
        raise InvalidArgument(
            f"{model} is a drafter ({kind.value}), which is checked together with the model it "
            f"drafts for: graft models check {model} --target MODEL",
            field="target",
        )


def _check_drafter(path: str, target: str, allow_pickle: bool) -> None:
    """Loads the checkpoint for the target; what does not fit is raised as one sentence."""
    from graft.draft.checkpoints.check import fit, switches

    info = fit(path, target, allow_pickle=allow_pickle)
    tier, needs = info.default_tier, info.needs
    print(f"proposer   {tier.proposer}: {info.detail}")
    if needs is None:
        print("reads      no hidden states of the target")
    else:
        states = ", ".join(map(str, needs.layers))
        norm = "after" if needs.final_norm else "before"
        print(f"reads      hidden states {states} of the target, {norm} its final norm")
    print(f"vocabulary {info.vocab_size}, digest {info.tokenizer_digest[:16]}")
    print(f"tree       {tier.num_steps} steps, {tier.topk} wide, {tier.num_draft_tokens} nodes")
    words = [f"--{name.replace('_', '-')}" for name in switches(path, allow_pickle=allow_pickle)]
    start = ["graft up --model", target, "--proposers", f"{tier.proposer}={path}", *words]
    print("start      " + " ".join(start))
    print("ok")


def _fuse(
    checkpoint: Annotated[str, typer.Argument(help="Drafter's checkpoint: folder or id.")],
    out: Annotated[Path, typer.Argument(help="Safetensors file to write.")],
    target: Annotated[str, typer.Option(help="The model it drafts for.")] = EMBEDDED,
    allow_pickle: Annotated[bool, typer.Option(help="Read .bin and .pt files.")] = False,
) -> None:
    from graft.draft.checkpoints.fuse import write_fused

    projection = write_fused(checkpoint, target, out, allow_pickle=allow_pickle)
    states = ", ".join(map(str, projection.layers))
    print(f"{out} makes {projection.width} values of hidden states {states}")
    print(f"id {projection.fused_id}")
    print(f"verify applies it with --fused-features={out}, a drafter asks by --feature-fused")


def _weights(files: ModelFiles) -> str:
    """Reads the header of every safetensors file and compares it with the file's length."""
    paths = weight_files(files.folder)
    if not paths:
        return f"{files.gguf}"
    num_tensors = sum(_num_tensors(path) for path in paths)
    num_bytes = sum(path.stat().st_size for path in paths)
    num_files = "1 file" if len(paths) == 1 else f"{len(paths)} files"
    return f"{num_tensors} tensors in {num_files}, {num_bytes / 1e6:,.0f} MB"


def _num_tensors(path: Path) -> int:
    size = path.stat().st_size
    with path.open("rb") as file:
        head = int.from_bytes(file.read(8), "little")
        if not 0 < head <= size - 8:
            raise ModelNotFound(f"{path} is damaged: its header does not fit the file")
        try:
            header = json.loads(file.read(head))
        except ValueError:
            raise ModelNotFound(f"{path} is damaged: its header is not JSON") from None
    tensors = [entry for name, entry in header.items() if name != "__metadata__"]
    end = 8 + head + max((entry["data_offsets"][1] for entry in tensors), default=0)
    if end != size:
        raise ModelNotFound(f"{path} is damaged: expected {end} bytes, got {size}")
    return len(tensors)


def _progress() -> Progress:
    """A bar on a terminal, and otherwise one line for each thing that is done."""
    if sys.stderr.isatty():
        return _bar()
    told: set[str] = set()

    def tell(what: str, _share: float) -> None:
        if what not in told:
            told.add(what)
            print(what, file=sys.stderr, flush=True)

    return tell


def _bar() -> Progress:
    def draw(what: str, share: float) -> None:
        width = 30
        full = round(width * min(max(share, 0.0), 1.0))
        end = "\n" if share >= 1.0 else ""
        bar = "#" * full + "." * (width - full)
        print(f"\r{what} [{bar}] {share:4.0%}", end=end, file=sys.stderr, flush=True)

    return draw
