"""The traces of one role on disk: one step's after another's, as long as there is room for them."""

from collections.abc import Sequence
from pathlib import Path

from offbeat_types import TracePlan


class TraceFiles:
    """Keeps what was traced of a step as `ROLE-STEP.json`, and of further processes as `ROLE-STEP.rank1.json`, ....

    Args:
        plan: which steps, where to, how much. Files of the role's former processes count too; a step whose traces would
            exceed the bound is not kept, and is the last to be traced.

    Attributes:
        left_out: why the last traced step was not kept; "" while all were.
    """

    def __init__(self, plan: TracePlan) -> None:
        self._plan, self._folder = plan, Path(plan.folder)
        held = self._folder.glob(f"{plan.role}-*.json")
        self._left_bytes = plan.max_bytes - sum(path.stat().st_size for path in held)
        self.left_out = ""

    def wants(self, step: int) -> bool:
        """Whether this step is to be traced."""
        return self._plan.first <= step < self._plan.last and not self.left_out

    def unfinished(self, step: int) -> Path:
        """Where to write the trace of a step before it is kept; its folder is there."""
        self._folder.mkdir(parents=True, exist_ok=True)
        return self._folder / f"{self._plan.role}-{step}.json.partial"

    def keep(self, step: int, written: Sequence[Path]) -> None:
        """Take the traces of a step in, or remove them.

        Args:
            step: its number.
            written: whole files, one for each process that computes, on the file system of the plan's folder.
        """
        num_bytes = sum(path.stat().st_size for path in written)
        if num_bytes > self._left_bytes:
            for path in written:
                path.unlink()
            self._tell_left_out(step, num_bytes)
            return
        for rank, path in enumerate(written):
            of_rank = f".rank{rank}" * (rank > 0)
            path.replace(self._folder / f"{self._plan.role}-{step}{of_rank}.json")
        self._left_bytes -= num_bytes

    def _tell_left_out(self, step: int, num_bytes: int) -> None:
        left = f"{max(self._left_bytes, 0)} of {self._plan.max_bytes} (profile.max_bytes)"
        self.left_out = (
            f"the trace of step {step} has {num_bytes} bytes, and {left} are left: it is not kept, and nothing "
            "is traced after it"
        )
        print(f"{self._plan.role}: {self.left_out}", flush=True)
