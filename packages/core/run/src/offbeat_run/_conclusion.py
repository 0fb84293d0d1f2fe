"""The end of a run: its figures before and after, where it lies, and its report and model card."""

import os
import sys
from collections.abc import Mapping

from offbeat_run._console.printing import print_text
from offbeat_run._console.status import doing
from offbeat_run._folder.folder import RunFolder
from offbeat_run._folder.sessions import read_sessions
from offbeat_run._log.progress import print_before_after, print_facts
from offbeat_run._metrics.series import read_run_metrics
from offbeat_run._publish.card import write_card
from offbeat_run._report.page import write_report
from offbeat_run._run_summary import compare_ends, shown_path, summarize_run


def print_conclusion(run: RunFolder, compared: Mapping[str, str], *, title: str = "", application: str = "") -> None:
    """Print how the run went, a table of before and after, where the checkpoints are, and where the report is.

    Args:
        run: at its end. A resumed one is compared with its very beginning.
        compared: names in the table by metric, such as {"eval/loss": "held-out loss"}; without any there is no table.
        title: over the table.
        application: its name is on the model card, which is written beside the weights of the checkpoint that the
            run publishes; empty: none is written.
    """
    doing("writing the report")
    metrics = read_run_metrics(run.metrics, [])
    print_facts(summarize_run(run, metrics, read_sessions(run, [])).tiles)
    if changes := compare_ends(metrics, compared):
        of = {change.of for change in changes if change.of}
        heading = f"{title} ({of.pop()})" if title and len(of) == 1 else title
        print_before_after([(each.label, each.before, each.after) for each in changes], title=heading)
    latest, best = run.checkpoints.latest(), run.checkpoints.best()
    if latest:
        _print_path("checkpoint", latest.path)
    if best and latest and best.step != latest.step:
        _print_path("best checkpoint", best.path)
    if latest and application:
        _print_path("model card", write_card(run, best or latest, application))
    _print_path("report", write_report(run))


def _print_path(name: str, path: os.PathLike[str]) -> None:
    """Print a path so that no terminal breaks it where a line of its own has room for it."""
    text, columns = shown_path(path), os.get_terminal_size().columns if sys.stdout.isatty() else 0
    print_text(f"{name}:\n  {text}" if 0 < columns < len(name) + 2 + len(text) else f"{name}: {text}")
