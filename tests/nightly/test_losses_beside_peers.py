"""Our losses and advantages beside verl's and TRL's own functions, on random inputs in float64: `nox -s peers`.

Both have an environment of their own; nothing here is skipped where they are missing, so that their absence is seen.
"""

from collections import defaultdict
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from trl import GRPOTrainer
from verl.trainer.config import AlgoConfig
from verl.trainer.ppo.core_algos import (
    compute_gae_advantage_return,
    compute_value_loss,
    get_adv_estimator_fn,
    get_policy_loss_fn,
)
from verl.workers.config import ActorConfig, PolicyLossConfig

from offbeat_core import LossTokens
from offbeat_objectives import AlgorithmConfig, ValueLoss, build_loss, compute_advantages, compute_returns, pack

NUM_SEQUENCES, LENGTH = 6, 9
AGGREGATIONS = {
    "token_mean": "token-mean",
    "sequence_mean": "seq-mean-token-mean",
    "fixed_length": "seq-mean-token-sum-norm",
}
LARGEST: dict[str, float] = defaultdict(float)


@pytest.fixture(scope="module", autouse=True)
def _say_the_largest_differences():
    yield
    for name, difference in sorted(LARGEST.items()):
        print(f"{name}: largest difference {difference:.1e}")


def close(name, ours, theirs, *, rel=1e-7, abs_=1e-8):
    """Compare with a tolerance: verl adds 1e-8 to the tokens of a sequence before it divides by them."""
    ours, theirs = (torch.as_tensor(each, dtype=torch.float64).detach() for each in (ours, theirs))
    LARGEST[name] = max(LARGEST[name], float((ours - theirs).abs().max()))
    torch.testing.assert_close(ours, theirs, rtol=rel, atol=abs_)


class Batch:
    """Padded on the right: log-probabilities of now, old, of rollout and reference, advantages, and the mask."""

    def __init__(self, seed, spread, *, of_sequences):
        generator = torch.Generator().manual_seed(seed)

        def noise(*size):
            return torch.randn(*size, generator=generator, dtype=torch.float64)

        lengths_B = torch.randint(1, LENGTH + 1, (NUM_SEQUENCES,), generator=generator)
        self.mask_BT = (torch.arange(LENGTH) < lengths_B[:, None]).double()
        self.new_BT = -noise(NUM_SEQUENCES, LENGTH).abs() - 0.01
        self.old_BT = (self.new_BT + spread * noise(NUM_SEQUENCES, LENGTH)).clamp(max=-1e-3)
        self.rollout_BT = (self.new_BT + spread * noise(NUM_SEQUENCES, LENGTH)).clamp(max=-1e-3)
        self.reference_BT = self.new_BT + 0.3 * noise(NUM_SEQUENCES, LENGTH)
        advantages = noise(NUM_SEQUENCES, 1).expand(-1, LENGTH) if of_sequences else noise(NUM_SEQUENCES, LENGTH)
        self.advantages_BT = advantages.contiguous()

    def ours(self, config):
        """Return our loss, and its gradient padded like theirs."""
        new_BT = self.new_BT.clone().requires_grad_()
        given = (new_BT, self.old_BT, self.rollout_BT, self.reference_BT, self.advantages_BT)
        packed = pack(self.mask_BT, *given)
        new_N, old_N, rollout_N, reference_N, advantages_N = packed.tensors
        tokens = LossTokens(
            logprobs_N=new_N,
            entropy_N=torch.zeros_like(old_N),
            sequence_N=packed.sequence_N,
            num_sequences=NUM_SEQUENCES,
            extras={
                "advantages": advantages_N,
                "old_logprobs": old_N,
                "rollout_logprobs": rollout_N,
                "ref_logprobs": reference_N,
            },
            total_tokens=len(old_N),
            total_sequences=NUM_SEQUENCES,
        )
        loss, _ = build_loss(config)(tokens)
        return loss, torch.autograd.grad(loss, new_BT)[0]


def config_of(loss, aggregation, **changes):
    length = LENGTH if aggregation == "fixed_length" else None
    return AlgorithmConfig(loss=loss, aggregation=aggregation, fixed_length=length, **changes)


batch_seeds = given(seed=st.integers(0, 2**31), spread=st.sampled_from([0.01, 0.3, 1.0]))

VERL = {
    "ppo_clip": ("vanilla", {"clip_low": 0.1, "clip_high": 0.3, "dual_clip": 1.5}, {}),
    "cispo": ("cispo", {"clip_low": 0.2, "clip_high": 0.3}, {}),
    "gspo": ("gspo", {"clip_low": 0.1, "clip_high": 0.2}, {}),
    "sapo": ("sapo", {"options": {"tau_positive": 1.25, "tau_negative": 1.75}}, {}),
    "gmpo": ("geo_mean", {"clip_low": 0.2, "clip_high": 0.4}, {}),
    "gpg": ("gpg", {}, {}),
    "dppo_tv": ("dppo_tv", {"clip_low": 0.02, "clip_high": 0.05, "options": {"ratio_cap": 1.5}}, {}),
    "dppo_kl": ("dppo_kl", {"clip_low": 0.002, "clip_high": 0.01, "options": {"ratio_cap": 1.5}}, {}),
    "clip_cov": (
        "clip_cov",
        {"clip_low": 0.1, "clip_high": 0.3, "options": {"cov_share": 0.1, "cov_low": 0.01, "cov_high": 2.0}},
        {"clip_cov_ratio": 0.1, "clip_cov_lb": 0.01, "clip_cov_ub": 2.0},
    ),
    "kl_cov": (
        "kl_cov",
        {"options": {"cov_share": 0.2, "kl_weight": 0.7}},
        {"kl_cov_ratio": 0.2, "ppo_kl_coef": 0.7},
    ),
}
OF_SEQUENCES = ("gspo", "sapo", "gmpo")


def verl_loss(mode, batch, aggregation, changes, of_loss):
    low, high = changes.get("clip_low", 0.2), changes.get("clip_high", 0.2)
    options = changes.get("options", {})
    config = ActorConfig(
        strategy="fsdp",
        rollout_n=1,
        ppo_micro_batch_size_per_gpu=1,
        clip_ratio_low=low,
        clip_ratio_high=high,
        clip_ratio_c=options.get("ratio_cap", changes.get("dual_clip", 3.0)),
        tau_pos=options.get("tau_positive", 1.0),
        tau_neg=options.get("tau_negative", 1.05),
        policy_loss=PolicyLossConfig(loss_mode=mode, **of_loss),
    )
    new_BT = batch.new_BT.clone().requires_grad_()
    torch.manual_seed(int(batch.mask_BT.sum()))  # what our draw of clip_cov begins with
    loss, _ = get_policy_loss_fn(mode)(
        old_log_prob=batch.old_BT,
        log_prob=new_BT,
        advantages=batch.advantages_BT,
        response_mask=batch.mask_BT,
        loss_agg_mode=AGGREGATIONS[aggregation],
        config=config,
    )
    return loss, torch.autograd.grad(loss, new_BT)[0]


@pytest.mark.parametrize("aggregation", list(AGGREGATIONS))
@pytest.mark.parametrize("loss", list(VERL))
@settings(max_examples=30)
@batch_seeds
def test_a_loss_is_that_of_verl(loss, aggregation, seed, spread):
    mode, changes, of_loss = VERL[loss]
    how = "sequence_mean" if loss in OF_SEQUENCES else aggregation
    batch = Batch(seed, spread, of_sequences=loss in OF_SEQUENCES)
    ours, theirs = batch.ours(config_of(loss, how, **changes)), verl_loss(mode, batch, how, changes, of_loss)
    close(f"verl {mode}, value", ours[0], theirs[0])
    close(f"verl {mode}, gradient", ours[1], theirs[1])


TRL = {
    "grpo": ("ppo_clip", "sequence_mean"),
    "dapo": ("ppo_clip", "token_mean"),
    "dr_grpo": ("ppo_clip", "fixed_length"),
    "cispo": ("cispo", "token_mean"),
    "sapo": ("sapo", "sequence_mean"),
    "gspo": ("gspo", "sequence_mean"),
}


class Absent(SimpleNamespace):
    """A trainer without what a test does not give it."""

    def __getattr__(self, name):
        return None


def trl_accelerator():
    return SimpleNamespace(
        gather=lambda values: values,
        reduce=lambda values, reduction: values,
        num_processes=1,
        process_index=0,
        device=torch.device("cpu"),
        unwrap_model=lambda model: model,
    )


def trl_loss(kind, batch, *, threshold, beta, delta):
    new_BT = batch.new_BT.clone().requires_grad_()
    ids_BT = torch.zeros(NUM_SEQUENCES, LENGTH, dtype=torch.long)
    trainer = Absent(
        accelerator=trl_accelerator(),
        args=Absent(delta=delta, sapo_temperature_pos=1.25, sapo_temperature_neg=1.75, steps_per_generation=1),
        beta=beta,
        current_gradient_accumulation_steps=1,
        epsilon_low=0.1,
        epsilon_high=1.3 if kind == "cispo" else 0.3,
        importance_sampling_level="sequence" if kind == "gspo" else "token",
        loss_type="grpo" if kind == "gspo" else kind,
        max_completion_length=LENGTH,
        model=SimpleNamespace(training=True),
        off_policy_mask_threshold=threshold,
        get_off_policy_mask=GRPOTrainer.get_off_policy_mask,
        top_entropy_quantile=1.0,
        _metrics={"train": defaultdict(list)},
        _get_per_token_logps_and_entropies=lambda *_, **__: (new_BT, torch.zeros_like(batch.new_BT), None),
    )
    inputs = {
        "prompt_ids": ids_BT[:, :1],
        "prompt_mask": ids_BT[:, :1],
        "completion_ids": ids_BT,
        "completion_mask": batch.mask_BT,
        "advantages": batch.advantages_BT[:, 0],
        "old_per_token_logps": batch.old_BT,
        "sampling_per_token_logps": batch.rollout_BT,
        "ref_per_token_logps": batch.reference_BT,
        "num_items_in_batch": batch.mask_BT.sum(),
    }
    loss = GRPOTrainer._compute_loss(trainer, None, inputs)
    return loss, torch.autograd.grad(loss, new_BT)[0]


@pytest.mark.parametrize("threshold", [None, 0.05], ids=["", "off-policy mask"])
@pytest.mark.parametrize("kind", list(TRL))
@settings(max_examples=30)
@batch_seeds
def test_a_loss_is_that_of_trl(kind, threshold, seed, spread):
    loss, aggregation = TRL[kind]
    batch = Batch(seed, spread, of_sequences=True)
    options = {"tau_positive": 1.25, "tau_negative": 1.75} if loss == "sapo" else {}  # TRL rounds them to float32
    options |= {} if threshold is None else {"off_policy_mask": threshold}
    clips = {} if loss == "sapo" else {"clip_low": 1.0 if loss == "cispo" else 0.1, "clip_high": 0.3}
    dual = {"dual_clip": 1.6} if loss == "ppo_clip" else {}
    config = config_of(loss, aggregation, kl_coefficient=0.2, kl_ratio_weight=False, options=options, **clips, **dual)
    ours = batch.ours(config)
    theirs = trl_loss(kind, batch, threshold=threshold, beta=0.2, delta=dual.get("dual_clip"))
    name = f"trl {kind}" + (" with the off-policy mask" if threshold else "")
    close(f"{name}, value", ours[0], theirs[0])
    close(f"{name}, gradient", ours[1], theirs[1])


class Samples:
    """Groups of equal size, of rewards in eighths, which float32 holds exactly; of 1 to T tokens each, or all of T."""

    def __init__(self, seed, *, equal_lengths=False, num_groups=4, group_size=4):
        generator = torch.Generator().manual_seed(seed)
        size = num_groups * group_size
        self.index_S = torch.arange(num_groups).repeat_interleave(group_size)[torch.randperm(size, generator=generator)]
        self.parts_S = {
            name: torch.randint(-8, 9, (size,), generator=generator).double() / 8 * scale
            for name, scale in (("right", 1.0), ("format", 4.0))
        }
        self.weights = {"right": 1.0, "format": 0.5}
        self.rewards_S = sum(self.weights[name] * values_S for name, values_S in self.parts_S.items())
        lengths_S = torch.randint(1, LENGTH + 1, (size,), generator=generator)
        self.lengths_S = torch.full_like(lengths_S, LENGTH) if equal_lengths else lengths_S
        self.mask_ST = (torch.arange(LENGTH) < self.lengths_S[:, None]).double()
        self.rewards_ST = torch.zeros(size, LENGTH, dtype=torch.float64)
        self.rewards_ST[torch.arange(size), self.lengths_S - 1] = self.rewards_S

    def ours(self, name, **options):
        config = AlgorithmConfig(advantage=name, options=options)
        given = (self.rewards_S, self.index_S, self.lengths_S)
        advantages_N, _ = compute_advantages(config, *given, parts_S=self.parts_S, weights=self.weights)
        return advantages_N.double()

    def verl(self, name, **extra):
        found_ST, _ = get_adv_estimator_fn(name)(
            token_level_rewards=self.rewards_ST.clone(),
            response_mask=self.mask_ST,
            index=self.index_S.numpy().astype(object),
            **{"config": AlgoConfig(), **extra},
        )
        return found_ST[self.mask_ST.bool()]


sample_seeds = given(seed=st.integers(0, 2**31))


@pytest.mark.parametrize("name", ["grpo", "grpo_passk", "rloo", "opo"])
@settings(max_examples=30)
@sample_seeds
def test_an_advantage_is_that_of_verl(name, seed):
    samples = Samples(seed)
    close(f"verl {name}", samples.ours(name), samples.verl(name), rel=1e-5, abs_=1e-5)


@settings(max_examples=30)
@sample_seeds
def test_grpo_passk_without_a_deviation_is_that_of_verl(seed):
    samples = Samples(seed)
    config = AlgoConfig(norm_adv_by_std_in_grpo=False)
    theirs = samples.verl("grpo_passk", config=config)
    close("verl grpo_passk, plain", samples.ours("grpo_passk", divide_by_std=False), theirs, rel=1e-6, abs_=1e-6)


@settings(max_examples=30)
@sample_seeds
def test_gpg_is_that_of_verl_but_for_what_the_scale_counts(seed):
    """verl divides by the samples with a reward that is not 0, the paper and we by those of groups that differ."""
    samples = Samples(seed)
    size = len(samples.rewards_S)
    own = [samples.rewards_S[samples.index_S == i] for i in samples.index_S.tolist()]
    spread_S = torch.stack([rewards.max() - rewards.min() for rewards in own])
    ours = samples.ours("gpg") * max(int((spread_S > 0).sum()), 1) / size
    theirs = samples.verl("gpg") * max(int(torch.count_nonzero(samples.rewards_S)), 1) / size
    close("verl gpg, unscaled", ours, theirs, rel=1e-6, abs_=1e-6)


@settings(max_examples=30)
@sample_seeds
def test_what_is_normalised_over_tokens_differs_from_verl_by_n_and_n_minus_1_alone(seed):
    samples = Samples(seed)
    count = int(samples.lengths_S.sum())
    for name in ("reinforce_plus_plus", "reinforce_plus_plus_baseline"):
        ours = samples.ours(name) * ((count - 1) / count) ** 0.5
        close(f"verl {name}", ours, samples.verl(name), rel=1e-4, abs_=1e-4)


@settings(max_examples=30)
@sample_seeds
def test_gdpo_is_that_of_verl_where_samples_are_of_one_length(seed):
    """verl normalises over tokens, so that long samples weigh more; the paper, TRL and we over samples."""
    samples = Samples(seed, equal_lengths=True)
    size, count = len(samples.rewards_S), int(samples.lengths_S.sum())
    config = AlgoConfig(gdpo_reward_keys=list(samples.weights), gdpo_reward_weights=list(samples.weights.values()))
    theirs = samples.verl(
        "gdpo",
        config=config,
        non_tensor_batch={name: values_S.numpy().astype(np.float32) for name, values_S in samples.parts_S.items()},
        batch={"prompts": torch.zeros(size, 1), "attention_mask": torch.ones(size, 1 + LENGTH, dtype=torch.long)},
    )
    ours = samples.ours("gdpo") * ((count - 1) / (LENGTH * (size - 1))) ** 0.5
    close("verl gdpo", ours, theirs, rel=1e-4, abs_=1e-4)


def trl_advantages(samples, kind):
    """Run `GRPOTrainer._generate_and_score_completions` with given completions and rewards."""
    order = samples.index_S.argsort(stable=True)
    names = list(samples.weights)
    size = len(order)
    rewards = torch.stack([samples.parts_S[name][order] for name in names], dim=1)
    completions = [[1] * int(samples.lengths_S[i]) for i in order]
    trainer = Absent(
        accelerator=trl_accelerator(),
        args=Absent(steps_per_generation=1, gradient_accumulation_steps=1, per_device_train_batch_size=size),
        beta=0.0,
        model=Absent(training=True),
        multi_objective_aggregation=kind,
        num_generations=size // (int(samples.index_S.max()) + 1),
        num_iterations=1,
        reward_func_names=names,
        reward_funcs=names,
        reward_weights=torch.tensor(list(samples.weights.values()), dtype=torch.float64),
        scale_rewards="group",
        _tokenizer=SimpleNamespace(pad_token_id=0),
        _metrics={"train": defaultdict(list)},
        _logs=defaultdict(list, rewards=defaultdict(list), extra=defaultdict(list)),
        _pending_extra_logs={},
        _pending_metrics={},
        _generate=lambda prompts: ([[1]] * size, completions, None, [""] * size, None, {}, None, None),
        _calculate_rewards=lambda *_: rewards,
    )
    found = GRPOTrainer._generate_and_score_completions(trainer, [{"prompt": "?"} for _ in range(size)])
    advantages_S = torch.empty(size, dtype=torch.float64).index_copy(0, order, found["advantages"].double())
    return advantages_S.repeat_interleave(samples.lengths_S)


@pytest.mark.parametrize(("name", "kind"), [("grpo", "sum_then_normalize"), ("gdpo", "normalize_then_sum")])
@settings(max_examples=20)
@sample_seeds
def test_an_advantage_is_that_of_trl(name, kind, seed):
    """TRL adds 1e-4 to deviations where we add 1e-6."""
    samples = Samples(seed)
    close(f"trl {name}", samples.ours(name), trl_advantages(samples, kind), rel=3e-3, abs_=3e-3)


@settings(max_examples=20)
@given(seed=st.integers(0, 2**31), gamma=st.sampled_from([1.0, 0.97]), lam=st.sampled_from([0.9, 1.0]))
def test_a_critic_is_asked_and_taught_as_by_verl(seed, gamma, lam):
    batch = Batch(seed, 0.3, of_sequences=False)
    mask_BT, values_BT, moved_BT = batch.mask_BT, batch.old_BT, batch.new_BT
    lengths_B = mask_BT.sum(1).long()
    rewards_B = batch.reference_BT[:, 0]
    rewards_BT = torch.zeros_like(mask_BT)
    rewards_BT[torch.arange(NUM_SEQUENCES), lengths_B - 1] = rewards_B
    theirs_BT, returns_BT = compute_gae_advantage_return(rewards_BT, values_BT * mask_BT, mask_BT, gamma, lam)
    packed = pack(mask_BT, values_BT, moved_BT, theirs_BT, returns_BT)
    values_N, moved_N, theirs_N, returns_N = packed.tensors
    config = AlgorithmConfig(advantage="gae", gamma=gamma, gae_lambda=lam)
    prompts_B = torch.arange(NUM_SEQUENCES)
    ours_N, _ = compute_advantages(config, rewards_B, prompts_B, lengths_B, values_N=values_N)
    num_tokens = len(ours_N)
    theirs_N = theirs_N * (num_tokens / (num_tokens - 1)) ** 0.5  # their deviation has n - 1
    close("gae", ours_N, theirs_N, rel=1e-4, abs_=1e-4)
    ours_N = compute_returns(config, rewards_B, lengths_B, values_N, lam=lam)
    close("returns", ours_N, returns_N, rel=1e-5, abs_=1e-6)
    tokens = LossTokens(
        logprobs_N=moved_N,
        entropy_N=torch.zeros_like(moved_N),
        sequence_N=packed.sequence_N,
        num_sequences=NUM_SEQUENCES,
        extras={"values": values_N, "returns": returns_N},
        total_tokens=num_tokens,
        total_sequences=NUM_SEQUENCES,
    )
    loss, metrics = ValueLoss(0.2)(tokens)
    wanted, clipped = compute_value_loss(moved_BT, returns_BT, values_BT, mask_BT, 0.2)
    close("value loss", loss, wanted)
    close("value clip", metrics["critic/clip_fraction"].value, clipped, rel=1e-5)
