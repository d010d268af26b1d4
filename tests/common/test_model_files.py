"""Models are found by name, converted once, and each thing that is wrong has one sentence."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import gguf
import pytest
from tokenizers import Tokenizer

from graft.common.errors import GraftError, ModelNotFound, Unsupported
from graft.common.gguf_file import GgufFile
from graft.common.model_files import (
    EMBEDDED,
    ModelFiles,
    check,
    list_models,
    resolve,
    tokenizer_digest,
    weight_files,
)
from graft.testing.gguf_models import write_gguf
from graft.testing.models import write_tiny_model

F32 = gguf.GGMLQuantizationType.F32


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_tiny_model(tmp_path / "tiny")


@pytest.fixture(scope="module")
def embedded(tmp_path_factory: pytest.TempPathFactory) -> ModelFiles:
    return resolve(EMBEDDED, weights=False, cache=tmp_path_factory.mktemp("cache"))


def run_python(code: str, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", code],
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


# Local folders.


def test_a_local_folder_is_itself(folder: Path) -> None:
    assert resolve(str(folder), weights=True) == ModelFiles(folder, "tiny")


def test_words_need_no_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    assert resolve(str(folder), weights=False) == ModelFiles(folder, "tiny")


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_missing_file_is_named(folder: Path, name: str) -> None:
    (folder / name).unlink()
    with pytest.raises(ModelNotFound, match=f"tiny has no {name}"):
        resolve(str(folder), weights=True)


def test_weights_in_a_format_that_is_not_read_are_named(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ModelNotFound, match=r"\(it has pytorch_model\.bin, which is not read\)"):
        resolve(str(folder), weights=True)


@pytest.mark.parametrize("content", ["{", "[1]", "\xff"])
def test_a_damaged_config_is_named(folder: Path, content: str) -> None:
    (folder / "config.json").write_bytes(content.encode("latin-1"))
    with pytest.raises(ModelNotFound, match=r"config\.json"):
        resolve(str(folder), weights=True)


def test_a_damaged_index_is_named(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {}}')
    with pytest.raises(ModelNotFound, match=r"index\.json has no weight_map"):
        weight_files(folder)


@pytest.mark.parametrize(
    ("model", "sentence"),
    [
        ("./nowhere", r"^there is no folder or file \./nowhere$"),
        ("nowhere", f"^there is no model nowhere: expected {EMBEDDED}, a local folder"),
        ("", "^the model has an empty name$"),
        ("a/b/c", "^there is no model a/b/c: expected"),
        ("../../etc", "^there is no folder or file"),
    ],
)
def test_an_unknown_name_says_what_would_do(
    model: str, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelNotFound, match=sentence):
        resolve(model, weights=False)


# Tokenizer digests.


def test_equal_vocabularies_have_equal_digests_and_others_do_not(folder: Path) -> None:
    before = tokenizer_digest(folder)
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text())
    content["model"]["vocab"] = dict(reversed(content["model"]["vocab"].items()))
    path.write_text(json.dumps(content))
    assert tokenizer_digest(folder) == before
    content["model"]["vocab"]["a"], content["model"]["vocab"]["b"] = 98, 97
    path.write_text(json.dumps(content))
    assert tokenizer_digest(folder) != before
    assert len(before) == 64


def test_a_digest_covers_added_tokens(folder: Path) -> None:
    before = tokenizer_digest(folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_tokens(["<|tool|>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    assert tokenizer_digest(folder) != before


def test_a_tokenizer_without_a_vocabulary_is_refused(folder: Path) -> None:
    (folder / "tokenizer.json").write_text('{"model": {"vocab": 3}}')
    with pytest.raises(ModelNotFound, match=r"tokenizer\.json holds no vocabulary"):
        tokenizer_digest(folder)


# The embedded model.


@pytest.mark.embedded
def test_the_embedded_config_is_that_of_smollm2(embedded: ModelFiles) -> None:
    config = json.loads((embedded.folder / "config.json").read_text())
    expected = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_theta": 100000.0,
        "tie_word_embeddings": True,
        "eos_token_id": 2,
    }
    assert expected.items() <= config.items()
    assert not (embedded.folder / "model.safetensors").exists()
    assert embedded.gguf is not None and embedded.gguf.suffix == ".gguf"


@pytest.mark.embedded
@pytest.mark.parametrize(
    "text",
    [
        "Hello, world! It's 12345.678",
        "  two  spaces\n\n\ttab\r\n",
        "naïve café — 世界 🙂🇩🇪 עברית",
        "def f(x):\n    return x ** 2\n",
        "<|im_start|>user\nHi<|im_end|>\n",
        "\x00\x7f\u200b\ufeff",
        "",
    ],
)
def test_the_embedded_tokenizer_gives_text_back(embedded: ModelFiles, text: str) -> None:
    tokenizer = Tokenizer.from_file(str(embedded.folder / "tokenizer.json"))
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


@pytest.mark.embedded
def test_the_embedded_tokenizer_splits_digits_and_knows_its_specials(
    embedded: ModelFiles,
) -> None:
    tokenizer = Tokenizer.from_file(str(embedded.folder / "tokenizer.json"))
    assert tokenizer.encode("in 1984").tokens == ["in", "Ġ", "1", "9", "8", "4"]
    assert tokenizer.encode("<|im_start|>user\n<|im_end|>").ids == [1, 4093, 198, 2]
    assert tokenizer.get_vocab_size() == 49152


@pytest.mark.embedded
def test_the_embedded_template_keeps_the_default_system_prompt(embedded: ModelFiles) -> None:
    config = json.loads((embedded.folder / "tokenizer_config.json").read_text())
    assert "You are a helpful AI assistant named SmolLM" in config["chat_template"]
    assert (config["bos_token"], config["eos_token"]) == ("<|im_start|>", "<|im_end|>")


# Conversion and its cache.


@pytest.fixture
def model_gguf(folder: Path, tmp_path: Path) -> Path:
    return write_gguf(folder, tmp_path / "model.gguf", F32)


def test_a_gguf_file_is_converted_once(model_gguf: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    first = resolve(str(model_gguf), weights=True, cache=cache)
    before = (first.folder / "config.json").stat()
    second = resolve(str(model_gguf), weights=True, cache=cache)
    assert first == second and first.gguf == model_gguf
    assert (second.folder / "config.json").stat() == before
    assert not list(cache.glob("**/*.part"))
    tokenizer = Tokenizer.from_file(str(first.folder / "tokenizer.json"))
    assert tokenizer.encode("to ta").ids == [116, 111, 259, 97]


def test_another_file_in_its_place_is_converted_again(folder: Path, model_gguf: Path) -> None:
    cache = folder.parent / "cache"
    resolve(str(model_gguf), weights=False, cache=cache)
    other = write_tiny_model(folder.parent / "other", hidden=32)
    write_gguf(other, model_gguf, F32)
    files = resolve(str(model_gguf), weights=False, cache=cache)
    assert json.loads((files.folder / "config.json").read_text())["hidden_size"] == 32


@pytest.mark.parametrize("damage", ["truncate", "flip", "remove", "manifest"])
def test_a_damaged_cache_is_built_again(model_gguf: Path, tmp_path: Path, damage: str) -> None:
    files = resolve(str(model_gguf), weights=False, cache=tmp_path / "cache")
    path = files.folder / "tokenizer.json"
    good = path.read_bytes()
    if damage == "truncate":
        path.write_bytes(good[:100])
    elif damage == "flip":
        path.write_bytes(good.replace(b"a", b"b", 1))
    elif damage == "remove":
        path.unlink()
    else:
        (files.folder / "graft.json").write_text("{")
    resolve(str(model_gguf), weights=False, cache=tmp_path / "cache")
    assert path.read_bytes() == good


def test_a_gguf_file_beside_its_own_config_needs_no_conversion(
    folder: Path, model_gguf: Path, tmp_path: Path
) -> None:
    (folder / "model.safetensors").unlink()
    inside = model_gguf.rename(folder / "model.gguf")
    expected = ModelFiles(folder, "tiny", inside)
    assert resolve(str(folder), weights=True, cache=tmp_path / "cache") == expected
    assert resolve(str(inside), weights=True) == ModelFiles(folder, "model", inside)
    assert not (tmp_path / "cache").exists()


def test_a_folder_with_nothing_but_a_gguf_file_is_that_file(
    model_gguf: Path, tmp_path: Path
) -> None:
    alone = tmp_path / "alone"
    alone.mkdir()
    moved = model_gguf.rename(alone / "model.gguf")
    assert resolve(str(alone), weights=True, cache=tmp_path / "cache").gguf == moved


def test_a_cache_that_cannot_be_written_is_named(model_gguf: Path, tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("a file where the cache should be")
    with pytest.raises(ModelNotFound, match=r"cannot write the model cache .*GRAFT_CACHE"):
        resolve(str(model_gguf), weights=False, cache=tmp_path / "taken")


@pytest.mark.parametrize(
    ("change", "kind", "sentence"),
    [
        (lambda good: good[:50], ModelNotFound, "cut short or damaged in its header"),
        (lambda good: good[:-64], ModelNotFound, "is cut short: tensor .* ends at byte"),
        (lambda good: b"", ModelNotFound, "cannot read"),
        (lambda good: b"GGML" + good[4:], ModelNotFound, "is not a GGUF file"),
        (lambda good: good[:4] + b"\x01" + good[5:], Unsupported, "is GGUF version 1"),
        (lambda good: good.replace(b"llama", b"mamba"), Unsupported, "holds a mamba model"),
        (lambda good: good.replace(b"gpt-2", b"ufo-9"), Unsupported, "splits words the ufo-9 way"),
    ],
)
def test_a_wrong_gguf_file_is_one_sentence(
    model_gguf: Path,
    tmp_path: Path,
    change: Callable[[bytes], bytes],
    kind: type[GraftError],
    sentence: str,
) -> None:
    model_gguf.write_bytes(change(model_gguf.read_bytes()))
    with pytest.raises(kind, match=sentence):
        resolve(str(model_gguf), weights=False, cache=tmp_path / "cache")


def test_every_shorter_header_is_refused(model_gguf: Path, tmp_path: Path) -> None:
    good = model_gguf.read_bytes()
    cut = tmp_path / "cut.gguf"
    for kept in range(0, 4096, 61):
        cut.write_bytes(good[:kept])
        with pytest.raises(GraftError):
            GgufFile(cut)


@pytest.mark.embedded
@pytest.mark.slow
def test_two_processes_that_start_at_once_share_one_conversion(tmp_path: Path) -> None:
    code = (
        "from graft.common.model_files import EMBEDDED, resolve\n"
        "shares = []\n"
        "resolve(EMBEDDED, weights=True, progress=lambda what, share: shares.append(share))\n"
        "print(bool(shares))"
    )
    running = [run_python(code, GRAFT_CACHE=str(tmp_path)) for _ in range(2)]
    said = [process.communicate(timeout=100) for process in running]
    assert sorted(out.strip() for out, _ in said) == ["False", "True"], said
    check(ModelFiles(tmp_path / EMBEDDED, EMBEDDED), weights=True)


def test_two_processes_that_convert_at_once_both_succeed(model_gguf: Path, tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from graft.common.model_files import resolve\n"
        f"files = resolve({str(model_gguf)!r}, weights=False)\n"
        "print(files.folder)"
    )
    running = [run_python(code, GRAFT_CACHE=str(tmp_path / "cache")) for _ in range(2)]
    said = [process.communicate(timeout=60) for process in running]
    assert said[0] == said[1] and said[0][1] == ""
    check(ModelFiles(Path(said[0][0].strip()), "model", model_gguf), weights=True)


def test_finding_files_loads_neither_torch_nor_transformers() -> None:
    code = (
        "import sys, graft.common.model_files\n"
        "print(sorted({'torch', 'transformers', 'gguf', 'safetensors'} & sys.modules.keys()))"
    )
    out, errors = run_python(code).communicate(timeout=60)
    assert (out.strip(), errors) == ("[]", "")


# Hub ids, against a hub on this machine.


class _Hub(BaseHTTPRequestHandler):
    """Knows one repository, owner/tiny, and gates another, owner/gated."""

    folder: Path

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        names = sorted(path.name for path in self.folder.iterdir())
        file = self.path.rsplit("/", 1)[-1]
        if self.path.startswith("/api/models/owner/tiny/tree/"):
            files = [{"type": "file", "path": name, "size": 1, "oid": "5" * 40} for name in names]
            self._send(200, json.dumps(files))
        elif self.path.startswith("/api/models/owner/tiny/"):
            listed = [{"rfilename": name} for name in names]
            self._send(200, json.dumps({"id": "owner/tiny", "sha": "5" * 40, "siblings": listed}))
        elif self.path.startswith("/owner/tiny/resolve/") and file in names:
            self._send(200, (self.folder / file).read_bytes(), ETag=f'"{file}"')
        elif "owner/gated" in self.path:
            self._send(403, "", **{"X-Error-Code": "GatedRepo"})
        else:
            self._send(404, "", **{"X-Error-Code": "RepoNotFound"})

    def _send(self, status: int, body: str | bytes, **headers: str) -> None:
        content = body.encode() if isinstance(body, str) else body
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("X-Repo-Commit", "5" * 40)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def hub(folder: Path) -> Iterator[str]:
    (folder / "notes.md").write_text("not wanted")
    server = ThreadingHTTPServer(
        ("127.0.0.1", 0), type("Hub", (_Hub,), {"folder": folder, "protocol_version": "HTTP/1.1"})
    )
    thread = Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def fetch(model: str, weights: bool, home: Path, endpoint: str) -> str:
    code = (
        "from graft.common.errors import GraftError\n"
        "from graft.common.model_files import list_models, resolve\n"
        "try:\n"
        f"    files = resolve({model!r}, weights={weights})\n"
        "    print(files.name, *sorted(path.name for path in files.folder.iterdir()))\n"
        "    print([entry.name for entry in list_models() if entry.origin == 'hub'])\n"
        "except GraftError as error:\n"
        "    print(type(error).__name__, error)\n"
    )
    environment = {
        "HF_HOME": str(home),
        "HF_ENDPOINT": endpoint,
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "NO_PROXY": "127.0.0.1",
        "HF_TOKEN": "",
    }
    out, errors = run_python(code, **environment).communicate(timeout=100)
    assert out, errors
    return out.strip()


def test_a_hub_id_brings_only_the_files_that_are_read(hub: str, tmp_path: Path) -> None:
    words = "config.json generation_config.json tokenizer.json tokenizer_config.json"
    expected = f"owner/tiny {words}\n['owner/tiny']"
    assert fetch("owner/tiny", False, tmp_path / "hf", hub) == expected
    whole = fetch("owner/tiny", True, tmp_path / "hf", hub)
    assert whole.startswith("owner/tiny config.json generation_config.json model.safetensors")
    assert "notes.md" not in whole


def test_a_fetched_model_needs_no_network_afterwards(hub: str, tmp_path: Path) -> None:
    first = fetch("owner/tiny", True, tmp_path / "hf", hub)
    assert fetch("owner/tiny", True, tmp_path / "hf", "http://127.0.0.1:9") == first


def test_an_unknown_hub_id_is_one_sentence(hub: str, tmp_path: Path) -> None:
    said = fetch("owner/none", True, tmp_path / "hf", hub)
    assert said == ("ModelNotFound the Hugging Face hub has no model owner/none, or it is private")


def test_a_gated_hub_id_says_what_to_do(hub: str, tmp_path: Path) -> None:
    said = fetch("owner/gated", True, tmp_path / "hf", hub)
    assert said.startswith("ModelNotFound model owner/gated is gated on the Hugging Face hub")


def test_a_hub_out_of_reach_is_one_sentence(tmp_path: Path) -> None:
    said = fetch("owner/tiny", True, tmp_path / "hf", "http://127.0.0.1:9")
    assert said == (
        "ModelNotFound model owner/tiny is not on this machine"
        " and the Hugging Face hub cannot be reached"
    )


@pytest.mark.embedded
def test_the_list_says_what_is_here(embedded: ModelFiles, tmp_path: Path) -> None:
    here = list_models(embedded.folder.parent)[0]
    nowhere = list_models(tmp_path)[0]
    assert (here.name, here.origin, here.folder) == (EMBEDDED, "embedded", embedded.folder)
    assert here.num_bytes > 1_000_000
    assert (nowhere.folder, nowhere.num_bytes) == (None, 0)
