"""`diagnose`: why trainer and rollout engines of a run give tokens different log-probabilities."""

import json
from pathlib import Path
from typing import Final

from grpo_async_app._config.sections import GrpoConfig
from grpo_async_app._preflight.preflight import check_run
from offbeat_core import ConfigError, atomic_write, load_config, user_path
from offbeat_run import Checkpoint, CommandWords, RunFolder, print_text, refuse_foreign_run, whole_number, write_report

_NUM_SAMPLES: Final = 24
_FORMATS: Final = ("text", "json")
FOUND: Final = 5
"""Exit code where a cause was found."""


def diagnose_command(words: CommandWords, target: str) -> int:
    """Name what makes log-probabilities of a run differ; 0 where nothing does, FOUND where a cause was found."""
    # Imports transformers, which takes seconds that other commands need not wait for.
    from grpo_async_app._diagnosis.examine import examine
    from grpo_async_app._diagnosis.report import describe, to_json
    from grpo_async_app._diagnosis.settings import Examined, for_diagnosis

    style = words.options.get("format", "text")
    if style not in _FORMATS:
        raise ConfigError(f"--format takes {' or '.join(_FORMATS)}: got {style!r}")
    num_samples = whole_number(words, "samples") if "samples" in words.options else _NUM_SAMPLES
    path = user_path(target).absolute()
    is_run = (path / "config.toml").is_file()
    if not is_run and "at" in words.options:
        raise ConfigError(f"--at names a checkpoint of a run, and {path} is none")
    checkpoint = _checkpoint(path, words) if is_run else None
    config = for_diagnosis(load_config(path / "config.toml" if is_run else path, GrpoConfig, words.overrides))
    default = (path / "diagnosis" if is_run else Path("diagnosis") / path.stem).absolute()
    out = user_path(words.options["out"]).absolute() if "out" in words.options else default
    asked = Examined(
        preflight=check_run(config),
        checkpoint=checkpoint.path if checkpoint else None,
        step=checkpoint.step if checkpoint else 0,
        num_samples=num_samples,
        log_folder=out / "logs",
    )
    if style == "text":
        print_text(f"examines {asked.weights} with about {num_samples} samples; answer and logs in {out}")
    found = examine(asked)
    with atomic_write(out / "diagnosis.json") as file:
        json.dump(to_json(found), file, indent=1)
    if is_run and out == default:
        write_report(path)
    print_text(json.dumps(to_json(found), indent=1) if style == "json" else describe(found))
    return FOUND if found.findings else 0


def _checkpoint(path: Path, words: CommandWords) -> Checkpoint | None:
    """Return the latest whole one, or the one of `--at`; None where the run has none yet."""
    with RunFolder.open(path, write=False) as run:
        refuse_foreign_run(run, "grpo-async-app")
        if "at" in words.options:
            return run.checkpoints.find(whole_number(words, "at"))
        return run.checkpoints.latest()
