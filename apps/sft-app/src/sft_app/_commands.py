"""The commands."""

from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path

from offbeat_actors import run_on_driver
from offbeat_core import ConfigError, load_config, naming_lines
from offbeat_recipes import PLAN_OPTIONS, PLAN_SWITCHES, REHEARSAL_BYTES, batch_commands, plan_command
from offbeat_run import (
    Command,
    CommandWords,
    Problems,
    RunFolder,
    check_destination,
    check_trackers,
    doctor_command,
    doing,
    load_to_train,
    new_run_folder,
    print_conclusion,
    print_text,
    push,
    push_command,
    record_session,
    refuse_foreign_run,
    report_command,
    run_named_command,
    save_command,
    say_finished,
)
from sft_app._config import SftConfig
from sft_app._imports.command import import_command
from sft_app._init import init_command
from sft_app._learners import create_learner
from sft_app._plan import SftPlanner, describe_run
from sft_app._preflight import Preflight, check_run
from sft_app._problems import find_problems, list_needs
from sft_app._reference import Reference, compute_reference, load_reference
from sft_app._shrink import shrink_run
from sft_app._train import create_engine, find_start, resume, train

_PROGRAM = "sft-app"


def dispatch(words: list[str]) -> int:
    """Run the command that the words name."""
    return run_named_command(["--format=json" if word == "--json" else word for word in words], _COMMANDS, SftConfig)


def _train(words: CommandWords, file: str) -> int:
    config, problems = load_to_train(words, file, SftConfig, find_problems)
    if "shrink" in words.switches:
        return _rehearse(words, config, f"{Path(file).stem}-shrunk")
    doing("")  # a process that is not the driver waits without a word
    return run_on_driver(config, partial(_drive, words, config, file, problems))


def _drive(words: CommandWords, config: SftConfig, file: str, problems: Problems) -> int:
    with naming_lines(file, SftConfig, words.overrides):
        preflight = check_run(config, problems=problems)
    with RunFolder.create(new_run_folder(words, Path(file).stem), required_bytes=preflight.required_bytes) as run:
        return _begin(preflight, run, words)


def _rehearse(words: CommandWords, config: SftConfig, name: str) -> int:
    """`train --shrink`: the same structure, tiny, here."""
    with RunFolder.create(new_run_folder(words, name), required_bytes=REHEARSAL_BYTES) as run:
        return _begin(shrink_run(config, run.path / "model").prepare(), run, words)


def _begin(preflight: Preflight, run: RunFolder, words: CommandWords) -> int:
    plan = describe_run(preflight)
    plan.show()
    run.write_config(preflight.written, preflight.config, preflight.hub.digests)
    run.write_plan([*plan.rows, ("placement", f"\n{preflight.placement.picture}")])
    with closing(create_engine(preflight, run)) as engine:
        run.keep()
        print_text(f"run folder: {run.path}")
        return _work(partial(train, preflight, run, engine), run, words)


def _resume(words: CommandWords, folder: str) -> int:
    check_destination(words)
    with RunFolder.open(folder, write=False) as run:
        refuse_foreign_run(run, _PROGRAM)
        config = load_config(run.config, SftConfig, words.overrides)
    doing("")  # a process that is not the driver waits without a word
    return run_on_driver(config, partial(_drive_resumed, words, config, folder))


def _drive_resumed(words: CommandWords, config: SftConfig, folder: str) -> int:
    with RunFolder.open(folder) as run:
        start = find_start(run)
        check_trackers(config.log)
        with naming_lines(run.config, SftConfig, words.overrides):
            preflight = check_run(config, start.progress)
        if not words.overrides and say_finished(run, start.updates, preflight.num_updates):
            return _conclude(run, words)
        with closing(create_engine(preflight, run)) as engine:
            return _work(partial(resume, preflight, run, engine, start), run, words)


def _eval(words: CommandWords, folder: str) -> int:
    with RunFolder.open(folder, write=False) as run:
        refuse_foreign_run(run, _PROGRAM)
        checkpoint = run.checkpoints.chosen()
        first = load_config(run.config, SftConfig, words.overrides)
        preflight = check_run(replace(first, model=replace(first.model, path=str(checkpoint.path))))
        if not preflight.held_out:
            raise ConfigError("eval needs held-out data: set data.eval_size or data.eval_path")
        reference = _find_reference(run, first, preflight) if first.preference.needs_reference else None
        with closing(create_engine(preflight)) as engine:
            values = create_learner(preflight, engine, run, reference=reference).validate()
        print_text(f"checkpoint of update {checkpoint.step}: loss {values.pop('loss'):.4f} nats")
        print_text("".join(f"  {name} {value:.4f}\n" for name, value in values.items()), end="")
        return 0


def _find_reference(run: RunFolder, first: SftConfig, preflight: Preflight) -> Reference:
    """Return what the run has kept of these held-out rows; of others the model that the run began with is asked."""
    if kept := load_reference(run.path, preflight):
        return kept
    held_out = replace(preflight, config=first, examples=replace(preflight.examples, train=()))
    with closing(create_engine(held_out)) as engine:
        return compute_reference(held_out, engine, has_begun=False, is_asked_to_end=lambda: False)


def _work(train_or_resume: Callable[[], None], run: RunFolder, words: CommandWords) -> int:
    """Train, and then say how it went and where to look."""
    with record_session(run, f"{_PROGRAM} {words.text}"):
        train_or_resume()
    return _conclude(run, words)


def _conclude(run: RunFolder, words: CommandWords) -> int:
    print_conclusion(run, {"eval/loss": "held-out loss"}, title="held-out sequences", application=_PROGRAM)
    push(run, words, _PROGRAM)
    return 0


_COMMANDS: dict[str, Command] = {
    "init": Command(init_command, options=("data", "loss", "model", "out")),
    "train": Command(_train, "FILE", options=("out", "push-to"), overrides=True, switches=("shrink",)),
    "plan": Command(
        partial(plan_command, SftPlanner()), "FILE", options=PLAN_OPTIONS, overrides=True, switches=PLAN_SWITCHES
    ),
    **batch_commands(SftPlanner(), _PROGRAM),
    "import": Command(import_command, "FRAMEWORK FILE", options=("out", "set"), switches=("strict",)),
    "resume": Command(_resume, "RUN", options=("push-to",), overrides=True),
    "save": Command(save_command, "RUN"),
    "eval": Command(_eval, "RUN", overrides=True),
    "push": Command(partial(push_command, application=_PROGRAM), "RUN", options=("push-to", "step")),
    "report": Command(report_command, "RUN", options=("serve",)),
    "doctor": Command(
        partial(doctor_command, config_type=SftConfig, checks=list_needs), "[FILE]", overrides=True, switches=("all",)
    ),
}
