"""`plan`: where every rank would go, what it would hold, and what it would do. Starts nothing."""

import json
import math
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Final, Generic

from offbeat_core import ConfigError, ModelError, load_config, naming_lines, write_new_file
from offbeat_placement import (
    ClusterView,
    MemoryEstimate,
    ModelShape,
    Placement,
    ResourceRequest,
    SettingValue,
    fit_settings,
)
from offbeat_recipes._elsewhere import NOT_LOOKED_AT
from offbeat_recipes._recipe_text import ConfigT, change_recipe, relative_keys, with_settings
from offbeat_run import CommandWords, count_text, doing, print_table, print_text, size_text

PLAN_OPTIONS: Final = ("cluster", "fit", "format")
PLAN_SWITCHES: Final = ("shrink",)
_KEEPS_ON_DEVICE: Final = {
    "optimizer": "engine.options.offload_optimizer = false",
    "inputs of layers": "engine.options.offload_activations = false",
    "parked": "cluster.colocate = false",
}
"""Settings that leave on the device what would wait in main memory."""
_FORMATS: Final = ("text", "json")
_SAMPLE_CHARACTERS: Final = 400, 200
"""Lengths of the beginning and the end of a text that a plan shows: they hold what a template writes."""
_MADE_TO_FIT: Final = "made to fit another cluster: where words and settings differ, the settings hold."


@dataclass(frozen=True)
class RunMemory:
    """Estimates of one rank of each role.

    Args:
        shape: of the model that is trained.
        roles: estimates by role.
        advice: by role, what to change where a device holds too little.
        limits: by role, bytes of its device that it allows itself; others take all of it.
    """

    shape: ModelShape
    roles: Mapping[str, MemoryEstimate]
    advice: Mapping[str, str]
    limits: Mapping[str, int] = field(default_factory=dict)

    def rows(self, placement: Placement | None = None) -> list[tuple[str, str]]:
        """Return the plan as text."""
        shape = self.shape
        model = f"{shape.family}, {count_text(shape.num_parameters)} parameters"
        if shape.num_vision_parameters:
            model += f", {count_text(shape.num_vision_parameters)} of them for vision"
        rows = [("parameters", model)]
        for role, estimate in self.roles.items():
            of = _of_text(estimate, placement, role) if placement else ""
            waits = f"; in main memory {_sum_text(estimate.main)}" if estimate.main else ""
            rows.append((f"{role} memory", f"{_parts_text(estimate)}{of}{waits}"))
        for nodes, (needed, has) in placement.main_memory(self.roles).items() if placement else ():
            of = f" (of {size_text(has)}, {needed / has:.0%})" if has < math.inf else ""
            rows.append(("main memory", f"{nodes}: {size_text(needed)}{of}"))
        return rows

    def notices(self, placement: Placement) -> list[str]:
        """Devices that hold too little for a rank of a role, alone or with what is loaded there all the time.

        Then nodes whose main memory holds too little for what waits there.
        """
        found = [notice for role in self.roles if (notice := self._notice(placement, role))]
        waits = {name for estimate in self.roles.values() for name in estimate.main}
        changes = [*(change for name, change in _KEEPS_ON_DEVICE.items() if name in waits), "fewer ranks on a node"]
        return found + [
            f"{nodes}: {size_text(needed)} of main memory needed and {size_text(has)} free: {', or '.join(changes)}"
            for nodes, (needed, has) in placement.main_memory(self.roles).items()
            if needed > has
        ]

    def _notice(self, placement: Placement, role: str) -> str:
        has, needed = placement.accelerator_bytes(role), self.roles[role].num_bytes
        limit, others = self.limits.get(role) or has, self._loaded_beside(placement, role)
        together = self._num_bytes([role, *others])
        if limit and needed > limit:
            return (
                f"a {role} rank needs about {size_text(needed)} and {_limit_text(limit, placement, role)}: "
                f"{self.advice[role]}"
            )
        if has and together > has:
            names, keys = " and ".join(others), {group.role: group.keys for group in placement.groups}
            apart = [f"{key} = false" for other in others if (key := keys[other].get("shares_devices_with"))]
            return (
                f"a {role} rank needs about {size_text(together)} with the {names} rank beside it and its device has "
                f"{size_text(has)}: {', or '.join([self.advice[role], *apart])}"
            )
        return ""

    def _loaded_beside(self, placement: Placement, role: str) -> list[str]:
        """Return the roles that need most of those on a device of this one, all of them loaded while it computes.

        Roles that share the trainer's devices take turns with it. Any other that shares devices is loaded all the time,
        and is reported with those that it shares with.
        """
        hosts = {group.role: group.shares_devices_with for group in placement.groups}
        stay = {other for other, host in hosts.items() if host and host != "trainer" and other in self.roles}
        if role in stay:
            return []
        devices: dict[tuple[str, int], set[str]] = {}
        for rank in placement.plan.ranks:
            if rank.device is not None:
                devices.setdefault((rank.node, rank.device), set()).add(rank.role)
        beside = [roles & stay for roles in devices.values() if role in roles]
        return sorted(max(beside, key=self._num_bytes, default=set()))

    def _num_bytes(self, roles: Iterable[str]) -> int:
        return sum(self.roles[role].num_bytes for role in roles)


def _parts_text(estimate: MemoryEstimate) -> str:
    return f"{size_text(estimate.num_bytes)} a rank: {_sum_text(estimate.parts)}"


def _sum_text(parts: Mapping[str, int]) -> str:
    return " + ".join(f"{name} {size_text(size)}" for name, size in parts.items())


def _limit_text(limit: int, placement: Placement, role: str) -> str:
    has = placement.accelerator_bytes(role)
    if limit == has:
        return f"its device has {size_text(has)}"
    return f"may take {size_text(limit)} of the {size_text(has)} of its device"


def _of_text(estimate: MemoryEstimate, placement: Placement, role: str) -> str:
    has = placement.accelerator_bytes(role)
    return f" (of {size_text(has)}, {estimate.num_bytes / has:.0%})" if has else ""


@dataclass(frozen=True, kw_only=True)
class RunPlan:
    """Facts about a run before it starts, here or on another cluster.

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
            print_text(self.placement.picture)
        print_table(self.rows, title="plan")

    def as_data(self) -> dict[str, Any]:
        """Return the plan for programs."""
        placed: dict[str, Any] = {}
        if self.placement:
            nodes = [{"name": node.name, "address": node.address} for node in self.placement.nodes]
            placed = {**self.placement.plan.as_data(), "nodes": nodes}
        roles = self.memory.roles if self.memory else {}
        bytes_of = {role: {**estimate.parts, "all": estimate.num_bytes} for role, estimate in roles.items()}
        main = {
            role: {**estimate.main, "all": estimate.main_bytes} for role, estimate in roles.items() if estimate.main
        }
        rows = [{"what": what, "text": text} for what, text in self.rows]
        return {**placed, "memory_bytes": bytes_of or None, "main_memory_bytes": main, **self.facts, "rows": rows}


def sample_row(what: str, text: str, template: str) -> tuple[str, str]:
    """Make the row that shows one text as the model gets it, on one line and cut in the middle.

    Args:
        what: it is.
        text: with special tokens.
        template: file of the model folder whose chat template has rendered it; "" for none.
    """
    first, last = _SAMPLE_CHARACTERS
    if (left_out := len(text) - first - last) > 0:
        text = f"{text[:first]} [{left_out} characters] {text[-last:]}"
    how = f"rendered with the chat template of {template}" if template else "as it is, without a chat template"
    shown = text.replace("\n", "\\n")
    return what, f"{how}: {shown}"


def plan_unseen(
    placement: Placement,
    estimate: Callable[[], RunMemory],
    *,
    rows: Sequence[tuple[str, str]],
    notices: Sequence[str] = (),
    facts: Mapping[str, Any],
) -> RunPlan:
    """Return what can be known from here of a run in another place.

    Args:
        placement: there.
        estimate: of memory; raises ModelError where the model's config.json is not here, or of a family not known.
        rows: of (what, how much).
        notices: on its settings.
        facts: numbers by section, for programs.
    """
    memory: RunMemory | None = None
    rows, notices = list(rows), list(notices)
    try:
        memory = estimate()
    except ModelError as error:
        rows.append(("memory", f"not estimated: {error}"))
    else:
        rows += memory.rows(placement)
        notices += memory.notices(placement)
    rows += [("notice", notice) for notice in notices]
    return RunPlan(rows=[*rows, NOT_LOOKED_AT], placement=placement, memory=memory, facts=facts)


class Planner(ABC, Generic[ConfigT]):
    """An application's knowledge of its own runs; `plan_command` does the rest."""

    config_type: ClassVar[type]

    @abstractmethod
    def plan_here(self, config: ConfigT) -> RunPlan:
        """Check everything, as before a run, on this machine."""

    @abstractmethod
    def plan_elsewhere(self, config: ConfigT, view: ClusterView) -> RunPlan:
        """Check what can be known from here of a run in another place."""

    @abstractmethod
    def plan_rehearsal(self, config: ConfigT, folder: Path) -> RunPlan:
        """Check the shrunken run, as before a run; its model and data may be made in the folder."""

    def find_problems(self, sections: Mapping[str, Any], failed: Collection[str]) -> Sequence[str]:
        """Return what is wrong besides values that do not fit; see `offbeat_core.load_config`."""
        return ()

    @abstractmethod
    def find_view(self, config: ConfigT, words: str) -> ClusterView:
        """Return the nodes that words name, such as "4x8"."""

    @abstractmethod
    def request_resources(self, config: ConfigT, view: ClusterView) -> ResourceRequest:
        """Return what a run asks of a place."""

    def companions(self, config: ConfigT, settings: Mapping[str, SettingValue]) -> Mapping[str, SettingValue]:
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
    is_as_given = "cluster" not in words.options and "shrink" not in words.switches  # else models need not be here
    look = planner.find_problems if is_as_given else None
    config: ConfigT = load_config(file, planner.config_type, words.overrides, look=look)
    with naming_lines(file, planner.config_type, words.overrides):
        run_plan = _look(planner, config, words, Path(file))
    if style == "json":
        print(json.dumps(run_plan.as_data(), indent=1))
    else:
        run_plan.show()
    return 0


def _look(planner: Planner[ConfigT], config: ConfigT, words: CommandWords, file: Path) -> RunPlan:
    cluster, target = words.options.get("cluster", ""), words.options.get("fit", "")
    if "shrink" in words.switches:
        if cluster or target:
            raise ConfigError("--shrink rehearses a recipe on this machine: leave --cluster and --fit out")
        with tempfile.TemporaryDirectory(prefix="offbeat-plan-") as folder:
            return planner.plan_rehearsal(config, Path(folder))
    if not cluster and not target:
        return planner.plan_here(config)
    doing("placing the run", cluster)
    view = planner.find_view(config, cluster)
    if target:
        config = _fit(planner, config, view, words, (file, Path(target)))
    return planner.plan_elsewhere(config, view) if cluster else planner.plan_here(config)


def _fit(
    planner: Planner[ConfigT], config: ConfigT, view: ClusterView, words: CommandWords, files: tuple[Path, Path]
) -> ConfigT:
    """Write the recipe with the changes that make it fit."""
    if words.overrides:
        raise ConfigError(
            "--fit changes the recipe's file: put settings into it instead of giving them as --section.key"
        )
    recipe, target = files
    settings = fit_settings(
        view,
        lambda settings: planner.request_resources(with_settings(config, settings), view),
        lambda settings: planner.companions(config, settings),
    )
    if not settings:
        raise ConfigError(f"{recipe} fits as it is: nothing to write to {target}")
    if recipe.absolute().parent != target.absolute().parent and (keys := relative_keys(config)):
        raise ConfigError(
            f"--fit {target}: relative paths of {recipe} ({', '.join(keys)}) are relative to its folder: write the new "
            f"file there, as --fit {recipe.with_name(target.name)}"
        )
    changed = change_recipe(recipe.read_text(), settings, type(config))
    write_new_file(target, f"# {recipe.name} {_MADE_TO_FIT}\n#\n{changed}", "--fit")
    for key, value in settings.items():
        print_text(f"{key} = {str(value).lower()}", to_stderr=True)
    print_text(f"written to {target}", to_stderr=True)  # what is printed to the other stream may be JSON
    return with_settings(config, settings)
