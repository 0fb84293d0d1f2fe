"""A tracker is a line in the configuration; one that is missing says how to install it."""

import importlib.util
import math
from pathlib import Path

import pytest

from offbeat_run import LogConfig, MetricsLog, RunFolder, check_trackers, open_trackers
from offbeat_types import BackendError

TRACKERS = ("wandb", "trackio", "mlflow")


@pytest.mark.parametrize("name", TRACKERS)
def test_a_tracker_that_is_not_installed_names_its_install_line(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, name, None)  # what Python itself does to forbid an import
    with (
        RunFolder.create(tmp_path / "run") as run,
        pytest.raises(BackendError, match=rf'{name} is not installed \(.*pip install "offbeat-run\[{name}\]"'),
    ):
        open_trackers(LogConfig(trackers=(name,)), run)
    with pytest.raises(BackendError, match=rf'{name} is not installed; .*pip install "offbeat-run\[{name}\]"'):
        check_trackers(LogConfig(trackers=(name,)))


def test_a_tracker_that_does_not_start_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "wandb.py").write_text("def init(**_): raise RuntimeError('no key')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(__import__("sys").modules, "wandb", raising=False)
    with (
        RunFolder.create(tmp_path / "run") as run,
        pytest.raises(BackendError, match=r"wandb did not start: no key; put it right, or leave it out"),
    ):
        open_trackers(LogConfig(trackers=("wandb",)), run)
    monkeypatch.delitem(__import__("sys").modules, "wandb", raising=False)


@pytest.mark.skipif(importlib.util.find_spec("mlflow") is None, reason="mlflow is an extra: offbeat-run[mlflow]")
def test_mlflow_gets_the_finite_numbers_and_goes_on_with_the_same_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import mlflow

    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    log = LogConfig(trackers=("mlflow",), project="offbeat-test")
    with RunFolder.create(tmp_path / "run") as run:
        for step in (1, 2):
            with MetricsLog(run, tensorboard=False, trackers=open_trackers(log, run)) as metrics:
                metrics.write(step, {"a": step / 2, "nan": math.nan, "h": [1, 2]})
    (found,) = mlflow.search_runs(experiment_names=["offbeat-test"], output_format="list")
    history = mlflow.MlflowClient().get_metric_history(found.info.run_id, "a")
    assert [(each.step, each.value) for each in history] == [(1, 0.5), (2, 1.0)]
    assert set(found.data.metrics) == {"a"}
