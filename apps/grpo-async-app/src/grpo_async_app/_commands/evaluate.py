"""`eval`: validation sets answered by a checkpoint or any model folder; `compare`: two of these side by side."""

from pathlib import Path

from grpo_async_app._config.sections import GrpoConfig
from grpo_async_app._preflight.evaluation import check_evaluation
from grpo_async_app._run.evaluation import default_folder, evaluate
from grpo_async_app._run.session import with_model
from offbeat_core import ConfigError, find_hub_name, load_config, local_model, parse_config, toml_value, user_path
from offbeat_run import (
    Checkpoint,
    CommandWords,
    EvalFolder,
    RunFolder,
    check_model,
    inspect_model,
    print_text,
    refuse_foreign_run,
    whole_number,
    write_comparison,
)


def eval_command(words: CommandWords, target: str) -> int:
    """Answer the sets that have no answers in the folder yet, and write the table."""
    on_hub, target = find_hub_name(target, "model"), local_model(target)
    path = user_path(target).absolute()
    is_run = (path / "config.toml").is_file()
    checkpoint = _checkpoint(path, words) if is_run else None
    if not is_run and "step" in words.options:
        raise ConfigError(f"--step names a checkpoint of a run, and {path} is none")
    if not is_run:
        check_model(inspect_model(target, "eval").path)
    model_path = checkpoint.path if checkpoint else path
    config = with_model(_config(words, path, is_run), model_path)
    evaluation = check_evaluation(config, _names(words))
    step = checkpoint.step if checkpoint else None
    named = Path(on_hub.repository) if on_hub else path  # in the cache a folder is called by its commit
    out = user_path(words.options.get("out") or default_folder(named, step)).absolute()
    about = {"model": str(model_path), "step": step}
    with EvalFolder(out, about, evaluation.asked()) as folder:
        print_text("\n".join([f"evaluates {model_path}; answers in {out}", *evaluation.choices]))
        for each in evaluation.run.sets:
            print_text(f"  {each.describe()}")
        table = folder.write_table(evaluate(evaluation, folder, step or 0))
    print_text(table, end="")
    print_text(f"table: {out / 'table.md'}")
    return 0


def _checkpoint(path: Path, words: CommandWords) -> Checkpoint:
    """Return the best one, or the one of `--step`."""
    with RunFolder.open(path, write=False) as run:
        refuse_foreign_run(run, "grpo-async-app")
        return (
            run.checkpoints.find(whole_number(words, "step")) if "step" in words.options else run.checkpoints.chosen()
        )


def _config(words: CommandWords, path: Path, is_run: bool) -> GrpoConfig:
    """Return the configuration of the run or of `--config`; for a model alone, the defaults with the overrides."""
    if file := words.options.get("config"):
        return load_config(file, GrpoConfig, words.overrides)
    if is_run:
        return load_config(path / "config.toml", GrpoConfig, words.overrides)
    text = f'[model]\npath = {toml_value(str(path))}\n[data]\npath = ""\n'
    return parse_config(text, GrpoConfig, words.overrides, name=f"eval {path.name}")


def _names(words: CommandWords) -> list[str]:
    return [name.strip() for name in words.options.get("set", "").split(",") if name.strip()]


def compare_command(words: CommandWords, first: str, second: str) -> int:
    """Two evaluations side by side: what changed, item by item."""
    folders = [user_path(each).absolute() for each in (first, second)]
    out = user_path(words.options.get("out") or folders[1] / f"beside-{folders[0].name}.html").absolute()
    print_text(write_comparison(folders[0], folders[1], out, _names(words)), end="")
    print_text(f"side by side: {out}")
    return 0
