"""Model folders whose experts are in mxfp4, as gpt-oss is published: served in the engine's own number format.

That is how the trainer sends them. vLLM starts without weights, as of a folder in plain numbers, and the first update
brings the folder's, decoded.

Source: transformers 5.19.0, transformers/integrations/mxfp4.py (`convert_moe_packed_tensors`); the names of published
gpt-oss folders.
"""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from copy import copy
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

from offbeat_core import ConfigError, ModelError, ModelFolder, list_model_files, read_model_json
from offbeat_rollout_vllm._updates import FolderStream

if TYPE_CHECKING:
    from torch import Tensor


CONFIG_KEY: Final = "quantization_config"
BLOCKS: Final = "_blocks"
SCALES: Final = "_scales"


def is_mxfp4(folder: ModelFolder) -> bool:
    """Return whether its config says that its experts are in mxfp4."""
    stored = read_model_json(folder.path / "config.json").get(CONFIG_KEY) or {}
    return stored.get("quant_method") == "mxfp4"


def served_folder(path: Any) -> ModelFolder:
    """Return a folder with the shapes that an update must bring: of experts in mxfp4 those of their numbers."""
    folder = ModelFolder(path)
    if not is_mxfp4(folder):
        return folder
    found = copy(folder)
    found.shapes = {name: shape for name, shape in folder.shapes.items() if not name.endswith((BLOCKS, SCALES))}
    for name, shape in folder.shapes.items():
        if name.endswith(BLOCKS):
            experts, columns, groups, num_bytes = shape
            found.shapes[name.removesuffix(BLOCKS)] = (experts, groups * num_bytes * 2, columns)
    return found


def plain_arguments(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments by which vLLM starts as with a folder in plain numbers, without weights."""
    arguments = {"hf_overrides": forget_mxfp4, "load_format": "dummy"}
    for name in [*arguments, "quantization"]:
        if name in options:
            raise ConfigError(
                f"option {name} of rollout-vllm cannot be set: the model folder is in mxfp4, and is served decoded"
            )
    return arguments


def forget_mxfp4(config: Any) -> Any:
    """Take the format out of a model's config; called by vLLM, in its processes too."""
    if hasattr(config, CONFIG_KEY):
        delattr(config, CONFIG_KEY)
    return config


def read_decoded(folder: ModelFolder) -> FolderStream:
    """Return the folder's weights, experts in bfloat16, which has every number of mxfp4."""
    return FolderStream(lambda: _read_tensors(folder), version=0)


def _read_tensors(folder: ModelFolder) -> "Iterator[tuple[str, Tensor]]":
    from safetensors import SafetensorError, safe_open

    decode = import_module("transformers.integrations.mxfp4").convert_moe_packed_tensors  # vLLM brings it

    try:
        with ExitStack() as stack:
            files = [stack.enter_context(safe_open(path, framework="pt")) for path in list_model_files(folder.path)]
            holders = {name: file for file in files for name in file.keys()}  # noqa: SIM118 - not a dict
            for name in folder.shapes:
                if name in holders:
                    yield name, holders[name].get_tensor(name)
                    continue
                blocks, scales = (holders[name + part].get_tensor(name + part) for part in (BLOCKS, SCALES))
                yield name, decode(blocks, scales)
    except (SafetensorError, KeyError) as error:
        raise ModelError(f"{folder.path} is not a whole folder of safetensors ({error})") from error
