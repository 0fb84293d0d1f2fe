"""What each command does."""

from pathlib import Path

from offbeat_run import (
    Command,
    CommandWords,
    RunFolder,
    examine,
    load_config,
    new_run_folder,
    print_before_after,
    print_table,
    report_command,
    run_named_command,
    write_report,
)
from offbeat_types import ConfigError, RunFolderError, load_backend
from sft_app._config import SftConfig
from sft_app._preflight import check_run
from sft_app._train import held_out_loss, train


def dispatch(words: list[str]) -> int:
    """Run the command that the words name.

    Raises:
        OffbeatError: whatever it raises.
    """
    return run_named_command(words, _COMMANDS, SftConfig, options=("out", "serve"))


def _train(words: CommandWords, file: str) -> int:
    preflight = check_run(load_config(file, SftConfig, words.overrides))
    with RunFolder.create(new_run_folder(words, Path(file).stem), required_bytes=preflight.required_bytes) as run:
        run.write_config(preflight.config)
        rows = preflight.plan()
        run.write_text(run.plan, "\n".join(f"{name}: {text}" for name, text in rows) + "\n")
        print_table(rows, title="plan")
        print(f"run folder: {run.path}")
        return _conclude(train(preflight, run), run)


def _plan(words: CommandWords, file: str) -> int:
    print_table(check_run(load_config(file, SftConfig, words.overrides)).plan(), title="plan")
    return 0


def _resume(words: CommandWords, folder: str) -> int:
    with RunFolder.open(folder) as run:
        preflight = check_run(load_config(run.config, SftConfig, words.overrides))
        return _conclude(train(preflight, run, resume=True), run)


def _eval(words: CommandWords, folder: str) -> int:
    with RunFolder.open(folder, write=False) as run:
        checkpoint = run.checkpoints.best() or run.checkpoints.latest()
        if checkpoint is None:
            raise RunFolderError(f"{folder} holds no whole checkpoint to evaluate")
        config = load_config(run.config, SftConfig, (*words.overrides, f"--model.path={checkpoint.path}"))
        preflight = check_run(config)
        if not preflight.held_out:
            raise ConfigError("eval needs held-out data: set data.eval_size or data.eval_path")
        engine = load_backend("offbeat.engine", config.engine.backend).create(config.train_engine(1))
        print(f"checkpoint of update {checkpoint.step}: loss {held_out_loss(engine, preflight.held_out):.4f} nats")
        return 0


def _doctor(words: CommandWords) -> int:
    print_table(examine())
    return 0


def _conclude(validations: list[tuple[int, float]], run: RunFolder) -> int:
    if len(validations) > 1:
        print_before_after([("held-out loss", validations[0][1], validations[-1][1])])
    latest = run.checkpoints.latest()
    if latest:
        print(f"checkpoint: {latest.path}")
    print(f"report: {write_report(run)}")
    return 0


_COMMANDS: dict[str, Command] = {
    "train": Command(_train, "FILE"),
    "plan": Command(_plan, "FILE"),
    "resume": Command(_resume, "RUN"),
    "eval": Command(_eval, "RUN"),
    "report": Command(report_command, "RUN"),
    "doctor": Command(_doctor),
}
