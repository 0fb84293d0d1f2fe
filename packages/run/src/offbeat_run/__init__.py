"""What every offbeat application shares: configuration, run folder, metrics, timeline, report. No torch."""

from offbeat_run._atomic import atomic_folder, atomic_write, disk_errors, write_new_file
from offbeat_run._checkpoints import Checkpoint, Checkpoints
from offbeat_run._command import CommandWords, run_command, split_arguments
from offbeat_run._command_table import (
    Command,
    doctor_command,
    new_run_folder,
    print_table,
    report_command,
    run_named_command,
    whole_number,
)
from offbeat_run._conclusion import print_conclusion
from offbeat_run._config_fields import check_limits
from offbeat_run._config_load import load_config, parse_config, split_overrides
from offbeat_run._config_text import dump_config, explain
from offbeat_run._doctor import examine
from offbeat_run._folder import RunFolder
from offbeat_run._generations import Generation, GenerationKind, GenerationsLog, read_generations
from offbeat_run._metrics import MetricsLine, MetricsLog, MetricValue, Tracker, read_metrics
from offbeat_run._model_folder import ModelFolder, inspect_model
from offbeat_run._names import METRIC_NAMES, MetricName
from offbeat_run._profile import ProfileConfig
from offbeat_run._progress import Progress, duration_text, print_before_after
from offbeat_run._quantities import count_text, size_text
from offbeat_run._report import write_report
from offbeat_run._run_log import RunLog
from offbeat_run._serve import serve_report
from offbeat_run._settings import CheckpointConfig, LivenessConfig, LogConfig
from offbeat_run._timeline import Timeline, clock_s, read_timeline
from offbeat_run._trackers import check_trackers, open_trackers

__all__ = [
    "METRIC_NAMES",
    "Checkpoint",
    "CheckpointConfig",
    "Checkpoints",
    "Command",
    "CommandWords",
    "Generation",
    "GenerationKind",
    "GenerationsLog",
    "LivenessConfig",
    "LogConfig",
    "MetricName",
    "MetricValue",
    "MetricsLine",
    "MetricsLog",
    "ModelFolder",
    "ProfileConfig",
    "Progress",
    "RunFolder",
    "RunLog",
    "Timeline",
    "Tracker",
    "atomic_folder",
    "atomic_write",
    "check_limits",
    "check_trackers",
    "clock_s",
    "count_text",
    "disk_errors",
    "doctor_command",
    "dump_config",
    "duration_text",
    "examine",
    "explain",
    "inspect_model",
    "load_config",
    "new_run_folder",
    "open_trackers",
    "parse_config",
    "print_before_after",
    "print_conclusion",
    "print_table",
    "read_generations",
    "read_metrics",
    "read_timeline",
    "report_command",
    "run_command",
    "run_named_command",
    "serve_report",
    "size_text",
    "split_arguments",
    "split_overrides",
    "whole_number",
    "write_new_file",
    "write_report",
]
