"""The healthy programs of tests/e2e/healthy: long pauses as real jobs have them, and nothing wrong.

Each is plain torch, prints "rank N: done" on every rank, and takes the length of its pauses from PAUSE_S.
"""

import re
import signal
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from fault_runs import Act, FaultRun, Observation
from workspace import ROOT

PROGRAMS: Final = ROOT / "tests" / "e2e" / "healthy"
SIZES: Final = (2, 4)
# Of one pause: a suspicion, and that it has gone.
MAX_TOLD: Final = 2
SECONDS: Final = re.compile(r"\d+ s\b")
# Until every rank is in its first call, and for what a loaded machine adds.
START_S: Final = 1.0
PATIENCE_S: Final = 40.0

Acts = Callable[[float], tuple[Act, ...]]


def _nothing(pause_s: float) -> tuple[Act, ...]:
    return ()


def _go_on(pause_s: float) -> tuple[Act, ...]:
    return (Act(at_s=START_S + pause_s, rank=0, text="continue\n"),)


def _say_yes(pause_s: float) -> tuple[Act, ...]:
    return (Act(at_s=START_S + pause_s, rank=0, text="yes\n"),)


def _stop_for_a_while(pause_s: float) -> tuple[Act, ...]:
    stop = Act(at_s=START_S, rank=1, signal=signal.SIGSTOP)
    return (stop, Act(at_s=START_S + pause_s, rank=1, signal=signal.SIGCONT))


@dataclass(frozen=True, kw_only=True)
class Healthy:
    """One program that stands still for a while and ends well.

    Args:
        name: of its file.
        like: what people do that is like it.
        sizes: numbers of ranks it makes sense with.
        pauses: how many times PAUSE_S it takes at most.
        acts: what is done to it from outside, by the length of its pause in seconds.
        unwatched: ranks without the monitor, counted from the last one: -1.
    """

    name: str
    like: str
    sizes: tuple[int, ...] = SIZES
    pauses: float = 1.5
    acts: Acts = _nothing
    unwatched: tuple[int, ...] = ()

    @property
    def script(self) -> Path:
        """The program."""
        return PROGRAMS / f"{self.name}.py"

    @property
    def title(self) -> str:
        """The first line of its docstring."""
        return self.script.read_text().partition('"""')[2].partition('"""')[0].strip()

    def run(self, size: int, *, stall_after_s: float, pause_s: float) -> FaultRun:
        """It, watched, with the policy that ends what is proven to be stuck."""
        limit_s = START_S + self.pauses * pause_s + PATIENCE_S
        return FaultRun(
            script=self.script,
            size=size,
            stall_after_s=stall_after_s,
            limit_s=limit_s,
            last_rank_s=limit_s,
            environment=(("PAUSE_S", str(pause_s)),),
            acts=self.acts(pause_s),
            unwatched=tuple(size + place for place in self.unwatched),
        )


HEALTHY: Final = (
    # Work outside torch while others are in a collective.
    Healthy(name="evaluates_on_rank0", like="evaluation on one rank"),
    Healthy(name="evaluates_within_group_timeout", like="a group with a timeout of two hours"),
    Healthy(name="main_process_first", like="`main_process_first`, `datasets.map(num_proc=2)`", pauses=2),
    Healthy(name="executor_of_processes", like="verifiers of rewards in processes"),
    Healthy(name="compiler_in_subprocess", like="`load_inline`, Triton, flash-attn's build"),
    Healthy(name="quiet_subprocess", like="`gsutil cp`, `sbatch --wait`"),
    Healthy(name="uploads", like="`push_to_hub`, a bucket"),
    Healthy(name="downloads", like="`snapshot_download`"),
    Healthy(name="asks_an_engine", like="a generation server"),
    Healthy(name="loader_workers", like="`DataLoader(num_workers=2)`"),
    Healthy(name="many_loader_workers", like="`DataLoader(num_workers=200)`", sizes=(2,), pauses=4),
    Healthy(name="native_threads", like="tokenizers, numpy, OpenSSL", pauses=2),
    Healthy(name="one_native_thread", like="one long call of a C library", pauses=3),
    Healthy(name="slow_file_system", like="NFS, FUSE"),
    Healthy(name="saves_a_checkpoint", like="`torch.save` on rank 0", pauses=2),
    Healthy(name="fsync_loop", like="a database, a log"),
    Healthy(name="file_lock", like="`filelock` of datasets, of extensions"),
    Healthy(name="debugger", like="`breakpoint()`", acts=_go_on),
    Healthy(name="asks_the_user", like="`input()`", acts=_say_yes),
    Healthy(name="idle_command_loop", like="an RPC worker, vLLM's executor"),
    Healthy(name="asyncio_orchestrator", like="an RL controller in asyncio"),
    Healthy(name="backs_off", like="a client with retries"),
    Healthy(name="waits_for_a_queue", like="prefetching in a thread"),
    Healthy(name="queues_everywhere", like="workers without work"),
    Healthy(name="many_threads", like="a server on rank 0"),
    Healthy(name="first_compile", like="the first `torch.compile`"),
    # Declared waits.
    Healthy(name="declared_wait", like="`waiting(deadline_s=600)`"),
    Healthy(name="unwatched_producer", like="`waiting(on=...)` of somebody unknown"),
    Healthy(name="quiet_producer", like="a producer in asyncio"),
    # The start and the end.
    Healthy(name="starts_late", like="a slow node"),
    Healthy(name="imports_slowly", like="imports from a cold file system"),
    Healthy(name="late_to_new_group", like="a slow rank at `new_group`"),
    Healthy(name="waits_in_turn", like="loading in turn"),
    Healthy(name="exits_holding_the_gil", like="a long end of the main thread"),
    Healthy(name="writes_after_the_others", like="the last checkpoint"),
    # What one rank cannot say.
    Healthy(name="holds_the_gil", like="a C extension that keeps the GIL"),
    Healthy(name="unwatched_rank", like="a rank without the wrapper", unwatched=(-1,)),
    Healthy(name="slow_rank_beside_unwatched", like="half a job under the wrapper", unwatched=(-1,)),
    Healthy(name="stopped_and_continued", like="Ctrl-Z, a snapshot of the machine", acts=_stop_for_a_while),
    # Several groups, worlds and threads.
    Healthy(name="side_thread_reduces", like="metrics in a thread", pauses=2),
    Healthy(name="async_checkpoint", like="`dcp.async_save`"),
    Healthy(name="worlds_with_a_bridge", like="weights from trainer to engine", sizes=(4,)),
    Healthy(name="two_worlds_that_talk", like="trainer and engine over a socket", sizes=(4,)),
    Healthy(name="stateless_world", like="vLLM's stateless group"),
    Healthy(name="waits_for_a_key", like="a store of one's own"),
    # Point to point.
    Healthy(name="ping_pong", like="a pipeline at work beside a barrier", sizes=(3, 4)),
    Healthy(name="delivered_isend", like="`isend` waited for later"),
    Healthy(name="isend_nobody_waits_for", like="`isend` and forget"),
    Healthy(name="slow_pipeline_stage", like="a slow stage", pauses=2),
    # Long collectives, and unequal data.
    Healthy(name="transfers_slowly", like="a slow network", sizes=(2,)),
    Healthy(name="gathers_large_objects", like="`all_gather_object` of very much", pauses=2),
    Healthy(name="uneven_join", like="`Join`"),
    Healthy(name="ddp_unused_parameters", like="DDP, experts, unequal epochs"),
    Healthy(name="fsdp_slow_rank", like="FSDP2", pauses=2),
    Healthy(name="pause_each_epoch", like="evaluation each epoch", pauses=2.5),
)
"""Every healthy program; tests of each tier and the table in docs/liveness.md use these."""


def complaints(healthy: Healthy, seen: Observation) -> list[str]:
    """What a monitor did wrong to a healthy run; empty if it let it be."""
    told = seen.told
    found = [f"proof on rank {each.rank}: {each.text}" for each in told if each.what == "proof"]
    things = Counter[tuple[str, str]]()
    for rank in seen.outputs:  # where the leader is too busy to answer, the next one says the same: no second thing
        things |= Counter((each.what, SECONDS.sub("", each.text)) for each in told if each.rank == rank)
    if things.total() > MAX_TOLD:
        found.append(f"{things.total()} things were said: {', '.join(each.what for each in told)}")
    if set(seen.exit_codes.values()) != {0}:
        found.append(f"exit codes {seen.exit_codes}")
    found += [f"rank {rank} is not done" for rank, text in seen.outputs.items() if f"rank {rank}: done" not in text]
    return found


def report(seen: Observation) -> str:
    """Everything that was printed, for a failed test."""
    return "\n".join(f"--- rank {rank}\n{output}" for rank, output in seen.outputs.items())
