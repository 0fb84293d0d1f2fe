"""What a run says at its end."""

from collections.abc import Mapping

from offbeat_run._folder import RunFolder
from offbeat_run._metrics import read_metrics
from offbeat_run._progress import print_before_after
from offbeat_run._report import write_report


def print_conclusion(run: RunFolder, compared: Mapping[str, str], *, title: str = "") -> None:
    """Print the table of before and after, where the checkpoints are, and where the report is.

    Args:
        run: at its end. A resumed one is compared with its very beginning.
        compared: names in the table by metric, such as {"eval/loss": "held-out loss"}.
        title: over the table.
    """
    lines = [line.values for line in read_metrics(run.metrics) if compared.keys() <= line.values.keys()]
    if len(lines) > 1:
        before, after = lines[0], lines[-1]
        rows = [(name, float(before[metric]), float(after[metric])) for metric, name in compared.items()]  # type: ignore[arg-type]
        print_before_after(rows, title=title)
    latest, best = run.checkpoints.latest(), run.checkpoints.best()
    if latest:
        print(f"checkpoint: {latest.path}")
    if best and latest and best.step != latest.step:
        print(f"best checkpoint: {best.path}")
    print(f"report: {write_report(run)}")
