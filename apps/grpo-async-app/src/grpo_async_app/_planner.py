"""What `grpo-async-app plan` shows, here, on another cluster, and of a rehearsal."""

from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar, Final

from grpo_async_app._batch import BatchArithmetic
from grpo_async_app._config import GrpoConfig
from grpo_async_app._memory import estimate_memory
from grpo_async_app._placement import find_site, want
from grpo_async_app._plan import describe_plan
from grpo_async_app._preflight import Preflight, check_reward, check_run, check_settings
from grpo_async_app._shrink import shrink_run
from offbeat_recipes import NOT_LOOKED_AT, Outlook, Planner, Setting, Site, Wanted, layout_elsewhere, layout_row
from offbeat_types import BackendError, ModelError, TrainLayout

_IN_TURNS: Final[Mapping[str, Setting]] = {
    "async.staleness_threshold": 0,
    "async.trigger_parameter_sync_step": 1,
    "async.partial_rollout": False,
}
"""What goes with cluster.colocate: roles that take turns train synchronously."""


class GrpoPlanner(Planner[GrpoConfig]):
    """Trainer, rollout engines and what belongs to them, in their places."""

    config_type: ClassVar = GrpoConfig

    def look_here(self, config: GrpoConfig) -> Outlook:
        """As before a run."""
        return _outlook(check_run(config))

    def look_elsewhere(self, config: GrpoConfig, site: Site) -> Outlook:
        """Settings, places, batches, and memory where the model's config.json is here."""
        placement = want(config, site).place(site)
        notices = [*check_settings(config), *_reward_notice(config)]
        layout = _layout(config)
        batch = BatchArithmetic.of(config, layout)
        rows = [*batch.rows(), layout_row(layout, config.engine.backend)]
        memory = None
        try:
            memory = estimate_memory(config, layout, placement)
        except ModelError as error:
            rows.append(("memory", f"not estimated: {error}"))
        else:
            rows += memory.rows(placement)
            notices += memory.notices(placement)
        rows += [("notice", notice) for notice in (*notices, *batch.notices())]
        return Outlook(
            rows=[*rows, NOT_LOOKED_AT], placement=placement, memory=memory, facts={"batch": batch.as_data()}
        )

    def look_at_rehearsal(self, config: GrpoConfig, folder: Path) -> Outlook:
        """As before a run."""
        return _outlook(shrink_run(config, folder).prepare())

    def find_site(self, config: GrpoConfig, words: str) -> Site:
        """Also "live", the Ray cluster, and "", where the launcher would start."""
        return find_site(config, words)

    def want(self, config: GrpoConfig, site: Site) -> Wanted:
        """Groups of all roles."""
        return want(config, site)

    def companions(self, config: GrpoConfig, settings: Mapping[str, Setting]) -> Mapping[str, Setting]:
        """Roles that take turns cannot lag."""
        return _IN_TURNS if "cluster.colocate" in settings and config.async_.mode != "on-policy pipeline" else {}


def _reward_notice(config: GrpoConfig) -> list[str]:
    """Refuse a reward that does not exist; what one needs may be installed where the run will be."""
    try:
        check_reward(config)
    except BackendError as error:
        return [f"on this machine {error}"]
    return []


def _layout(config: GrpoConfig) -> TrainLayout | None:
    wanted = config.train_engine(config.model.path, config.engine.max_updates)
    return layout_elsewhere(wanted, config.engine.backend, config.engine.num_ranks)


def _outlook(preflight: Preflight) -> Outlook:
    batch = BatchArithmetic.of(preflight.config, preflight.layout)
    return Outlook(
        rows=describe_plan(preflight),
        placement=preflight.placement,
        memory=preflight.memory,
        facts={"batch": batch.as_data()},
    )
