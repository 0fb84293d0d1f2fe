"""Code that every offbeat application shares: configuration, run folder, metrics, timeline, report. No torch."""

from offbeat_run._checkpoints import Checkpoint, Checkpoints, check_model, reading
from offbeat_run._command.command import (
    Command,
    CommandWords,
    doctor_command,
    new_run_folder,
    print_table,
    report_command,
    run_command,
    run_named_command,
    show_usage,
    whole_number,
)
from offbeat_run._command.error_file import ERROR_FILE_VARIABLE, load_error
from offbeat_run._command.examine import ExaminedModel, inspect_model
from offbeat_run._command.hub import HubModels, fetch_models, find_model_problems, has_hub_model
from offbeat_run._command.init import MODEL_AND_DATA, Question, ask, write_first_config
from offbeat_run._command.save import save_command, save_running
from offbeat_run._command.signals import EndRequests, ending_signals
from offbeat_run._conclusion import print_conclusion
from offbeat_run._config.problems import Problems
from offbeat_run._config.sections import VALIDATED_EVERY, CheckpointConfig, LivenessConfig, LogConfig, ProfileConfig
from offbeat_run._console.printing import print_text
from offbeat_run._console.quantities import count_text, duration_text, size_text
from offbeat_run._console.status import counted_loss, doing, so_far
from offbeat_run._folder.folder import RunFolder, check_shared
from offbeat_run._folder.lock import Writer, writer_of
from offbeat_run._folder.sessions import LENGTH_KEYS, application_of, record_session, refuse_foreign_run, say_finished
from offbeat_run._log.progress import Progress
from offbeat_run._log.role_log import log_line, log_loaded, log_start
from offbeat_run._log.run_log import (
    Generation,
    RunLog,
    read_alarms,
    read_generations,
)
from offbeat_run._log.timeline import clock_s, read_timeline
from offbeat_run._metrics.metrics import MetricsLine, MetricsTail, Tracker, iter_metrics, read_metrics
from offbeat_run._metrics.names import label_of
from offbeat_run._metrics.trackers import check_trackers, tracker_notices
from offbeat_run._publish.card import model_card
from offbeat_run._publish.push import PushError, check_destination, push, push_command
from offbeat_run._report.compare import write_comparison
from offbeat_run._report.page import write_report
from offbeat_run._train_command import load_to_train
from offbeat_run._validation.estimates import pass_at_k
from offbeat_run._validation.folder import EvalFolder
from offbeat_run._validation.items import (
    HELD_OUT,
    AnswersLog,
    ItemAnswers,
    SampledAnswer,
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
    "ERROR_FILE_VARIABLE",
    "HELD_OUT",
    "LENGTH_KEYS",
    "MODEL_AND_DATA",
    "VALIDATED_EVERY",
    "AnswersLog",
    "Checkpoint",
    "CheckpointConfig",
    "Checkpoints",
    "Command",
    "CommandWords",
    "EndRequests",
    "Estimate",
    "EvalFolder",
    "ExaminedModel",
    "Generation",
    "HubModels",
    "ItemAnswers",
    "LivenessConfig",
    "LogConfig",
    "MetricsLine",
    "MetricsTail",
    "Problems",
    "ProfileConfig",
    "Progress",
    "PushError",
    "Question",
    "RunFolder",
    "RunLog",
    "SampledAnswer",
    "SetSummary",
    "Tracker",
    "Writer",
    "application_of",
    "ask",
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
    "fetch_models",
    "find_model_problems",
    "has_hub_model",
    "inspect_model",
    "iter_metrics",
    "label_of",
    "load_error",
    "load_to_train",
    "log_line",
    "log_loaded",
    "log_start",
    "model_card",
    "new_run_folder",
    "pass_at_k",
    "print_conclusion",
    "print_table",
    "print_text",
    "push",
    "push_command",
    "read_alarms",
    "read_answers",
    "read_generations",
    "read_metrics",
    "read_timeline",
    "reading",
    "record_session",
    "refuse_foreign_run",
    "report_command",
    "run_command",
    "run_named_command",
    "save_command",
    "save_running",
    "say_finished",
    "show_usage",
    "size_text",
    "so_far",
    "summarize",
    "table_json",
    "table_markdown",
    "table_text",
    "tracker_notices",
    "whole_number",
    "write_comparison",
    "write_first_config",
    "write_report",
    "writer_of",
]
