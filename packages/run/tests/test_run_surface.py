"""Importing the package loads nothing heavy."""

import subprocess
import sys

import offbeat_run


def test_importing_loads_no_library_before_it_is_needed() -> None:
    code = "import sys, offbeat_run\nprint(*sorted({name.partition('.')[0] for name in sys.modules}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    heavy = {"torch", "plotly", "tensorboardX", "jinja2", "wandb", "trackio", "mlflow", "ray", "vllm", "transformers"}
    assert not heavy & set(done.stdout.split())


def test_every_metric_of_the_report_is_written_down_with_its_meaning() -> None:
    assert {
        "train/reward",
        "async/lag_histogram",
        "eval/loss",
        "engine/steps_refused",
    } <= offbeat_run.METRIC_NAMES.keys()
    assert all(metric.doc.endswith(".") for metric in offbeat_run.METRIC_NAMES.values())
