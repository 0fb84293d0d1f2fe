"""The rollout correction, and the alarm about a mismatch, of a run that leaves them open: by how tokens are sampled."""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from grpo_async_app._config.sections import GrpoConfig
from grpo_async_app._preflight.engines import rounding_reason
from offbeat_core import ModelError, read_model_json
from offbeat_objectives import resolve_correction

_ALARMS_NATS: Final = {"float32": 0.05, "half": 0.5, "half with experts": 2.0, "fp8": 2.0}
"""At least twice what rounding alone does; docs/losses.md has the table."""


def choose_correction(config: GrpoConfig) -> tuple[GrpoConfig, list[str]]:
    """Replace `auto` in `algorithm.correction` and `correction_form`, and settle `mismatch_alarm_nats`.

    Args:
        config: with `rollout.dtype` settled by `choose_for_platform`.

    Returns:
        The configuration without open choices, and each choice with its reason.
    """
    algorithm, said = resolve_correction(config.algorithm, off_policy_reason(config), _unclipped_reason(config))
    if algorithm.mismatch_alarm_nats is None:
        bound_nats, why = _alarm_bound(config)
        algorithm = replace(algorithm, mismatch_alarm_nats=bound_nats)
        said.append(f"algorithm.mismatch_alarm_nats = {bound_nats:g} ({why})")
    return replace(config, algorithm=algorithm), said


def _alarm_bound(config: GrpoConfig) -> tuple[float, str]:
    rollout, engine = config.rollout, config.engine
    if rounding := rounding_reason(rollout):
        return _ALARMS_NATS["fp8"], rounding
    if {rollout.dtype, engine.dtype} == {"float32"}:
        return _ALARMS_NATS["float32"], "trainer and engines compute in float32"
    formats = f"engine.dtype = {engine.dtype}, rollout.dtype = {rollout.dtype}"
    if _has_experts(config.model.path):
        return _ALARMS_NATS["half with experts"], f"{formats}, and a token may go to other experts on the two sides"
    return _ALARMS_NATS["half"], formats


def _has_experts(folder: str) -> bool:
    """Return whether the model has experts; False where its config.json is not here, as in `plan --cluster`."""
    model: Mapping[str, Any] = {}
    with suppress(ModelError):
        model = read_model_json(Path(folder).expanduser() / "config.json")
    text = model.get("text_config")
    sizes = {**model, **(text if isinstance(text, Mapping) else {})}
    # num_experts, num_local_experts, n_routed_experts, moe_num_experts: each family has a name of its own.
    return any(name.endswith("experts") and isinstance(size, int) and size > 1 for name, size in sizes.items())


def off_policy_reason(config: GrpoConfig) -> str:
    """Return why tokens may be sampled by another policy than the one in training; empty where they are not."""
    rollout, engine = config.rollout, config.engine
    if lag := _lag_reason(config):
        return lag
    if rounding := rounding_reason(rollout):
        return rounding
    if rollout.dtype != engine.dtype:
        return f"rollout.dtype = {rollout.dtype}, engine.dtype = {engine.dtype}: two number formats"
    if rollout.backend != engine.backend:
        return f"rollout.backend = {rollout.backend}, engine.backend = {engine.backend}: two implementations"
    return ""


def _lag_reason(config: GrpoConfig) -> str:
    async_ = config.async_
    if async_.staleness_threshold > 0:
        return f"async.staleness_threshold = {async_.staleness_threshold:g}: some samples are of older weights"
    if async_.trigger_parameter_sync_step > 1:
        return (
            f"async.trigger_parameter_sync_step = {async_.trigger_parameter_sync_step}: the engines sample with older "
            "weights between two syncs"
        )
    return ""


def _unclipped_reason(config: GrpoConfig) -> str:
    """Return why a clip around the policy before the update bounds nothing; see `resolve_correction`.

    The rounding of FP8 moves ratios further than a clip is wide: there weights correct, not the clip.
    """
    lag = _lag_reason(config)
    if not lag or config.steps_per_update > 1 or rounding_reason(config.rollout):
        return ""
    return f"{lag}, and with one optimizer step an update only a clip around the policy that sampled acts"
