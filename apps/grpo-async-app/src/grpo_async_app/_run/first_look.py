"""A first look at a mismatch, in the run that has it: which of weights, computation and state it comes from."""

from collections.abc import Sequence
from typing import Final

import numpy as np

from grpo_async_app._config.sections import GrpoConfig
from grpo_async_app._fleet.fleet import Fleet
from grpo_async_app._roles.groups import SampledGroup
from offbeat_core import Fingerprint, Floats

_NUM_SAMPLES: Final = 4


async def look_at_mismatch(fleet: Fleet, config: GrpoConfig, groups: Sequence[SampledGroup]) -> str:
    """Say where trainer and engine part, in a sentence; "" where the engine does not say what it computes.

    Both hold the same version now. The engine scores samples alone, as if nothing had been cached.

    Args:
        fleet: right after a sync.
        config: whose `algorithm.mismatch_alarm_nats` says what is much.
        groups: that have raised the alarm.
    """
    engines, deadline_s = fleet.engines, config.async_.sync_deadline_s
    name, marks = engines.names[0], dict[str, Fingerprint]
    pairs = [(group, each) for group in groups if not group.pictures for each in group.trajectories][:_NUM_SAMPLES]
    sequences = [trajectory.to_sequence(group.prompt_ids) for group, trajectory in pairs]
    if not sequences:
        return ""
    trained: list[Floats] = await fleet.trainer.call("logprobs", sequences, returns=list[Floats], deadline_s=deadline_s)
    errors = []
    for sequence, scored in zip(sequences, trained, strict=True):
        args = ("score_alone", sequence.ids, config.rollout.temperature or 1.0)
        alone: Floats | None = await engines.call(name, *args, returns=Floats | None, deadline_s=deadline_s)
        if alone is None:
            return ""
        errors.append(np.abs(alone - scored)[sequence.loss_mask])
    held: dict[str, Fingerprint] = await fleet.trainer.call("fingerprints", returns=marks, deadline_s=deadline_s)
    served: dict[str, Fingerprint] = await engines.call(
        name, "fingerprints", list(held), returns=marks, deadline_s=deadline_s
    )
    wrong = [each for each, mark in served.items() if not np.array_equal(mark, held[each])]
    nats = float(np.quantile(np.concatenate(errors), 0.99))
    if wrong and config.rollout.weight_format == "dtype":
        others = f" and {len(wrong) - 1} others" if len(wrong) > 1 else ""
        return f"{name} holds other weights than the trainer: {wrong[0]}{others}"
    if nats > (config.algorithm.mismatch_alarm_nats or 0.0):
        return f"{name} differs from the trainer on the same tokens alone, too ({nats:.2g} nats): layers or inputs"
    return (
        f"{name} computes what the trainer does of the same tokens alone ({nats:.2g} nats): state, such as caches and "
        "batches, or sampling settings"
    )
