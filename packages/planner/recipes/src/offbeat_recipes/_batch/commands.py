"""The commands that write what a batch system takes."""

from functools import partial
from typing import Any

from offbeat_recipes._batch.kubernetes import K8S_OPTIONS, k8s_command
from offbeat_recipes._batch.sky import SKY_OPTIONS, sky_command
from offbeat_recipes._batch.slurm import SLURM_OPTIONS, slurm_command
from offbeat_recipes._plan_command import Planner
from offbeat_run import Command


def batch_commands(planner: Planner[Any], program: str) -> dict[str, Command]:
    """Return the commands `slurm`, `sky` and `k8s` of an application.

    Args:
        planner: of the application.
        program: its name on the command line.
    """
    return {
        "slurm": Command(partial(slurm_command, planner, program), "FILE", options=SLURM_OPTIONS, overrides=True),
        "sky": Command(partial(sky_command, planner, program), "FILE", options=SKY_OPTIONS, overrides=True),
        "k8s": Command(partial(k8s_command, planner, program), "FILE", options=K8S_OPTIONS, overrides=True),
    }
