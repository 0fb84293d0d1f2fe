"""Cost of the digests of a checkpoint: the time to write and to read one of about 1 GiB, with digests and without.

    uv run python tools/bench/checkpoint_digests.py [--repeats N] [--layers N]

The trainer saves and loads, and the run folder publishes and chooses, as in a run. With and without take turns in one
process. The ratio is that of the shortest times, and of the least processor time: other processes disturb these least.
Files are read from the page cache: a disk makes the ratio smaller.
"""

import argparse
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from unittest.mock import patch

import numpy as np

from offbeat_core import TrainEngineConfig, TrainSequence
from offbeat_engine_torch import TorchTrainEngine
from offbeat_objectives import sft_loss
from offbeat_run import Checkpoints, size_text
from offbeat_testing import tiny_model

HIDDEN_SIZE = 1024


class NoDigest:
    """A stand-in for xxh3 where nothing is digested."""

    def update(self, data: object) -> None:
        """Ignore the data."""

    def hexdigest(self) -> str:
        """Return nothing."""
        return ""


def without_digests() -> ExitStack:
    """Disable digests while the block lasts, in writing and in reading."""
    stack = ExitStack()
    for name, stand_in in (
        ("offbeat_training._tensor_files.xxhash.xxh3_64", NoDigest),
        ("offbeat_training._trainer_state.digest_file", lambda path: ""),
        ("offbeat_run._checkpoints.digest_of", lambda path: ""),
        ("offbeat_run._checkpoints._require_same", lambda folder, digests: None),
        ("offbeat_engine_torch._state.checkpoint.find_damage", lambda folder, rank, num_ranks: ""),
    ):
        stack.enter_context(patch(name, stand_in))
    return stack


def trained_engine(folder: Path, num_layers: int) -> TorchTrainEngine:
    """Return an engine after one update, so that its checkpoint holds weights and both moments."""
    model = tiny_model(folder / "model", hidden_size=HIDDEN_SIZE, num_layers=num_layers)
    engine = TorchTrainEngine.create(TrainEngineConfig(model_path=str(model), device="cpu"))
    ids = np.arange(1, 9, dtype=np.int32)
    engine.forward_backward([TrainSequence(ids=ids, loss_mask=ids > 1, group=0)], sft_loss)
    engine.step()
    return engine


def timed(work: Callable[[], object]) -> tuple[float, float]:
    """Return the seconds that a call takes, and the processor time of these."""
    start_s, cpu_s = time.monotonic(), time.process_time()
    work()
    return time.monotonic() - start_s, time.process_time() - cpu_s


def main() -> None:
    """Measure, and print a line each for writing and reading."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--layers", type=int, default=14, help=f"of {HIDDEN_SIZE} numbers; 14 make 1 GiB")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        engine = trained_engine(Path(name), asked.layers)
        taken: dict[tuple[str, bool], list[tuple[float, float]]] = {}
        for number in range(2 * asked.repeats):
            has_digests = number % 2 == 0
            with ExitStack() if has_digests else without_digests():
                checkpoints = Checkpoints(Path(name) / str(number))

                def write(checkpoints: Checkpoints = checkpoints) -> None:
                    with checkpoints.write(1) as folder:
                        engine.save(folder)

                def read(checkpoints: Checkpoints = checkpoints) -> None:
                    checkpoints.read_latest(engine.load, lambda _: None)

                taken.setdefault(("write", has_digests), []).append(timed(write))
                taken.setdefault(("read", has_digests), []).append(timed(read))
                num_bytes = sum(file.stat().st_size for file in checkpoints.path.rglob("*") if file.is_file())
                for file in checkpoints.path.rglob("*.safetensors"):
                    file.unlink()
        for what in ("write", "read"):
            for number, of in enumerate(("time", "processor time")):
                each = [[times[number] for times in taken[what, digests]] for digests in (True, False)]
                with_s, without_s = map(min, each)
                print(
                    f"{what} {size_text(num_bytes)}, {of}: {with_s:.2f} s with digests, {without_s:.2f} s without, "
                    f"{with_s / without_s:.2f} times; all: {[[round(s, 2) for s in some] for some in each]}"
                )


if __name__ == "__main__":
    main()
