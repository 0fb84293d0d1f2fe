"""Settings that the machine decides where the configuration does not: formats of engines, batch of rollout engines."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from grpo_async_app._config.sections import AUTO, GrpoConfig
from offbeat_placement import ClusterView

RUNNING_ON_A_CPU: Final = 64
RUNNING_ON_A_DEVICE: Final = 256
"""Samples decoded together: a device has room and bandwidth for more, and vLLM's own default is the same."""
_CPU_FLAGS: Final = ("amx_bf16", "avx512_bf16")
_CPU_INFO: Final = Path("/proc/cpuinfo")


def choose_for_platform(config: GrpoConfig, sampling: str, training: str) -> tuple[GrpoConfig, list[str]]:
    """Fill in `engine.dtype = "auto"`, `rollout.dtype = "auto"` and `rollout.max_running = 0`.

    Args:
        config: as it was written.
        sampling: kind of the accelerator that samples, such as GPU; "" for CPUs.
        training: the same of the trainer.

    Returns:
        The configuration without open choices, and each choice with its reason.
    """
    engine, rollout, said = config.engine, config.rollout, list[str]()
    dtype, place = ("bfloat16", f"a {training}") if training else ("float32", "CPUs")
    of_trainer = []
    if engine.dtype == AUTO:
        engine, of_trainer = replace(engine, dtype=dtype), [f"engine.dtype = {dtype} (trains on {place})"]
    if rollout.dtype == AUTO:
        dtype, why = ("bfloat16", f"samples on a {sampling}") if sampling else _cpu_format()
        if config.is_exact:
            dtype, why = engine.dtype, 'that of the trainer, for engine.options.numerics = "exact"'
        rollout = replace(rollout, dtype=dtype)
        said.append(f"rollout.dtype = {dtype} ({why})")
    if not rollout.max_running:
        rollout = replace(rollout, max_running=RUNNING_ON_A_DEVICE if sampling else RUNNING_ON_A_CPU)
        place = f"a {sampling}" if sampling else "CPUs"
        said.append(f"rollout.max_running = {rollout.max_running} (samples on {place})")
    return replace(config, rollout=rollout, engine=engine), [*said, *of_trainer]


def slow_formats(config: GrpoConfig, kind: str) -> list[str]:
    """Return what was asked for and this CPU has no instructions for, where the roles compute here; `kind` as above."""
    if not _cpu_flags() or _bfloat16_flag():
        return []
    on_cpu = {"cpu"} if kind else {"cpu", AUTO}
    engine, rollout = config.engine, config.rollout
    asked = {"engine": (engine.dtype, engine.device), "rollout": (rollout.dtype, rollout.device)}
    slow = [name for name, (dtype, device) in asked.items() if dtype == "bfloat16" and device in on_cpu]
    return [
        f"{name}.dtype = bfloat16, and this CPU has neither {' nor '.join(_CPU_FLAGS)}: it takes several times "
        "as long as in float32"
        for name in slow
    ]


def device_kinds(config: GrpoConfig, view: ClusterView) -> tuple[str, str]:
    """Return the kinds of accelerator that sample and train, "" for CPUs. Imports torch where only torch can tell."""
    return _kind(config.rollout.device, view), _kind(config.engine.device, view)


def engine_kinds(config: GrpoConfig, view: ClusterView) -> dict[str, str]:
    """Return the same of the roles with a rollout engine, by section."""
    teacher = _kind(config.teacher.device, view) if config.teacher.is_set else ""
    return {"rollout": _kind(config.rollout.device, view), "teacher": teacher}


def _kind(device: str, view: ClusterView) -> str:
    if view.reserves or device == "cpu":
        return view.kind(device)
    from offbeat_device import accelerator_kind

    return accelerator_kind(device)


def _cpu_format() -> tuple[str, str]:
    flag = _bfloat16_flag()
    return ("bfloat16", f"this CPU has {flag}") if flag else ("float32", "this CPU has no products in bfloat16")


def _bfloat16_flag() -> str:
    """By which this CPU multiplies in bfloat16; empty where it does not, or does not tell."""
    return next((flag for flag in _CPU_FLAGS if flag in _cpu_flags()), "")


def _cpu_flags() -> Sequence[str]:
    """Return the flags of the first CPU; none where the system does not tell."""
    try:
        lines = _CPU_INFO.read_text().splitlines()
    except OSError:
        return ()
    return next((line.split() for line in lines if line.startswith("flags")), ())
