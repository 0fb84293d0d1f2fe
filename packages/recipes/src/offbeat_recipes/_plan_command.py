"""`plan`: where every rank would go, what it would hold, and what it would do. Starts nothing."""

import json
import sys
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Final, Generic

from offbeat_recipes._fit import fit_settings, write_fitted
from offbeat_recipes._memory import RunMemory
from offbeat_recipes._placement import Placement, Site, Wanted
from offbeat_recipes._recipe_text import ConfigT, Setting
from offbeat_run import CommandWords, load_config, print_table
from offbeat_types import ConfigError

PLAN_OPTIONS: Final = ("cluster", "fit", "format")
PLAN_SWITCHES: Final = ("shrink",)
_FORMATS: Final = ("text", "json")


@dataclass(frozen=True, kw_only=True)
class Outlook:
    """What is known of a run before it starts, here or on another cluster.

    Args:
        rows: of (what, how much), in the order to read them.
        placement: every rank in its place; None where nothing is placed.
        memory: estimates; None for a family whose formulas are not known.
        facts: numbers by section, for programs.
    """

    rows: list[tuple[str, str]]
    placement: Placement | None = None
    memory: RunMemory | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)

    def show(self) -> None:
        """Print it for people."""
        if self.placement:
            print(self.placement.picture)
        print_table(self.rows, title="plan")

    def as_data(self) -> dict[str, Any]:
        """For programs."""
        placed: dict[str, Any] = {}
        if self.placement:
            nodes = [{"name": node.name, "address": node.address} for node in self.placement.nodes]
            placed = {**self.placement.plan.as_data(), "nodes": nodes}
        roles = self.memory.roles if self.memory else {}
        bytes_of = {role: {**estimate.parts, "all": estimate.num_bytes} for role, estimate in roles.items()}
        rows = [{"what": what, "text": text} for what, text in self.rows]
        return {**placed, "memory_bytes": bytes_of or None, **self.facts, "rows": rows}


class Planner(ABC, Generic[ConfigT]):
    """What an application knows about its own runs; `plan_command` does the rest."""

    config_type: ClassVar[type]

    @abstractmethod
    def look_here(self, config: ConfigT) -> Outlook:
        """Check everything, as before a run, on this machine."""

    @abstractmethod
    def look_elsewhere(self, config: ConfigT, site: Site) -> Outlook:
        """Check what can be known from here of a run in another place."""

    @abstractmethod
    def look_at_rehearsal(self, config: ConfigT, folder: Path) -> Outlook:
        """Check the shrunken run, as before a run; its model and data may be made in the folder."""

    @abstractmethod
    def find_site(self, config: ConfigT, words: str) -> Site:
        """The nodes that words name, such as "4x8"."""

    @abstractmethod
    def want(self, config: ConfigT, site: Site) -> Wanted:
        """What a run asks of a place."""

    def companions(self, config: ConfigT, settings: Mapping[str, Setting]) -> Mapping[str, Setting]:
        """Settings that must change together with those that make a run fit."""
        return {}


def plan_command(planner: Planner[ConfigT], words: CommandWords, file: str) -> int:
    """`plan FILE [--cluster 4x8 | FILE] [--json] [--fit NEW_FILE] [--shrink]`.

    Without `--cluster` everything is checked as for `train`: model, data, devices, and this machine's room. With it the
    run is for another place, so only what can be known from here is looked at.

    Args:
        planner: of the application.
        words: of the command line.
        file: the recipe.

    Raises:
        UserError: the first thing that is wrong, with what to do.
    """
    style = words.options.get("format", "text")
    if style not in _FORMATS:
        raise ConfigError(f"--format takes {' or '.join(_FORMATS)}: got {style!r}")
    config: ConfigT = load_config(file, planner.config_type, words.overrides)
    outlook = _look(planner, config, words, Path(file))
    if style == "json":
        print(json.dumps(outlook.as_data(), indent=1))
    else:
        outlook.show()
    return 0


def _look(planner: Planner[ConfigT], config: ConfigT, words: CommandWords, file: Path) -> Outlook:
    cluster, target = words.options.get("cluster", ""), words.options.get("fit", "")
    if "shrink" in words.switches:
        if cluster or target:
            raise ConfigError("--shrink rehearses a recipe on this machine: leave --cluster and --fit out")
        with tempfile.TemporaryDirectory(prefix="offbeat-plan-") as folder:
            return planner.look_at_rehearsal(config, Path(folder))
    if not cluster and not target:
        return planner.look_here(config)
    site = planner.find_site(config, cluster)
    if target:
        config = _fit(planner, config, site, words, (file, Path(target)))
    return planner.look_elsewhere(config, site) if cluster else planner.look_here(config)


def _fit(
    planner: Planner[ConfigT], config: ConfigT, site: Site, words: CommandWords, files: tuple[Path, Path]
) -> ConfigT:
    """Write the recipe with the changes that make it fit."""
    if words.overrides:
        raise ConfigError(
            "--fit changes the recipe's file: put settings into it instead of giving them as --section.key"
        )
    settings = fit_settings(config, site, lambda changed: planner.want(changed, site), planner.companions)
    fitted = write_fitted(*files, config, settings)
    for key, value in settings.items():
        print(f"{key} = {str(value).lower()}", file=sys.stderr)
    print(f"written to {files[1]}", file=sys.stderr)  # what is printed to the other stream may be JSON
    return fitted
