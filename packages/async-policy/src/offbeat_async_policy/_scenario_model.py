"""A scenario made ready to be simulated: lengths read, costs known. Many runs may follow, each with a change."""

from dataclasses import dataclass, replace

from offbeat_async_policy._calibration import calibrate, engine_time
from offbeat_async_policy._cluster import Cluster, Workload
from offbeat_async_policy._config import AsyncConfig
from offbeat_async_policy._measured_lengths import read_lengths
from offbeat_async_policy._scenario import MachinesConfig, Scenario, TrainerConfig
from offbeat_async_policy._simulate import simulate
from offbeat_async_policy._simulation_report import SimulationReport
from offbeat_async_policy._workload import DecodeCurve, DecodeSpeed, DecodeTime, Lengths
from offbeat_types import ConfigError


@dataclass(frozen=True, kw_only=True)
class ScenarioModel:
    """What a scenario comes to.

    Args:
        scenario: as read.
        lengths: of the completions.
        speed: of one rollout engine.
        trainer: what training costs.
        switch_s: of a colocated step.
    """

    scenario: Scenario
    lengths: Lengths
    speed: DecodeSpeed
    trainer: TrainerConfig
    switch_s: float

    @classmethod
    def of(cls, scenario: Scenario) -> "ScenarioModel":
        """Read what the scenario names, and fit what its colocated rows say.

        Raises:
            ConfigError, DataError: something of it cannot be used.
        """
        config = scenario.lengths
        measured = read_lengths(scenario.folder / config.file) if config.file else ()
        lengths = Lengths(measured=measured, median=config.median, spread=config.spread, longest=config.longest)
        if scenario.colocated:
            return cls._calibrated(scenario, lengths)
        engines = scenario.engines
        speed: DecodeSpeed = (
            DecodeCurve.parse(engines.decode_curve)
            if engines.decode_curve
            else DecodeTime(engines.step_s, engines.sample_s)
        )
        return cls(
            scenario=scenario,
            lengths=lengths,
            speed=speed,
            trainer=scenario.trainer,
            switch_s=scenario.sync.switch_s,
        )

    @classmethod
    def _calibrated(cls, scenario: Scenario, lengths: Lengths) -> "ScenarioModel":
        fit = calibrate(scenario.colocated)
        num_steps = fit.groups / scenario.async_.mini_batch_size
        trainer = replace(
            scenario.trainer,
            step_s=fit.update.fixed_s / num_steps,
            group_s=fit.update.work_s / fit.groups,
            logprob_step_s=fit.logprob.fixed_s / num_steps,
            logprob_group_s=fit.logprob.work_s / fit.groups,
        )
        return cls(
            scenario=scenario,
            lengths=lengths,
            speed=engine_time(fit, lengths, scenario.work.group_size, scenario.machines.per_engine),
            trainer=trainer,
            switch_s=fit.switch_s,
        )

    def run(self, config: AsyncConfig | None = None, machines: MachinesConfig | None = None) -> SimulationReport:
        """Simulate the scenario, with these settings or this split in the place of its own."""
        config, machines = config or self.scenario.async_, machines or self.scenario.machines
        num_engines = machines.rollout // machines.per_engine
        per_engine = self.scenario.engines.groups_per_engine
        if per_engine and not config.max_in_flight:
            config = replace(config, max_in_flight=per_engine * num_engines)
        recompute = self.trainer.recompute_logprobs
        return self._simulate(config, num_engines, machines.trainer, recompute, self.scenario.sync.sync_s)

    def run_colocated(self) -> SimulationReport:
        """Simulate synchronous training on all accelerators, which generate and train in turn."""
        config, machines = self.scenario.async_, self.scenario.machines
        synchronous = AsyncConfig(
            staleness_threshold=0.0,
            require_batches=config.require_batches * config.trigger_parameter_sync_step,
            mini_batch_size=config.mini_batch_size,
        )
        every = self.scenario.num_accelerators
        return self._simulate(synchronous, max(1, every // machines.per_engine), every, True, self.switch_s)

    def _simulate(
        self, config: AsyncConfig, num_engines: int, num_trainers: int, logprobs: bool, sync_s: float
    ) -> SimulationReport:
        trainer, work = self.trainer, self.scenario.work
        step_s = trainer.step_s + (trainer.logprob_step_s if logprobs else 0.0)
        group_s = trainer.group_s + (trainer.logprob_group_s if logprobs else 0.0)
        cluster = Cluster(
            num_engines=num_engines,
            max_running=self.scenario.engines.max_running,
            decode_curve=self.speed,
            update_s=step_s * config.require_batches + group_s * config.groups_per_update / num_trainers,
            update_tokens_per_s=num_trainers / trainer.token_s if trainer.token_s else 0.0,
            sync_s=sync_s,
        )
        return simulate(config, workload=self._workload(config, work.num_syncs), cluster=cluster)

    def _workload(self, config: AsyncConfig, num_syncs: int) -> Workload:
        work = self.scenario.work
        if work.filtered_share == 1:
            raise ConfigError("work.filtered_share=1 leaves nothing to train")
        num_groups = round(num_syncs * config.groups_per_sync / (1 - work.filtered_share))
        return Workload(
            num_groups=num_groups,
            group_size=work.group_size,
            lengths=self.lengths,
            filtered_share=work.filtered_share,
            seed=work.seed,
        )
