"""An evaluation beside any run: engines serve a folder of weights, and answers that are there are not asked again."""

from collections.abc import Callable, Sequence
from contextlib import aclosing
from pathlib import Path

from grpo_async_app._config.resolved import ValidationSet
from grpo_async_app._fleet.fleet import Fleet
from grpo_async_app._preflight.evaluation import Evaluation
from grpo_async_app._run.interruption import run_interruptible
from grpo_async_app._run.log.activity import describe_start, following
from grpo_async_app._run.sampling import Rollouts
from grpo_async_app._run.session import watched_driver
from grpo_async_app._run.validation import answers
from offbeat_run import EvalFolder, ItemAnswers, SetSummary, doing, summarize


def evaluate(evaluation: Evaluation, folder: EvalFolder, step: int) -> list[SetSummary]:
    """Answer what the folder has no answers to yet.

    Args:
        evaluation: checked.
        folder: open; takes each item when it is scored.
        step: updates done by the weights; 0 of a model from elsewhere.
    """
    held = {each.name: folder.answered(each.name) for each in evaluation.run.sets}
    missing = [
        (each, [number for number in range(len(each.prompts)) if number not in held[each.name]])
        for each in evaluation.run.sets
    ]
    num_missing = sum(len(numbers) for _, numbers in missing)
    if num_held := sum(len(each.prompts) for each in evaluation.run.sets) - num_missing:
        print(f"{num_held} items are answered in {folder.path} already; {num_missing} are left", flush=True)

    def take(name: str, item: ItemAnswers) -> None:
        folder.write(name, item)
        held[name][item.item] = item

    if num_missing:
        logs = folder.path / "logs"
        logs.mkdir(exist_ok=True)
        with watched_driver(evaluation.config.liveness, logs):
            fleet = Fleet(evaluation.run, str(evaluation.model_path), logs)
            run_interruptible(_ask(evaluation, fleet, missing, num_missing, step, take), fleet.kill)
    return [
        summarize(
            each.name, step, [held[each.name][number] for number in range(len(each.prompts))], each.num_samples, each.k
        )
        for each in evaluation.run.sets
    ]


async def _ask(
    evaluation: Evaluation,
    fleet: Fleet,
    missing: Sequence[tuple[ValidationSet, Sequence[int]]],
    num_missing: int,
    step: int,
    take: Callable[[str, ItemAnswers], None],
) -> None:
    config, num_done = evaluation.config, 0
    async with fleet:
        async with following(lambda: describe_start(fleet.places())):
            await fleet.start(evaluation.placement)
        rollouts = Rollouts(evaluation.run, fleet)
        async with aclosing(answers(rollouts, fleet.engines, config, missing, "eval")) as stream:
            doing("evaluating", f"0 of {num_missing} items")
            async for answered in stream:
                has_turns = answered.asked.environment.is_set or config.agent.is_set
                item = answered.to_item(step, has_turns=has_turns, keep_texts=True, loaded=True)
                take(answered.asked.name, item)
                num_done += 1
                doing("evaluating", f"{num_done} of {num_missing} items")


def default_folder(target: Path, step: int | None) -> Path:
    """Return where an evaluation is kept that names no folder: in the run, or in `evals` here."""
    return Path("evals") / target.name if step is None else target / "evals" / f"step-{step:06d}"
