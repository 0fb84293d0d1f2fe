"""Trackers of experiments that get the metrics too. Each is imported only when the configuration asks for it."""

import importlib
import importlib.util
import uuid
from collections.abc import Callable
from typing import Any

from offbeat_run._config.sections import LogConfig
from offbeat_run._folder import RunFolder
from offbeat_run._metrics import Tracker
from offbeat_types import BackendError


def check_trackers(log: LogConfig) -> None:
    """See whether the packages of `log.trackers` are there, without importing them.

    Raises:
        BackendError: one is not, with the line that installs it.
    """
    for name in log.trackers:
        if importlib.util.find_spec(name) is None:
            raise _missing(name)


def open_trackers(log: LogConfig, run: RunFolder) -> tuple[Tracker, ...]:
    """Open the trackers of `log.trackers`; the run is listed under the name of its folder, and goes on there on resume.

    Raises:
        BackendError: the package of one is missing, with the line that installs it, or it refuses to start.
    """
    opened: list[Tracker] = []
    for name in log.trackers:
        module = _import(name)
        try:
            opened.append(_OPENERS[name](module, log.project, run))
        except Exception as error:
            for tracker in opened:
                tracker.close()
            raise BackendError(
                f"log.trackers: {name} did not start: {error}; put it right, or leave it out of log.trackers"
            ) from error
    return tuple(opened)


def _import(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise _missing(name, f" ({error})") from error


def _missing(name: str, why: str = "") -> BackendError:
    return BackendError(
        f"log.trackers: {name} is not installed{why}; leave it out, or install it with: "
        f'pip install "offbeat-run[{name}]"'
    )


def _open_wandb(wandb: Any, project: str, run: RunFolder) -> Tracker:
    started = wandb.init(project=project, name=run.path.name, id=_run_id(run), resume="allow", dir=str(run.logs))
    # Validation may come after an update of the same step was sent; W&B's own counter allows no step back, so
    # the step is a metric like others and the axis of all of them.
    started.define_metric("step")
    started.define_metric("*", step_metric="step")
    return Tracker(lambda values, step: started.log({**values, "step": step}), started.finish)


def _open_trackio(trackio: Any, project: str, run: RunFolder) -> Tracker:
    trackio.init(project=project, name=run.path.name, resume="allow")
    return Tracker(lambda values, step: trackio.log(values, step=step), trackio.finish)


def _open_mlflow(mlflow: Any, project: str, run: RunFolder) -> Tracker:
    mlflow.set_experiment(project)
    tag = _run_id(run)
    found = mlflow.search_runs(
        experiment_names=[project], filter_string=f"tags.offbeat_run = '{tag}'", output_format="list"
    )
    known = found[0].info.run_id if found else None
    mlflow.start_run(run_id=known, run_name=None if known else run.path.name, tags={"offbeat_run": tag})
    return Tracker(lambda values, step: mlflow.log_metrics(values, step=step), mlflow.end_run)


def _run_id(run: RunFolder) -> str:
    """The same on every resume: made once, kept in the run folder."""
    path = run.logs / "tracker_id"
    if not path.is_file():
        run.write_text(path, uuid.uuid4().hex[:12])
    return path.read_text().strip()


_OPENERS: dict[str, Callable[[Any, str, RunFolder], Tracker]] = {
    "wandb": _open_wandb,
    "trackio": _open_trackio,
    "mlflow": _open_mlflow,
}
