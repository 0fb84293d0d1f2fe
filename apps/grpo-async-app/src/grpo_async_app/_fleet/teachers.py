"""Questions to a teacher and a reward model, each served by replicas."""

from collections.abc import Callable, Sequence
from typing import Any

from grpo_async_app._config.environment_images import refuse_environment_images
from grpo_async_app._config.reward_model import RewardModelAsk, RewardModelOptions
from grpo_async_app._config.sections import GrpoConfig
from grpo_async_app._fleet.replicas import Replicas
from grpo_async_app._roles.scorer import Judged, ScorerAnswer
from offbeat_core import Floats, Ids, Image, ScoreRequest, Trajectory
from offbeat_data import Prompt


class Teachers:
    """The teacher of a run."""

    def __init__(self, config: GrpoConfig, replicas: Replicas) -> None:
        self._config, self.replicas = config, replicas

    async def score(
        self,
        group_id: int,
        prompt_ids: Ids,
        trajectories: list[Trajectory],
        where: Callable[[str], object],
        images: tuple[Image, ...] = (),
    ) -> list[Floats]:
        """Return the teacher's log-probabilities of what the policy has sampled.

        `where` takes the name of the replica that is asked.

        Returns:
            [N] float32 for each trajectory: nats, of its sampled tokens, at the sampler's temperature.

        Raises:
            ConfigError: a trajectory holds images, which a teacher would take for tokens.
        """
        refuse_environment_images(trajectories)
        request = ScoreRequest(
            request_id=f"group-{group_id}",
            prompt_ids=prompt_ids,
            continuations=tuple(trajectory.ids for trajectory in trajectories),
            temperature=self._config.rollout.temperature,
            images=images,
        )
        scores = await self.replicas.score(request, list[Floats], self._config.teacher.deadline_s, where)
        return [found[each.loss_mask] for found, each in zip(scores, trajectories, strict=True)]


class RewardModels:
    """The reward model of a run."""

    def __init__(self, options: RewardModelOptions, replicas: Replicas) -> None:
        self._options, self.replicas = options, replicas

    async def score(self, prompt: Prompt, texts: Sequence[str]) -> list[Judged]:
        """Return what it makes of completions of one prompt: its own score, before any weight."""
        asked = prompt.question
        chat = [{"role": "user", "content": asked}] if isinstance(asked, str) else asked
        messages = [(str(each.get("role")), _content(each.get("content"))) for each in chat]
        ask = RewardModelAsk(messages=messages, text=prompt.escaped or prompt.text, completions=list(texts))
        answers = await self.replicas.score(ask, list[ScorerAnswer], self._options.deadline_s)
        return [answer.judged() for answer in answers]


def _content(content: Any) -> str:
    """Return the words of a message, which may come in parts."""
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    return str(content or "")
