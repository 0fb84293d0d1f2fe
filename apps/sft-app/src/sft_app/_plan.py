"""What `sft-app plan` shows, here, on another machine, and of a rehearsal."""

from pathlib import Path
from typing import ClassVar, Final

from offbeat_placement import ClusterView, RankGroup, ResourceRequest
from offbeat_recipes import Planner, RunPlan, layout_elsewhere, layout_row, plan_unseen
from offbeat_types import ConfigError, TrainLayout
from sft_app._config import SftConfig
from sft_app._preflight import Preflight, check_run, estimate_memory, sharing_ranks
from sft_app._shrink import shrink_run

_LIVE: Final = "live"
_KEYS: Final = {"tensor_parallel": "engine.num_ranks"}


class SftPlanner(Planner[SftConfig]):
    """The ranks of the trainer, all on one machine."""

    config_type: ClassVar = SftConfig

    def plan_here(self, config: SftConfig) -> RunPlan:
        return _run_plan(check_run(config))

    def plan_elsewhere(self, config: SftConfig, view: ClusterView) -> RunPlan:
        """The machine, how ranks share the model, and memory where the model's config.json is here."""
        placement = self.request_resources(config, view).place(view)
        engine = config.engine
        layout = layout_elsewhere(config.train_engine(engine.max_updates), engine.backend, engine.num_ranks)
        return plan_unseen(
            placement,
            lambda: estimate_memory(config, layout),
            rows=[("batch", _batch_text(config, layout)), layout_row(layout, engine.backend)],
            facts=_facts(config, layout),
        )

    def plan_rehearsal(self, config: SftConfig, folder: Path) -> RunPlan:
        return _run_plan(shrink_run(config, folder / "model").prepare())

    def find_view(self, config: SftConfig, words: str) -> ClusterView:
        if words in ("", _LIVE):
            raise ConfigError(
                f"--cluster {words or 'is missing'}: sft-app trains on one machine; name it: --cluster 1x8, or a file"
            )
        return ClusterView.named(words, [config.engine.device])

    def request_resources(self, config: SftConfig, view: ClusterView) -> ResourceRequest:
        """All ranks on one node: they are processes of one machine."""
        kind = view.kind(config.engine.device)
        group = RankGroup(
            role="trainer",
            tensor_parallel=config.engine.num_ranks,
            width_multiple=sharing_ranks(config),
            accelerator=kind,
            cpus_per_rank=0 if kind else 1,
            keys=_KEYS,
        )
        return ResourceRequest(groups=(group,))


def _batch_text(config: SftConfig, layout: TrainLayout | None) -> str:
    engine = config.engine
    shares = layout.dp if layout else engine.num_ranks // sharing_ranks(config)
    each = f" over {shares} data parallel ranks, {engine.batch_size / shares:g} each" if shares > 1 else ""
    return f"{engine.batch_size} sequences in one step{each}"


def _facts(config: SftConfig, layout: TrainLayout | None) -> dict[str, dict[str, int]]:
    shares = layout.dp if layout else config.engine.num_ranks // sharing_ranks(config)
    return {"batch": {"sequences_per_step": config.engine.batch_size, "data_parallel": shares}}


def _run_plan(preflight: Preflight) -> RunPlan:
    return RunPlan(rows=preflight.plan(), memory=preflight.memory, facts=_facts(preflight.config, preflight.layout))
