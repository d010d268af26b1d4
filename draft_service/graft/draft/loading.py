"""Makes model proposers from settings. Loads torch only when one is asked for."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from graft.common import log
from graft.common.errors import InvalidArgument, ModelNotFound
from graft.common.tier import Tier
from graft.draft.proposers.base import Proposer
from graft.draft.settings import DraftSettings

if TYPE_CHECKING:
    from graft.draft.checkpoints.load import Workshop

_log = log.get("loading")

MODEL_PROPOSERS = ("standalone", "eagle", "eagle3", "mtp", "dflash", "uno")

# num_steps, topk and num_draft_tokens where none of them is given.
_CHAIN = (3, 1, 4)
_LONG_CHAIN = (7, 1, 8)
_BUSH = (5, 4, 8)


class ModelLoader:
    """Makes the model proposers of one service; what they share is loaded once."""

    def __init__(self, settings: DraftSettings) -> None:
        self._settings = settings
        self._workshop: Workshop | None = None

    def load(self, name: str, path: str) -> Proposer:
        """The proposer `name` with the checkpoint at `path`, or at draft_model_path.

        Raises:
            InvalidArgument: a setting is missing, or the checkpoint is for another proposer.
            ModelNotFound, Unsupported, Mismatch: the checkpoint cannot be used.
        """
        settings = self._settings
        path = path or checkpoint_path(settings, name)
        _warn_of_inactive(settings, name)
        if self._workshop is None:
            from graft.draft.checkpoints.load import Workshop

            self._workshop = Workshop(settings)
        made = self._workshop.load(name, path)
        tier = made.describe().default_tier
        _log.info(
            "checkpoint loaded",
            proposer=name,
            checkpoint=path,
            steps=tier.num_steps,
            topk=tier.topk,
            nodes=tier.num_draft_tokens,
        )
        return made


def checkpoint_path(settings: DraftSettings, name: str) -> str:
    """What the settings name for a proposer.

    Raises:
        InvalidArgument: they name nothing.
    """
    setting = "uno_lora_path" if name == "uno" else "draft_model_path"
    path: str = getattr(settings, setting)
    if not path:
        raise InvalidArgument(
            f"proposer {name} needs a checkpoint: {setting} names it", field=setting
        )
    return path


def default_tier(
    settings: DraftSettings, name: str, target_architecture: str = "", itself: bool = False
) -> Tier:
    """The tier where a request names only the proposer.

    Without settings, EAGLE heads of Llama models grow bushes and everything else chains, as in
    SGLang; those of a drafter that is its target, `itself`, are long, as it is hardly ever wrong. A
    chain of S steps has S + 1 nodes, whatever was asked for.
    """
    bushy = name != "standalone" and target_architecture == "LlamaForCausalLM"
    steps, topk, nodes = _LONG_CHAIN if itself else _BUSH if bushy else _CHAIN
    steps, topk = settings.num_steps or steps, settings.eagle_topk or topk
    nodes = settings.num_draft_tokens or max(nodes, steps + 1)
    if topk == 1 and nodes != steps + 1:
        if settings.num_draft_tokens is not None:
            _log.warning("setting is overridden", setting="num_draft_tokens", value=steps + 1)
        nodes = steps + 1
    return Tier(name, num_steps=steps, topk=topk, num_draft_tokens=nodes)


def checkpoint_folder(path: str, revision: str = "") -> Path:
    """A local folder as it is, or what the hub holds under an id.

    Raises:
        ModelNotFound: there is no such folder or id, or the hub cannot be reached.
    """
    folder = Path(path).expanduser()
    if folder.is_dir():
        if revision:
            _log.warning("setting is inactive", setting="draft_model_revision", reason="a folder")
        return folder
    if path.startswith(("/", ".", "~")) or path.count("/") != 1:
        raise ModelNotFound(f"there is no draft checkpoint {path}")
    hub = _hub(path)
    wanted = ["*.json", "*.safetensors", "*.bin", "*.pt", "*.jinja", "tokenizer*"]
    try:
        return Path(hub.snapshot_download(path, revision=revision or None, allow_patterns=wanted))
    except Exception as error:
        raise ModelNotFound(_cannot_fetch(path, error)) from None


def hub_file(path: str) -> Path:
    """A local file as it is, or owner/name/file of the hub.

    Raises:
        ModelNotFound: there is no such file, or the hub cannot be reached.
    """
    local = Path(path).expanduser()
    if local.is_file() or path.startswith(("/", ".", "~")) or path.count("/") < 2:
        return local
    owner, name, file = path.split("/", 2)
    hub = _hub(path)
    try:
        return Path(hub.hf_hub_download(f"{owner}/{name}", file))
    except Exception as error:
        raise ModelNotFound(_cannot_fetch(path, error)) from None


def _warn_of_inactive(settings: DraftSettings, name: str) -> None:
    """Says which settings a proposer does not look at, once it is loaded."""
    reasons = {}
    if settings.token_map and name != "eagle":
        reasons["token_map"] = {
            "eagle3": "it has a map of its own",
            "standalone": "it has a head of its own",
        }.get(name, "its head is not cut")
    if settings.dflash_block_size is not None and name != "dflash":
        reasons["dflash_block_size"] = "it drafts no blocks"
    if settings.draft_window_size is not None and name != "dflash":
        reasons["draft_window_size"] = "it sees all of the prefix"
    if settings.enable_multi_layer_eagle and name != "mtp":
        reasons["enable_multi_layer_eagle"] = "it has no MTP layers"
    if settings.draft_model_quantization != "none" and name == "uno":
        reasons["draft_model_quantization"] = "it is its target, exactly"
    if settings.torch_compile and not _grows_by_steps(settings, name):
        reasons["torch_compile"] = "it does not draft level by level"
    if name == "dflash":
        for setting in ("num_steps", "eagle_topk"):
            if getattr(settings, setting) is not None:
                reasons[setting] = "a block is drafted in one step, as a chain"
    for setting, reason in reasons.items():
        _log.warning("setting is inactive", setting=setting, proposer=name, reason=reason)


def _grows_by_steps(settings: DraftSettings, name: str) -> bool:
    if name == "mtp":
        return not settings.enable_multi_layer_eagle
    return name in ("standalone", "eagle", "eagle3")


def _hub(path: str) -> Any:
    try:
        import huggingface_hub
    except ImportError:
        raise ModelNotFound(
            f"fetching {path} needs the package huggingface-hub: pip install huggingface-hub"
        ) from None
    return huggingface_hub


def _cannot_fetch(path: str, error: Exception) -> str:
    first = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return f"{path} is not on this machine and cannot be fetched from the hub: {first}"
