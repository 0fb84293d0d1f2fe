"""Mistakes of a newcomer, mistyped, misplaced or not installed, are answered with what to do."""

import json
import re
import shutil
from importlib.util import find_spec
from pathlib import Path

import pytest

from offbeat_testing import CommandLine, HubServer

LATIN = '{"prompt": "2 + 3 =", "answer": "5"}\n{"prompt": "caf\xe9", "answer": "1"}\n'


def test_a_mistyped_command_is_answered_with_all_commands(command: CommandLine) -> None:
    assert "did you mean train? the commands are quickstart, init, train, plan" in command.refused("trian", "my.toml")
    assert "compare takes 2 arguments, EVAL EVAL, got 1 (a)" in command.refused("compare", "a")


def test_explain_alone_lists_the_sections(command: CommandLine) -> None:
    sections = command("--explain").out
    assert "  rollout      The engines that sample, and how they sample." in sections.splitlines()


@pytest.mark.parametrize("key", ["critic.path", "teacher.path", "data.eval_path"])
def test_a_name_that_the_hub_has_not_is_answered_with_its_key(
    command: CommandLine, config: Path, key: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    needed = {
        "critic.path": ["--algorithm.advantage=gae"],
        "teacher.path": ["--algorithm.distillation_coefficient=1"],
        "data.eval_path": ["--data.eval_size=0"],
    }
    with HubServer() as hub:
        hub.use_in_this_process(monkeypatch, tmp_path / "cache")
        said = command.refused("plan", config, f"--{key}=Qwen/Qwen3-0.6B", *needed[key])
        assert f"{key}: Qwen/Qwen3-0.6B: there is no such" in said
        said = command.refused("eval", "Qwen/Qwen3-0.6B")
        assert "Qwen/Qwen3-0.6B: there is no such model on the Hub" in said


def test_no_model_is_fetched_for_data_that_are_missing(
    command: CommandLine, config: Path, model: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with HubServer() as hub:
        hub.use_in_this_process(monkeypatch, tmp_path / "cache")
        hub.add("Qwen/Tiny", model)
        said = command.refused("plan", config, "--model.path=Qwen/Tiny", "--data.path=absent.jsonl")
        assert "absent.jsonl" in said
        assert not [request for request in hub.requests if "model.safetensors" in request]


@pytest.mark.nightly
def test_a_run_of_names_goes_on_without_the_hub(
    command: CommandLine, config: Path, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = tmp_path / "rows"
    rows.mkdir()
    lines = [json.dumps({"prompt": f"{number}+{number}=", "answer": str(2 * number)}) for number in range(30)]
    (rows / "train.jsonl").write_text("\n".join(lines))
    names = ["--model.path=Qwen/Tiny", "--data.path=my/sums", "--engine.max_updates=1"]
    with HubServer() as hub:
        hub.use_in_this_process(monkeypatch, tmp_path / "cache")
        commit, rows_commit = hub.add("Qwen/Tiny", model).commit, hub.add("my/sums", rows, "dataset").commit
        ended = command("train", config, *names, "--out", tmp_path / "run")
        assert ended.code == 0, ended.err
    kept = (tmp_path / "run" / "config.toml").read_text()
    assert f'path = "hub:Qwen/Tiny@{commit}"' in kept
    assert f'path = "hub:my/sums@{rows_commit}"' in kept
    assert "model.safetensors" in (tmp_path / "run" / "hub.json").read_text()
    ended = command("resume", tmp_path / "run", "--engine.max_updates=2")
    assert ended.code == 0, ended.err
    assert (tmp_path / "run" / "checkpoints" / "step-000002").is_dir()


def test_a_plan_says_what_a_known_data_set_brings(
    command: CommandLine, config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "rows" / "main").mkdir(parents=True)
    row = {"question": "1 + 1?", "answer": "It is two. #### 2"}
    (tmp_path / "rows" / "main" / "train.jsonl").write_text(json.dumps(row))
    with HubServer() as hub:
        hub.use_in_this_process(monkeypatch, tmp_path / "cache")
        hub.add("openai/gsm8k", tmp_path / "rows", "dataset")
        room = (
            "--data.max_prompt_tokens=128",
            "--rollout.max_model_len=256",
            "--data.eval_size=0",
            "--eval.every_updates=0",
        )
        planned = command("plan", config, "--data.path=openai/gsm8k", "--reward.name=", *room)
    assert planned.code == 0, planned.err
    said = " ".join(planned.out.split())
    for choice in ("data.prompt_column = 'question'", "reward.name = 'math_verify'"):
        assert f"{choice} (as openai/gsm8k has it)" in said


def test_a_run_folder_in_place_of_a_model_is_answered_with_its_latest_checkpoint(
    command: CommandLine, config: Path, model: Path, tmp_path: Path
) -> None:
    run = tmp_path / "lora"
    for step in (999_999, 1_000_000):
        shutil.copytree(model, run / "checkpoints" / f"step-{step:06d}")
    said = command.refused("plan", config, f"--model.path={run}")
    assert f"model.path: {run} is a run folder, not a model folder; give one of its checkpoints" in said
    assert said.rstrip().endswith(f"such as {run}/checkpoints/step-1000000")


def test_a_model_without_weights_is_told_apart_from_one_with_pickled_weights(
    command: CommandLine, config: Path, model: Path, tmp_path: Path
) -> None:
    half = shutil.copytree(model, tmp_path / "half")
    for file in half.glob("*.safetensors"):
        file.unlink()
    assert "its download is not complete; download it again" in command.refused("plan", config, f"--model.path={half}")
    (half / "pytorch_model.bin").touch()
    assert "weights in pytorch_model.bin and no *.safetensors" in command.refused(
        "plan", config, f"--model.path={half}"
    )


def test_a_file_in_another_encoding_is_named_with_its_line_and_what_converts_it(
    command: CommandLine, config: Path, tmp_path: Path
) -> None:
    rows = tmp_path / "latin.jsonl"
    rows.write_bytes(LATIN.encode("latin-1"))
    said = command.refused("plan", config, f"--data.path={rows}")
    assert "line 2: not UTF-8 text (byte 16 of the line is 0xe9)" in said
    assert "iconv -f latin1 -t utf-8 latin.jsonl" in said


def test_a_bound_is_written_with_all_its_digits(command: CommandLine, config: Path) -> None:
    said = command.refused("plan", config, f"--rollout.max_tokens={2**30 + 1}")
    assert "must be an integer >= 1 and <= 1073741824, in tokens, got the integer 1073741825" in said


def test_a_plan_says_mistakes_of_every_section_at_once(command: CommandLine, config: Path) -> None:
    wrong = ["--model.path=nowhere", "--data.path=none.jsonl", "--reward.name=exact_mach", "--rollout.backend=sglang"]
    said = command.refused("plan", config, *wrong)
    assert said.startswith("error: 4 problems\n")
    for part in ("model.path: no such folder", "none.jsonl does not exist", "no reward 'exact_mach'", "'sglang'"):
        assert part in said


def test_values_that_do_not_fit_hide_no_missing_file_and_no_contradiction(command: CommandLine, config: Path) -> None:
    wrong = ["--rollout.temperature=-1", "--data.epocs=2", "--model.path=nowhere", "--data.path=none.jsonl"]
    wrong += ["--reward.name=exact_mach", "--cluster.colocate=true", "--algorithm.distillation_coefficient=1"]
    wrong += ["--critic.path=absent", "--critic.clip=many"]
    said = command.refused("train", config, *wrong)
    for part in (
        "rollout.temperature: must be a number > 0",
        "did you mean data.epochs?",
        "critic.clip: must be",
        "model.path: no such folder",
        "critic.path: no such folder",
        "none.jsonl does not exist",
        "no reward 'exact_mach'",
        "cluster.colocate = true: trainer and engines take turns",
        "there is no teacher",
    ):
        assert part in said
    assert "no effect" not in said  # of the critic: a section with a wrong value contradicts nothing
    assert "no such folder" not in command.refused("train", config, *wrong, "--shrink")  # which needs no model


def test_contradictions_of_several_sections_are_said_at_once(command: CommandLine, config: Path) -> None:
    wrong = ["--cluster.colocate=true", "--algorithm.distillation_coefficient=1", "--algorithm.tis_cap=3"]
    said = command.refused("plan", config, *wrong, "--algorithm.correction=none", "--engine.options={temperature = 1}")
    assert said.startswith("error: 4 problems\n")


@pytest.mark.skipif(find_spec("vllm") is not None, reason="vLLM is installed here")
def test_a_rollout_engine_that_is_not_installed_is_refused_before_anything_starts(
    command: CommandLine, config: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    said = command.refused("train", config, "--rollout.backend=vllm", "--out", run)
    assert 'vLLM is not installed; install it with: pip install "offbeat-rollout-vllm[engine]"' in said
    assert 'without a GPU its README ("Installing on a CPU")' in said
    assert not run.exists()
    said = command.refused("train", config, "--rollout.backend=trtllm", "--out", run)
    assert "TensorRT-LLM is not installed here" in said
    server = "--rollout.options={server = 'http://127.0.0.1:9'}"
    assert "TensorRT-LLM is not installed" not in command("plan", config, "--rollout.backend=trtllm", server).err


def test_a_plan_bounds_memory_and_micro_batches_by_the_prompts_that_there_are(
    command: CommandLine, config: Path
) -> None:
    planned = command("plan", config, "--engine.max_tokens_per_microbatch=1000000").out
    assert not [line for line in planned.splitlines() if line != line.rstrip()]
    text = " ".join(planned.split())
    assert "at most 1 micro-batch of up to" in text
    activations = re.search(r"activations ([\d.]+) (\w+)", text)
    assert activations
    assert activations[2] != "GiB", "of 8 samples of a few tokens"
    assert re.search(r"in flight at most \d+ prompts \(\d+ samples\) started between two syncs; the engines", text)


@pytest.mark.parametrize("name", ["resume", "eval", "where"])
def test_the_run_of_the_other_application_is_named_as_such(command: CommandLine, tmp_path: Path, name: str) -> None:
    (tmp_path / "config.toml").write_text("[model]\npath = 'm'\n")
    (tmp_path / "sessions.jsonl").write_text('{"command": "sft-app train my.toml", "started_s": 1.0}\n')
    assert "is a run of sft-app, and not of grpo-async-app; sft-app continues it" in command.refused(name, tmp_path)
