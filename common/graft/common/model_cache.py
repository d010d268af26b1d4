"""Keeps converted models on disk: built once, whole or not at all, rebuilt when damaged.

Knows files, digests and one lock a model; the content comes from `graft.common.gguf_model`.
Readers take no lock: a model counts only when its manifest, written last, matches its files.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from graft.common import gguf_model
from graft.common.errors import ModelNotFound
from graft.common.gguf_file import GgufFile

Progress = Callable[[str, float], None]

MANIFEST = "graft.json"
WEIGHTS = "model.safetensors"
# Raised when the conversion changes, so that older results are built again.
_RECIPE = 1
_SOURCE_START = 1 << 20
_CHUNK = 1 << 22


def convert_once(gguf: Path, folder: Path, *, weights: bool, progress: Progress) -> None:
    """Makes `folder` hold the Hugging Face files of a GGUF model, float32 weights if asked for.

    Raises:
        ModelNotFound: the source is missing or damaged, or the folder cannot be written.
        Unsupported: the model is of a kind that is not converted here.
    """
    source = _source(gguf)
    if _is_whole(folder, source, weights):
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _lock(folder):
            if not _is_whole(folder, source, weights):
                _build(gguf, folder, source, weights, progress)
    except OSError as error:
        raise ModelNotFound(
            f"cannot write the model cache {folder}: {error.strerror or error};"
            " GRAFT_CACHE names another place"
        ) from None


def _build(
    gguf: Path, folder: Path, source: dict[str, Any], weights: bool, progress: Progress
) -> None:
    model = GgufFile(gguf)
    manifest = _manifest(folder)
    files: dict[str, Any] = {}
    if manifest.get("source") == source and _matches(folder, manifest, WEIGHTS):
        files[WEIGHTS] = manifest["files"][WEIGHTS]
    texts = {
        "config.json": _json(gguf_model.config_of(model)),
        "generation_config.json": _json(gguf_model.generation_config_of(model)),
        "tokenizer_config.json": _json(gguf_model.tokenizer_config_of(model)),
        "tokenizer.json": gguf_model.tokenizer_of(model).to_str(),
    }
    for name, text in texts.items():
        with _replacing(folder / name) as temporary:
            temporary.write_text(text)
        files[name] = _stamp(folder / name)
    if weights and WEIGHTS not in files:
        with _replacing(folder / WEIGHTS) as temporary:
            _write_weights(model, temporary, progress)
        files[WEIGHTS] = _stamp(folder / WEIGHTS)
    with _replacing(folder / MANIFEST) as temporary:
        temporary.write_text(_json({"source": source, "files": files}))


def _write_weights(model: GgufFile, path: Path, progress: Progress) -> None:
    """A safetensors file, written tensor by tensor so that only one is in memory."""
    names = gguf_model.hf_names(model)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, stored in names.items():
        shape = model.tensors[stored].shape
        begin, end = end, end + 4 * int(np.prod(shape, dtype=np.int64))
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [begin, end]}
    head = json.dumps(header, separators=(",", ":")).encode()
    head += b" " * (-len(head) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(head)) + head)
        for number, stored in enumerate(names.values()):
            progress("converting weights", number / len(names))
            file.write(gguf_model.weight_of(model, stored).tobytes())
        file.flush()
        os.fsync(file.fileno())
    progress("converting weights", 1.0)


def _is_whole(folder: Path, source: dict[str, Any], weights: bool) -> bool:
    manifest = _manifest(folder)
    if manifest.get("source") != source:
        return False
    wanted = ["config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json"]
    if weights:
        wanted.append(WEIGHTS)
    return all(_matches(folder, manifest, name) for name in wanted)


def _matches(folder: Path, manifest: dict[str, Any], name: str) -> bool:
    stamp = manifest.get("files", {}).get(name)
    path = folder / name
    if stamp is None or not path.is_file() or path.stat().st_size != stamp.get("bytes"):
        return False
    return bool(_stamp(path) == stamp)


def _stamp(path: Path) -> dict[str, Any]:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return {"bytes": path.stat().st_size, "sha256": digest.hexdigest()}


def _source(gguf: Path) -> dict[str, Any]:
    """Names a source by size and by its start, which holds all metadata but the weights."""
    try:
        with gguf.open("rb") as file:
            start = hashlib.sha256(file.read(_SOURCE_START)).hexdigest()
        return {"recipe": _RECIPE, "bytes": gguf.stat().st_size, "start_sha256": start}
    except OSError as error:
        raise ModelNotFound(f"cannot read {gguf}: {error.strerror}") from None


def _manifest(folder: Path) -> dict[str, Any]:
    try:
        content = json.loads((folder / MANIFEST).read_text())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _json(content: dict[str, Any]) -> str:
    return json.dumps(content, indent=2, ensure_ascii=False) + "\n"


@contextlib.contextmanager
def _replacing(path: Path) -> Iterator[Path]:
    """A temporary path that takes the place of `path` when the block ends well."""
    temporary = path.with_name(f".{path.name}.part")
    try:
        yield temporary
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def _lock(folder: Path) -> Iterator[None]:
    """Held by one process at a time; the kernel frees it when its holder dies."""
    with folder.with_name(f".{folder.name}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
