"""The files for SkyPilot and Kubernetes: valid by their own schemas, and started as they say."""

import json
import os
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator
from jsonschema.validators import extend

from offbeat_core import ConfigError
from offbeat_recipes._batch.job import RAY_VERSION, BatchJob
from offbeat_recipes._batch.kubernetes import k8s_manifest
from offbeat_recipes._batch.sky import sky_task
from offbeat_run import CommandWords

PROGRAM = "a-program-of-this-test"
HOSTILE = "--data.path=$(touch hit) `touch hit` \"; touch hit #' \\ é"
SCHEMAS = Path(__file__).parent / "batch_schemas"
LAYOUTS = pytest.mark.parametrize(
    ("num_nodes", "devices", "kind"), [(1, 0, ""), (1, 8, "GPU"), (2, 8, "GPU"), (4, 16, "TPU")]
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my.toml").write_text('[model]\npath = "a: b"  # $(touch hit)\n\n\t[data]\npath = "{{ x }}"\n')
    return tmp_path


def job_of(folder: Path, num_nodes: int, devices: int = 8, kind: str = "GPU") -> BatchJob:
    return BatchJob(
        program=PROGRAM,
        name="my-run",
        config=folder / "my.toml",
        settings=(HOSTILE,),
        num_nodes=num_nodes,
        devices_per_node=devices,
        kind=kind,
        save_s=240.0,
    )


def sky(job: BatchJob, **options: str) -> dict[str, Any]:
    words = CommandWords(options={"bucket": "runs-of-us", "accelerator": "H100", **options})
    return dict(yaml.safe_load(sky_task(job, words)))


def k8s(job: BatchJob, **options: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(k8s_manifest(job, CommandWords(options={"image": "us/run:1", **options}))))


@cache
def recorded(name: str) -> dict[str, Any]:
    return dict(json.loads((SCHEMAS / f"{name}.json").read_text()))


def _any_case(_: Any, wanted: list[str], value: Any, __: Any) -> Iterator[Exception]:
    """SkyPilot's own keyword (sky/utils/validator.py)."""
    from jsonschema import ValidationError

    if value.lower() not in [each.lower() for each in wanted]:
        yield ValidationError(f"{value} is none of {wanted}")


def check(value: Any, schema: dict[str, Any]) -> None:
    extend(Draft202012Validator, {"case_insensitive_enum": _any_case})(schema).validate(value)


def check_kubernetes(value: Any, kind: str) -> None:
    check(value, {**recorded("kubernetes")[kind], "$defs": recorded("kubernetes")["$defs"]})


@LAYOUTS
def test_a_task_is_valid_by_the_schemas_of_skypilot(folder: Path, num_nodes: int, devices: int, kind: str) -> None:
    task = sky(job_of(folder, num_nodes, devices, kind), image="us/run:1")
    check(task, recorded("skypilot")["task"])
    check(task["resources"], recorded("skypilot")["resources"])
    check(task["file_mounts"]["/runs"], recorded("skypilot")["storage"])
    assert task["num_nodes"] == num_nodes
    assert task["resources"].get("accelerators") == (f"H100:{devices}" if devices else None)


@LAYOUTS
def test_a_manifest_is_valid_by_the_schemas_of_kubernetes_and_kuberay(
    folder: Path, num_nodes: int, devices: int, kind: str
) -> None:
    named = {"TPU": {"resource": "google.com/tpu"}}.get(kind, {})
    config, claim, job = k8s(job_of(folder, num_nodes, devices, kind), cpus="32", memory="256Gi", **named)
    check_kubernetes(config, "configmap-v1")
    check_kubernetes(claim, "persistentvolumeclaim-v1")
    resource = {"GPU": "nvidia.com/gpu", "TPU": "google.com/tpu"}.get(kind)
    templates = [job["spec"]["template"]] if num_nodes == 1 else []
    if num_nodes == 1:
        check_kubernetes(job, "job-batch-v1")
    else:
        check(job["spec"], recorded("kuberay")["spec"])
        cluster = job["spec"]["rayClusterSpec"]
        (workers,) = cluster["workerGroupSpecs"]
        assert workers["replicas"] == num_nodes - 1
        templates = [cluster["headGroupSpec"]["template"], workers["template"]]
    for template in templates:
        check_kubernetes(template, "podtemplatespec-v1")
        (container,) = template["spec"]["containers"]
        assert container["resources"]["limits"].get(resource) == (str(devices) if devices else None)
    assert config["data"]["recipe.toml"] == (folder / "my.toml").read_text()


def test_schemas_refuse_what_is_misspelt(folder: Path) -> None:
    """The records are of use only as long as they refuse something."""
    job = k8s(job_of(folder, 2))[2]
    job["spec"]["rayClusterSpec"]["authOption"] = {}
    with pytest.raises(Exception, match="authOption"):
        check(job["spec"], recorded("kuberay")["spec"])
    one = k8s(job_of(folder, 1))[2]
    one["spec"]["template"]["spec"]["container"] = []
    with pytest.raises(Exception, match="container"):
        check_kubernetes(one, "job-batch-v1")
    task = sky(job_of(folder, 2))
    with pytest.raises(Exception, match="num_node"):
        check({**task, "num_node": 2}, recorded("skypilot")["task"])


def started(folder: Path, script: str, runs: Path) -> list[list[str]]:
    """Run a script of one node twice, with a program that stands in; return the words it gets each time."""
    path = folder / "bin" / PROGRAM
    path.parent.mkdir()
    path.write_text(f"#!/bin/bash\nprintf '%s\\n' \"$@\" >{folder}/words\nmkdir -p {runs}\ntouch {runs}/config.toml\n")
    path.chmod(0o755)
    environment = os.environ | {"PATH": f"{path.parent}{os.pathsep}{os.environ['PATH']}"}
    found = []
    for _ in range(2):
        subprocess.run(["bash", "-c", script], env=environment, check=True, cwd=folder)
        found.append((folder / "words").read_text().splitlines())
    assert not (folder / "hit").exists()
    return found


def test_a_task_trains_and_a_second_time_resumes_with_values_as_they_are(folder: Path) -> None:
    script = sky(job_of(folder, 1))["run"].replace("/runs/my-run", str(folder / "run"))
    first, second = started(folder, script, folder / "run")
    assert first[:4] == ["train", "/tmp/my-run.toml", "--out", str(folder / "run")]
    assert HOSTILE in first
    assert second == ["resume", str(folder / "run"), "--cluster.launcher=local"]


def test_a_job_trains_and_a_second_time_resumes_with_values_as_they_are(folder: Path) -> None:
    script = k8s(job_of(folder, 1))[0]["data"]["start.sh"].replace("/runs/my-run", str(folder / "run"))
    first, second = started(folder, script, folder / "run")
    assert first[:4] == ["train", "/config/recipe.toml", "--out", str(folder / "run")]
    assert HOSTILE in first
    assert second == ["resume", str(folder / "run"), "--cluster.launcher=local"]


def test_bash_reads_the_scripts_of_several_nodes(folder: Path) -> None:
    job = job_of(folder, 2)
    for script in (sky(job)["run"], k8s(job)[0]["data"]["start.sh"]):
        done = subprocess.run(["bash", "-n"], input=script, text=True, capture_output=True)
        assert (done.returncode, done.stderr) == (0, "")


def test_a_cluster_of_several_nodes_has_a_token(folder: Path) -> None:
    assert k8s(job_of(folder, 2))[2]["spec"]["rayClusterSpec"]["authOptions"] == {"mode": "token"}
    task = sky(job_of(folder, 2))
    assert task["envs"]["RAY_AUTH_MODE"] == "token"
    assert task["secrets"] == {"RAY_AUTH_TOKEN": None}, "SkyPilot asks for it"


def test_the_release_of_ray_is_one_that_the_launcher_takes() -> None:
    project = (Path(__file__).parents[3] / "runtime" / "actors" / "pyproject.toml").read_text()
    major, minor, _ = RAY_VERSION.split(".")
    assert f'"ray>={major}.{minor},<' in project


@pytest.mark.parametrize(
    ("write", "options", "wanted"),
    [
        (sky_task, {}, "--bucket NAME"),
        (sky_task, {"bucket": "a b", "accelerator": "H100"}, "--bucket takes"),
        (sky_task, {"bucket": "us"}, "--accelerator NAME"),
        (sky_task, {"bucket": "us", "accelerator": "H100:8\nrun: x"}, "--accelerator takes"),
        (k8s_manifest, {}, "--image IMAGE"),
        (k8s_manifest, {"image": 'a"'}, "--image takes"),
        (k8s_manifest, {"image": "a", "memory": "much"}, "--memory takes"),
        (k8s_manifest, {"image": "a", "resource": "gpu"}, "--resource takes"),
    ],
)
def test_what_is_missing_or_cannot_be_read_is_named(
    folder: Path, write: Any, options: dict[str, str], wanted: str
) -> None:
    with pytest.raises(ConfigError, match=wanted):
        write(job_of(folder, 2), CommandWords(options=options))
