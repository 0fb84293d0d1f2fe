"""When to generate, when to update, when to sync: the control logic of asynchronous RL, its loop and its simulator."""

from offbeat_async_policy._config import AsyncConfig
from offbeat_async_policy._loop import GroupResult, LoopBackend, LoopSummary, run_loop
from offbeat_async_policy._policy import AsyncPolicy
from offbeat_async_policy._simulation.runs import RunMeasures, read_run, scenario_text
from offbeat_async_policy._simulation.scenario import Scenario, ScenarioModel, read_scenario
from offbeat_async_policy._simulation.simulate import SimulationReport, simulate
from offbeat_async_policy._simulation.workload import Cluster, DecodeCurve, DecodeTime, Lengths, Workload, read_lengths
from offbeat_async_policy._state import Action, Drop, Finish, PolicyStatus, Statistics, Submit, Sync, Update

__all__ = [
    "Action",
    "AsyncConfig",
    "AsyncPolicy",
    "Cluster",
    "DecodeCurve",
    "DecodeTime",
    "Drop",
    "Finish",
    "GroupResult",
    "Lengths",
    "LoopBackend",
    "LoopSummary",
    "PolicyStatus",
    "RunMeasures",
    "Scenario",
    "ScenarioModel",
    "SimulationReport",
    "Statistics",
    "Submit",
    "Sync",
    "Update",
    "Workload",
    "read_lengths",
    "read_run",
    "read_scenario",
    "run_loop",
    "scenario_text",
    "simulate",
]
