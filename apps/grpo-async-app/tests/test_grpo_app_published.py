"""Scripts that ran on published clusters, imported: the plan refuses none of them there, every rank has room."""

import re
from pathlib import Path

import pytest

from offbeat_testing import CommandLine, large_model_configs

ACTOR, ROLLOUT = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout."
FSDP = {f"{ACTOR}fsdp_config.param_offload": False, "actor_rollout_ref.model.enable_gradient_checkpointing": True}
MEGATRON = {
    f"{ACTOR}strategy": "megatron",
    f"{ACTOR}megatron.tensor_model_parallel_size": 2,
    f"{ACTOR}megatron.pipeline_model_parallel_size": 2,
}
# Options of scripts of verl b178a3cd (2026-01-29), examples/grpo_trainer, with the cluster that each names: model,
# nodes, devices of each, memory of a device in GiB, prompts of a batch and of a mini batch, lengths of prompt and
# response, width and memory share of an engine, samples; and what else decides memory.
PUBLISHED = {
    "run_qwen3-8b": ("Qwen3-8B", 1, 8, 80, 1024, 256, 512, 1024, 2, 0.6, 5, FSDP),
    "run_qwen3-8b of 64 GiB": ("Qwen3-8B", 1, 8, 64, 256, 64, 512, 1024, 2, 0.6, 5, FSDP),
    "run_qwen2-7b_math": ("Qwen2.5-7B", 1, 8, 80, 1024, 256, 1024, 1024, 2, 0.6, 5, FSDP),
    "run_qwen2-7b_math_megatron": ("Qwen2.5-7B", 1, 8, 80, 1024, 256, 1024, 1024, 2, 0.6, 5, MEGATRON),
    "run_qwen2_5_7b_grpo": ("Qwen2.5-7B", 1, 16, 64, 1024, 32, 1024, 1024, 4, 0.3, 5, FSDP),
    "run_deepseek7b_llm": ("deepseek-llm-7b", 1, 8, 80, 1024, 256, 512, 1024, 2, 0.6, 5, FSDP),
    "run_deepseek7b_llm_math_megatron": ("deepseek-llm-7b", 1, 16, 80, 1024, 256, 1024, 1024, 2, 0.6, 5, MEGATRON),
    "run_qwen2_5_32b_grpo": ("Qwen2.5-32B", 2, 16, 64, 1024, 128, 1024, 1024, 8, 0.4, 5, FSDP),
    "run_qwen3-32b": ("Qwen3-32B", 4, 8, 64, 1024, 64, 2048, 2048, 4, 0.7, 4, FSDP),
    "run_qwen3moe-30b_megatron": (
        "Qwen3-30B-A3B",
        1,
        8,
        96,
        512,
        32,
        2048,
        4096,
        4,
        0.7,
        16,
        {
            f"{ACTOR}strategy": "megatron",
            f"{ACTOR}megatron.tensor_model_parallel_size": 4,
            f"{ACTOR}megatron.expert_model_parallel_size": 8,
        },
    ),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return large_model_configs(tmp_path_factory.mktemp("models"))


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_script_that_ran_on_a_published_cluster_has_room_there(
    command: CommandLine, tmp_path: Path, models: Path, name: str
) -> None:
    model, nodes, devices, memory, batch, mini, prompt, response, width, share, samples, more = PUBLISHED[name]
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    options = {
        "algorithm.adv_estimator": "grpo",
        "data.train_files": tmp_path / "rows.jsonl",
        "data.train_batch_size": batch,
        "data.max_prompt_length": prompt,
        "data.max_response_length": response,
        "actor_rollout_ref.model.path": models / model,
        f"{ACTOR}ppo_mini_batch_size": mini,
        f"{ACTOR}use_kl_loss": True,
        f"{ROLLOUT}name": "vllm",
        f"{ROLLOUT}n": samples,
        f"{ROLLOUT}tensor_model_parallel_size": width,
        f"{ROLLOUT}gpu_memory_utilization": share,
        "trainer.nnodes": nodes,
        "trainer.n_gpus_per_node": devices,
        **more,
    }
    words = " ".join(f"{key}={value}" for key, value in options.items())
    (tmp_path / "run.sh").write_text(f"python3 -m verl.trainer.main_ppo {words}\n")
    (tmp_path / "cluster.toml").write_text(
        f"[[nodes]]\nname = 'node'\ncount = {nodes}\naccelerators = {devices}\naccelerator_memory_gib = {memory}\n"
    )
    recipe = tmp_path / "mine.toml"
    assert command("import", "verl", tmp_path / "run.sh", "--out", recipe).code == 0
    ended = command("plan", recipe, "--cluster", tmp_path / "cluster.toml")
    assert ended.code == 0, ended.err
    said = " ".join(ended.out.split())
    assert "trainer memory" in said
    assert not re.search(r"its device has|of its device", said), (
        said
    )  # a rank that needs more, or an engine that may take too little
