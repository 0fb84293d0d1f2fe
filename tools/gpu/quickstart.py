"""The quickstart on one device, trainer and engine at once: 0.9 of held-out sums right within 20 s of updates.

As `grpo-async-app quickstart` runs on a CPU, with the formats that the application chooses for the device.
"""

import sys
import tempfile
from pathlib import Path
from typing import Final

sys.path.insert(0, str(Path(__file__).parents[1]))

from gpu.piece import Figures, Place, main, reach
from gpu.whole_run import GRPO, learning_curve, require_ended, run_application

GOALS: Final = {"accuracy_after": 0.9}
LIMITS: Final = {"seconds_of_updates": 20.0}
LIMIT_S: Final = 300.0


def run(place: Place) -> Figures:
    """Run the command as a user would, and read what it wrote."""
    devices = ("--engine.device", place.name, "--rollout.device", place.name, "--rollout.dtype", "auto")
    short = ("--engine.max_updates", "12", "--data.eval_size", "16") if place.tiny else ()
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        ended, said = run_application(
            GRPO, place, ["quickstart", "--seed", "0", *devices, *short, "--out", str(out)], LIMIT_S
        )
        require_ended(ended, said)
        figures = learning_curve(out)
        place.note(figures)
    return reach(place, figures, GOALS, LIMITS)


if __name__ == "__main__":
    main(run)
