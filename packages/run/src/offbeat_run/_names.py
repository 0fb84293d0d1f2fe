"""The metrics an offbeat run writes and its report reads: one list, each with what it means and its unit."""

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True)
class MetricName:
    """One metric of a run.

    Args:
        name: as written in metrics.jsonl; the part before the slash groups it.
        doc: what it is, in one sentence.
        unit: empty for a pure number or a share of 1.
        histogram: the value is a list: element i counts what had the whole number i.
    """

    name: str
    doc: str
    unit: str = ""
    histogram: bool = False


METRIC_NAMES: Final = {
    metric.name: metric
    for metric in (
        MetricName("train/reward", "Mean reward of the completions trained on."),
        MetricName("train/loss", "Mean loss over the loss tokens of the update.", "nats"),
        MetricName("train/entropy", "Mean entropy of the policy at the tokens trained on.", "nats"),
        MetricName("train/kl_ref", "Mean KL divergence from the reference policy.", "nats"),
        MetricName("train/clip_fraction", "Share of tokens whose ratio was clipped."),
        MetricName("train/ratio_max", "Largest probability ratio of new to old policy."),
        MetricName("train/response_tokens", "Mean length of a completion.", "tokens"),
        MetricName("train/lag_mean", "Mean lag: versions between sampling the oldest token and training.", "versions"),
        MetricName("train/lag_max", "Largest lag of the update.", "versions"),
        MetricName("async/lag_histogram", "Completions by lag: element i counts those of lag i.", "", True),
        MetricName("async/trainer_idle_share", "Share of the time the trainer waited for samples."),
        MetricName("async/rollout_idle_share", "Share of the time the rollout engines sampled nothing."),
        MetricName("async/overlap_share", "Share of the time trainer and rollout worked at once."),
        MetricName("perf/tokens_per_s", "Tokens sampled (GRPO) or trained on (SFT) per second.", "tokens/s"),
        MetricName("perf/samples_per_s", "Samples trained on per second.", "samples/s"),
        MetricName("eval/accuracy", "Share of held-out prompts answered rightly."),
        MetricName("eval/reward", "Mean reward on held-out prompts."),
        MetricName("eval/loss", "Mean loss on held-out sequences.", "nats"),
        MetricName("groups/filtered", "Groups left out because all their rewards are equal.", "groups"),
        MetricName("groups/dropped", "Groups left out because their lag was too large.", "groups"),
        MetricName("engines/restarts", "Times a rollout engine died and was started again.", "restarts"),
        MetricName("engines/stragglers", "Rollout engines much slower than the others.", "engines"),
        MetricName("engines/serving", "Rollout engines, once they are not as many as configured.", "engines"),
        MetricName("distillation/kl", "Divergence of the policy from its teacher on its own samples.", "nats"),
        MetricName("distillation/kl_k3", "The same, estimated without negative values.", "nats"),
        MetricName("distillation/teacher_logprob", "Log-probability the teacher gives what was sampled.", "nats"),
        MetricName("teacher/restarts", "Times a replica of the teacher died and was started again.", "restarts"),
        MetricName("trainer/restarts", "Times the trainer died and was started again.", "restarts"),
        MetricName("engine/grad_norm", "Norm of the gradient before clipping."),
        MetricName("engine/learning_rate", "Learning rate of the last optimizer step."),
        MetricName("engine/steps_refused", "Optimizer steps refused because the gradient was not finite.", "steps"),
    )
}
"""By name. Others are welcome; those under `correction/` and any of a known group appear in the report too."""

CORRECTION_PREFIX: Final = "correction/"
