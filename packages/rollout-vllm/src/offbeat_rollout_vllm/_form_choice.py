"""Which form of vLLM a configuration asks for, with all it starts with."""

from collections.abc import Mapping
from typing import Any

from offbeat_rollout_vllm._async_llm import AsyncForm
from offbeat_rollout_vllm._environment import start_variables
from offbeat_rollout_vllm._form import EngineForm
from offbeat_rollout_vllm._fp8 import FP8, READABLE_KERNELS
from offbeat_rollout_vllm._in_process import InProcessForm
from offbeat_rollout_vllm._options import VllmRolloutOptions, engine_arguments
from offbeat_types import RolloutEngineConfig


def choose_form(
    config: RolloutEngineConfig,
    options: VllmRolloutOptions,
    extra: Mapping[str, Any],
    required: Mapping[str, str],
    *,
    is_cpu: bool,
) -> tuple[EngineForm, int]:
    """The form, not started yet, and how many workers it will have.

    Args:
        config: what every engine gets.
        options: parsed.
        extra: further arguments of vLLM's.
        required: variables of the environment, whatever the user has set.
        is_cpu: whether it is vLLM's build for CPUs.
    """
    arguments = {**engine_arguments(config, options, is_cpu=is_cpu), **extra}
    num_workers = config.tensor_parallel * int(arguments.get("pipeline_parallel_size", 1))
    variables = start_variables(config, num_workers) | (READABLE_KERNELS if config.weight_format == FP8 else {})
    if options.form == "async":
        return AsyncForm(arguments, variables, required), num_workers
    return InProcessForm(arguments, variables, required, config.num_threads), num_workers
