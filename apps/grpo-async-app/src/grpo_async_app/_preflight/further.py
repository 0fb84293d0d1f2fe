"""Problems of a configuration besides values that do not fit: models, data, rewards, engines and contradictions."""

from collections.abc import Collection, Mapping
from dataclasses import fields
from typing import Any

from grpo_async_app._config.sections import GrpoConfig
from grpo_async_app._preflight.engines import check_backends
from grpo_async_app._preflight.settings import collect_contradictions
from offbeat_data import build_reward, check_data_paths
from offbeat_run import Problems, find_model_problems


def find_further(sections: Mapping[str, Any], failed: Collection[str]) -> list[str]:
    """Return what is wrong with a configuration besides what its loader says; see `offbeat_core.load_config`.

    What a value that does not fit might have changed is left out: it may be no mistake at all.

    Args:
        sections: with the values that fit, by the fields of `GrpoConfig`.
        failed: names of the sections that have others.
    """
    problems = Problems()
    models = {name: sections[name] for name in ("model", "teacher", "critic") if name in sections}
    if "data" in sections:
        with problems.collected():
            check_data_paths(sections["data"])
    if "reward" in sections and "reward" not in failed and sections["reward"].is_set:
        with problems.collected():
            build_reward(sections["reward"])
    if all(field.name in sections for field in fields(GrpoConfig)):
        config = GrpoConfig(**sections)
        with problems.collected():
            check_backends(config)
        collect_contradictions(config, problems, failed)
    return [*find_model_problems(models), *problems.texts]
