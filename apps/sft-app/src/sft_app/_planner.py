"""What `sft-app plan` shows, here, on another machine, and of a rehearsal."""

from pathlib import Path
from typing import ClassVar, Final

from offbeat_placement import RankGroup
from offbeat_recipes import NOT_LOOKED_AT, Outlook, Planner, RunMemory, Site, Wanted, layout_elsewhere, layout_row
from offbeat_types import ConfigError, ModelError, TrainLayout
from sft_app._config import SftConfig
from sft_app._memory import estimate_memory, sharing_ranks
from sft_app._preflight import Preflight, check_run
from sft_app._shrink import shrink_run

_LIVE: Final = "live"
_KEYS: Final = {"tensor_parallel": "engine.num_ranks"}


class SftPlanner(Planner[SftConfig]):
    """The ranks of the trainer, all on one machine."""

    config_type: ClassVar = SftConfig

    def look_here(self, config: SftConfig) -> Outlook:
        """As before a run."""
        return _outlook(check_run(config))

    def look_elsewhere(self, config: SftConfig, site: Site) -> Outlook:
        """The machine, how ranks share the model, and memory where the model's config.json is here."""
        placement = self.want(config, site).place(site)
        engine, layout = config.engine, _layout(config)
        rows = [("batch", _batch_text(config, layout)), layout_row(layout, engine.backend)]
        notices: list[str] = []
        memory: RunMemory | None = None
        try:
            memory = estimate_memory(config, layout)
        except ModelError as error:
            rows.append(("memory", f"not estimated: {error}"))
        else:
            rows += memory.rows(placement)
            notices += memory.notices(placement)
        rows += [("notice", notice) for notice in notices]
        return Outlook(rows=[*rows, NOT_LOOKED_AT], placement=placement, memory=memory, facts=_facts(config, layout))

    def look_at_rehearsal(self, config: SftConfig, folder: Path) -> Outlook:
        """As before a run."""
        return _outlook(shrink_run(config, folder / "model").prepare())

    def find_site(self, config: SftConfig, words: str) -> Site:
        """Machines, of which one will do."""
        if words in ("", _LIVE):
            raise ConfigError(
                f"--cluster {words or 'is missing'}: sft-app trains on one machine; name it: --cluster 1x8, or a file"
            )
        return Site.named(words, [config.engine.device])

    def want(self, config: SftConfig, site: Site) -> Wanted:
        """All ranks on one node: they are processes of one machine."""
        kind = site.kind(config.engine.device)
        group = RankGroup(
            role="trainer",
            tensor_parallel=config.engine.num_ranks,
            width_multiple=sharing_ranks(config),
            accelerator=kind,
            cpus_per_rank=0 if kind else 1,
            keys=_KEYS,
        )
        return Wanted(groups=(group,))


def _layout(config: SftConfig) -> TrainLayout | None:
    engine = config.engine
    wanted = config.train_engine(engine.max_updates)
    return layout_elsewhere(wanted, engine.backend, engine.num_ranks)


def _batch_text(config: SftConfig, layout: TrainLayout | None) -> str:
    engine = config.engine
    shares = layout.dp if layout else engine.num_ranks // sharing_ranks(config)
    each = f" over {shares} data parallel ranks, {engine.batch_size / shares:g} each" if shares > 1 else ""
    return f"{engine.batch_size} sequences in one step{each}"


def _facts(config: SftConfig, layout: TrainLayout | None) -> dict[str, dict[str, int]]:
    shares = layout.dp if layout else config.engine.num_ranks // sharing_ranks(config)
    return {"batch": {"sequences_per_step": config.engine.batch_size, "data_parallel": shares}}


def _outlook(preflight: Preflight) -> Outlook:
    return Outlook(rows=preflight.plan(), memory=preflight.memory, facts=_facts(preflight.config, preflight.layout))
