"""What each command does."""

from contextlib import closing
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
from offbeat_types import ConfigError, RunFolderError
from sft_app._config import SftConfig
from sft_app._preflight import check_run
from sft_app._train import create_engine, held_out_loss, resume, train


def dispatch(words: list[str]) -> int:
    """Run the command that the words name.

    Raises:
        OffbeatError: whatever it raises.
    """
    return run_named_command(words, _COMMANDS, SftConfig, options=("out", "serve"))


def _train(words: CommandWords, file: str) -> int:
    preflight = check_run(load_config(file, SftConfig, words.overrides))
    rows = preflight.plan()
    print_table(rows, title="plan")
    # The engine comes first: what it refuses must not leave a run folder behind.
    with (
        closing(create_engine(preflight)) as engine,
        RunFolder.create(new_run_folder(words, Path(file).stem), required_bytes=preflight.required_bytes) as run,
    ):
        run.write_config(preflight.config)
        run.write_text(run.plan, "\n".join(f"{name}: {text}" for name, text in rows) + "\n")
        print(f"run folder: {run.path}", flush=True)
        return _conclude(train(preflight, run, engine), run)


def _plan(words: CommandWords, file: str) -> int:
    print_table(check_run(load_config(file, SftConfig, words.overrides)).plan(), title="plan")
    return 0


def _resume(words: CommandWords, folder: str) -> int:
    with RunFolder.open(folder) as run:
        preflight = check_run(load_config(run.config, SftConfig, words.overrides))
        with closing(create_engine(preflight)) as engine:
            return _conclude(resume(preflight, run, engine), run)


def _eval(words: CommandWords, folder: str) -> int:
    with RunFolder.open(folder, write=False) as run:
        checkpoint = run.checkpoints.best() or run.checkpoints.latest()
        if checkpoint is None:
            raise RunFolderError(f"{folder} holds no whole checkpoint to evaluate")
        config = load_config(run.config, SftConfig, (*words.overrides, f"--model.path={checkpoint.path}"))
        preflight = check_run(config)
        if not preflight.held_out:
            raise ConfigError("eval needs held-out data: set data.eval_size or data.eval_path")
        with closing(create_engine(preflight)) as engine:
            loss = held_out_loss(engine, preflight.held_out)
        print(f"checkpoint of update {checkpoint.step}: loss {loss:.4f} nats")
        return 0


def _doctor(words: CommandWords) -> int:
    print_table(examine())
    return 0


def _conclude(validations: list[tuple[int, float]], run: RunFolder) -> int:
    if len(validations) > 1:
        print_before_after([("held-out loss", validations[0][1], validations[-1][1])])
    latest, best = run.checkpoints.latest(), run.checkpoints.best()
    if latest:
        print(f"checkpoint: {latest.path}")
    if best and latest and best.step != latest.step:
        print(f"best checkpoint: {best.path}")
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
