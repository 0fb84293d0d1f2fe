"""The end of a run: what it was and what it is, where it lies, and what others are told of it."""

from collections.abc import Mapping

from offbeat_run._folder import RunFolder
from offbeat_run._metrics import read_metrics
from offbeat_run._progress import print_before_after
from offbeat_run._publish.card import write_card
from offbeat_run._report.page import write_report


def print_conclusion(run: RunFolder, compared: Mapping[str, str], *, title: str = "", application: str = "") -> None:
    """Print the table of before and after, where the checkpoints are, and where the report is.

    Args:
        run: at its end. A resumed one is compared with its very beginning.
        compared: names in the table by metric, such as {"eval/loss": "held-out loss"}.
        title: over the table.
        application: whose name is on the model card, which is written beside the weights of the checkpoint that the
            run gives to the world; empty: none is.
    """
    found = [line for line in read_metrics(run.metrics) if compared.keys() <= line.values.keys()]
    lines = [line.values for line in sorted(found, key=lambda line: line.step)]
    if len(lines) > 1:
        before, after = lines[0], lines[-1]
        rows = [(name, float(before[metric]), float(after[metric])) for metric, name in compared.items()]  # type: ignore[arg-type]
        print_before_after(rows, title=title)
    latest, best = run.checkpoints.latest(), run.checkpoints.best()
    if latest:
        print(f"checkpoint: {latest.path}")
    if best and latest and best.step != latest.step:
        print(f"best checkpoint: {best.path}")
    if latest and application:
        print(f"model card: {write_card(run, best or latest, application)}")
    print(f"report: {write_report(run)}")
