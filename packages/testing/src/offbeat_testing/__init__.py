"""Conformance suites, fakes and tiny models for authors of offbeat engines; tests on several processes.

Names are imported when asked for: the plugin lives in this package, and every pytest session loads it.
"""

from typing import TYPE_CHECKING

from offbeat_testing._lazy import load_lazily

if TYPE_CHECKING:
    from offbeat_testing._commands import (
        CommandConformance,
        CommandEnded,
        CommandLine,
        log_every_stage,
        small_grpo_run,
        small_sft_run,
    )
    from offbeat_testing._disk import DAMAGES, DiskRecord, DiskStep, drop_digests
    from offbeat_testing._fakes import FakeRolloutEngine, FakeWeightStream, Script
    from offbeat_testing._forked_roles import fork_roles, forked_main
    from offbeat_testing._hub import HubServer
    from offbeat_testing._models import (
        TinyFamily,
        changed_weights,
        large_model_configs,
        logprob_errors,
        reference_logprobs,
        reference_model,
        tiny_model,
        tiny_tokenizer,
        tiny_vision_model,
    )
    from offbeat_testing._processes import RunningCommand, read_terminal, wait_for_leaving_threads, wait_until_gone
    from offbeat_testing._ranks._child import Ranks
    from offbeat_testing._ray_nodes import RayNodes, ray_nodes
    from offbeat_testing._rollout_conformance import RolloutConformance
    from offbeat_testing._slurm import SlurmStandIn
    from offbeat_testing._torchrun import TorchrunNodes
    from offbeat_testing._train_conformance import TrainEngineConformance

__all__ = [
    "DAMAGES",
    "CommandConformance",
    "CommandEnded",
    "CommandLine",
    "DiskRecord",
    "DiskStep",
    "FakeRolloutEngine",
    "FakeWeightStream",
    "HubServer",
    "Ranks",
    "RayNodes",
    "RolloutConformance",
    "RunningCommand",
    "Script",
    "SlurmStandIn",
    "TinyFamily",
    "TorchrunNodes",
    "TrainEngineConformance",
    "changed_weights",
    "drop_digests",
    "fork_roles",
    "forked_main",
    "large_model_configs",
    "log_every_stage",
    "logprob_errors",
    "ray_nodes",
    "read_terminal",
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

__getattr__, __dir__ = load_lazily(
    __name__,
    {
        "_commands": "CommandConformance CommandEnded CommandLine log_every_stage small_grpo_run small_sft_run",
        "_disk": "DAMAGES DiskRecord DiskStep drop_digests",
        "_fakes": "FakeRolloutEngine FakeWeightStream Script",
        "_forked_roles": "fork_roles forked_main",
        "_hub": "HubServer",
        "_models": "changed_weights large_model_configs logprob_errors reference_logprobs reference_model"
        " tiny_model tiny_tokenizer tiny_vision_model TinyFamily",
        "_processes": "read_terminal RunningCommand wait_for_leaving_threads wait_until_gone",
        "_ranks._child": "Ranks",
        "_ray_nodes": "ray_nodes RayNodes",
        "_rollout_conformance": "RolloutConformance",
        "_slurm": "SlurmStandIn",
        "_torchrun": "TorchrunNodes",
        "_train_conformance": "TrainEngineConformance",
    },
)
