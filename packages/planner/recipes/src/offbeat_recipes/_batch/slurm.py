"""`slurm`: a batch script for Slurm."""

import re
import shlex
import sys
from pathlib import Path
from typing import Any, Final

from offbeat_core import ConfigError
from offbeat_recipes._batch.job import BatchJob, checked, plan_job, quote_all, render, write_job
from offbeat_recipes._plan_command import Planner
from offbeat_run import CommandWords

SLURM_OPTIONS: Final = ("account", "cluster", "container", "out", "partition", "runs", "set", "time")
_NAME: Final = r"[A-Za-z0-9_.,@+-]+"
_TIME: Final = r"(\d+-)?\d+(:\d+){0,2}"
_DIRECTIVE: Final = re.compile(r"([a-z][a-z-]*)(?:=([^\s\"'\\#]*))?")


def slurm_command(planner: Planner[Any], program: str, words: CommandWords, file: str) -> int:
    """`slurm FILE`: write a batch script for the machines of the plan.

    Raises:
        ConfigError: an option that Slurm would not read.
        UserError: whatever `plan` says of the recipe.
    """
    job = plan_job(planner, words, file, program)
    return write_job(words, job, slurm_script(job, words), ".sbatch", "sbatch {}")


def slurm_script(job: BatchJob, words: CommandWords) -> str:
    """Return the batch script of a job."""
    options = words.options
    folder = Path.cwd()
    runs = folder / Path(options.get("runs", "runs")).expanduser()
    container = options.get("container", "")
    return render(
        "slurm.sbatch.j2",
        job,
        {
            "directives": _directives(job, words),
            "folder": folder,
            "runs": runs,
            "bin": "" if container else Path(sys.executable).parent,
            "container": [
                f"--container-image={container}",
                f"--container-mounts={_mounts({folder, runs, job.config.parent})}",
            ]
            if container
            else [],
            "settings": quote_all([*job.settings, f"--checkpoint.on_signal_s={job.save_s:g}"]),
        },
    )


def _mounts(folders: set[Path]) -> str:
    for folder in folders:
        if set(str(folder)) & set(",:"):
            raise ConfigError(f"--container: {folder} has a comma or a colon in its name, which mounts cannot have")
    return ",".join(f"{folder}:{folder}" for folder in sorted(folders))


def _directives(job: BatchJob, words: CommandWords) -> list[str]:
    """Return the options of sbatch, without their dashes; those of `--set` replace ours, and `KEY=` removes one."""
    options = words.options
    devices = {"GPU": ("gpus-per-node", str(job.devices_per_node))}
    held: dict[str, str | None] = {
        "job-name": job.name,
        "nodes": str(job.num_nodes),
        "ntasks-per-node": "1",
        "exclusive": None,
        "mem": "0",
        "time": checked("--time", options.get("time", "24:00:00"), _TIME, "minutes, H:MM:SS or D-H:MM:SS"),
        "requeue": None,
        "open-mode": "append",
        "output": "%x-%j.out",
        "signal": f"B:USR1@{job.warn_s}",
    }
    for name in ("partition", "account"):
        if name in options:
            held[name] = checked(f"--{name}", options[name], _NAME, "a name")
    if job.devices_per_node:
        key, value = devices.get(job.kind, ("gres", f"{job.kind.lower()}:{job.devices_per_node}"))
        held[key] = value
    for word in shlex.split(options.get("set", "")):
        if not (read := _DIRECTIVE.fullmatch(word)):
            raise ConfigError(f"--set takes KEY=VALUE words, such as 'qos=high constraint=h100': got {word!r}")
        key, given = read.groups()
        held[key] = given
        if given == "":
            del held[key]
    return [key if value is None else f"{key}={value}" for key, value in held.items()]
