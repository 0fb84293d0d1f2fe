"""`sky`: a task of SkyPilot."""

from typing import Any, Final

from offbeat_core import ConfigError
from offbeat_recipes._batch.job import BatchJob, checked, plan_job, quote_all, render, write_job
from offbeat_recipes._plan_command import Planner
from offbeat_run import CommandWords

SKY_OPTIONS: Final = ("accelerator", "bucket", "cluster", "image", "out")
_TOKEN: Final = "python3 -c 'import secrets; print(secrets.token_hex(32))'"


def sky_command(planner: Planner[Any], program: str, words: CommandWords, file: str) -> int:
    """`sky FILE`: write a task for the machines of the plan.

    Raises:
        ConfigError: no bucket for the run folder, or no name of the accelerator.
        UserError: whatever `plan` says of the recipe.
    """
    job = plan_job(planner, words, file, program, is_copied=True)
    secret = f' --secret RAY_AUTH_TOKEN="$({_TOKEN})"' if job.num_nodes > 1 else ""
    return write_job(words, job, sky_task(job, words), ".sky.yaml", f"sky jobs launch {{}}{secret}")


def sky_task(job: BatchJob, words: CommandWords) -> str:
    """Return the task of a job, as YAML."""
    options = words.options
    if "bucket" not in options:
        raise ConfigError("sky needs --bucket NAME, for the run folder: SkyPilot makes it if it is not there")
    if job.devices_per_node and "accelerator" not in options:
        raise ConfigError("sky needs --accelerator NAME, such as H100: `sky show-gpus` lists them")
    image = options.get("image", "")
    values = {
        "accelerator": checked("--accelerator", options.get("accelerator", "none"), r"[\w.+-]+", "a name such as H100"),
        "bucket": checked("--bucket", options["bucket"], r"[a-z0-9][a-z0-9._-]+", "the name of a bucket"),
        "image": image and checked("--image", image, r"[\w./:@-]+", "a container image"),
        "settings": quote_all([*job.settings, f"--checkpoint.on_signal_s={job.save_s:g}"]),
    }
    return render("sky.yaml.j2", job, values)
