"""Conformance suites, fakes and tiny models for whoever writes an offbeat engine; tests on several processes.

Names are imported when asked for: the plugin lives in this package, and every pytest session loads it.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from offbeat_testing._command_conformance import CommandConformance
    from offbeat_testing._command_line import CommandEnded, CommandLine
    from offbeat_testing._fakes import FakeRolloutEngine, FakeWeightStream, Script
    from offbeat_testing._forked_roles import fork_roles, forked_main
    from offbeat_testing._large_models import large_model_configs
    from offbeat_testing._leaving_threads import wait_for_leaving_threads
    from offbeat_testing._ranks._child import Ranks
    from offbeat_testing._ray_nodes import RayNodes, ray_nodes
    from offbeat_testing._reference import changed_weights, logprob_errors, reference_logprobs, reference_model
    from offbeat_testing._rollout_conformance import RolloutConformance
    from offbeat_testing._running_command import RunningCommand, wait_until_gone
    from offbeat_testing._small_runs import small_grpo_run, small_sft_run
    from offbeat_testing._tiny_models import TinyFamily, tiny_model, tiny_tokenizer
    from offbeat_testing._tiny_vision_models import tiny_vision_model
    from offbeat_testing._train_conformance import TrainEngineConformance

__all__ = [
    "CommandConformance",
    "CommandEnded",
    "CommandLine",
    "FakeRolloutEngine",
    "FakeWeightStream",
    "Ranks",
    "RayNodes",
    "RolloutConformance",
    "RunningCommand",
    "Script",
    "TinyFamily",
    "TrainEngineConformance",
    "changed_weights",
    "fork_roles",
    "forked_main",
    "large_model_configs",
    "logprob_errors",
    "ray_nodes",
    "reference_logprobs",
    "reference_model",
    "small_grpo_run",
    "small_sft_run",
    "tiny_model",
    "tiny_tokenizer",
    "tiny_vision_model",
    "wait_for_leaving_threads",
    "wait_until_gone",
]

_MODULES = {
    "CommandConformance": "_command_conformance",
    "CommandEnded": "_command_line",
    "CommandLine": "_command_line",
    "FakeRolloutEngine": "_fakes",
    "FakeWeightStream": "_fakes",
    "Ranks": "_ranks._child",
    "RayNodes": "_ray_nodes",
    "RolloutConformance": "_rollout_conformance",
    "RunningCommand": "_running_command",
    "Script": "_fakes",
    "TinyFamily": "_tiny_models",
    "TrainEngineConformance": "_train_conformance",
    "changed_weights": "_reference",
    "fork_roles": "_forked_roles",
    "forked_main": "_forked_roles",
    "large_model_configs": "_large_models",
    "logprob_errors": "_reference",
    "ray_nodes": "_ray_nodes",
    "reference_logprobs": "_reference",
    "reference_model": "_reference",
    "small_grpo_run": "_small_runs",
    "small_sft_run": "_small_runs",
    "tiny_model": "_tiny_models",
    "tiny_tokenizer": "_tiny_models",
    "tiny_vision_model": "_tiny_vision_models",
    "wait_for_leaving_threads": "_leaving_threads",
    "wait_until_gone": "_running_command",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
