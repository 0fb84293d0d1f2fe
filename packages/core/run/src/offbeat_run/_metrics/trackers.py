"""Trackers of experiments that get the metrics too, and completions as tables with their images.

Each is imported only when the configuration asks for it.
"""

import base64
import importlib
import importlib.util
import io
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from offbeat_core import BackendError
from offbeat_run._config.sections import LogConfig
from offbeat_run._folder.folder import RunFolder
from offbeat_run._metrics.metrics import Tracker

_COLUMNS: Final = ("step", "set", "version", "reward", "prompt", "completion", "answer", "num_tokens", "stop_reason")
"""Columns of the table of completions, before its images."""


def check_trackers(log: LogConfig) -> None:
    """See whether the packages of `log.trackers` are there, without importing them.

    Raises:
        BackendError: one is not, with the line that installs it.
    """
    for name in log.trackers:
        if importlib.util.find_spec(name) is None:
            raise _missing(name)


def tracker_notices(log: LogConfig) -> list[str]:
    """Say what `check_trackers` would refuse, for a plan, which needs no tracker."""
    try:
        check_trackers(log)
    except BackendError as error:
        return [str(error)]
    return []


def open_trackers(log: LogConfig, run: RunFolder) -> tuple[Tracker, ...]:
    """Open the trackers of `log.trackers`; the run is listed under the name of its folder, and continues on resume.

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
                f"log.trackers: {name} did not start: {error}; fix the cause, or leave it out of log.trackers"
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


Rows = Sequence[Mapping[str, Any]]
"""Completions as plain data: see `Generation`."""


def _table(rows: Rows, as_image: Callable[[Any], Any]) -> tuple[list[str], list[list[Any]]]:
    """Names of the columns, and the rows; one column for each image of the row that has most."""
    most = max(len(row["images"]) for row in rows)
    names = [*_COLUMNS, *(f"image {number}" for number in range(1, most + 1))]
    table = []
    for row in rows:
        images = [as_image(_picture(address)) for address in row["images"]]
        table.append([*(row[name] for name in _COLUMNS), *images, *[None] * (most - len(images))])
    return names, table


def _picture(address: str) -> Any:
    """Return a picture of Pillow's, from a `data:` address that was made with it."""
    from PIL import Image

    return Image.open(io.BytesIO(base64.b64decode(address.partition(",")[2])), formats=("PNG", "JPEG"))


def _open_wandb(wandb: Any, project: str, run: RunFolder) -> Tracker:
    started = wandb.init(project=project, name=run.path.name, id=_run_id(run), resume="allow", dir=str(run.logs))
    # Validation may come after an update of the same step was sent; W&B's own counter allows no step back, so
    # the step is a metric like others and the axis of all of them.
    started.define_metric("step")
    started.define_metric("*", step_metric="step")

    def write_table(name: str, step: int, rows: Rows) -> None:
        # Images of a table go into an artifact of it alone; so that they are seen beside the run's curves, once more.
        columns, data = _table(rows, wandb.Image)
        images = [
            wandb.Image(_picture(address), caption=row["prompt"][:200]) for row in rows for address in row["images"]
        ]
        shown = {f"{name} images": images} if images else {}
        started.log({name: wandb.Table(columns=columns, data=data), **shown, "step": step})

    return Tracker(lambda values, step: started.log({**values, "step": step}), started.finish, write_table)


def _open_trackio(trackio: Any, project: str, run: RunFolder) -> Tracker:
    trackio.init(project=project, name=run.path.name, resume="allow")

    def write_table(name: str, step: int, rows: Rows) -> None:
        columns, data = _table(rows, trackio.Image)
        trackio.log({name: trackio.Table(columns=columns, data=data)}, step=step)

    return Tracker(lambda values, step: trackio.log(values, step=step), trackio.finish, write_table)


def _open_mlflow(mlflow: Any, project: str, run: RunFolder) -> Tracker:
    mlflow.set_experiment(project)
    tag = _run_id(run)
    found = mlflow.search_runs(
        experiment_names=[project], filter_string=f"tags.offbeat_run = '{tag}'", output_format="list"
    )
    known = found[0].info.run_id if found else None
    mlflow.start_run(run_id=known, run_name=None if known else run.path.name, tags={"offbeat_run": tag})

    def write_table(name: str, step: int, rows: Rows) -> None:
        pictures: list[Any] = []

        def as_file(picture: Any) -> str:
            pictures.append(picture)
            return f"{name}-{step:06d}-{len(pictures)}.png"

        # The images lie beside the table, which names their files: a column of MLflow's holds images alone, or none.
        columns, data = _table(rows, as_file)
        for number, picture in enumerate(pictures, 1):
            mlflow.log_image(picture, artifact_file=f"{name}-{step:06d}-{number}.png")
        # A file for each step: to append to one, MLflow fetches it and writes all of it anew.
        by_column = dict(zip(columns, map(list, zip(*data, strict=True)), strict=True))
        mlflow.log_table(by_column, artifact_file=f"{name}-{step:06d}.json")

    return Tracker(lambda values, step: mlflow.log_metrics(values, step=step), mlflow.end_run, write_table)


def _run_id(run: RunFolder) -> str:
    """Return the same on every resume: made once, kept in the run folder."""
    path = run.logs / "tracker_id"
    if not path.is_file():
        run.write_text(path, uuid.uuid4().hex[:12])
    return path.read_text().strip()


_OPENERS: dict[str, Callable[[Any, str, RunFolder], Tracker]] = {
    "wandb": _open_wandb,
    "trackio": _open_trackio,
    "mlflow": _open_mlflow,
}
