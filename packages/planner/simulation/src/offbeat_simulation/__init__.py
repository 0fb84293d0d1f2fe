"""Asynchronous RL on a simulated cluster: the control logic of a real run, on a simulated clock. No torch."""

from offbeat_simulation._runs import RunMeasures, read_run, scenario_text
from offbeat_simulation._scenario import Scenario, ScenarioModel, read_scenario
from offbeat_simulation._simulate import SimulationReport, simulate
from offbeat_simulation._workload import Cluster, DecodeCurve, DecodeTime, Lengths, Workload

__all__ = [
    "Cluster",
    "DecodeCurve",
    "DecodeTime",
    "Lengths",
    "RunMeasures",
    "Scenario",
    "ScenarioModel",
    "SimulationReport",
    "Workload",
    "read_run",
    "read_scenario",
    "scenario_text",
    "simulate",
]
