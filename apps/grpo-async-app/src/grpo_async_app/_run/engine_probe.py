"""Starts one rollout engine after the other, wider each time, to find the width and the node at which that stops.

At each width one engine starts on every node that has room for it, all nodes at once:

    tensor parallel 1   node-0 starts, answers, stops    node-1 starts, answers, stops
    tensor parallel 2   node-0 starts, answers, stops    node-1 is not ready in time: here it stops
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import numpy as np

from grpo_async_app._config.sections import GrpoConfig
from offbeat_actors import Launcher, RoleSpec, available_cpus, read_log_tail
from offbeat_core import Completion, GenerateRequest, OffbeatError, PlacementError, RoleName, SamplingParams, UserError
from offbeat_placement import ClusterView, Node, Plan, RankGroup, plan_placement

_PROMPT: Final = np.asarray([1, 2, 3], np.int32)
_NUM_TOKENS: Final = 2
"""Sampled by each engine: the second token is the first of a decoding step."""


@dataclass(frozen=True, kw_only=True)
class ProbeOutcome:
    """The outcome of starting one engine.

    Args:
        width: of tensor parallel.
        node: where it was started; "" where no node has room for it.
        no_room: the other nodes, which have no room for it.
        start_s: until it was ready.
        answer_s: until it had sampled two tokens.
        error: what went wrong; None when all went well.
        log_tail: the last lines of its log, where it went wrong in a way that its error does not explain.
        log: its log.
    """

    width: int
    node: str
    no_room: tuple[str, ...] = ()
    start_s: float = 0.0
    answer_s: float = 0.0
    error: OffbeatError | None = None
    log_tail: str = ""
    log: Path | None = None


def widths_to_probe(tensor_parallel: int) -> list[int]:
    """Widths up to that of the configuration: powers of two, and the width itself."""
    widths = [1 << power for power in range(tensor_parallel.bit_length()) if 1 << power <= tensor_parallel]
    return widths if widths[-1] == tensor_parallel else [*widths, tensor_parallel]


async def probe_engines(
    config: GrpoConfig, launcher: Launcher, view: ClusterView, log_folder: Path, notify: Callable[[ProbeOutcome], None]
) -> list[ProbeOutcome]:
    """Start engines of growing width until one fails.

    Args:
        config: whose rollout section is probed, with `cluster.start_timeout_s` for each engine.
        launcher: of the configuration; it stays open.
        view: its nodes, before anything was started.
        log_folder: takes a log for each engine.
        notify: takes each outcome as soon as it is known.

    Returns:
        Every outcome; those of the last width alone may have an error.
    """
    outcomes: list[ProbeOutcome] = []
    for width in widths_to_probe(config.rollout.tensor_parallel):
        probe = _WidthProbe(config, launcher, view, log_folder, width, notify)
        outcomes += await probe.run()
        if any(outcome.error for outcome in outcomes):
            break
    return outcomes


class _WidthProbe:
    """Engines of one width."""

    def __init__(
        self,
        config: GrpoConfig,
        launcher: Launcher,
        view: ClusterView,
        log_folder: Path,
        width: int,
        notify: Callable[[ProbeOutcome], None],
    ) -> None:
        self._config, self._launcher, self._view, self._width = config, launcher, view, width
        self._log_folder, self._notify = log_folder, notify
        self._no_room: tuple[str, ...] = ()
        self._num_threads = config.cluster.rollout_threads or available_cpus()

    async def run(self) -> list[ProbeOutcome]:
        """Probe every node that has room at once. Where none has, that is the outcome."""
        try:
            planned = self._plan()
        except PlacementError as error:
            outcome = ProbeOutcome(width=self._width, node="", error=error)
            self._notify(outcome)
            return [outcome]
        return list(await asyncio.gather(*(self._probe(group, plan) for group, plan in planned)))

    def _plan(self) -> list[tuple[RankGroup, Plan]]:
        """Return a plan for each node that has room; one for all nodes together where an engine may span them.

        Raises:
            PlacementError: no node has room.
        """
        planned = []
        for number, node in enumerate(self._view.nodes):
            try:
                planned.append(self._plan_on([node], number))
            except PlacementError:
                self._no_room += (node.name,)
        return planned or [self._plan_on(self._view.nodes, 0)]  # it names what every node is short of

    def _plan_on(self, nodes: Sequence[Node], number: int) -> tuple[RankGroup, Plan]:
        rollout, kind = self._config.rollout, self._view.kind(self._config.rollout.device)
        group = RankGroup(
            role=f"probe{number}",  # the same at each width: the place of the engine before is given back
            num_replicas=1,
            tensor_parallel=self._width,
            accelerator=kind,
            cpus_per_rank=self._view.cpus_per_rank(
                kind, self._config.cluster.rollout_threads / rollout.tensor_parallel
            ),
            spans_nodes=self._config.cluster.spans_nodes and bool(kind),
            process_per_replica=True,
            keys={"tensor_parallel": "rollout.tensor_parallel"},
        )
        return group, plan_placement(nodes, [group])

    async def _probe(self, group: RankGroup, plan: Plan) -> ProbeOutcome:
        nodes = list(dict.fromkeys(rank.node for rank in plan.ranks))
        outcome = ProbeOutcome(
            width=self._width,
            node="+".join(nodes),
            no_room=tuple(name for name in self._no_room if name not in nodes),  # a node spanned has room for its part
            log=self._log_folder / f"{group.role}-tp{self._width}.log",
        )
        try:
            await self._launcher.place(plan, [group])
            outcome = await self._start_and_ask(RoleName(group.role), outcome)
        except OffbeatError as error:
            assert outcome.log is not None
            says_all = isinstance(error, UserError)  # its log holds the traceback of the same words
            outcome = replace(outcome, error=error, log_tail="" if says_all else read_log_tail(outcome.log))
        self._notify(outcome)
        return outcome

    async def _start_and_ask(self, role: RoleName, outcome: ProbeOutcome) -> ProbeOutcome:
        deadline_s, begin_s = self._config.cluster.start_timeout_s, time.monotonic()
        actor = await self._launcher.start(self._spec(role, outcome.log), deadline_s=deadline_s)
        try:
            start_s, begin_s = time.monotonic() - begin_s, time.monotonic()
            params = SamplingParams(max_tokens=_NUM_TOKENS, ignore_eos=True)
            request = GenerateRequest(request_id="probe", prompt_ids=_PROMPT, params=params)
            returns = list[Completion]
            await actor.call("generate", request, returns=returns, deadline_s=deadline_s)
            answer_s = time.monotonic() - begin_s
        except BaseException:
            await actor.destroy()
            raise
        await actor.stop()
        return replace(outcome, start_s=start_s, answer_s=answer_s)

    def _spec(self, role: RoleName, log: Path | None) -> RoleSpec:
        """Return an engine as the run would start it, without the endpoint, the traces and the transport of a run."""
        run = self._config
        rollout = replace(
            run.rollout, tensor_parallel=self._width, num_engines=1, serve_port=None, weight_transport="auto"
        )
        config = replace(run, rollout=rollout, profile=type(run.profile)(), agent=type(run.agent)())
        kwargs = {"config": config, "role": role, "model_path": config.model.path, "num_threads": self._num_threads}
        return RoleSpec(
            role=role,
            target="grpo_async_app._roles.rollout:RolloutRole",
            kwargs=kwargs,
            num_threads=self._num_threads,
            log_path=log,
        )
