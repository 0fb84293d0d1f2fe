"""Code that every offbeat application shares: configuration, run folder, metrics, timeline, report. No torch."""

from offbeat_run._checkpoints import Checkpoint, Checkpoints, check_model, reading
from offbeat_run._command import (
    Command,
    CommandWords,
    doctor_command,
    new_run_folder,
    print_table,
    report_command,
    run_command,
    run_named_command,
    show_usage,
    split_arguments,
    whole_number,
)
from offbeat_run._conclusion import print_conclusion
from offbeat_run._examine import ExaminedModel, examine, inspect_model
from offbeat_run._folder import RunFolder, check_shared
from offbeat_run._lock import Writer, writer_of
from offbeat_run._metric_names import METRIC_NAMES, MetricName, label_of
from offbeat_run._metrics import MetricsLine, MetricsLog, MetricValue, Tracker, iter_metrics, read_metrics
from offbeat_run._printing import print_text
from offbeat_run._problems import Problems
from offbeat_run._progress import Progress, print_before_after
from offbeat_run._prometheus import PrometheusServer
from offbeat_run._publish.card import model_card, write_card
from offbeat_run._publish.push import PushError, check_destination, push, push_command
from offbeat_run._quantities import count_text, duration_text, size_text
from offbeat_run._report.compare import write_comparison
from offbeat_run._report.page import write_report
from offbeat_run._report.serving import serve_report
from offbeat_run._role_log import log_line, log_loaded, log_start
from offbeat_run._run_log import (
    Alarm,
    Generation,
    GenerationKind,
    GenerationsLog,
    RunLog,
    read_alarms,
    read_generations,
)
from offbeat_run._sections import VALIDATED_EVERY, CheckpointConfig, LivenessConfig, LogConfig, ProfileConfig
from offbeat_run._sessions import LENGTH_KEYS, record_session, refuse_foreign_run, say_finished
from offbeat_run._signals import ending_signals
from offbeat_run._status import counted_loss, doing, so_far
from offbeat_run._timeline import Timeline, clock_s, read_timeline
from offbeat_run._trackers import check_trackers, open_trackers, tracker_notices
from offbeat_run._validation.estimates import bootstrap_interval, majority_at_k, pass_at_k
from offbeat_run._validation.folder import EvalFolder, read_eval_note
from offbeat_run._validation.items import (
    HELD_OUT,
    AnswersLog,
    ItemAnswers,
    ItemHistory,
    SampledAnswer,
    answers_path,
    item_histories,
    read_answers,
)
from offbeat_run._validation.summary import (
    Estimate,
    SetSummary,
    summarize,
    table_json,
    table_markdown,
    table_text,
)

__all__ = [
    "HELD_OUT",
    "LENGTH_KEYS",
    "METRIC_NAMES",
    "VALIDATED_EVERY",
    "Alarm",
    "AnswersLog",
    "Checkpoint",
    "CheckpointConfig",
    "Checkpoints",
    "Command",
    "CommandWords",
    "Estimate",
    "EvalFolder",
    "ExaminedModel",
    "Generation",
    "GenerationKind",
    "GenerationsLog",
    "ItemAnswers",
    "ItemHistory",
    "LivenessConfig",
    "LogConfig",
    "MetricName",
    "MetricValue",
    "MetricsLine",
    "MetricsLog",
    "Problems",
    "ProfileConfig",
    "Progress",
    "PrometheusServer",
    "PushError",
    "RunFolder",
    "RunLog",
    "SampledAnswer",
    "SetSummary",
    "Timeline",
    "Tracker",
    "Writer",
    "answers_path",
    "bootstrap_interval",
    "check_destination",
    "check_model",
    "check_shared",
    "check_trackers",
    "clock_s",
    "count_text",
    "counted_loss",
    "doctor_command",
    "doing",
    "duration_text",
    "ending_signals",
    "examine",
    "inspect_model",
    "item_histories",
    "iter_metrics",
    "label_of",
    "log_line",
    "log_loaded",
    "log_start",
    "majority_at_k",
    "model_card",
    "new_run_folder",
    "open_trackers",
    "pass_at_k",
    "print_before_after",
    "print_conclusion",
    "print_table",
    "print_text",
    "push",
    "push_command",
    "read_alarms",
    "read_answers",
    "read_eval_note",
    "read_generations",
    "read_metrics",
    "read_timeline",
    "reading",
    "record_session",
    "refuse_foreign_run",
    "report_command",
    "run_command",
    "run_named_command",
    "say_finished",
    "serve_report",
    "show_usage",
    "size_text",
    "so_far",
    "split_arguments",
    "summarize",
    "table_json",
    "table_markdown",
    "table_text",
    "tracker_notices",
    "whole_number",
    "write_card",
    "write_comparison",
    "write_report",
    "writer_of",
]
