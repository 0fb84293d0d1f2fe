"""The real trackers, offline: numbers, completions as tables, and their images."""

import base64
import importlib.util
import io
import json
import math

import pytest

from offbeat_run import Generation, LogConfig, RunFolder, RunLog

pytestmark = pytest.mark.nightly


def needs(name):
    return pytest.mark.skipif(importlib.util.find_spec(name) is None, reason=f"an extra: offbeat-run[{name}]")


def picture():
    from PIL import Image

    held = io.BytesIO()
    Image.new("RGB", (4, 3), (200, 30, 30)).save(held, "PNG")
    return f"data:image/png;base64,{base64.b64encode(held.getvalue()).decode()}"


def said(step, kind, **about):
    return Generation(
        step=step, kind=kind, version=step, prompt="1+1=", completion="2 <b>", reward=0.5, answer="2", **about
    )


def write_a_run(tmp_path, tracker, resume_step=None):
    """Two steps: one validated, with an image in one of its rows, and one trained on."""
    log = LogConfig(trackers=(tracker,), project="offbeat-test", tensorboard=False)
    run = RunFolder.create(tmp_path / "run") if resume_step is None else RunFolder.open(tmp_path / "run")
    with run, RunLog(run, log, 2, resume_step) as written:
        run.write_text(run.config, "")
        run.keep()
        step = 1 if resume_step is None else resume_step + 1
        written.write(step, {"a": step / 2, "nan": math.nan, "h": [1, 2], "eval/aime/pass_at_8": 0.25})
        written.write_generations([said(step, "validation", set="aime", images=(picture(),)), said(step, "validation")])
        written.write_generations([said(step, "train")])


@needs("mlflow")
def test_mlflow_gets_numbers_tables_and_images_and_goes_on_with_the_same_run(tmp_path, monkeypatch):
    import mlflow

    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    monkeypatch.chdir(tmp_path)
    write_a_run(tmp_path, "mlflow")
    write_a_run(tmp_path, "mlflow", resume_step=1)
    (found,) = mlflow.search_runs(experiment_names=["offbeat-test"], output_format="list")
    history = mlflow.MlflowClient().get_metric_history(found.info.run_id, "a")
    assert [(each.step, each.value) for each in history] == [(1, 0.5), (2, 1.0)]
    assert set(found.data.metrics) == {"a", "eval/aime/pass_at_8"}
    for kind, rows in (("validation", 2), ("train", 1)):
        for step in (1, 2):
            table = mlflow.load_table(f"generations/{kind}-{step:06d}.json", run_ids=[found.info.run_id])
            assert list(table["completion"]) == ["2 <b>"] * rows
            assert list(table["step"]) == [step] * rows
    held = [
        each.path for each in mlflow.artifacts.list_artifacts(run_id=found.info.run_id, artifact_path="generations")
    ]
    assert "generations/validation-000001-1.png" in held
    validated = mlflow.load_table("generations/validation-000001.json", run_ids=[found.info.run_id])
    assert "generations/validation-000001-1.png" in set(validated["image 1"])


@needs("wandb")
def test_wandb_gets_numbers_tables_and_images_offline(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    write_a_run(tmp_path, "wandb")
    logs = tmp_path / "run" / "logs"
    tables = [json.loads(path.read_text()) for path in logs.rglob("*.table.json")]
    by_rows = {len(table["data"]): table for table in tables}
    assert set(by_rows) == {1, 2}, "one table of the validation, one of what was trained on"
    assert by_rows[2]["columns"][-1] == "image 1"
    assert by_rows[2]["data"][0][by_rows[2]["columns"].index("set")] == "aime"
    assert by_rows[1]["data"][0][by_rows[1]["columns"].index("completion")] == "2 <b>"
    assert [path.name for path in logs.rglob("media/images/**/*.*")], "the image lies beside the table"
    assert list(logs.rglob("*.wandb")), "what `wandb sync` sends"


@needs("trackio")
def test_trackio_gets_numbers_tables_and_images_on_this_machine(tmp_path, monkeypatch):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    import trackio

    write_a_run(tmp_path, "trackio")
    from trackio.sqlite_storage import SQLiteStorage

    rows = SQLiteStorage.get_logs("offbeat-test", "run")
    assert {row["a"] for row in rows if "a" in row} == {0.5}
    tables = {name: row[name] for row in rows for name in row if str(name).startswith("generations/")}
    assert set(tables) == {"generations/validation", "generations/train"}
    text = json.dumps(tables, default=str)
    assert "2 <b>" in text
    assert list((tmp_path / "trackio").rglob("*.png")), "the image lies among its media"
    assert trackio.__version__
