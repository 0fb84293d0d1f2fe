"""`grpo-async-app plan`: where every rank would go, what it would hold, and what it would do. Starts nothing."""

import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_async_app._batch import BatchArithmetic
from grpo_async_app._config import GrpoConfig
from grpo_async_app._fit import change_recipe, fit_settings, with_settings
from grpo_async_app._memory import RunMemory, estimate_memory
from grpo_async_app._placement import Placement, find_site, place_run
from grpo_async_app._plan import describe_plan
from grpo_async_app._preflight import Preflight, check_run, check_settings
from grpo_async_app._shrink import shrink_run
from offbeat_run import CommandWords, load_config, print_table
from offbeat_types import ConfigError, ModelError, RunFolderError

FORMATS = ("text", "json")


@dataclass(frozen=True, kw_only=True)
class _Outlook:
    """What is known of a run before it starts, here or on another cluster."""

    placement: Placement
    batch: BatchArithmetic
    memory: RunMemory | None
    rows: list[tuple[str, str]]

    def as_data(self) -> dict[str, Any]:
        """For `--json`."""
        memory = self.memory
        return {
            **self.placement.plan.as_data(),
            "nodes": [{"name": node.name, "address": node.address} for node in self.placement.nodes],
            "memory_bytes": {
                role: {**estimate.parts, "all": estimate.num_bytes} for role, estimate in memory.roles.items()
            }
            if memory
            else None,
            "batch": self.batch.as_data(),
            "rows": [{"what": what, "text": text} for what, text in self.rows],
        }


def plan_command(words: CommandWords, file: str) -> int:
    """`plan FILE [--cluster 4x8 | FILE | live] [--json] [--fit NEW_FILE] [--shrink]`.

    Without `--cluster` everything is checked as for `train`: model, data, devices, and this machine's room. With it the
    run is for another place, so only what can be known from here is looked at.

    Raises:
        UserError: the first thing that is wrong, with what to do.
    """
    style = words.options.get("format", "text")
    if style not in FORMATS:
        raise ConfigError(f"--format takes {' or '.join(FORMATS)}: got {style!r}")
    config, cluster = load_config(file, GrpoConfig, words.overrides), words.options.get("cluster", "")
    if "shrink" in words.switches:
        outlook = _look_at_rehearsal(config, words)
    else:
        if "fit" in words.options:
            config = _fit(config, cluster, Path(file), Path(words.options["fit"]), words)
        outlook = _look_elsewhere(config, cluster) if cluster else _look_at(check_run(config))
    if style == "json":
        print(json.dumps(outlook.as_data(), indent=1))
    else:
        print(outlook.placement.picture)
        print_table(outlook.rows, title="plan")
    return 0


def _look_elsewhere(config: GrpoConfig, cluster: str) -> _Outlook:
    placement = place_run(config, find_site(config, cluster))
    notices = list(check_settings(config))
    batch = BatchArithmetic.of(config)
    rows = [*batch.rows()]
    memory = None
    try:
        memory = estimate_memory(config)
    except ModelError as error:
        rows.append(("memory", f"not estimated: {error}"))
    else:
        rows += memory.rows(placement)
        notices += memory.notices(placement)
    rows += [("notice", notice) for notice in (*notices, *batch.notices())]
    rows.append(("not looked at", "model weights, data and devices: they are on the cluster"))
    return _Outlook(placement=placement, batch=batch, memory=memory, rows=rows)


def _look_at_rehearsal(config: GrpoConfig, words: CommandWords) -> _Outlook:
    if words.options.keys() & {"cluster", "fit"}:
        raise ConfigError("--shrink rehearses a recipe on this machine: leave --cluster and --fit out")
    with tempfile.TemporaryDirectory(prefix="offbeat-plan-") as folder:
        return _look_at(shrink_run(config, Path(folder)).prepare())


def _look_at(preflight: Preflight) -> _Outlook:
    return _Outlook(
        placement=preflight.placement,
        batch=BatchArithmetic.of(preflight.config, preflight.layout),
        memory=preflight.memory,
        rows=describe_plan(preflight),
    )


def _fit(config: GrpoConfig, cluster: str, recipe: Path, target: Path, words: CommandWords) -> GrpoConfig:
    """Write the recipe with the changes that make it fit, and say which they are."""
    if words.overrides:
        raise ConfigError(
            "--fit changes the recipe's file: put settings into it instead of giving them as --section.key"
        )
    settings = fit_settings(config, find_site(config, cluster))
    if not settings:
        raise ConfigError(f"{recipe} fits as it is: nothing to write to {target}")
    if target.exists():
        raise RunFolderError(f"--fit {target}: exists already; choose another name")
    changed = change_recipe(recipe.read_text(), settings)
    target.write_text(changed)
    for key, value in settings.items():
        print(f"{key} = {str(value).lower()}")
    print(f"written to {target}")
    return with_settings(config, settings)
