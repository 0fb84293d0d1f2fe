"""Says in words where a simulated recipe wastes its machines, and what would change that."""

from offbeat_async_policy._config import AsyncConfig
from offbeat_async_policy._simulation_report import SimulationReport

WORTH_SAYING = 0.05


def advise(config: AsyncConfig, report: SimulationReport) -> list[str]:
    """One line for each waste of at least 5 % of the trainer's or the engines' time, the greatest first.

    Args:
        config: the settings simulated.
        report: what came of them.
    """
    found = [*_of_trainer(config, report), *_of_engines(config, report), *_of_tokens(config, report)]
    lines = [line for share, line in sorted(found, reverse=True) if share >= WORTH_SAYING]
    return lines or ["nothing stands out: trainer and engines are busy at least 95 % of what they could be"]


def _of_trainer(config: AsyncConfig, report: SimulationReport) -> list[tuple[float, str]]:
    shares = report.trainer_shares
    bound = "raise staleness_threshold" if config.staleness_threshold else "set staleness_threshold above 0"
    bound += " or max_in_flight" if config.max_in_flight else ""
    return [
        (
            shares["supply"],
            f"trainer waits {shares['supply']:.0%} of the time for engines that are busy: move accelerators to rollout",
        ),
        (
            shares["bound"],
            f"trainer waits {shares['bound']:.0%} of the time for the last samples of what may be in flight: {bound}",
        ),
        (
            shares["drain"],
            f"trainer waits {shares['drain']:.0%} of the time until what is in flight ends before a sync: "
            "set partial_rollout = true",
        ),
        (
            shares["sync"],
            f"weight syncs take {shares['sync']:.0%} of the time: raise trigger_parameter_sync_step, or sync faster",
        ),
    ]


def _of_engines(config: AsyncConfig, report: SimulationReport) -> list[tuple[float, str]]:
    shares = report.engine_shares
    trainer_is_busy = report.trainer_shares["training"] >= 0.85
    change = "move accelerators to the trainer" if trainer_is_busy else "raise staleness_threshold"
    if config.max_in_flight and not trainer_is_busy:
        change = "raise max_in_flight, or staleness_threshold"
    tail = "move accelerators to the trainer" if trainer_is_busy else "more groups in flight would fill them"
    return [
        (shares["bound"], f"engines are empty {shares['bound']:.0%} of the time, at their bound: {change}"),
        (
            shares["tail"],
            f"engines run at most an eighth of their most samples {shares['tail']:.0%} of the time: {tail}",
        ),
        (
            shares["drain"],
            f"engines are empty {shares['drain']:.0%} of the time, as a sync waits for others: "
            "set partial_rollout = true",
        ),
    ]


def _of_tokens(config: AsyncConfig, report: SimulationReport) -> list[tuple[float, str]]:
    wasted = report.wasted_token_share
    dropped = report.dropped > 0
    change = "raise max_version_lag, or on_exceed = 'wait'" if dropped else "prompts of middling difficulty waste less"
    what = "dropped as too old, or filtered" if dropped else "filtered: no learning signal"
    return [(wasted, f"{wasted:.0%} of the sampled tokens are never trained ({what}): {change}")]
