"""Options of prime-rl and OpenRLHF become a configuration that loads, and what does not carry over is reported."""

import tomllib
from pathlib import Path

import numpy as np
import pytest

from offbeat_data import Prompt, RewardConfig, build_reward
from offbeat_testing import CommandLine

# Options of PrimeIntellect-ai/prime-rl 559b4477 (2026-08-21), of configs/basic/hendrycks-sanity/rl.toml and of
# examples/advanced/qwen3-30b-a3b/math.toml.
PRIME_RL = """
max_steps = 5000
[deployment]
type = "multi_node"
num_train_nodes = 2
num_infer_nodes = 2
[model]
name = "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B"
[monitors.wandb]
project = "hendrycks-sanity"
[weight_broadcast]
type = "nccl"
[orchestrator]
batch_size = 512
group_size = 8
seq_len = 8192
max_off_policy_steps = 8
[[orchestrator.train.source]]
name = "hendrycks-math"
[orchestrator.train.source.env.taskset]
id = "math-env"
dataset_name = "mikasenghaas/Sanity-Test-R1D-1.5B"
[orchestrator.eval]
interval = 50
[[orchestrator.eval.source]]
name = "aime2024"
[trainer.model]
seq_len = 16384
ep = 8
[trainer.optim]
lr = 1e-6
[ckpt]
interval = 100
[inference]
[inference.vllm]
tensor_parallel_size = 8
max_model_len = 8192
"""


def imported(
    command: CommandLine, framework: str, source: Path, *words: str
) -> tuple[dict[str, dict[str, object]], str]:
    """Sections of what was written, and what was said."""
    target = source.with_name("mine.toml")
    ended = command("import", framework, source, "--out", target)
    assert ended.code == 0, ended.err
    return tomllib.loads(target.read_text()), ended.out


def test_a_configuration_of_prime_rl_becomes_ours(command: CommandLine, tmp_path: Path) -> None:
    source = tmp_path / "rl.toml"
    source.write_text(PRIME_RL)
    held, said = imported(command, "prime-rl", source)
    assert held["data"]["path"] == "verifiers:math-env"
    assert held["data"]["task_options"] == {"dataset_name": "mikasenghaas/Sanity-Test-R1D-1.5B"}
    engine, rollout = held["engine"], held["rollout"]
    assert (engine["num_ranks"], rollout["num_engines"], rollout["tensor_parallel"]) == (16, 2, 8)
    assert (engine["backend"], engine["options"]) == ("megatron", {"expert_parallel": 8})
    assert (held["async"]["mini_batch_size"], held["async"]["max_version_lag"]) == (64, 8)
    assert rollout["max_model_len"] == 8192
    assert (engine["max_updates"], held["eval"]["every_updates"], held["checkpoint"]["every"]) == (5000, 50, 100)
    assert held["algorithm"]["advantage"] == "dr_grpo"
    assert "512 are 64 prompts" in said
    missing = said.partition("\n\n")[0]
    assert "orchestrator.eval.source" in missing
    assert "weight_broadcast" not in missing


def test_ranks_of_prime_rl_that_share_sequences_stay_with_the_torch_engine(
    command: CommandLine, tmp_path: Path
) -> None:
    source = tmp_path / "rl.toml"
    source.write_text(PRIME_RL.replace("ep = 8", "cp = 2\ntp = 4"))
    held, _ = imported(command, "prime-rl", source)
    assert held["engine"].get("backend", "torch") == "torch"
    assert held["engine"]["options"] == {"context_parallel": 2, "tensor_parallel": 4}


def test_what_is_for_another_command_of_prime_rl_is_refused(command: CommandLine, tmp_path: Path) -> None:
    source = tmp_path / "sft.toml"
    source.write_text("max_steps = 100\n[data]\nname = 'x'\n")
    ended = command("import", "prime-rl", source)
    assert ended.code == 2
    assert "section orchestrator is required" in ended.err


# Reward files as users of the three have them.
REWARDS = {
    "verl": "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
    "    return {'score': float(solution_str == ground_truth and data_source == 'sums')}\n",
    "trl": "def reward(prompts, completions, data_source, **columns):\n"
    "    return [float(said.startswith('4') and asked == '2+2=') for asked, said in zip(prompts, completions)]\n",
    "openrlhf": "import torch\n\ndef reward_func(queries, prompts, labels):\n"
    "    return {'rewards': torch.tensor([float(each == p + a) for each, p, a in zip(queries, prompts, labels)])}\n",
}
FUNCTIONS = {"verl": "compute_score", "trl": "reward", "openrlhf": "reward_func"}


@pytest.mark.parametrize("peer", REWARDS)
def test_a_reward_file_of_a_peer_runs_unchanged(peer: str, tmp_path: Path) -> None:
    (tmp_path / f"{peer}_reward.py").write_text(REWARDS[peer])
    prompt = Prompt(index=0, ids=np.array([1], np.int32), text="2+2=", answer="4", fields={"data_source": "sums"})
    reward = build_reward(RewardConfig(name=f"{tmp_path}/{peer}_reward.py:{FUNCTIONS[peer]}"))
    assert [reward.score(prompt, said).value for said in ("4", "5")] == [1.0, 0.0]
