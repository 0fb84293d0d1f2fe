"""Options of verl and TRL keep what they mean there, or it is reported; read in their sources at the commits named."""

import pytest
from import_meaning import holds

from grpo_async_app._imports.openrlhf import import_openrlhf
from grpo_async_app._imports.prime_rl import import_prime_rl
from grpo_async_app._imports.trl import import_trl
from grpo_async_app._imports.verl import import_verl
from offbeat_recipes import Program, RecipeBuilder

PREFIX = "actor_rollout_ref."
ASYNC = Program("verl.experimental.fully_async_policy.fully_async_main", "fully_async_ppo_trainer")
ONE_STEP_OFF = Program("verl.experimental.one_step_off_policy.main_ppo", "one_step_off_ppo_megatron_trainer")
MAIN = Program("verl.trainer.main_ppo")
CORRECTION = "algorithm.rollout_correction."
ENGINE = f"{PREFIX}rollout.engine_kwargs"
MEGATRON = {f"{PREFIX}actor.megatron.tensor_model_parallel_size": 4}
AGGREGATION = f"{PREFIX}actor.loss_agg_mode"
MODEL_DTYPE = f"{PREFIX}actor.fsdp_config.model_dtype"
TEACHER = "distillation.teacher_models.teacher_model."


@pytest.mark.parametrize(
    ("program", "options", "expected", "remarks"),
    [
        pytest.param(
            MAIN,
            {"critic.model.path": "/critic", "critic.optim.lr": 2e-5, "algorithm.gamma": 0.99, "critic.ppo_epochs": 2}
            | {"trainer.critic_warmup": 10},
            {"algorithm.advantage": "gae", "algorithm.gae_lambda": 1.0, "algorithm.gamma": 0.99}
            | {"critic.path": "/critic", "critic.learning_rate": 2e-5, "critic.clip": 0.5, "critic.warmup_updates": 10},
            {"critic.ppo_epochs": "but for section critic as engine says"},
            id="PPO with a critic, verl's default",
        ),
        pytest.param(
            MAIN,
            {"algorithm.adv_estimator": "grpo", "critic.model.path": "/critic", "algorithm.lam": 0.9},
            {"algorithm.advantage": "grpo", "critic.path": None, "algorithm.gae_lambda": None},
            {"critic.model.path": "only with gae", "algorithm.lam": "belongs to gae"},
            id="a critic that is not asked",
        ),
        pytest.param(
            MAIN,
            {"algorithm.filter_groups.enable": True, "algorithm.filter_groups.metric": "seq_final_reward"},
            {"algorithm.filter_groups": True, "async.max_filtered_batches": 10**6},
            {"algorithm.filter_groups.metric": "counts the overlong penalty and the KL penalty there"}
            | {"algorithm.filter_groups.max_num_gen_batches": "no limit there"},
            id="groups are filtered by what was scored",
        ),
        *(
            pytest.param(
                MAIN,
                {"algorithm.filter_groups.enable": True, "algorithm.filter_groups.max_num_gen_batches": most},
                {"async.max_filtered_batches": most if most > 0 else 10**6},
                {},
                id=f"{most} filtered batches at most",
            )
            for most in (-1, 0, 10)
        ),
        pytest.param(
            MAIN,
            {"data.train_max_samples": 2000, "data.val_max_samples": 100, "data.val_files": "v"},
            {"data.num_items": 2000, "eval.max_prompts": 100},
            dict.fromkeys(("data.train_max_samples", "data.val_max_samples"), "at random there"),
            id="a part of the rows",
        ),
        pytest.param(
            MAIN,
            {"data.train_max_samples": -1, "data.val_max_samples": -1, "data.val_files": "v"},
            {"data.num_items": None, "eval.max_prompts": None},
            {},
            id="all rows",
        ),
        pytest.param(
            ASYNC,
            {f"{PREFIX}actor.ppo_mini_batch_size": 32, "trainer.total_epochs": 15},
            {"engine.max_updates": 4, "data.epochs": 15},
            {"rollout.total_rollout_steps": "100 prompts where it is not set"},
            id="the asynchronous trainer's own number of prompts",
        ),
        pytest.param(
            ASYNC,
            {f"{PREFIX}actor.ppo_mini_batch_size": 32, "rollout.total_rollout_steps": None, "rollout.total_epochs": 3}
            | {"trainer.total_training_steps": 7},
            {"engine.max_updates": None, "data.epochs": 3},
            {"trainer.total_training_steps": "not read by the fully asynchronous trainer"},
            id="the asynchronous trainer ends by its epochs",
        ),
        pytest.param(
            MAIN,
            {"data.train_batch_size": 512, f"{PREFIX}actor.ppo_mini_batch_size": 128, f"{PREFIX}actor.ppo_epochs": 2}
            | {f"{PREFIX}actor.optim.lr_warmup_steps": 10, f"{PREFIX}actor.shuffle": True},
            {"async.require_batches": 4, "algorithm.num_passes": 2, "engine.warmup_steps": 80},
            {
                f"{PREFIX}actor.shuffle": "the same order in each pass",
                f"{PREFIX}actor.optim.lr_warmup_steps": "8 in each",
            },
            id="several passes over a batch",
        ),
        pytest.param(
            MAIN,
            {f"{PREFIX}actor.use_kl_loss": True, f"{PREFIX}actor.kl_loss_coef": 0.01},
            {"algorithm.kl_coefficient": 0.01, "algorithm.kl_ratio_weight": False},
            {},
            id="a penalty in the loss has no ratio",
        ),
        pytest.param(
            MAIN,
            {"data.train_batch_size": 512, f"{PREFIX}actor.ppo_mini_batch_size": 32}
            | {f"{PREFIX}actor.optim.lr_warmup_steps": 10, "trainer.save_freq": 20},
            {"async.require_batches": 16, "engine.warmup_steps": 160, "checkpoint.every": 20},
            {f"{PREFIX}actor.optim.lr_warmup_steps": "16 in each"},
            id="warm-up is counted in train batches",
        ),
        pytest.param(
            MAIN,
            {f"{PREFIX}actor.optim.lr_warmup_steps_ratio": 0.1, "trainer.total_training_steps": 50},
            {"engine.warmup_steps": 20, "engine.max_updates": 50},
            {},
            id="warm-up as a share of steps that are known",
        ),
        pytest.param(
            ASYNC,
            {"trainer.save_freq": 10, "trainer.test_freq": 5, "data.val_files": "v"}
            | {"async_training.trigger_parameter_sync_step": 4},
            {"checkpoint.every": 40, "eval.every_updates": 20},
            {"trainer.save_freq": "counted in syncs"},
            id="checkpoints of the asynchronous trainer are counted in syncs",
        ),
        pytest.param(
            ONE_STEP_OFF,
            {"data.train_batch_size": 64, f"{PREFIX}actor.ppo_mini_batch_size": 32, "rollout.n_gpus_per_node": 4},
            {"async.require_batches": 2, "async.staleness_threshold": 1, "engine.backend": "megatron"}
            | {"rollout.num_engines": 2, "cluster.colocate": None, "async.partial_rollout": None},
            {"rollout.n_gpus_per_node": "one step off"},
            id="one step off is no fully asynchronous run",
        ),
        pytest.param(
            MAIN,
            {"trainer.v1.trainer_mode": "separate_async", "data.train_batch_size": 256}
            | {f"{PREFIX}actor.ppo_mini_batch_size": 64, f"{PREFIX}rollout.n_gpus_per_node": 4, "trainer.save_freq": 5},
            {"async.trigger_parameter_sync_step": 4, "async.require_batches": 1, "async.staleness_threshold": 1}
            | {"async.partial_rollout": True, "cluster.colocate": None, "rollout.num_engines": 2}
            | {"checkpoint.every": 20},
            {},
            id="main_ppo's own asynchronous trainer",
        ),
        pytest.param(
            MAIN,
            {"trainer.v1.trainer_mode": "colocate_async"},
            {"cluster.colocate": True, "async.staleness_threshold": 0},
            {"trainer.v1.trainer_mode": "synchronous"},
            id="a colocated trainer that is asynchronous",
        ),
        pytest.param(
            MAIN,
            {f"{CORRECTION}rollout_rs": "token_k1", f"{CORRECTION}rollout_rs_threshold": "0.5_4.0"},
            {"algorithm.correction": "token_rs", "algorithm.rs_low": 0.25, "algorithm.rs_high": 2.0},
            {},
            id="k1 is -log r",
        ),
        pytest.param(
            MAIN,
            {f"{CORRECTION}rollout_rs": "seq_mean_k1,seq_max_k2", f"{CORRECTION}rollout_rs_threshold": "0.5_2.0,0.1"},
            {"algorithm.correction": "geometric_rs", "algorithm.rs_low": 0.5, "algorithm.rs_high": 2.0},
            {f"{CORRECTION}rollout_rs": "seq_max_k2"},
            id="several statistics",
        ),
        pytest.param(
            MAIN,
            {f"{CORRECTION}rollout_is": "geometric", f"{CORRECTION}rollout_rs": "geometric"},
            {"algorithm.correction": "geometric_rs", "algorithm.rs_high": 2.0},
            {f"{CORRECTION}rollout_is": "a token or a sequence"},
            id="a weight that is not there",
        ),
        pytest.param(
            MAIN,
            {"reward_model.overlong_buffer.enable": True, "reward_model.overlong_buffer.len": 512},
            {"algorithm.overlong_penalty_factor": 0.5, "algorithm.overlong_buffer_tokens": 512},
            {"reward_model.overlong_buffer.penalty_factor": "half of it"},
            id="rewards of 1 and -1",
        ),
        pytest.param(
            MAIN,
            {f"{PREFIX}actor.policy_loss.loss_mode": "cispo", f"{PREFIX}actor.clip_ratio_low": 10}
            | {f"{PREFIX}actor.clip_ratio": 0.3},
            {"algorithm.loss": "cispo", "algorithm.clip_low": 1.0, "algorithm.clip_high": 0.2},
            {f"{PREFIX}actor.clip_ratio": "no effect there"},
            id="bounds of cispo",
        ),
        pytest.param(
            MAIN,
            {f"{PREFIX}actor.policy_loss.loss_mode": "clip_cov", f"{PREFIX}actor.policy_loss.clip_cov_ub": 40.0}
            | {f"{PREFIX}actor.clip_ratio_high": 1.0, "algorithm.adv_estimator": "grpo_passk"}
            | {"algorithm.norm_adv_by_std_in_grpo": False},
            {"algorithm.loss": "clip_cov", "algorithm.clip_low": 0.2, "algorithm.clip_high": 1.0}
            | {"algorithm.advantage": "grpo_passk", "algorithm.dual_clip": None, "algorithm.aggregation": "token_mean"}
            | {
                "algorithm.options": {
                    "divide_by_std": False,
                    "cov_share": 0.0002,
                    "cov_low": 1.0,
                    "cov_high": 40.0,
                }
            },
            {},
            id="clip-cov, and the advantage of pass@k",
        ),
        pytest.param(
            MAIN,
            {
                f"{PREFIX}actor.policy_loss.loss_mode": "kl_cov",
                "algorithm.adv_estimator": "reinforce_plus_plus_baseline",
            }
            | {f"{PREFIX}actor.loss_agg_mode": "token-sum"},
            {"algorithm.loss": "kl_cov", "algorithm.clip_low": None, "algorithm.aggregation": "token_mean"}
            | {"algorithm.advantage": "reinforce_plus_plus_baseline"}
            | {"algorithm.options": {"cov_share": 0.0002, "kl_weight": 0.1}},
            {f"{PREFIX}actor.loss_agg_mode": "their mean is used here"},
            id="kl-cov with verl's own weight of the penalty",
        ),
        pytest.param(
            MAIN,
            {f"{PREFIX}actor.policy_loss.loss_mode": "gpg", "algorithm.adv_estimator": "gpg"},
            {"algorithm.loss": "gpg", "algorithm.advantage": "gpg", "algorithm.clip_low": None}
            | {"algorithm.options": None},
            {"algorithm.adv_estimator": "non-zero rewards"},
            id="gpg",
        ),
        pytest.param(
            MAIN,
            {f"{PREFIX}actor.policy_loss.loss_mode": "dppo_tv", f"{PREFIX}actor.clip_ratio_low": 0.15}
            | {f"{PREFIX}actor.loss_agg_mode": "seq-mean-token-sum-norm", "data.max_response_length": 1024},
            {"algorithm.loss": "dppo_tv", "algorithm.clip_low": 0.15, "algorithm.clip_high": 0.2}
            | {"algorithm.aggregation": "fixed_length", "algorithm.fixed_length": 1024}
            | {"algorithm.options": {"ratio_cap": 3.0}},
            {},
            id="dppo, whose weight verl's default of clip_ratio_c bounds at 3",
        ),
        pytest.param(
            MAIN,
            {"algorithm.adv_estimator": "gdpo", "algorithm.gdpo_reward_keys": ["right", "format"]}
            | {"algorithm.gdpo_reward_weights": [1, 0.5], "custom_reward_function.path": "a/rlla.py"},
            {"algorithm.advantage": "gdpo", "reward.name": None}
            | {"reward.weights": {"a/rlla.py:right": 1.0, "a/rlla.py:format": 0.5}},
            {"algorithm.gdpo_reward_keys": "a function each"},
            id="gdpo has a reward by name for each key",
        ),
        pytest.param(
            MAIN,
            {f"{PREFIX}actor.megatron.virtual_pipeline_model_parallel_size": 2, "model_engine": "megatron"}
            | {f"{PREFIX}actor.optim.lr_decay_style": "cosine", f"{PREFIX}actor.optim.min_lr": 1e-7},
            {"engine.options": {"virtual_pipeline": 2}, "engine.schedule": "cosine"}
            | {"engine.min_learning_rate_ratio": pytest.approx(0.1), "engine.backend": "megatron"},
            {},
            id="megatron's schedule and virtual pipeline",
        ),
        pytest.param(
            MAIN,
            {f"{PREFIX}model.lora_rank": 0, f"{PREFIX}model.lora_alpha": 32},
            {"engine.lora_rank": None, "engine.lora_alpha": None},
            {},
            id="the scale of adapters that are not there",
        ),
        pytest.param(
            MAIN,
            {f"{PREFIX}model.lora_rank": 8},
            {"engine.lora_rank": 8, "engine.lora_alpha": 16.0},
            {},
            id="the usual scale of adapters",
        ),
        pytest.param(
            MAIN,
            {"reward.custom_reward_function.path": "a/mine.py", "trainer.logger": "[console,wandb]"},
            {"reward.name": "a/mine.py:compute_score", "reward.signature": "verl", "log.trackers": ["wandb"]},
            {},
            id="the newer name of a reward of one's own",
        ),
        pytest.param(
            MAIN,
            {"distillation.enabled": True, f"{TEACHER}model_path": "/t", "distillation.nnodes": 1}
            | {"distillation.n_gpus_per_node": 4, "distillation.distillation_loss.use_task_rewards": False},
            {"teacher.path": "/t", "teacher.num_replicas": 2, "teacher.backend": "vllm", "reward.name": None}
            | {"algorithm.distillation_coefficient": 1.0, "algorithm.advantage": "none"},
            {"distillation.distillation_loss.loss_mode": "KL(policy, teacher)"},
            id="the teacher",
        ),
        pytest.param(
            MAIN,
            {f"{PREFIX}actor.use_kl_loss": "${KL}", "data.train_files": ["/a/x.parquet", "/b/y.parquet"]},
            {"data.path": "/a/x.parquet"},
            {f"{PREFIX}actor.use_kl_loss": "unknown here", "data.train_files": "link all 2 into one folder"},
            id="what is not known, and a second file",
        ),
        pytest.param(
            MAIN,
            {f"{ENGINE}.vllm.compilation_config.level": 3, f"{ENGINE}.vllm.swap_space": 4},
            {"rollout.options": {"compilation_config": {"level": 3}, "swap_space": 4}},
            {},
            id="arguments of the engine keep their nesting",
        ),
        pytest.param(
            MAIN,
            {f"{PREFIX}rollout.name": "sglang", f"{ENGINE}.sglang.attention_backend": "fa3"},
            {"rollout.options": None},
            {f"{ENGINE}.sglang.attention_backend": "belongs to SGLang: vllm is used instead, with rollout.options"},
            id="arguments of another engine stay with it",
        ),
        pytest.param(
            MAIN,
            {f"{PREFIX}actor.optim.betas": "[0.9,0.95]"},
            {"engine.adam_beta1": 0.9, "engine.adam_beta2": 0.95},
            {},
            id="a list that a shell's quotes have made a text",
        ),
        pytest.param(
            MAIN,
            {f"{PREFIX}actor.optim.betas": [0.9]},
            {"engine.adam_beta2": 0.999},
            {f"{PREFIX}actor.optim.betas": "not a pair of numbers"},
            id="a list of another length",
        ),
        *(
            pytest.param(
                MAIN,
                {AGGREGATION: f"seq-mean-token-sum{norm}", f"{PREFIX}actor.loss_scale_factor": scale},
                {"algorithm.aggregation": "fixed_length", "algorithm.fixed_length": length},
                {AGGREGATION: remarks} if remarks else {},
                id=f"sums of sequences{norm}, by {scale}",
            )
            for norm, scale, length, remarks in (
                ("-norm", 8192, 8192, "the sum before"),
                ("-norm", None, 512, "the sum before"),
                ("", None, 1, ""),
            )
        ),
        pytest.param(
            MAIN,
            {f"{PREFIX}actor.loss_scale_factor": 8192},
            {"algorithm.aggregation": "token_mean", "algorithm.fixed_length": None},
            {f"{PREFIX}actor.loss_scale_factor": "with seq-mean-token-sum-norm alone"},
            id="a divisor that nothing is divided by",
        ),
        *(
            pytest.param(MAIN, {f"{PREFIX}actor.{name}": value, **more}, {"engine.dtype": ours}, remarks, id=f"{name}")
            for name, value, more, ours, remarks in (
                ("fsdp_config.dtype", "float32", {}, "float32", {}),
                ("fsdp_config.mixed_precision.param_dtype", "fp32", {}, "float32", {}),
                ("megatron.dtype", "float32", MEGATRON, "float32", {}),
                ("fsdp_config.model_dtype", "bf16", {}, "bfloat16", {MODEL_DTYPE: "in float32"}),
                (
                    "fsdp_config.dtype",
                    "float16",
                    {},
                    "bfloat16",
                    {f"{PREFIX}actor.fsdp_config.dtype": "using bfloat16 instead"},
                ),
            )
        ),
        pytest.param(
            MAIN,
            {**MEGATRON, f"{PREFIX}model.lora.rank": 16},
            {"engine.lora_rank": 16, "engine.lora_alpha": 32.0},
            {},
            id="adapters of Megatron",
        ),
        pytest.param(
            MAIN,
            {"reward_model.enable": True, "reward_model.model.path": "/judge", "data.max_response_length": 8192},
            {"reward.name": "reward_model", "reward.reward_model.path": "/judge", "reward.signature": None}
            | {"reward.reward_model.dtype": "bfloat16", "reward.reward_model.max_tokens": 8704},
            {},
            id="a reward model is the reward",
        ),
        pytest.param(
            MAIN,
            {"reward.reward_model.enable": True, "reward.reward_model.model_path": "/judge"}
            | {"reward.custom_reward_function.path": "my.py"},
            {"reward.name": "my.py:compute_score", "reward.reward_model.path": None},
            {"reward.reward_model.model_path": "reward.weights"},
            id="a reward model beside a function",
        ),
        pytest.param(
            MAIN,
            {"reward_model.enable": True},
            {"reward.name": "reward_model", "reward.reward_model.path": None},
            {"reward_model.enable": "set reward.reward_model.path"},
            id="a reward model without a name",
        ),
        pytest.param(
            MAIN,
            {f"{PREFIX}actor.fsdp_config.entropy_checkpointing": True, f"{PREFIX}actor.fsdp_config.fsdp_size": 8},
            {},
            {f"{PREFIX}actor.fsdp_config.entropy_checkpointing": "another implementation"}
            | {f"{PREFIX}actor.fsdp_config.fsdp_size": "always sharded"},
            id="each option of FSDP with its own reason",
        ),
        pytest.param(
            MAIN,
            {f"{PREFIX}rollout.val_kwargs.{name}": value for name, value in (("n", 16), ("top_p", 0.7), ("top_k", -1))},
            {},
            {f"{PREFIX}rollout.val_kwargs.{name}": "[eval.sets.NAME]" for name in ("n", "top_p")},
            id="validation with several samples",
        ),
        pytest.param(MAIN, MEGATRON, {"engine.backend": "megatron"}, {}, id="the sizes of megatron name it"),
        pytest.param(
            MAIN,
            {**MEGATRON, f"{PREFIX}actor.strategy": "fsdp2"},
            {"engine.backend": "torch", "engine.options": None},
            dict.fromkeys(MEGATRON, "Megatron's alone"),
            id="the strategy that is named decides the trainer",
        ),
    ],
)
def test_options_of_verl_keep_their_meaning(
    program: Program, options: dict[str, object], expected: dict[str, object], remarks: dict[str, str]
) -> None:
    holds(import_verl({f"{PREFIX}model.path": "m", **options}, program), expected, remarks)


VLLM = {"use_vllm": True, "vllm_importance_sampling_clip_max": 5.0, "vllm_importance_sampling_clip_min": 0.5}


@pytest.mark.parametrize(
    ("options", "expected", "remarks"),
    [
        (
            {},
            {"rollout.max_tokens": 512, "data.max_prompt_tokens": 1024, "engine.schedule": "linear"}
            | {"engine.activation_checkpointing": True, "async.mini_batch_size": 1, "algorithm.correction": "none"},
            {"max_prompt_length": "no limit there"},
        ),
        ({"vllm_max_model_length": 2048}, {"data.max_prompt_tokens": 1536, "rollout.max_model_len": 2048}, {}),
        (
            {"max_completion_length": None},
            {"rollout.max_tokens": 512, "data.max_prompt_tokens": 1024},
            {"max_completion_length": "no limit there"},
        ),
        (
            {"max_completion_length": None, "max_prompt_length": 512, "vllm_max_model_length": 4096},
            {"rollout.max_tokens": 3584, "data.max_prompt_tokens": 512, "rollout.max_model_len": 4096},
            {"max_completion_length": "no limit there"},
        ),
        (
            {"use_vllm": True, "num_processes": 8, "vllm_tensor_parallel_size": 2},
            {"cluster.colocate": True, "rollout.num_engines": 4, "engine.num_ranks": 8},
            {},
        ),
        (
            {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr_rate": 0.1}},
            {"engine.schedule": "cosine", "engine.min_learning_rate_ratio": 0.1},
            {},
        ),
        (
            {"lr_scheduler_kwargs": '{"min_lr": 1e-7, "num_cycles": 1}'},
            {"engine.min_learning_rate_ratio": pytest.approx(0.1)},
            {"lr_scheduler_kwargs": "num_cycles: not here"},
        ),
        ({"warmup_ratio": 0.1, "max_steps": 200}, {"engine.warmup_steps": 20}, {}),
        (
            {"eval_strategy": "epoch", "save_strategy": "best"},
            {"eval.every_updates": None, "checkpoint.every": None},
            {"eval_strategy": "eval.every_updates", "save_strategy": "checkpoint.every"},
        ),
        ({"save_steps": 0.1, "max_steps": 200}, {"checkpoint.every": 20}, {}),
        ({"save_steps": 0.1}, {"checkpoint.every": None}, {"save_steps": "a share of all steps"}),
        ({"save_strategy": "no"}, {"checkpoint.every": 0}, {}),
        ({"loss_type": ["dr_grpo", "sapo"]}, {"algorithm.aggregation": "fixed_length"}, {"loss_type": "the first"}),
        (
            {"delta": 2.0, "importance_sampling_level": "sequence"},
            {"algorithm.loss": "gspo", "algorithm.dual_clip": None},
            {"delta": "ratios of sequences"},
        ),
        (
            {"reward_funcs": ["a:b", "c:d"], "reward_weights": [2.0]},
            {"reward.weights": {"a:b": 2.0, "c:d": 1.0}, "reward.signature": "trl"},
            {"reward_weights": "1 for 2 functions"},
        ),
        (
            {"loss_type": "sapo", "off_policy_mask_threshold": 0.5},
            {"algorithm.aggregation": "sequence_mean"}
            | {"algorithm.options": {"tau_positive": 1.0, "tau_negative": 1.05, "off_policy_mask": 0.5}},
            {},
        ),
        (
            {"multi_objective_aggregation": "normalize_then_sum", "reward_funcs": ["a:b", "c:d"]},
            {"algorithm.advantage": "gdpo", "reward.weights": {"a:b": 1.0, "c:d": 1.0}},
            {},
        ),
        ({"loss_type": "cispo"}, {"algorithm.aggregation": "token_mean"}, {}),
        (
            {**VLLM, "vllm_importance_sampling_mode": "token_mask"},
            {"algorithm.correction": "icepop", "algorithm.rs_low": 0.5, "algorithm.rs_high": 5.0},
            {},
        ),
        (
            {**VLLM, "vllm_importance_sampling_mode": "token_truncate"},
            {"algorithm.tis_cap": 5.0},
            {"vllm_importance_sampling_clip_min": "not raised"},
        ),
        (
            {"eval_strategy": "steps", "eval_steps": 20, "save_steps": 30, "max_steps": 100}
            | {"gradient_accumulation_steps": 2, "steps_per_generation": 8},
            {"async.require_batches": 4, "engine.max_updates": 25, "eval.every_updates": 5, "checkpoint.every": 8},
            {},
        ),
        ({"warmup_steps": 0.1}, {"engine.warmup_steps": None}, {"warmup_steps": "a share of all steps"}),
        ({"warmup_steps": 10}, {"engine.warmup_steps": 10}, {}),
        ({"beta": 0.04}, {"algorithm.kl_ratio_weight": False, "algorithm.num_passes": 1}, {}),
        (
            {"beta": 0.04, "use_bias_correction_kl": True},
            {"algorithm.kl_ratio_weight": True},
            {"use_bias_correction_kl": "the policy that sampled here"},
        ),
        ({"mask_truncated_completions": True}, {"algorithm.mask_truncated": True}, {}),
        (
            {"mask_truncated_completions": True, "loss_type": "grpo"},
            {"algorithm.mask_truncated": True},
            {"mask_truncated_completions": "there, and not here"},
        ),
        ({"num_iterations": 2, "max_steps": 100}, {"algorithm.num_passes": 2, "engine.max_updates": 50}, {}),
    ],
)
def test_options_and_defaults_of_trl_keep_their_meaning(
    options: dict[str, object], expected: dict[str, object], remarks: dict[str, str]
) -> None:
    holds(import_trl(options), expected, remarks)


@pytest.mark.parametrize(
    ("draft", "correction", "form"),
    [
        pytest.param(import_verl({f"{PREFIX}model.path": "m"}, MAIN), "none", "decoupled", id="verl"),
        pytest.param(import_verl({f"{PREFIX}model.path": "m"}, ASYNC), "none", "bypass", id="verl, asynchronous"),
        pytest.param(import_trl({"use_vllm": False}), "none", "decoupled", id="TRL"),
        pytest.param(import_trl(VLLM), "sequence_tis_sequence_rs", "decoupled", id="TRL with vLLM"),
        pytest.param(import_openrlhf({}), "none", "decoupled", id="OpenRLHF"),
        pytest.param(import_prime_rl({}), "none", "bypass", id="prime-rl"),
    ],
)
def test_what_corrects_is_written_out_and_never_left_to_the_default(
    draft: RecipeBuilder, correction: str, form: str
) -> None:
    """The default may choose weights that the other framework does not have."""
    holds(draft, {"algorithm.correction": correction, "algorithm.correction_form": form}, {})


def test_a_default_of_trl_that_has_changed_says_what_it_was_before():
    said = {key: entry.source for key, entry in import_trl({"epsilon": 0.3}).entries.items()}
    assert said["algorithm.kl_coefficient"] == "default of beta since TRL 0.19; before, 0.04"
    assert said["rollout.temperature"] == "default of temperature since TRL 0.18; before, 0.9 with top_k 50"
    assert said["algorithm.clip_low"] == "epsilon"
    assert import_trl({"beta": 0.04}).entries["algorithm.kl_coefficient"].source == "beta"
