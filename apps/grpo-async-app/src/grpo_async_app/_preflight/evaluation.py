"""Inputs of an evaluation: weights, sets and engines, checked without anything of training."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from grpo_async_app._config.agent import AgentConfig
from grpo_async_app._config.resolved import ResolvedRun, ValidationSet, resolve
from grpo_async_app._config.sections import EngineConfig, GrpoConfig, TeacherConfig
from grpo_async_app._preflight.backends import check_open_backends, choose_backends
from grpo_async_app._preflight.data import ask_tools, mark_of, read_sets, turn_templates, with_tools
from grpo_async_app._preflight.engines import check_engine_model, check_positions
from grpo_async_app._preflight.placement import find_view, place_run
from grpo_async_app._preflight.platform import choose_for_platform, device_kinds, engine_kinds
from grpo_async_app._preflight.sources import check_rewards
from offbeat_actors import check_processes
from offbeat_core import ConfigError
from offbeat_data import CurriculumConfig, Tokenizer, load_prompts, load_tokenizer
from offbeat_objectives import AlgorithmConfig
from offbeat_placement import Placement
from offbeat_run import HELD_OUT, inspect_model


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Checked.

    Args:
        run: with nothing of training left in it, and with the sets to answer.
        model_path: folder of the weights.
        placement: of the engines.
        choices: of an engine that was left open, with the reason.
    """

    run: ResolvedRun
    model_path: Path
    placement: Placement
    choices: tuple[str, ...] = ()

    @property
    def config(self) -> GrpoConfig:
        return self.run.config

    def asked(self) -> dict[str, Any]:
        """By set, all that answers depend on."""
        rollout = self.config.rollout
        weights = sorted(
            (file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in self.model_path.glob("*.safetensors")
        )
        shared = {
            "weights": weights,
            "engine": (rollout.backend, rollout.dtype, rollout.weight_format, rollout.max_model_len, rollout.options),
            "agent": _asked_of(self.config.agent),
        }
        return {each.name: {**shared, **_asked(each)} for each in self.run.sets}


def _asked_of(agent: AgentConfig) -> dict[str, Any] | None:
    """Return what episodes of an agent depend on: all but how many run at once, and how long it may take to start."""
    if not agent.is_set:
        return None
    return {name: value for name, value in asdict(agent).items() if name not in ("max_running", "preload_deadline_s")}


def _asked(each: ValidationSet) -> dict[str, Any]:
    return {
        "prompts": mark_of(each.prompts),
        "references": hashlib.sha256(json.dumps([prompt.answer for prompt in each.prompts]).encode()).hexdigest(),
        "params": asdict(each.params),
        "num_samples": each.num_samples,
        "success_reward": each.success_reward,
        "reward": asdict(each.judge.settings),
        "environment": asdict(each.environment.settings) if each.environment.is_set else None,
    }


def check_evaluation(config: GrpoConfig, names: Sequence[str]) -> Evaluation:
    """Check what is to be evaluated against the machine, the model folder and the data.

    Args:
        config: whose model.path names the weights.
        names: of the sets; empty: all there are.

    Raises:
        UserError: the first thing that is wrong, with what to do.
    """
    run = resolve(_without_training(config))
    config = run.config
    model = inspect_model(config.model.path)
    check_positions(config, model)
    check_open_backends(config)
    if config.reward.is_set or config.environment.name:
        check_rewards(run, trains=False)
    run = _read(run, load_tokenizer(model.path, config.model.trust_remote_code), names)
    view = find_view(config)
    if not view.reserves:
        check_processes(config.processes)
    has_images = any(prompt.pictures for each in run.sets for prompt in each.prompts)
    config, choices = choose_backends(config, engine_kinds(config, view), has_images=has_images)
    check_engine_model(config.rollout.backend, model)
    config, _ = choose_for_platform(config, *device_kinds(config, view))
    return Evaluation(
        run=replace(run, config=config),
        model_path=model.path,
        placement=place_run(config, view),
        choices=tuple(choices),
    )


def _without_training(config: GrpoConfig) -> GrpoConfig:
    """Nothing that a trainer, a teacher or a sync of weights would need: the engines serve the folder as it is."""
    return replace(
        config,
        data=replace(config.data, mix={}),
        curriculum=CurriculumConfig(),
        eval=replace(config.eval, every_updates=1),
        engine=EngineConfig(device="cpu"),
        teacher=TeacherConfig(),
        algorithm=AlgorithmConfig(),
        cluster=replace(config.cluster, colocate=False),
        rollout=replace(config.rollout, lora_sync="auto", weight_transport="auto", full_sync_every=1, serve_port=None),
    )


def _read(run: ResolvedRun, tokenizer: Tokenizer, names: Sequence[str]) -> ResolvedRun:
    """Return the run with the sets that are to be answered, read."""
    config = run.config
    known = [*([HELD_OUT] if _holds_out(config) else []), *config.eval.sets]
    if unknown := [name for name in names if name not in known]:
        raise ConfigError(f"--set {unknown[0]}: no such validation set; there are {', '.join(known) or 'none'}")
    chosen = names or known
    if not chosen:
        raise ConfigError(
            "eval needs something to ask: set data.eval_size or data.eval_path, or give --eval.sets.NAME.path PATH"
        )
    tools = ask_tools(run)
    sets = read_sets(run, tokenizer, tools, [name for name in chosen if name != HELD_OUT])
    if HELD_OUT in chosen:
        data = with_tools(config.data, tools.get(run.held_out.environment, []))
        held_out = load_prompts(data, tokenizer, needs_answer=config.reward.needs_answer).eval
        sets = (replace(run.held_out, prompts=held_out[: config.eval.max_prompts or None]), *sets)
    return replace(run, sets=sets, templates=turn_templates(run, tokenizer, tools))


def _holds_out(config: GrpoConfig) -> bool:
    data = config.data
    return bool(data.path and (data.eval_size or data.eval_path or data.eval_split))
