"""`k8s`: a RayJob of KubeRay for several nodes, a Job of Kubernetes for one."""

from typing import Any, Final

from offbeat_core import ConfigError
from offbeat_recipes._batch.job import BatchJob, checked, plan_job, quote_all, render, write_job
from offbeat_recipes._plan_command import Planner
from offbeat_run import CommandWords

K8S_OPTIONS: Final = ("cluster", "cpus", "image", "memory", "out", "resource", "storage")
_RESOURCES: Final = {"GPU": "nvidia.com/gpu"}
"""Names under which device plugins offer accelerators, by Ray's name of the kind; `--resource` names others."""
_QUANTITY: Final = r"\d+(\.\d+)?([kMGTP]i?|m)?"


def k8s_command(planner: Planner[Any], program: str, words: CommandWords, file: str) -> int:
    """`k8s FILE`: write a manifest for the machines of the plan.

    Raises:
        ConfigError: no image, or an option that Kubernetes would not read.
        UserError: whatever `plan` says of the recipe.
    """
    job = plan_job(planner, words, file, program, is_copied=True)
    return write_job(words, job, k8s_manifest(job, words), ".k8s.yaml", "kubectl apply -f {}")


def k8s_manifest(job: BatchJob, words: CommandWords) -> str:
    """Return the objects of a job, as YAML."""
    options = words.options
    if "image" not in options:
        ray = "[ray]" if job.num_nodes > 1 else ""
        raise ConfigError(f'k8s needs --image IMAGE: a container image in which "{job.program}{ray}" is installed')
    limits: dict[str, str] = {}
    for option, key in (("cpus", "cpu"), ("memory", "memory")):
        if option in options:
            limits[key] = checked(f"--{option}", options[option], _QUANTITY, "a quantity such as 32 or 256Gi")
    if job.devices_per_node:
        resource = options.get("resource") or _RESOURCES.get(job.kind, "")
        if not resource:
            raise ConfigError(f"k8s needs --resource NAME: what the cluster calls a device of kind {job.kind}")
        name = checked("--resource", resource, r"[\w.-]+/[\w.-]+", "a name such as nvidia.com/gpu")
        limits[name] = str(job.devices_per_node)
    values = {
        "image": checked("--image", options["image"], r"[\w./:@-]+", "a container image"),
        "limits": limits,
        "storage": checked("--storage", options.get("storage", "500Gi"), _QUANTITY, "a quantity such as 500Gi"),
        "recipe": job.config.read_text(encoding="utf-8").rstrip() + "\n",
        "settings": quote_all([*job.settings, f"--checkpoint.on_signal_s={job.save_s:g}"]),
    }
    return render("kubernetes.yaml.j2", job, values)
