"""The plots of a report: which metrics share one, what each says, and in which group of the page it is."""

from dataclasses import dataclass
from typing import Final

LEARNING: Final = "Learning"
SPEED: Final = "Speed"
DISTANCE: Final = "Policy lag and mismatch"
CRITIC: Final = "Critic"
DATA: Final = "Data"
SCORING: Final = "Scoring"
OPTIMIZER: Final = "Optimizer"
VALIDATION: Final = "Validation sets"
OTHER: Final = "Other metrics"
GROUPS: Final = (LEARNING, SPEED, DISTANCE, CRITIC, DATA, SCORING, OPTIMIZER, VALIDATION, OTHER)


@dataclass(frozen=True, kw_only=True)
class LinePlot:
    """Lines over the updates.

    Args:
        group: of the page.
        title, caption: over the plot.
        names: metrics, one line each.
        labels: of lines whose metric's own name would say too much in this plot.
        unit: of the axis; "%" where values are shares of 1.
        from_zero: whether the axis begins at 0.
        hides_zeros: whether a plot of nothing but 0 is left out altogether.
        is_smoothed: whether many values are drawn faintly, under their running mean.
    """

    group: str
    title: str
    caption: str
    names: tuple[str, ...]
    labels: tuple[tuple[str, str], ...] = ()
    unit: str = ""
    from_zero: bool = True
    hides_zeros: bool = False
    is_smoothed: bool = True


def _plot(
    group: str,
    title: str,
    caption: str,
    *names: str,
    unit: str = "",
    from_zero: bool = True,
    hides_zeros: bool = False,
    is_smoothed: bool = True,
) -> LinePlot:
    return LinePlot(
        group=group,
        title=title,
        caption=caption,
        names=names,
        unit=unit,
        from_zero=from_zero,
        hides_zeros=hides_zeros,
        is_smoothed=is_smoothed,
    )


PLOTS: Final = (
    _plot(
        LEARNING,
        "Reward",
        "In training, and on held-out prompts.",
        *("train/reward", "eval/reward", "eval/accuracy"),
        from_zero=False,
    ),
    _plot(
        LEARNING,
        "Loss",
        "In training, and on held-out sequences. The loss of a policy says little: its reward is what counts.",
        *("train/loss", "eval/loss"),
        from_zero=False,
    ),
    _plot(LEARNING, "Pairs", "Of chosen and rejected answers.", "rewards/accuracies", unit="%"),
    _plot(
        LEARNING,
        "Implicit rewards",
        "Of chosen and rejected answers, and how far they are apart.",
        *("rewards/chosen", "rewards/rejected", "rewards/margins"),
        from_zero=False,
    ),
    _plot(
        LEARNING,
        "Response length",
        "Mean tokens of a completion. A jump to the limit means that answers no longer end.",
        *("train/response_tokens", "eval/response_tokens"),
        unit="tokens",
    ),
    _plot(
        LEARNING,
        "Completions cut off",
        "Share that a limit of tokens or turns has ended. What is cut off is seldom rewarded.",
        *("train/cut_off_share", "eval/cut_off_share"),
        unit="%",
    ),
    _plot(
        LEARNING,
        "Entropy",
        "Of the policy, in nats per token. A fall to zero means it has stopped exploring.",
        "train/entropy",
        unit="nats",
    ),
    _plot(
        LEARNING,
        "KL to the reference",
        "How far the policy has moved from where it began, in nats per token.",
        "train/kl_ref",
        unit="nats",
        from_zero=False,
    ),
    _plot(
        LEARNING,
        "Divergence from the teacher",
        "Of the policy on its own samples, in nats per token. k3 estimates the same without negative values.",
        *("distillation/kl", "distillation/kl_k3"),
        unit="nats",
        from_zero=False,
    ),
    _plot(
        LEARNING,
        "Turns of an episode",
        "Of the model, and the conversations they belong to.",
        *("train/turns", "train/trajectories", "eval/turns"),
    ),
    _plot(LEARNING, "Tokens read", "What a sample was answered with.", "train/read_tokens", unit="tokens"),
    _plot(
        SPEED,
        "Overlap and idle time",
        "Trainer and rollout working at once, and each waiting for the other.",
        *("async/overlap_share", "async/trainer_idle_share", "async/rollout_idle_share"),
        unit="%",
    ),
    _plot(
        SPEED,
        "Tokens per second",
        "Sampled, or trained on in a fine-tuning run.",
        "perf/tokens_per_s",
        unit="tokens/s",
    ),
    _plot(SPEED, "Update time", "From the end of one update to the end of the next.", "perf/update_s", unit="s"),
    _plot(SPEED, "Handover time", "Devices handed from one role to the other.", "perf/handover_s", unit="s"),
    _plot(SPEED, "Samples per second", "Trained on.", "perf/samples_per_s", unit="samples/s"),
    _plot(
        SPEED,
        "Restarts",
        "Of roles that died and were started again.",
        *("engines/restarts", "trainer/restarts", "teacher/restarts", "reward_model/restarts", "scoring/restarts"),
        hides_zeros=True,
        is_smoothed=False,
    ),
    _plot(
        SPEED,
        "Rollout engines",
        "Those that serve, and those much slower than the others.",
        *("engines/serving", "engines/stragglers"),
        hides_zeros=True,
        is_smoothed=False,
    ),
    _plot(
        DISTANCE,
        "Lag",
        "Policy versions between sampling the oldest token of a completion and training on it.",
        *("train/lag_mean", "train/lag_max"),
        unit="versions",
    ),
    _plot(
        DISTANCE,
        "Mismatch of trainer and rollout engines",
        "Nats that 99 of 100 log-probabilities differ by at most. A rise under the weights in training is an error.",
        *("mismatch/abs_p99_nats_lag0", "mismatch/abs_p99_nats_lagged"),
        unit="nats",
    ),
    _plot(
        DISTANCE,
        "Effective sample size",
        "Effective share of the tokens of an update if each were weighed by trainer's / engine's probability.",
        *("mismatch/ess_share", "mismatch/ess_share_lag0"),
        unit="%",
    ),
    _plot(
        DISTANCE,
        "Older weights",
        "Share of the tokens that other weights than those in training sampled, and of samples of several versions.",
        *("mismatch/lagged_share", "train/mixed_version_share"),
        unit="%",
    ),
    _plot(
        DISTANCE,
        "Clip fraction",
        "Share of tokens whose update was cut by the clip range.",
        "train/clip_fraction",
        unit="%",
    ),
    _plot(
        DISTANCE,
        "Ratio",
        "New to old policy: its mean, and at the token where they differ most.",
        *("train/ratio_max", "train/ratio_mean"),
        from_zero=False,
    ),
    _plot(DISTANCE, "KL to the old policy", "Before the update, per token.", "train/kl_old", unit="nats"),
    _plot(
        DISTANCE,
        "Tokens kept",
        "By the correction and by the objective, of all loss tokens.",
        *("train/share_kept", "train/masked_share"),
        unit="%",
    ),
    _plot(
        CRITIC,
        "What the critic explains",
        "Share of the returns' variance that its values explain, before the update. Near 0 it has learned nothing yet.",
        "critic/explained_variance",
        unit="%",
        from_zero=False,
    ),
    _plot(
        CRITIC,
        "Values and returns",
        "What the critic expects of a token, and what it should: means over the tokens of an update.",
        *("critic/value", "critic/return"),
        unit="reward",
        from_zero=False,
    ),
    _plot(CRITIC, "Loss of the critic", "Half the squared error of its values.", "critic/loss"),
    _plot(CRITIC, "Clipping of the critic", "Share of the tokens held back.", "critic/clip_fraction", unit="%"),
    _plot(CRITIC, "Gradient norm of the critic", "Before clipping.", "critic/grad_norm"),
    _plot(
        DATA,
        "Groups left out",
        "Filtered: all rewards equal, nothing to learn. Dropped: sampled by too old a policy. Since the start.",
        *("groups/filtered", "groups/dropped", "groups/reissued"),
        unit="groups",
    ),
    _plot(
        DATA,
        "Curriculum",
        "Share of the prompts whose success rate is known, and of those drawn less often for it.",
        *("curriculum/known", "curriculum/too_easy", "curriculum/too_hard"),
        unit="%",
        is_smoothed=False,
    ),
    _plot(DATA, "Epochs", "Passes over the training data.", "data/epoch", is_smoothed=False),
    _plot(
        SCORING,
        "Scoring time",
        "From asking for a reward to having it, the wait for a scorer included.",
        *("scoring/latency_p50_s", "scoring/latency_p95_s", "scoring/latency_max_s"),
        unit="s",
    ),
    _plot(
        SCORING,
        "Scorers at work",
        "Share of the time. Near 1 with completions in the queue, more processes would score sooner.",
        "scoring/busy_share",
        unit="%",
    ),
    _plot(SCORING, "Scorers", "Processes.", "scoring/processes", is_smoothed=False),
    _plot(
        SCORING,
        "Waiting for a scorer",
        "Completions in the queue.",
        "scoring/queue",
        unit="completions",
        hides_zeros=True,
    ),
    _plot(
        SCORING,
        "Replies of the judge",
        "Since the start. Cached replies were known from before and cost nothing.",
        *("judge/requests", "judge/cached", "judge/retries"),
        unit="requests",
        is_smoothed=False,
    ),
    _plot(
        SCORING,
        "Tokens of the judge",
        "Read and written since the start: what it costs.",
        *("judge/prompt_tokens", "judge/completion_tokens"),
        unit="tokens",
        is_smoothed=False,
    ),
    _plot(OPTIMIZER, "Gradient norm", "Before clipping.", "engine/grad_norm"),
    _plot(
        OPTIMIZER,
        "Learning rate",
        "Of the last optimizer step.",
        *("engine/learning_rate", "critic/learning_rate"),
        is_smoothed=False,
    ),
    _plot(
        OPTIMIZER,
        "Parts of the loss",
        "What the loss of an update is the sum of.",
        *("train/loss_policy", "train/loss_kl", "train/loss_entropy"),
        from_zero=False,
    ),
    _plot(
        OPTIMIZER,
        "Refused steps",
        "Optimizer steps with a gradient that was not finite.",
        *("engine/steps_refused", "critic/steps_refused"),
        hides_zeros=True,
    ),
)
"""Plots in the order of the page, within each group."""
DRAWN: Final = frozenset(name for plot in PLOTS for name in plot.names)
