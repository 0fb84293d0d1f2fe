"""Finds backends by entry point and users' functions by name, and asks devices what engines need."""

import difflib
import hashlib
import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from types import ModuleType
from typing import Any, Final

from offbeat_core._contracts.rollout import RolloutEngineSettings
from offbeat_core._errors import BackendError, ConfigError
from offbeat_core._hub_names import as_written

AUTOLOAD: Final = "TORCH_DEVICE_BACKEND_AUTOLOAD"
DEVICE_GROUP: Final = "offbeat.device"
INSTALL_LINES: Final = {
    ("offbeat.rollout", "torch"): "pip install offbeat-rollout-torch",
    ("offbeat.rollout", "vllm"): 'pip install "offbeat-rollout-vllm[engine]"; without a GPU its README ("Installing on '
    'a CPU") has the command',
    ("offbeat.rollout", "trtllm"): "pip install offbeat-rollout-trtllm",
    ("offbeat.engine", "torch"): "pip install offbeat-engine-torch",
    ("offbeat.engine", "megatron"): 'pip install "offbeat-engine-megatron[engine]"',
    ("offbeat.launcher", "local"): "pip install offbeat-actors",
    ("offbeat.launcher", "torchrun"): "pip install offbeat-actors torch",
    ("offbeat.launcher", "ray"): 'pip install "offbeat-actors[ray]"',
}
ACCELERATOR_ROLLOUT: Final = "vllm"
"""Rollout backend that "auto" takes on an accelerator which it serves; elsewhere it takes the embedded one."""


def installed_backends(kind: str) -> tuple[str, ...]:
    """Names registered under the entry-point group `kind`, such as "offbeat.rollout", sorted."""
    return tuple(sorted({point.name for point in entry_points(group=kind)}))


def load_backend(kind: str, name: str) -> Any:
    """Load the object that a backend registered.

    Args:
        kind: entry-point group: `offbeat.rollout`, `offbeat.engine`, `offbeat.device`, `offbeat.launcher`,
            `offbeat.transport`.
        name: such as "torch" or "vllm".

    Raises:
        BackendError: not installed, with the install line, or unknown, with the names that are.
    """
    for point in entry_points(group=kind):
        if point.name == name:
            return point.load()
    installed = ", ".join(installed_backends(kind)) or "none"
    line = INSTALL_LINES.get((kind, name))
    advice = f"install it with: {line}" if line else "check the name"
    raise BackendError(f"{kind} backend {name!r} is not installed (installed adapters: {installed}); {advice}")


def require_backend(kind: str, name: str, settings: RolloutEngineSettings | None = None) -> Any:
    """Load a backend, and see that the engine which it adapts is installed here too.

    Args:
        kind: as of `load_backend`.
        name: of the backend.
        settings: of a rollout engine; some need nothing here, such as a server that runs already.

    Raises:
        BackendError: either is missing, with the line that installs it.
    """
    backend = load_backend(kind, name)
    if check := getattr(backend, "check_installed", None):
        check(*(() if settings is None else (settings,)))
    return backend


def available_devices() -> dict[str, int]:
    """Kinds of device that are here and how many of each, the one that "auto" takes first; loads all that are known."""
    kinds = [load_backend(DEVICE_GROUP, name) for name in installed_backends(DEVICE_GROUP)]
    kinds.sort(key=lambda kind: -kind.preference)
    return {kind.kind: kind.count() for kind in kinds if kind.count()}


def find_function(section: str, name: str) -> Callable[..., Any]:
    """Import `module:function` or `path/to/file.py:function`, looking for modules in the working folder too.

    Args:
        section: that names it, such as "reward".
        name: such as "my_rewards:score" or "rewards/mine.py:score"; a file's own folder is looked in as well.

    Raises:
        ConfigError: there is no such module or function, or the module cannot be imported.
    """
    module_name, _, attribute = name.rpartition(":") if ":" in name else (name, "", "")
    name, whole_name = as_written(name), module_name
    module_name = as_written(module_name)
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        module = _import_file(whole_name) if module_name.endswith(".py") else importlib.import_module(module_name)
    except Exception as error:
        raise ConfigError(
            f"{section} {name}: importing {module_name} failed: {type(error).__name__}: {error}; "
            f"Python looks in the working folder {os.getcwd()} and in what is installed"
        ) from error
    function = getattr(module, attribute, None)
    if not callable(function):
        if hasattr(module, attribute):
            raise ConfigError(
                f"{section} {name}: {module_name} has no function {attribute!r}: what it has of that name is of type "
                f"{type(function).__name__}, which cannot be called"
            )
        near = difflib.get_close_matches(attribute, vars(module), n=3)
        advice = f"; nearest: {', '.join(near)}" if near else ""
        raise ConfigError(f"{section} {name}: {module_name} has no function {attribute!r}{advice}")
    return function  # type: ignore[no-any-return]


def _import_file(path: str) -> ModuleType:
    """Return the module that a file is, once in a process; under its own name where no other module has that."""
    whole = os.path.realpath(os.path.expanduser(path))
    stem = os.path.basename(whole).removesuffix(".py")
    is_taken = stem in sys.modules and getattr(sys.modules[stem], "__file__", None) != whole
    name = f"{stem}_{hashlib.sha256(whole.encode()).hexdigest()[:8]}" if is_taken else stem
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, whole)
    if spec is None or spec.loader is None or not os.path.isfile(whole):
        raise FileNotFoundError(f"no such file: {whole}")
    if os.path.dirname(whole) not in sys.path:
        sys.path.append(os.path.dirname(whole))
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def defer_device_backends() -> None:
    """Let a plugin of torch for a kind of device be imported when that device is opened, and not before.

    torch imports installed plugins by itself, and transformers those it knows; where a plugin's driver is missing, both
    imports fail, also where the device is not needed. So torch's import of plugins is disabled, and until
    `restore_module` the plugins look as if they were not installed. Every process of a command calls this before it
    imports torch. Where the user has set TORCH_DEVICE_BACKEND_AUTOLOAD, nothing is done.
    """
    if os.environ.setdefault(AUTOLOAD, "0") == "0":
        for point in entry_points(group="torch.backends"):
            sys.modules.setdefault(point.module.partition(".")[0], None)  # type: ignore[arg-type]


def restore_module(name: str) -> None:
    """Let a plugin be imported that `defer_device_backends` has hidden."""
    if name in sys.modules and sys.modules[name] is None:
        del sys.modules[name]


@dataclass(frozen=True, kw_only=True)
class EngineNeeds:
    """Needs of an engine on one kind of device.

    Args:
        variables: of the environment that it must start with, whatever the user has set.
        options: in the engine's own words, in place of the user's of these names, which they hold.
        notice: what is known to speak against it; "" for nothing.
    """

    variables: Mapping[str, str] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    notice: str = ""


def engine_needs(library: str, settings: RolloutEngineSettings, *, releases: Collection[str]) -> EngineNeeds:
    """Ask the kind of device that the settings name; nothing is needed where none is named, or it asks for nothing.

    The device need not be here. Its class is asked by `engine_needs(library, devices, options, releases)`, which it may
    have or not.

    Args:
        library: such as "vllm".
        settings: `device` such as "cuda:0", `tensor_parallel` devices from there on, `options` of the user.
        releases: releases of the library, such as "0.32"; one of them is going to be used.

    Raises:
        ConfigError: an option that cannot be on this kind of device.
    """
    kind, _, first = settings.device.partition(":")
    if kind not in installed_backends(DEVICE_GROUP):
        return EngineNeeds()
    ask = getattr(load_backend(DEVICE_GROUP, kind), "engine_needs", None)
    if ask is None:
        return EngineNeeds()
    devices = range(int(first), int(first) + settings.tensor_parallel) if first.isdecimal() else range(0)
    needs: EngineNeeds = ask(library, devices, settings.options, releases)
    return needs
