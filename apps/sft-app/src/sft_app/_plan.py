"""The plan of a run, here, on another cluster, and of a rehearsal."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from offbeat_actors import find_view
from offbeat_core import PlacementError, TrainLayout
from offbeat_placement import ClusterView, Placement, ResourceRequest
from offbeat_recipes import Planner, RunPlan, layout_elsewhere, layout_row, plan_unseen
from sft_app._config import SftConfig
from sft_app._preflight import (
    Preflight,
    assume_budget,
    check_run,
    estimate_memory,
    request_resources,
    settle_budget,
    settle_format,
    sharing_ranks,
)
from sft_app._problems import find_problems
from sft_app._shrink import shrink_run


class SftPlanner(Planner[SftConfig]):
    """The ranks of the trainer in their places."""

    config_type: ClassVar = SftConfig

    def find_problems(self, sections: Mapping[str, Any], failed: Collection[str]) -> Sequence[str]:
        return find_problems(sections, failed)

    def plan_here(self, config: SftConfig) -> RunPlan:
        return describe_run(check_run(config))

    def plan_elsewhere(self, config: SftConfig, view: ClusterView) -> RunPlan:
        """Places, how ranks share the model, and memory where the model's config.json is here."""
        config = settle_format(config, view)
        placement, engine = _place(config, view), config.engine
        wanted = assume_budget(config).train_engine(engine.max_updates)
        layout = layout_elsewhere(wanted, engine.backend, engine.num_ranks)
        config, choices = settle_budget(config, layout, placement)
        return plan_unseen(
            placement,
            lambda: estimate_memory(config, layout, placement),
            rows=[
                ("batch", _batch_text(config, layout)),
                layout_row(layout, engine.backend),
                *(("chosen", each) for each in choices),
            ],
            facts=_facts(config, layout),
        )

    def plan_rehearsal(self, config: SftConfig, folder: Path) -> RunPlan:
        return describe_run(shrink_run(config, folder / "model").prepare())

    def find_view(self, config: SftConfig, words: str) -> ClusterView:
        """Also "live", the Ray cluster, and "", where the launcher would start."""
        return find_view(config.cluster, config.devices, words)

    def request_resources(self, config: SftConfig, view: ClusterView) -> ResourceRequest:
        return request_resources(config, view)


def _place(config: SftConfig, view: ClusterView) -> Placement:
    """Return where one machine is too small and several would do, the error says so."""
    try:
        return request_resources(config, view).place(view)
    except PlacementError as error:
        try:
            request_resources(replace(config, cluster=replace(config.cluster, launcher="ray")), view).place(view)
        except PlacementError:
            raise error from None
        changes = (*error.changes, 'cluster.launcher = "ray", which trains on several nodes')
        raise PlacementError(error.reason, error.shortfall, changes) from None


def _batch_text(config: SftConfig, layout: TrainLayout | None) -> str:
    engine = config.engine
    shares = layout.dp if layout else engine.num_ranks // sharing_ranks(config)
    each = f" over {shares} data parallel ranks, {engine.batch_size / shares:g} each" if shares > 1 else ""
    return f"{engine.batch_size} {config.rows_name} in one step{each}"


def _facts(config: SftConfig, layout: TrainLayout | None) -> dict[str, dict[str, int]]:
    shares = layout.dp if layout else config.engine.num_ranks // sharing_ranks(config)
    return {"batch": {"sequences_per_step": config.engine.batch_size, "data_parallel": shares}}


def describe_run(preflight: Preflight) -> RunPlan:
    """Return what a checked run would take."""
    return RunPlan(
        rows=preflight.plan(),
        placement=preflight.placement,
        memory=preflight.memory,
        facts=_facts(preflight.config, preflight.layout),
    )
