"""Token budget and activation checkpointing of the trainer, by the memory of its devices and of all roles on them."""

from collections.abc import Callable
from dataclasses import replace

from grpo_async_app._config.parking import PARKS_ALL, PARKS_NOTHING
from grpo_async_app._config.sections import LEAST_THAT_FITS, EngineConfig, GrpoConfig
from grpo_async_app._preflight.estimates import BatchArithmetic, estimate_memory
from grpo_async_app._preflight.turns import held_in_trainers_turn, roles_awake
from offbeat_core import TrainLayout
from offbeat_placement import Placement, choose_budget


def settle_budget(
    config: GrpoConfig, layout: TrainLayout | None, placement: Placement, longest_prompt: int | None = None
) -> tuple[GrpoConfig, tuple[str, ...]]:
    """Settle `engine.max_tokens_per_microbatch = 0` and `engine.activation_checkpointing = "auto"`.

    Where `cluster.sleep_level` is open too, settings under which all roles of a device fit beside each other are
    preferred to those for which engines have to give their memory back.

    Args:
        config: with all else that memory depends on settled.
        layout: how the trainer's ranks share the model; None where its backend cannot be asked.
        placement: of all ranks.
        longest_prompt: tokens of the longest training prompt; None where the data are not read.

    Returns:
        The configuration, and the choice with its reason; none where nothing was open.
    """

    def held_asleep(sleep_level: int) -> Callable[[EngineConfig], int]:
        def held(engine: EngineConfig) -> int:
            memory = estimate_memory(replace(config, engine=engine), layout, placement, longest_prompt)
            return held_in_trainers_turn(memory, placement, sleep_level)

        return held

    level = config.cluster.sleep_level
    levels = (PARKS_NOTHING, PARKS_ALL) if level == LEAST_THAT_FITS else (level,)
    batch = BatchArithmetic(assume_budget(config), layout, longest_prompt)
    engine, said = choose_budget(
        config.engine,
        {" + ".join(roles_awake(placement, each)): held_asleep(each) for each in levels},
        placement.accelerator_bytes("trainer"),
        on_cpu=placement.is_on_cpu("trainer"),
        longest_tokens=batch.tokens_per_sample,
        step_tokens=batch.tokens_per_step,
    )
    return replace(config, engine=engine), said


def assume_budget(config: GrpoConfig) -> GrpoConfig:
    """Return the configuration for what does not depend on the choice, such as the layout of the ranks."""
    return replace(config, engine=config.engine.settle_budget(recomputes=True))
