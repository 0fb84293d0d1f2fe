"""Records the schemas of SkyPilot, Kubernetes and KubeRay that offbeat's batch files are checked against.

    python tools/record_batch_schemas.py KUBERAY_GIT_DIRECTORY TAG

Run it where `skypilot` and `kubernetes-validate` are installed, which need versions of packages that the workspace does
not have. Descriptions are left out, and so are the copies of Kubernetes' schema of a pod that KubeRay's schema holds.
"""

import json
import re
import subprocess
import sys
from importlib import import_module
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml

TARGET = Path(__file__).parents[1] / "packages/planner/recipes/tests/batch_schemas"
KUBERNETES = "v1.37.0-local-strict"
KINDS = ("configmap-v1", "persistentvolumeclaim-v1", "job-batch-v1", "podtemplatespec-v1")
CRD = "ray-operator/config/crd/bases/ray.io_rayjobs.yaml"


def bare(schema: Any) -> Any:
    """Return a schema without descriptions."""
    if isinstance(schema, dict):
        return {key: bare(value) for key, value in schema.items() if key != "description" or isinstance(value, dict)}
    return [bare(each) for each in schema] if isinstance(schema, list) else schema


def closed(schema: Any) -> Any:
    """Return a schema of a custom resource that refuses unknown fields, as `kubectl apply` does; any pod fits."""
    if not isinstance(schema, dict):
        return schema
    if {"spec", "metadata"} <= schema.get("properties", {}).keys():
        return {"type": "object"}
    result = {key: {name: closed(each) for name, each in value.items()} if key == "properties" else closed(value)
              for key, value in schema.items()}  # fmt: skip
    return result | ({"additionalProperties": False} if "properties" in result else {})


def kubernetes() -> dict[str, Any]:
    """Return the schemas of the kinds, and the definitions that they refer to."""
    folder = files("kubernetes_validate") / "kubernetes-json-schema" / KUBERNETES
    definitions = json.loads((folder / "_definitions.json").read_text())["$defs"]
    kinds = {kind: bare(json.loads((folder / f"{kind}.json").read_text())) for kind in KINDS}
    held, awaited = dict[str, Any](), re.findall(r"#/[$]defs/([\w.]+)", json.dumps(kinds))
    while awaited:
        if (name := awaited.pop()) not in held:
            held[name] = bare(definitions[name])
            awaited += re.findall(r"#/[$]defs/([\w.]+)", json.dumps(held[name]))
    text = json.dumps({**kinds, "$defs": held})
    found: dict[str, Any] = json.loads(re.sub(r"[\w:/.-]*_definitions.json#/[$]defs/", "#/$defs/", text))
    return found


def main(git_directory: str, tag: str) -> None:
    """Write the three records."""
    sky = import_module("sky.utils.schemas")
    crd = subprocess.check_output(["git", f"--git-dir={git_directory}", "show", f"{tag}:{CRD}"], text=True)
    served = next(each for each in yaml.safe_load(crd)["spec"]["versions"] if each["storage"])
    spec = served["schema"]["openAPIV3Schema"]["properties"]["spec"]
    records = {
        "skypilot": (
            f"skypilot {version('skypilot')}, sky/utils/schemas.py",
            {name: getattr(sky, f"get_{name}_schema")() for name in ("task", "resources", "storage")},
        ),
        "kubernetes": (f"kubernetes-validate {version('kubernetes-validate')}, {KUBERNETES}", kubernetes()),
        "kuberay": (f"github.com/ray-project/kuberay {tag}, {CRD}", {"spec": closed(bare(spec))}),
    }
    TARGET.mkdir(exist_ok=True)
    for name, (source, schemas) in records.items():
        text = json.dumps({"source": source, "licence": "Apache-2.0", **schemas}, separators=(",", ":"))
        (TARGET / f"{name}.json").write_text(text + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
