"""`grpo-async-app diagnose` of a run with vLLM: it names faults of vLLM's modules, and nothing where all is well."""

import json
import subprocess
import sys
from pathlib import Path

import planted_in_vllm
import pytest
from engine_checks import DEADLINE_S
from planted_in_vllm import FAULTS

from offbeat_testing import small_grpo_run, tiny_model

pytestmark = pytest.mark.timeout(2 * DEADLINE_S)
SETTINGS = (
    *("--rollout.backend=vllm", "--rollout.max_running=8", "--rollout.max_model_len=192", "--rollout.temperature=0.8"),
    *(
        "--data.max_prompt_tokens=128",
        "--engine.learning_rate=0.02",
        "--engine.weight_decay=5",
        "--engine.max_updates=2",
    ),
    *("--eval.every_updates=0", "--rollout.options={block_size=32}"),
)
IN_CI = ("epsilon of a norm", "a packed weight", "old keys and values")


class Planting:
    """The process that runs commands with faults."""

    def __init__(self):
        program = [sys.executable, planted_in_vllm.__file__]
        self._process = subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def run(self, fault, *words):
        """Exit code and output of one command."""
        self._process.stdin.write(json.dumps([fault, *map(str, words)]) + "\n")
        self._process.stdin.flush()
        code, output = json.loads(self._process.stdout.readline())
        return code, output

    def close(self):
        self._process.stdin.close()
        self._process.wait(DEADLINE_S)


@pytest.fixture(scope="module")
def planting():
    found = Planting()
    yield found
    found.close()


@pytest.fixture(scope="module")
def finished_run(planting, tmp_path_factory):
    """A run of two updates whose weights have moved far; its prompts fill blocks of vLLM's cache."""
    folder = tmp_path_factory.mktemp("diagnose")
    config = small_grpo_run(folder, tiny_model(folder / "model", "qwen3", spread=0.2))
    rows = [json.loads(line) for line in (folder / "sums.jsonl").read_text().splitlines()]
    longer = [
        {**row, "prompt": f"{row['prompt']} think of {n} and of all that comes after it"} for n, row in enumerate(rows)
    ]
    (folder / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in longer))
    code, output = planting.run("none", "train", config, "--out", folder / "run", *SETTINGS)
    assert code == 0, output
    return folder / "run"


def diagnose(planting, run: Path, fault: str):
    code, output = planting.run(fault, "diagnose", run, "--samples", "12")
    assert code in (0, 5), output
    return json.loads((run / "diagnosis" / "diagnosis.json").read_text())


def test_a_healthy_run_has_no_cause(planting, finished_run):
    found = diagnose(planting, finished_run, "none")
    assert found["findings"] == []
    assert found["notes"] == []
    assert found["mismatch_nats"] < 1e-4


@pytest.mark.parametrize(
    "name",
    [name if name in IN_CI else pytest.param(name, marks=pytest.mark.nightly) for name in FAULTS if name != "none"],
)
def test_a_fault_of_vllm_is_named(planting, finished_run, name):
    fault, found = FAULTS[name], diagnose(planting, finished_run, name)
    first = found["findings"][0]
    assert (first["kind"], fault.where in first["where"]) == (fault.kind, True), found
