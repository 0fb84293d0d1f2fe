"""The metrics of a run by name: what each is, its unit, and how it is shown to people."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

_P99: Final = "mismatch p99 nats"
_TOKENS: Final = {
    "": "",
    "_lag0": ", weights in training",
    "_lagged": ", older weights",
    "_same_routes": ", same experts",
    "_other_routes": ", other experts",
}


@dataclass(frozen=True)
class MetricName:
    """One metric of a run.

    Args:
        name: as written in metrics.jsonl; the part before the slash groups it.
        doc: what it is, in one sentence.
        unit: empty for a pure number or a share of 1.
        label: its name for people, the same in the terminal and in a report.
    """

    name: str
    doc: str
    unit: str = ""
    label: str = ""


def _mismatch_names() -> Iterator[MetricName]:
    """Names of trainer against rollout engine: of all tokens, of those without lag, of the others."""
    figures = (
        MetricName("kl", "KL(rollout ‖ train), estimator k3, a token", "nats", "mismatch KL"),
        MetricName("abs_p99_nats", "|log r| that 99 of 100 tokens do not exceed, r = trainer / engine", "nats", _P99),
        MetricName("abs_max_nats", "Largest |log r|, r = trainer's probability / engine's", "nats", "largest mismatch"),
        MetricName("ess_share", "Effective sample size under the weights r, as a share", "", "effective sample size"),
    )
    tokens = {
        "": "",
        "_lag0": ", of tokens sampled by the weights being trained",
        "_lagged": ", of all other tokens",
        "_same_routes": ", of tokens that the trainer's routers would compute with the sampler's experts in all layers",
        "_other_routes": ", of tokens for which they would choose others in some layer",
    }
    for suffix, which in tokens.items():
        for figure in figures:
            label = f"{figure.label}{_TOKENS[suffix]}"
            yield MetricName(f"mismatch/{figure.name}{suffix}", f"{figure.doc}{which}.", figure.unit, label)
    lagged = "Share of the tokens that other weights than those in training sampled."
    yield MetricName("mismatch/lagged_share", lagged, "", "older weights")
    routes = "Share of (token, layer) in which the trainer's router would choose other experts than the sampler did."
    yield MetricName("mismatch/routes_differ", routes, "", "other experts")


METRIC_NAMES: Final = {
    metric.name: metric
    for metric in (
        MetricName("train/reward", "Mean reward of the completions trained on.", "", "reward"),
        MetricName("train/loss", "Mean loss over the loss tokens of the update.", "nats", "loss"),
        MetricName("train/entropy", "Mean entropy of the policy at the tokens trained on.", "nats", "entropy"),
        MetricName("train/kl_ref", "Mean KL divergence from the reference policy.", "nats", "KL to the reference"),
        MetricName("train/clip_fraction", "Share of tokens whose ratio was clipped.", "", "clipped"),
        MetricName("train/ratio_max", "Largest probability ratio of new to old policy.", "", "largest ratio"),
        MetricName("train/response_tokens", "Mean length of a completion.", "tokens", "response tokens"),
        MetricName(
            "train/lag_mean", "Mean lag: versions between sampling the oldest token and training.", "versions", "lag"
        ),
        MetricName("train/lag_max", "Largest lag of the update.", "versions", "largest lag"),
        MetricName(
            "train/cut_off_share", "Share of the completions cut off by a limit of tokens or turns.", "", "cut off"
        ),
        MetricName(
            "train/mixed_version_share", "Share of the samples that several versions wrote.", "", "mixed versions"
        ),
        MetricName("train/ratio_mean", "Mean probability ratio of new to old policy.", "", "mean ratio"),
        MetricName(
            "train/kl_old", "Mean KL divergence from the policy before the update.", "nats", "KL to the old policy"
        ),
        MetricName("train/share_kept", "Share of the loss tokens that no correction rejected.", "", "tokens kept"),
        MetricName(
            "train/masked_share", "Share of the loss tokens that the objective leaves out.", "", "tokens masked"
        ),
        MetricName("train/loss_policy", "The policy's part of the loss.", "nats", "policy loss"),
        MetricName("train/loss_kl", "The part of the loss that holds the policy to the reference.", "nats", "KL loss"),
        MetricName("train/loss_entropy", "The part of the loss that rewards entropy.", "nats", "entropy loss"),
        MetricName("train/turns", "Turns of the model in a sample.", "turns", "turns"),
        MetricName("train/read_tokens", "Tokens that a sample was answered with.", "tokens", "tokens read"),
        MetricName("train/trajectories", "Conversations in a sample.", "conversations", "conversations"),
        *_mismatch_names(),
        MetricName(
            "async/lag_histogram", "Completions by lag: element i counts those of lag i.", "", "completions by lag"
        ),
        MetricName("async/trainer_idle_share", "Share of the time the trainer waited for samples.", "", "trainer idle"),
        MetricName(
            "async/rollout_idle_share", "Share of the time the rollout engines sampled nothing.", "", "rollout idle"
        ),
        MetricName("async/overlap_share", "Share of the time trainer and rollout worked at once.", "", "overlap"),
        MetricName(
            "perf/tokens_per_s",
            "Tokens per second: sampled (GRPO), or computed by the trainer with those of prompts (SFT).",
            "tokens/s",
            "tokens/s",
        ),
        MetricName("perf/samples_per_s", "Samples trained on per second.", "samples/s", "samples/s"),
        MetricName("perf/update_s", "From the end of the update before to the end of this one.", "s", "update time"),
        MetricName(
            "perf/handover_s", "Time to hand devices from one colocated role to the other.", "s", "handover time"
        ),
        MetricName("eval/accuracy", "Share of held-out prompts answered rightly.", "", "held-out accuracy"),
        MetricName("eval/reward", "Mean reward on held-out prompts.", "", "held-out reward"),
        MetricName("eval/loss", "Mean loss on held-out sequences.", "nats", "held-out loss"),
        MetricName(
            "eval/response_tokens", "Mean length of a held-out completion.", "tokens", "held-out response tokens"
        ),
        MetricName("eval/response_tokens_p95", "95 of 100 are not longer.", "tokens", "held-out response tokens, 95 %"),
        MetricName(
            "eval/cut_off_share", "Share of the held-out completions cut off by a limit.", "", "held-out cut off"
        ),
        MetricName("eval/turns", "Turns of the model in a held-out sample.", "turns", "held-out turns"),
        MetricName("eval/versions", "Policy versions that answered a validation.", "versions", "held-out versions"),
        MetricName("eval/items", "Held-out items that were answered.", "items", "held-out items"),
        MetricName(
            "groups/filtered", "Groups left out because all their rewards are equal.", "groups", "groups filtered"
        ),
        MetricName("groups/dropped", "Groups left out because their lag was too large.", "groups", "groups dropped"),
        MetricName("groups/reissued", "Groups sampled again after a failure.", "groups", "groups sampled again"),
        MetricName("data/epoch", "Passes over the training data.", "epochs", "epoch"),
        MetricName(
            "rewards/accuracies", "Share of pairs whose chosen answer has the larger reward.", "", "pairs right"
        ),
        MetricName("rewards/margins", "How far chosen answers are ahead of rejected ones.", "", "margin"),
        MetricName("rewards/chosen", "Implicit reward of chosen answers.", "", "chosen"),
        MetricName("rewards/rejected", "Implicit reward of rejected answers.", "", "rejected"),
        MetricName(
            "engines/restarts", "Times a rollout engine died and was started again.", "restarts", "engine restarts"
        ),
        MetricName("engines/stragglers", "Rollout engines much slower than the others.", "engines", "slow engines"),
        MetricName(
            "engines/serving", "Rollout engines, once they are not as many as configured.", "engines", "engines serving"
        ),
        MetricName("curriculum/known", "Share of the prompts whose success rate is known.", "", "known"),
        MetricName(
            "curriculum/too_easy",
            "Share of the prompts that lately succeed too often: curriculum.high.",
            "",
            "too easy",
        ),
        MetricName(
            "curriculum/too_hard",
            "Share of the prompts that lately succeed too seldom: curriculum.low.",
            "",
            "too hard",
        ),
        MetricName(
            "distillation/kl",
            "Divergence of the policy from its teacher on its own samples.",
            "nats",
            "KL to the teacher",
        ),
        MetricName(
            "distillation/kl_k3", "The same, estimated without negative values.", "nats", "KL to the teacher, k3"
        ),
        MetricName(
            "distillation/teacher_logprob",
            "Log-probability the teacher gives what was sampled.",
            "nats",
            "teacher's log-probability",
        ),
        MetricName(
            "critic/loss", "Loss of the critic: half the squared error of its values.", "reward²", "critic loss"
        ),
        MetricName(
            "critic/explained_variance",
            "Share of the returns' variance that the critic's values explain.",
            "",
            "explained variance",
        ),
        MetricName("critic/value", "Mean value of a token.", "reward", "value"),
        MetricName("critic/return", "Mean of what a token's value should be.", "reward", "return"),
        MetricName("critic/clip_fraction", "Share of the tokens whose value was held back.", "", "critic clipped"),
        MetricName("critic/grad_norm", "Norm of the critic's gradient before clipping.", "", "critic gradient norm"),
        MetricName("critic/learning_rate", "Learning rate of the critic's last step.", "", "critic learning rate"),
        MetricName("critic/steps_refused", "Steps of the critic that were refused.", "steps", "critic steps refused"),
        MetricName(
            "teacher/restarts",
            "Times a replica of the teacher died and was started again.",
            "restarts",
            "teacher restarts",
        ),
        MetricName(
            "reward_model/restarts",
            "Times a replica of the reward model was started again.",
            "restarts",
            "reward model restarts",
        ),
        MetricName(
            "scoring/latency_p50_s",
            "Time from asking for a score to having it: half took less.",
            "s",
            "scoring time, median",
        ),
        MetricName("scoring/latency_p95_s", "The same: 95 of 100 took less.", "s", "scoring time, 95 %"),
        MetricName("scoring/latency_max_s", "The same: the longest.", "s", "scoring time, longest"),
        MetricName("scoring/queue", "Completions that wait for a scorer.", "completions", "waiting for a scorer"),
        MetricName(
            "scoring/busy_share", "Share of the time that a process that scores was at work.", "", "scorers busy"
        ),
        MetricName("scoring/processes", "Processes that score.", "processes", "scorers"),
        MetricName(
            "scoring/restarts",
            "Times such a process was ended, or died, and was started again.",
            "restarts",
            "scorer restarts",
        ),
        MetricName("judge/requests", "Replies of the judge since the start.", "requests", "judge replies"),
        MetricName("judge/retries", "Requests to the judge that failed in passing.", "requests", "judge retries"),
        MetricName("judge/cached", "Replies that were known from before.", "requests", "judge replies cached"),
        MetricName("judge/prompt_tokens", "Tokens that the judge has read.", "tokens", "judge tokens read"),
        MetricName("judge/completion_tokens", "Tokens that the judge has written.", "tokens", "judge tokens written"),
        MetricName("trainer/restarts", "Times the trainer died and was started again.", "restarts", "trainer restarts"),
        MetricName("engine/grad_norm", "Norm of the gradient before clipping.", "", "gradient norm"),
        MetricName("engine/learning_rate", "Learning rate of the last optimizer step.", "", "learning rate"),
        MetricName(
            "engine/router_max_load",
            "Tokens of the expert that most chose, as a multiple of an even share; 1 is even.",
            "",
            "largest load of an expert",
        ),
        MetricName(
            "engine/router_unused_experts",
            "Experts that no token of the update chose, over all layers.",
            "experts",
            "experts without tokens",
        ),
        MetricName(
            "engine/router_aux_loss",
            "Loss that balances experts, before its coefficient; as many as a token chooses where they are even.",
            "",
            "loss of balance",
        ),
        MetricName(
            "engine/steps_refused",
            "Optimizer steps refused because the gradient was not finite.",
            "steps",
            "steps refused",
        ),
    )
}
"""Known metrics by name. The report also shows others: those under `correction/` and any of a known group."""

CORRECTION_PREFIX: Final = "correction/"


_OF_A_SET: Final = re.compile(r"eval/([^/]+)/(.+)")
_OF_K: Final = re.compile(r"(pass|maj)_at_(\d+)")


def label_of(name: str) -> str:
    """Return the name of a metric for people; of one without a description, the end of its name with spaces."""
    if known := METRIC_NAMES.get(name):
        return known.label
    words = _OF_K.sub(r"\1@\2", name.rpartition("/")[2]).replace("_", " ")
    if of_a_set := _OF_A_SET.fullmatch(name):
        return f"{of_a_set[1]}: {words}"
    return f"held-out {words}" if name.startswith("eval/") else words


def is_share(name: str) -> bool:
    """Return whether people read a metric in percent; accuracies and rewards are read as numbers from 0 to 1."""
    return name.endswith(("_share", "_fraction", "share_kept", "curriculum/known", "/too_easy", "/too_hard"))
