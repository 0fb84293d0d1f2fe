"""The rollout correction, the replay of experts, and the alarm about a mismatch, of a run that leaves them open."""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from grpo_async_app._config.sections import AUTO, GrpoConfig
from grpo_async_app._preflight.engines import backend_can, rounding_reason
from offbeat_core import ConfigError, ModelError, read_model_json
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
    config, replayed = _choose_replay(replace(config, algorithm=algorithm))
    return config, [*said, *replayed]


def _choose_replay(config: GrpoConfig) -> tuple[GrpoConfig, list[str]]:
    """Settle `rollout.replay_routes`: auto remains where engines and trainer can, as far as is known before the start.

    Raises:
        ConfigError: it is wanted, and there is nothing to replay, or a backend cannot.
    """
    wanted, rollout, engine = config.rollout.replay_routes, config.rollout.backend, config.engine.backend
    if wanted == "off" or (wanted == AUTO and not _has_experts(config.model.path)):
        return replace(config, rollout=replace(config.rollout, replay_routes="off")), []
    obstacles = {
        "the model has no experts": not _has_experts(config.model.path),
        f"rollout.backend = {rollout} does not say which experts tokens took": not backend_can(
            "offbeat.rollout", rollout, "returns_routes"
        ),
        f"engine.backend = {engine} does not replay them": not backend_can("offbeat.engine", engine, "replays_routes"),
    }
    problem = next((what for what, is_there in obstacles.items() if is_there), "")
    if problem and wanted != AUTO:
        raise ConfigError(f"rollout.replay_routes = {wanted}, and {problem}; leave it at auto")
    if problem:
        config = replace(config, rollout=replace(config.rollout, replay_routes="off"))
    does = "off" if problem else wanted
    # Neither a build of an engine nor a model's routers are known before the start.
    why = problem or "the trainer takes the experts that engines say tokens took, where both can"
    return config, [f"rollout.replay_routes = {does} ({why})"]


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
    return _num_experts(_text_config(folder)) > 1


def route_bytes(folder: str) -> int:
    """Return the bytes that say which experts one token took, before compression; 0 for a dense model."""
    sizes = _text_config(folder)
    width = next((size for name in _WIDTHS if isinstance(size := sizes.get(name), int)), 0)
    return int(sizes.get("num_hidden_layers") or 0) * width * (1 if _num_experts(sizes) < 256 else 2)


_WIDTHS: Final = ("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk", "top_k_experts")
"""Names that families give the number of a token's experts."""


def _text_config(folder: str) -> Mapping[str, Any]:
    model: Mapping[str, Any] = {}
    with suppress(ModelError):
        model = read_model_json(Path(folder).expanduser() / "config.json")
    text = model.get("text_config")
    return {**model, **(text if isinstance(text, Mapping) else {})}


def _num_experts(sizes: Mapping[str, Any]) -> int:
    # num_experts, num_local_experts, n_routed_experts, moe_num_experts: each family has a name of its own.
    return max((size for name, size in sizes.items() if name.endswith("experts") and isinstance(size, int)), default=0)


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
