"""The rollout engine of each role that leaves it open, by its accelerator, what is installed and what the run needs.

On CPUs it is the embedded engine. On an accelerator it is vLLM, where that is installed for this accelerator, serves
the model, supports what the run asks for, and has the device to itself while it computes; else the embedded engine.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from grpo_async_app._config.sections import AUTO, GrpoConfig
from grpo_async_app._preflight.platform import choose_for_platform
from offbeat_core import (
    ACCELERATOR_ROLLOUT,
    BackendError,
    ConfigError,
    ModelError,
    RolloutEngineConfig,
    load_backend,
)
from offbeat_recipes import EMBEDDED

_WORTHWHILE: Final = "1.5B"
"""Parameters of a model above which vLLM samples much faster on a GPU: an estimate, by kernels and bytes of a decoding
step. The embedded engine computes prompts without recorded graphs, and caches rows of max_model_len tokens."""


@dataclass(frozen=True, kw_only=True)
class _OpenRole:
    """A kind of role whose engine is left open.

    Args:
        section: of the configuration, "rollout" or "teacher".
        accelerator: kind that it computes on, such as GPU; "" for CPUs.
        settings: of its engine.
        needs: names in `RolloutCapabilities`, each with the setting or the data that needs it.
        sharing: setting by which another role stays loaded on its device; empty where it has the device to itself.
    """

    section: str
    accelerator: str
    settings: RolloutEngineConfig
    needs: Mapping[str, str] = field(default_factory=dict)
    sharing: str = ""


def check_open_backends(config: GrpoConfig) -> None:
    """Refuse options for an engine that is left open: the two that may be taken have none in common.

    Raises:
        ConfigError: with the section.
    """
    for name in _open_sections(config):
        if options := getattr(config, name).options:
            raise ConfigError(
                f"{name}.options ({', '.join(options)}) are of one engine, and {name}.backend = auto takes {EMBEDDED} "
                f"or {ACCELERATOR_ROLLOUT} by the machine: set {name}.backend to the one that they are for"
            )


def choose_backends(
    config: GrpoConfig, accelerators: Mapping[str, str], *, has_images: bool = False, is_here: bool = True
) -> tuple[GrpoConfig, list[str]]:
    """Fill in `rollout.backend = "auto"` and `teacher.backend = "auto"`.

    Args:
        config: as it was written.
        accelerators: kinds that "rollout" and "teacher" compute on, such as GPU; "" for CPUs.
        has_images: prompts have some.
        is_here: the run will be where this is asked. A plan for other machines, which may have other engines, is made
            also where the one chosen here could not serve the model or split it.

    Returns:
        The configuration without open engines, and each choice with its reason.

    Raises:
        ConfigError: options of an engine that is left open, or a width that the one chosen has not.
        ModelError: the one chosen does not serve the model; with the reason why it was chosen.
    """
    check_open_backends(config)
    chosen, said = dict[str, str](), list[str]()
    for role in _open_roles(config, accelerators, has_images=has_images):
        name, why = _choose(role)
        if name == EMBEDDED and is_here:
            _check_embedded(role, why)
        chosen[role.section] = name
        said.append(f"{role.section}.backend = {name} ({why})")
    return name_backends(config, chosen), said


def name_backends(config: GrpoConfig, names: Mapping[str, str]) -> GrpoConfig:
    """Return the configuration with these engines, by section."""
    sections: dict[str, Any] = {
        section: replace(getattr(config, section), backend=name) for section, name in names.items()
    }
    return replace(config, **sections)


def embed_open_backends(config: GrpoConfig) -> GrpoConfig:
    """Return the configuration with the embedded engine for each role that leaves it open, whatever the machine."""
    check_open_backends(config)
    return name_backends(config, dict.fromkeys(_open_sections(config), EMBEDDED))


def _open_sections(config: GrpoConfig) -> list[str]:
    present = ["rollout", *(["teacher"] if config.teacher.is_set else [])]
    return [name for name in present if getattr(config, name).backend == AUTO]


def _choose(role: _OpenRole) -> tuple[str, str]:
    """Return an engine, and the reason."""
    kind = role.accelerator
    if not kind:
        return EMBEDDED, "computes on CPUs"
    if role.sharing:
        return EMBEDDED, f"{role.sharing}, and {ACCELERATOR_ROLLOUT} takes most of a device"
    try:
        engine = load_backend("offbeat.rollout", ACCELERATOR_ROLLOUT)
        capabilities, about = engine.capabilities_on(role.settings, kind)
    except BackendError as error:
        return EMBEDDED, f"{error}; on a {kind} it is faster for models above {_WORTHWHILE} parameters"
    except (ConfigError, ModelError) as error:
        return EMBEDDED, str(error)
    lacks = [why for name, why in role.needs.items() if not getattr(capabilities, name)]
    if lacks:
        return EMBEDDED, f"{ACCELERATOR_ROLLOUT} does not support {' and '.join(lacks)}"
    return ACCELERATOR_ROLLOUT, f"on a {kind}; {about}"


def _check_embedded(role: _OpenRole, why: str) -> None:
    """Refuse what the embedded engine would refuse once it is started, with the reason why it was chosen."""
    section, settings, folder = role.section, role.settings, Path(role.settings.model_path).expanduser()
    chosen = f"{section}.backend = auto takes {EMBEDDED} here: {why}"
    if settings.tensor_parallel > 1:
        raise ConfigError(
            f"{section}.tensor_parallel = {settings.tensor_parallel} needs an engine that splits its model, and "
            f"{chosen}. Set it to 1, or {section}.backend to an engine that splits, such as {ACCELERATOR_ROLLOUT}"
        )
    check = getattr(load_backend("offbeat.rollout", EMBEDDED), "check_model", None)
    if check and (folder / "config.json").is_file():
        try:
            check(folder)
        except ModelError as error:
            raise ModelError(f"{error}. {chosen}. Set {section}.backend to an engine that serves the model") from error


def _open_roles(config: GrpoConfig, accelerators: Mapping[str, str], *, has_images: bool) -> Iterator[_OpenRole]:
    for name in _open_sections(config):
        kind, of_rollout = accelerators[name], name == "rollout"
        settled, _ = choose_for_platform(config, accelerators["rollout"], "")  # whose dtype an engine may refuse
        needs = _rollout_needs(config) if of_rollout else _teacher_needs(config)
        images = "multimodal" if of_rollout else "scores_images"
        yield _OpenRole(
            section=name,
            accelerator=kind,
            settings=settled.rollout_engine(config.model.path, 0) if of_rollout else settled.teacher_engine(0),
            needs={**needs, **({images: "prompts with images"} if has_images else {})},
            sharing=_sharing(config, name, accelerators),
        )


def _rollout_needs(config: GrpoConfig) -> dict[str, str]:
    rollout, needs = config.rollout, dict[str, str]()
    if rollout.sampling(rollout.seed).is_cut:
        needs["whole_logprobs"] = "losses on samples cut by rollout.top_p, top_k or min_p"
    if rollout.lora_sync == "adapter":
        needs["lora"] = "rollout.lora_sync = adapter without rollout.options"
    if rollout.weight_format != "dtype":
        needs["fp8_weights"] = f"rollout.weight_format = {rollout.weight_format}"
    if config.cluster.colocate:
        needs["sleep_levels"] = "cluster.colocate = true"
    return needs


def _teacher_needs(config: GrpoConfig) -> dict[str, str]:
    needs = {"scores": "a teacher"}
    if config.rollout.temperature != 1:
        needs["scores_any_temperature"] = f"a teacher at rollout.temperature = {config.rollout.temperature:g}"
    return needs


def _sharing(config: GrpoConfig, section: str, accelerators: Mapping[str, str]) -> str:
    """Return the setting by which another role stays loaded on the devices of this one; empty where none does."""
    if config.teacher.is_set and config.teacher.colocate and accelerators["rollout"] == accelerators["teacher"]:
        return "teacher.colocate = true"
    if section == "rollout" and config.cluster.colocate:
        return "cluster.sleep_level = 0" if config.cluster.sleep_level == 0 else ""
    own = config.devices[f"{section}.device"]
    has_number = ":" in own
    others = [key for key, name in config.devices.items() if name == own and key != f"{section}.device"]
    return f"{others[0]} is {own} too" if has_number and others else ""
