"""EleutherAI's lm-eval asks `offbeat-serve`, and finds what `grpo-async-app eval` finds with the same weights.

lm-eval is not in the lock, and has an environment of its own: `nox -s lm_eval`. Task, data and model are made here.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from grpo_async_app._commands.quickstart import find_lesson, make_model, quickstart_config, warm_up
from grpo_async_app._preflight.preflight import check_run

LM_EVAL_PYTHON = os.environ.get("OFFBEAT_LM_EVAL_PYTHON", "")
NUM_ITEMS = 60
TASK = """\
task: offbeat_sums
dataset_path: json
dataset_kwargs:
  data_files:
    test: {rows}
test_split: test
output_type: generate_until
doc_to_text: "{{{{prompt}}}}"
doc_to_target: "{{{{answer}}}}"
target_delimiter: ""
generation_kwargs:
  until: ["\\n"]
  max_gen_toks: 5
  temperature: 0.0
  do_sample: false
metric_list:
  - metric: exact_match
    aggregation: mean
    higher_is_better: true
"""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Return the quickstart's model after its warm-up: right about three times in ten."""
    lesson, folder = find_lesson("addition"), tmp_path / "model"
    config = quickstart_config(lesson, folder, 0, ())
    make_model(lesson, folder, 0)
    warm_up(lesson, folder, tmp_path / "warm", check_run(config).prompts.train, 0)
    return tmp_path / "warm"


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    pairs = [(10 + 7 * n % 90, 10 + 11 * n % 90) for n in range(NUM_ITEMS)]
    path.write_text("".join(json.dumps({"prompt": f"{a}+{b}=", "answer": str(a + b)}) + "\n" for a, b in pairs))
    return path


def our_accuracy(model: Path, rows: Path, out: Path) -> float:
    one = "--eval.sets.sums."
    words = [
        *("eval", model, "--out", out, f"{one}path={rows}", f"{one}max_tokens=5", "--reward.name=exact_match"),
        *("--rollout.device=cpu", "--rollout.dtype=float32", "--rollout.max_model_len=32"),
        "--data.max_prompt_tokens=16",
    ]
    subprocess.run([sys.executable, "-m", "grpo_async_app", *map(str, words)], check=True, timeout=300)
    [table] = json.loads((out / "table.json").read_text())["sets"]
    return float(table["estimates"]["avg@1"]["value"])


def their_accuracy(base_url: str, rows: Path, folder: Path) -> float:
    tasks, out = folder / "tasks", folder / "lm-eval"
    tasks.mkdir()
    (tasks / "sums.yaml").write_text(TASK.format(rows=rows))
    # Texts, not ids: lm-eval then needs no tokenizer of its own.
    about = (
        f"model=tiny,base_url={base_url}/completions,tokenizer_backend=None,tokenized_requests=False,num_concurrent=4"
    )
    words = ["--model", "local-completions", "--model_args", about, "--tasks", "offbeat_sums"]
    words += ["--include_path", str(tasks), "--output_path", str(out), "--log_samples"]
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": str(folder / "cache"), "HF_HOME": str(folder / "home")}
    subprocess.run([LM_EVAL_PYTHON, "-m", "lm_eval", *words], check=True, timeout=300, env={**os.environ, **offline})
    [results] = out.rglob("results_*.json")
    found = json.loads(results.read_text())["results"]["offbeat_sums"]
    return float(found["exact_match,none"])


@pytest.mark.skipif(not LM_EVAL_PYTHON, reason="nox -s lm_eval gives the Python of lm-eval's environment")
@pytest.mark.timeout(900)
def test_lm_eval_measures_through_the_endpoint_what_eval_measures(model: Path, rows: Path, tmp_path: Path) -> None:
    options = ["--model-name", "tiny", "--port", "0", "--device", "cpu", "--max-model-len", "32"]
    with subprocess.Popen(
        [sys.executable, "-m", "offbeat_serve", str(model), *options], stdout=subprocess.PIPE, text=True
    ) as server:
        try:
            assert server.stdout is not None
            said = next(line for line in server.stdout if "/v1" in line)
            base_url = next(word for word in said.split() if word.startswith("http"))
            theirs = their_accuracy(base_url, rows, tmp_path)
        finally:
            server.terminate()
    ours = our_accuracy(model, rows, tmp_path / "ours")
    print(f"lm-eval: {theirs:.4f}, grpo-async-app eval: {ours:.4f}")
    assert theirs == pytest.approx(ours, abs=1e-9)
    assert 0.05 < ours < 0.95, "a model that is sometimes right"
