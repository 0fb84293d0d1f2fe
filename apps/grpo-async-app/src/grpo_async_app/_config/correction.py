"""The rollout correction of a run that leaves it open: chosen by how its tokens are sampled, before anything starts."""

from dataclasses import replace

from grpo_async_app._config.sections import GrpoConfig
from offbeat_objectives import resolve_correction


def choose_correction(config: GrpoConfig) -> tuple[GrpoConfig, list[str]]:
    """Replace `algorithm.correction = "auto"` and `algorithm.correction_form = "auto"`.

    Args:
        config: with `rollout.dtype` settled by `choose_for_platform`.

    Returns:
        The configuration without open choices, and each choice with its reason.
    """
    algorithm, said = resolve_correction(config.algorithm, off_policy_reason(config))
    return replace(config, algorithm=algorithm), said


def off_policy_reason(config: GrpoConfig) -> str:
    """Return why tokens may be sampled by another policy than the one in training; empty where they are not."""
    async_, rollout, engine = config.async_, config.rollout, config.engine
    if async_.staleness_threshold > 0:
        return f"async.staleness_threshold = {async_.staleness_threshold:g}: some samples are of older weights"
    if async_.trigger_parameter_sync_step > 1:
        return (
            f"async.trigger_parameter_sync_step = {async_.trigger_parameter_sync_step}: the engines sample with older "
            "weights between two syncs"
        )
    if rollout.weight_format != "dtype":
        return f"rollout.weight_format = {rollout.weight_format}: the engines sample with rounded weights"
    if rollout.dtype != engine.dtype:
        return f"rollout.dtype = {rollout.dtype}, engine.dtype = {engine.dtype}: two number formats"
    if rollout.backend != engine.backend:
        return f"rollout.backend = {rollout.backend}, engine.backend = {engine.backend}: two implementations"
    return ""
