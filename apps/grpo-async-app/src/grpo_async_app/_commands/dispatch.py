"""The commands."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

from grpo_async_app._commands.diagnose import diagnose_command
from grpo_async_app._commands.doctor import examine_command
from grpo_async_app._commands.evaluate import compare_command, eval_command
from grpo_async_app._commands.init import init_command
from grpo_async_app._commands.plan import GrpoPlanner, describe_plan
from grpo_async_app._commands.quickstart import find_lesson, make_model, quickstart_config, warm_up
from grpo_async_app._commands.shrink import shrink_run
from grpo_async_app._commands.where import where_command
from grpo_async_app._config.sections import GrpoConfig
from grpo_async_app._imports.command import import_command
from grpo_async_app._preflight.preflight import Preflight, check_run
from grpo_async_app._preflight.settings import check_same_data, find_problems
from grpo_async_app._run.scaling import ask_for_engines
from grpo_async_app._run.session import find_session, resume, train, with_model
from grpo_async_app._run.validation import validated_names
from offbeat_actors import run_on_driver
from offbeat_core import load_config, naming_lines
from offbeat_recipes import PLAN_OPTIONS, PLAN_SWITCHES, REHEARSAL_BYTES, batch_commands, plan_command
from offbeat_run import (
    Command,
    CommandWords,
    Problems,
    RunFolder,
    check_destination,
    check_trackers,
    doing,
    load_to_train,
    new_run_folder,
    print_conclusion,
    print_table,
    print_text,
    push,
    push_command,
    record_session,
    refuse_foreign_run,
    report_command,
    run_named_command,
    save_command,
    say_finished,
    whole_number,
)

QUICKSTART_BYTES = 2**28
_PROGRAM = "grpo-async-app"


def dispatch(words: list[str]) -> int:
    """Run the command that the words name."""
    return run_named_command(["--format=json" if word == "--json" else word for word in words], _COMMANDS, GrpoConfig)


def _train(words: CommandWords, file: str) -> int:
    config, problems = load_to_train(words, file, GrpoConfig, find_problems)
    if "shrink" in words.switches:
        return _rehearse(words, config, f"{Path(file).stem}-shrunk")
    doing("")  # a process that is not the driver waits without a word
    return run_on_driver(config, partial(_drive, words, config, file, problems))


def _drive(words: CommandWords, config: GrpoConfig, file: str, problems: Problems) -> int:
    with naming_lines(file, GrpoConfig, words.overrides):
        preflight = check_run(config, problems)
    with RunFolder.create(new_run_folder(words, Path(file).stem), required_bytes=preflight.required_bytes) as run:
        _show_plan(preflight, run)
        run.write_config(preflight.written, preflight.config, preflight.hub.digests)
        return _work(partial(train, preflight, run), run, words, preflight)


def _rehearse(words: CommandWords, config: GrpoConfig, name: str) -> int:
    """`train --shrink`: the same structure, tiny, here."""
    with RunFolder.create(new_run_folder(words, name), required_bytes=REHEARSAL_BYTES) as run:
        preflight = shrink_run(config, run.path / "model").prepare()
        _show_plan(preflight, run)
        run.write_config(preflight.written, preflight.config, preflight.hub.digests)
        return _work(partial(train, preflight, run), run, words, preflight)


def _quickstart(words: CommandWords) -> int:
    check_destination(words)
    seed, lesson = whole_number(words, "seed"), find_lesson(words.options.get("lesson", "addition"))
    with RunFolder.create(new_run_folder(words, "quickstart"), required_bytes=QUICKSTART_BYTES) as run:
        config = quickstart_config(lesson, run.path / "model", seed, words.overrides)
        check_trackers(config.log)
        make_model(lesson, run.path / "model", seed)
        preflight = check_run(config)
        _show_plan(preflight, run)
        warm_folder = run.path / "model-warm"
        warm_up(lesson, run.path / "model", warm_folder, preflight.prompts.train, seed)
        preflight = check_run(with_model(config, warm_folder))
        run.write_config(preflight.written, preflight.config, preflight.hub.digests)
        return _work(partial(train, preflight, run), run, words, preflight)


def _resume(words: CommandWords, folder: str) -> int:
    check_destination(words)
    with RunFolder.open(folder, write=False) as run:
        refuse_foreign_run(run, _PROGRAM)
        config = load_config(run.config, GrpoConfig, words.overrides)
        check_same_data(load_config(run.config, GrpoConfig, ()), config)
    doing("")  # a process that is not the driver waits without a word
    return run_on_driver(config, partial(_drive_resumed, words, config, folder))


def _drive_resumed(words: CommandWords, config: GrpoConfig, folder: str) -> int:
    with RunFolder.open(folder) as run:
        check_trackers(config.log)
        with naming_lines(run.config, GrpoConfig, words.overrides):
            preflight = check_run(config)
        session = find_session(preflight, run)
        if not words.overrides and say_finished(run, session.step, preflight.num_updates):
            return _conclude(run, words, preflight)
        _show_plan(preflight, run)  # what is left open may be chosen otherwise now
        run.write_config(
            preflight.written, preflight.config, preflight.hub.digests
        )  # the next resume continues with it
        return _work(partial(resume, session), run, words, preflight)


def _scale(words: CommandWords, folder: str) -> int:
    number = whole_number(words, "engines")
    with RunFolder.open(folder, write=False) as run:
        refuse_foreign_run(run, _PROGRAM)
        ask_for_engines(run, number)
    print_text(f"{number} rollout engines asked for; the run says when they have joined or left")
    return 0


_COMMANDS: dict[str, Command] = {
    "quickstart": Command(_quickstart, options=("lesson", "out", "push-to", "seed"), overrides=True),
    "init": Command(init_command, options=("data", "model", "out", "reward")),
    "train": Command(_train, "FILE", options=("out", "push-to"), overrides=True, switches=("shrink",)),
    "plan": Command(
        partial(plan_command, GrpoPlanner()), "FILE", options=PLAN_OPTIONS, overrides=True, switches=PLAN_SWITCHES
    ),
    **batch_commands(GrpoPlanner(), _PROGRAM),
    "import": Command(import_command, "FRAMEWORK FILE", options=("out", "set"), switches=("strict",)),
    "resume": Command(_resume, "RUN", options=("push-to",), overrides=True),
    "save": Command(save_command, "RUN"),
    "scale": Command(_scale, "RUN", options=("engines",)),
    "where": Command(where_command, "RUN", options=("format",)),
    "eval": Command(eval_command, "RUN|MODEL", options=("config", "out", "set", "step"), overrides=True),
    "diagnose": Command(diagnose_command, "RUN|FILE", options=("at", "format", "out", "samples"), overrides=True),
    "compare": Command(compare_command, "EVAL EVAL", options=("out", "set"), switches=("strict",)),
    "push": Command(partial(push_command, application=_PROGRAM), "RUN", options=("push-to", "step")),
    "report": Command(report_command, "RUN", options=("serve",)),
    "doctor": Command(examine_command, "[FILE]", options=("probe-engines",), overrides=True, switches=("all",)),
}


def _show_plan(preflight: Preflight, run: RunFolder) -> None:
    rows = describe_plan(preflight)
    run.write_plan([*rows, ("placement", f"\n{preflight.placement.picture}")])
    print_text(preflight.placement.picture)
    print_table(rows, title="plan")
    print_text(f"run folder: {run.path}")


def _work(train_or_resume: Callable[[], object], run: RunFolder, words: CommandWords, preflight: Preflight) -> int:
    """Train, and then say how it went and where to look."""
    with record_session(run, f"{_PROGRAM} {words.text}"):
        train_or_resume()
    return _conclude(run, words, preflight)


def _conclude(run: RunFolder, words: CommandWords, preflight: Preflight) -> int:
    print_conclusion(run, validated_names(preflight.run.sets), title="held-out prompts", application=_PROGRAM)
    push(run, words, _PROGRAM)
    return 0
