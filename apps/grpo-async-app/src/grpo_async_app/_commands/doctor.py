"""The command `doctor`: versions and devices; with `--probe-engines`, the width at which engines no longer start."""

import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from grpo_async_app._config.sections import GrpoConfig
from grpo_async_app._preflight.backends import choose_backends
from grpo_async_app._preflight.engines import check_backends
from grpo_async_app._preflight.placement import find_view
from grpo_async_app._preflight.platform import choose_for_platform, device_kinds, engine_kinds
from grpo_async_app._preflight.trainer import check_devices
from grpo_async_app._run.engine_probe import ProbeOutcome, probe_engines, widths_to_probe
from grpo_async_app._run.interruption import run_interruptible
from offbeat_actors import Launcher
from offbeat_core import ConfigError, PeerFailedError, ProblemsError, load_backend, load_config, parse_config
from offbeat_data import build_reward, check_data_paths
from offbeat_placement import ClusterView
from offbeat_run import (
    CommandWords,
    check_trackers,
    doctor_command,
    doing,
    find_model_problems,
    inspect_model,
    print_table,
    print_text,
)

_SHOWN_LINES = 12
"""Last lines shown of a failed engine's log; the whole log is kept, and its path is printed."""


def examine_command(words: CommandWords, file: str = "") -> int:
    """`doctor`, `doctor FILE`, and `doctor --probe-engines FILE`."""
    probed = words.options.get("probe-engines")
    if probed is None:
        code = doctor_command(words, file, config_type=GrpoConfig, checks=_needs)
        if not file:
            print_table([("rollout.backend", f"auto takes {_default_engine()}")])
        return code
    if file:
        raise ConfigError(f"doctor takes FILE or --probe-engines FILE: got {file} and {probed}")
    file = probed
    config = load_config(file, GrpoConfig, words.overrides)
    inspect_model(config.model.path)
    view = find_view(config)
    config, choices = choose_backends(config, engine_kinds(config, view))
    for choice in choices:
        print_text(choice)
    config, _ = choose_for_platform(config, *device_kinds(config, view))
    return _probe(config, view)


def _needs(config: GrpoConfig) -> dict[str, Callable[[], object]]:
    """Return what a run needs, by what names it."""
    needs: dict[str, Callable[[], object]] = {
        "backends": lambda: check_backends(config),
        "models": lambda: _check_models(config),
        "data": lambda: check_data_paths(config.data),
        "devices": lambda: check_devices(config, find_view(config)),
        "log.trackers": lambda: check_trackers(config.log),
    }
    if config.reward.is_set:
        needs["reward"] = lambda: build_reward(config.reward)
    return needs


def _check_models(config: GrpoConfig) -> None:
    sections = {"model": config.model, "teacher": config.teacher, "critic": config.critic}
    if found := find_model_problems(sections):
        raise ProblemsError(*found)


def _default_engine() -> str:
    """Return the engine that "auto" takes on the devices here for a model that it serves, with the reason."""
    from offbeat_device import accelerator_kind  # imports torch

    config = parse_config('[model]\npath = ""\n[data]\npath = ""\n', GrpoConfig)
    _, [choice] = choose_backends(config, {"rollout": accelerator_kind(config.rollout.device), "teacher": ""})
    return choice.partition(" = ")[2]


def _probe(config: GrpoConfig, view: ClusterView) -> int:
    widths, deadline_s = widths_to_probe(config.rollout.tensor_parallel), config.cluster.start_timeout_s
    print_text(
        f"starts engines of rollout.backend = {config.rollout.backend!r} with tensor parallel "
        f"{', '.join(map(str, widths))} (rollout.tensor_parallel = {widths[-1]}) on {len(view.nodes)} "
        f"{'node' if len(view.nodes) == 1 else 'nodes'}; each has {deadline_s:g} s (cluster.start_timeout_s)",
    )
    doing("starting engines")
    logs = Path(tempfile.mkdtemp(prefix="offbeat-probe-"))
    launcher: Launcher = load_backend("offbeat.launcher", config.cluster.launcher)("probe", config.cluster)

    async def probe() -> list[ProbeOutcome]:
        async with launcher:
            return await probe_engines(config, launcher, view, logs, _notify)

    outcomes = run_interruptible(probe(), launcher.kill)
    failed = [outcome for outcome in outcomes if outcome.error is not None]
    if failed:
        return _explain(failed, logs)
    shutil.rmtree(logs, ignore_errors=True)
    print_text(f"engines start at every width up to tensor parallel {widths[-1]}")
    return 0


def _notify(outcome: ProbeOutcome) -> None:
    """Print one line as soon as an engine has come to something."""
    what = f"tensor parallel {outcome.width} on {outcome.node or 'any node'}"
    others = f"; no room on {', '.join(outcome.no_room)}" if outcome.no_room else ""
    if outcome.error is None:
        print_text(f"  {what}: ready in {outcome.start_s:.1f} s, answered in {outcome.answer_s:.1f} s{others}")
    else:
        print_text(f"  {what}: {type(outcome.error).__name__}{others}")


def _explain(failed: Sequence[ProbeOutcome], logs: Path) -> int:
    """Print why it stops, on each node, with the last lines of the engine's log; the exit code of the first error."""
    for outcome in failed:
        error = outcome.error
        assert error is not None
        reason = error.reason if isinstance(error, PeerFailedError) else str(error)
        where = f" on {outcome.node}" if outcome.node else ""
        print_text(f"error: stops at tensor parallel {outcome.width}{where}: {reason}", to_stderr=True)
        if tail := outcome.log_tail.splitlines()[-_SHOWN_LINES:]:
            print_text(
                "\n".join([f"the last lines of {outcome.log}:", *(f"  {line}" for line in tail)]), to_stderr=True
            )
    if not any(outcome.log_tail for outcome in failed):
        shutil.rmtree(logs, ignore_errors=True)
    error = failed[0].error
    assert error is not None
    return error.exit_code
