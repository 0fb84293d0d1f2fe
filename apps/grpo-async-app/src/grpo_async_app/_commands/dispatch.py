"""What each command does."""

from functools import partial
from pathlib import Path

from grpo_async_app._commands.doctor import examine_command
from grpo_async_app._commands.evaluate import compare_command, eval_command
from grpo_async_app._commands.plan import GrpoPlanner, describe_plan
from grpo_async_app._commands.quickstart import find_lesson, make_model, quickstart_config, warm_up
from grpo_async_app._commands.shrink import shrink_run
from grpo_async_app._commands.where import where_command
from grpo_async_app._config.critic import check_critic_is_kept
from grpo_async_app._config.preflight import Preflight, check_run, check_same_data
from grpo_async_app._config.sections import GrpoConfig
from grpo_async_app._imports.command import import_command
from grpo_async_app._run.scaling import ask_for_engines
from grpo_async_app._run.session import resume, train, with_model
from grpo_async_app._run.validation import validated_names
from offbeat_async_policy import LoopSummary
from offbeat_recipes import PLAN_OPTIONS, PLAN_SWITCHES, REHEARSAL_BYTES, plan_command
from offbeat_run import (
    Command,
    CommandWords,
    RunFolder,
    check_destination,
    duration_text,
    load_config,
    new_run_folder,
    print_conclusion,
    print_table,
    push,
    push_command,
    report_command,
    run_named_command,
    whole_number,
)

QUICKSTART_BYTES = 2**28
_PROGRAM = "grpo-async-app"


def dispatch(words: list[str]) -> int:
    """Run the command that the words name."""
    return run_named_command(["--format=json" if word == "--json" else word for word in words], _COMMANDS, GrpoConfig)


def _train(words: CommandWords, file: str) -> int:
    check_destination(words)
    config = load_config(file, GrpoConfig, words.overrides)
    if "shrink" in words.switches:
        return _rehearse(words, config, f"{Path(file).stem}-shrunk")
    preflight = check_run(config)
    with RunFolder.create(new_run_folder(words, Path(file).stem), required_bytes=preflight.required_bytes) as run:
        _show_plan(preflight, run)
        run.write_config(preflight.written, preflight.config)
        return _conclude(preflight, train(preflight, run), run, words)


def _rehearse(words: CommandWords, config: GrpoConfig, name: str) -> int:
    """`train --shrink`: the same structure, tiny, here."""
    with RunFolder.create(new_run_folder(words, name), required_bytes=REHEARSAL_BYTES) as run:
        preflight = shrink_run(config, run.path / "model").prepare()
        _show_plan(preflight, run)
        run.write_config(preflight.written, preflight.config)
        return _conclude(preflight, train(preflight, run), run, words)


def _quickstart(words: CommandWords) -> int:
    check_destination(words)
    seed, lesson = whole_number(words, "seed"), find_lesson(words.options.get("lesson", "addition"))
    with RunFolder.create(new_run_folder(words, "quickstart"), required_bytes=QUICKSTART_BYTES) as run:
        config = quickstart_config(lesson, run.path / "model", seed, words.overrides)
        make_model(lesson, run.path / "model", seed)
        preflight = check_run(config)
        _show_plan(preflight, run)
        warm_folder = run.path / "model-warm"
        warm_up(lesson, run.path / "model", warm_folder, preflight.prompts.train, seed)
        preflight = check_run(with_model(config, warm_folder))
        run.write_config(preflight.written, preflight.config)
        return _conclude(preflight, train(preflight, run), run, words)


def _resume(words: CommandWords, folder: str) -> int:
    check_destination(words)
    with RunFolder.open(folder) as run:
        print("\n".join(run.checkpoints.describe_resume()))
        config = load_config(run.config, GrpoConfig, words.overrides)
        check_same_data(load_config(run.config, GrpoConfig, ()), config)
        if config.algorithm.needs_critic and (checkpoint := run.checkpoints.latest()) is not None:
            check_critic_is_kept(checkpoint.path)
        preflight = check_run(config)
        _show_plan(preflight, run)  # what is left open may be chosen otherwise now
        run.write_config(preflight.written, preflight.config)  # the next resume goes on with it
        return _conclude(preflight, resume(preflight, run), run, words)


def _scale(words: CommandWords, folder: str) -> int:
    number = whole_number(words, "engines")
    with RunFolder.open(folder, write=False) as run:
        ask_for_engines(run, number)
    print(f"{number} rollout engines asked for; the run says when they have joined or left")
    return 0


_COMMANDS: dict[str, Command] = {
    "quickstart": Command(_quickstart, options=("lesson", "out", "push-to", "seed"), overrides=True),
    "train": Command(_train, "FILE", options=("out", "push-to"), overrides=True, switches=("shrink",)),
    "plan": Command(
        partial(plan_command, GrpoPlanner()), "FILE", options=PLAN_OPTIONS, overrides=True, switches=PLAN_SWITCHES
    ),
    "import": Command(import_command, "FRAMEWORK FILE", options=("out", "set")),
    "resume": Command(_resume, "RUN", options=("push-to",), overrides=True),
    "scale": Command(_scale, "RUN", options=("engines",)),
    "where": Command(where_command, "RUN", options=("format",)),
    "eval": Command(eval_command, "RUN|MODEL", options=("config", "out", "set", "step"), overrides=True),
    "compare": Command(compare_command, "EVAL EVAL", options=("out", "set")),
    "push": Command(partial(push_command, application=_PROGRAM), "RUN", options=("push-to", "step")),
    "report": Command(report_command, "RUN", options=("serve",)),
    "doctor": Command(examine_command, options=("probe-engines",), overrides=True),
}


def _show_plan(preflight: Preflight, run: RunFolder) -> None:
    rows = describe_plan(preflight)
    run.write_plan([*rows, ("placement", f"\n{preflight.placement.picture}")])
    print(preflight.placement.picture)
    print_table(rows, title="plan")
    print(f"run folder: {run.path}")


def _conclude(preflight: Preflight, summary: LoopSummary, run: RunFolder, words: CommandWords) -> int:
    """Where the time went, the table of before and after, and where to look."""
    print(
        f"{duration_text(summary.elapsed_s)} of training; trainer idle {summary.trainer_idle_share:.0%}, "
        f"rollout idle {summary.rollouter_idle_share:.0%}, both at work "
        f"{summary.overlap_s / max(summary.elapsed_s, 1e-9):.0%}"
    )
    names = validated_names(preflight.sets)
    print_conclusion(run, names, title="held-out prompts", application=_PROGRAM)
    push(run, words, _PROGRAM)
    return 0
