"""The liveness monitor over nccl, in a world of one: what the device's own recorder reports while work is pending.

The ranks are those of `packages/hangs/liveness/tests/cuda`, without pytest. nccl refuses two ranks on one device, so
verdicts over several of them need several. On a CPU gloo's recorder is asked.
"""

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[2] / "packages" / "hangs" / "liveness" / "tests"))

import torch.distributed as dist
from gpu.piece import Figures, Place, main, require


def collectives_are_recorded(rank: int) -> None:
    """Check that the recorder reports a collective that is over as done."""
    import torch
    from liveness_devices import read_all  # type: ignore[import-not-found]  # lies beside the tests

    dist.all_reduce(torch.ones(4))
    head = read_all()["gloo"]
    assert head.recent, "the recorder reports nothing"
    assert head.recent[-1].op == "all_reduce"


def run(place: Place) -> Figures:
    """Run each body in a process of its own."""
    import liveness_devices as devices
    from liveness_launch import Outcome, launch  # type: ignore[import-not-found]

    settings = {"policy": "report", "stall_after_s": 60.0}
    bodies: tuple[Callable[[int], None], ...]
    if place.is_accelerator:
        bodies = (
            devices.pending_behind_a_spinning_kernel,
            devices.the_recorder_answers_while_the_main_thread_synchronizes,
            devices.transfers_to_itself_in_a_batch,
        )
    else:
        bodies = (collectives_are_recorded,)
    with tempfile.TemporaryDirectory() as temporary:
        for body in bodies:
            folder = Path(temporary) / body.__name__
            start = devices.launch_on_devices if place.is_accelerator else launch
            outcome: Outcome = start(body, 1, folder, **settings)
            said = "\n".join(outcome.outputs)[-2000:]
            require(outcome.exit_codes == [0], f"{body.__name__} ended with {outcome.exit_codes}: {said}")
            headlines = [verdict.headline for verdict in outcome.verdicts]
            require(not headlines, f"{body.__name__}: a verdict without a fault: {headlines}")
    return {"bodies": len(bodies), "backend": place.device.collective_backend, "false_verdicts": 0}


if __name__ == "__main__":
    main(run)
