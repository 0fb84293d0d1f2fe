"""When to generate, when to update, when to sync: the control logic of asynchronous RL, its loop and its simulator."""

from offbeat_async_policy._actions import Action, Drop, Finish, Submit, Sync, Update
from offbeat_async_policy._backend import GroupResult, LoopBackend
from offbeat_async_policy._cluster import Cluster, Workload
from offbeat_async_policy._config import AsyncConfig
from offbeat_async_policy._describe import PolicyStatus
from offbeat_async_policy._loop import LoopSummary, run_loop
from offbeat_async_policy._measured_lengths import read_lengths
from offbeat_async_policy._policy import AsyncPolicy
from offbeat_async_policy._run_measures import RunMeasures, read_run, scenario_text
from offbeat_async_policy._scenario import Scenario
from offbeat_async_policy._scenario_file import read_scenario
from offbeat_async_policy._scenario_model import ScenarioModel
from offbeat_async_policy._simulate import simulate
from offbeat_async_policy._simulation_report import SimulationReport
from offbeat_async_policy._statistics import Statistics
from offbeat_async_policy._workload import DecodeCurve, DecodeTime, Lengths

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
