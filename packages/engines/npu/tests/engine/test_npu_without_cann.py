"""The real torch-npu beside no CANN: every command works but training on an NPU, and `doctor` says what is missing."""

import json
import os
import subprocess
import sys
from importlib.metadata import distribution, version
from pathlib import Path

import pytest
from record_api import record

from offbeat_core import BackendError
from offbeat_npu import NpuDevice, examine_environment
from offbeat_testing import small_grpo_run, small_sft_run, tiny_model

AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"
pytestmark = [
    pytest.mark.skipif(NpuDevice.count() > 0, reason="there are NPUs and CANN here: nothing is missing"),
    pytest.mark.timeout(400),
]


def run(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != AUTOLOAD} | variables
    return subprocess.run(words, env=environment, capture_output=True, text=True, timeout=300, check=False)


def application(*words: str) -> subprocess.CompletedProcess[str]:
    return run(sys.executable, "-m", "grpo_async_app", *words)


def on_any_device(config: Path) -> Path:
    config.write_text(config.read_text().replace('device = "cpu"', 'device = "auto"'))
    return config


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("job")
    return on_any_device(small_grpo_run(folder, tiny_model(folder / "model")))


def test_this_is_the_trap() -> None:
    """Without this, nothing below would show anything."""
    ended = run(sys.executable, "-c", "import torch")
    assert ended.returncode != 0
    assert "Failed to load the backend extension: torch_npu" in ended.stderr


def test_a_device_says_what_is_missing() -> None:
    with pytest.raises(BackendError, match=r"torch_npu does not import: lib\w+\.so.*set_env\.sh"):
        NpuDevice()
    found = dict(examine_environment())
    assert "missing" in found["npu CANN"]
    assert "fits torch" in found["npu torch-npu"]


@pytest.mark.nightly
def test_doctor_says_it_too() -> None:
    ended = application("doctor")
    assert ended.returncode == 0, ended.stderr
    said = " ".join(ended.stdout.split())
    assert "device npu none on this machine" in said
    assert "npu CANN missing: neither ASCEND_HOME_PATH nor ASCEND_TOOLKIT_HOME is set" in said
    assert "device cpu here" in said


@pytest.mark.nightly
def test_a_run_plans_trains_and_is_reported(job: Path, tmp_path: Path) -> None:
    assert application("plan", str(job)).returncode == 0
    trained = application("train", str(job), "--out", str(tmp_path / "run"))
    assert trained.returncode == 0, trained.stdout + trained.stderr
    assert (tmp_path / "run" / "report.html").is_file()
    assert application("report", str(tmp_path / "run")).returncode == 0


def test_options_of_another_framework_are_imported(tmp_path: Path) -> None:
    (tmp_path / "theirs.yaml").write_text("learning_rate: 1.0e-6\nnum_generations: 4\n")
    ended = application("import", "trl", str(tmp_path / "theirs.yaml"), "--out", str(tmp_path / "ours.toml"))
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "samples_per_prompt = 4" in (tmp_path / "ours.toml").read_text()


@pytest.mark.nightly  # a run of the other application is tried by day
def test_supervised_training_plans_and_trains(job: Path, tmp_path: Path) -> None:
    config = str(on_any_device(small_sft_run(tmp_path, job.parent / "model")))
    short = ("--engine.max_updates", "2")
    for words in (("doctor",), ("plan", config), ("train", config, "--out", str(tmp_path / "run"), *short)):
        ended = run(sys.executable, "-m", "sft_app", *words)
        assert ended.returncode == 0, f"{words}: {ended.stdout}{ended.stderr}"


@pytest.mark.parametrize("words", [("offbeat_serve", "--help"), ("offbeat_liveness", "--help")], ids=" ".join)
def test_commands_of_packages_answer(words: tuple[str, ...]) -> None:
    ended = run(sys.executable, "-m", *words)
    assert ended.returncode == 0, ended.stderr
    assert "usage" in ended.stdout


@pytest.mark.parametrize(
    ("script", "variables"), [("1", {}), ("import torch", {AUTOLOAD: "0"})], ids=["plain", "torch"]
)
def test_a_script_runs_under_watch(tmp_path: Path, script: str, variables: dict[str, str]) -> None:
    """One that imports torch needs the variable, as it does by itself."""
    (tmp_path / "script.py").write_text(f"{script}\nprint('ran')\n")
    ended = run(sys.executable, "-m", "offbeat_liveness", "run", str(tmp_path / "script.py"), **variables)
    assert (ended.returncode, ended.stdout) == (0, "ran\n"), ended.stderr


def test_the_record_is_of_the_release_that_is_installed() -> None:
    """Recorded again from what is here, it is the same."""
    recorded = Path(__file__).parents[1] / "recorded"
    wanted = json.loads((recorded / "wanted-torch-npu.json").read_text())
    if version("torch-npu") != wanted["version"]:
        pytest.skip(f"torch-npu {version('torch-npu')} is here, and {wanted['version']} is recorded")
    ours = json.loads((recorded / f"torch-npu-{wanted['version']}.json").read_text())
    assert record(wanted, Path(str(distribution("torch-npu").locate_file("")))) == ours


def test_training_on_an_npu_is_refused_with_the_devices_there_are(job: Path, tmp_path: Path) -> None:
    ended = application("train", str(job), "--out", str(tmp_path / "run"), "--engine.device", "npu")
    assert ended.returncode == 2, ended.stdout + ended.stderr
    assert "device 'npu' is not here: this machine has cpu" in ended.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.nightly
def test_a_run_is_resumed_and_evaluated(job: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    short = ("--engine.max_updates", "1", "--checkpoint.every", "1")
    trained = application("train", str(job), "--out", str(folder), *short)
    assert trained.returncode == 0, trained.stdout + trained.stderr
    for words in (("resume", str(folder), "--engine.max_updates", "2"), ("eval", str(folder))):
        ended = application(*words)
        assert ended.returncode == 0, f"{words}: {ended.stdout}{ended.stderr}"
