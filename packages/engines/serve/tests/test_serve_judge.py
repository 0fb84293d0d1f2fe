"""A judge of rewards served by this very server, on a tiny model."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from offbeat_data import CompletionText, Prompt, RewardConfig, build_reward

WRITTEN = [CompletionText(text=text) for text in ("twelve", "thirteen", "twelve")]


@pytest.mark.asyncio
async def test_a_model_served_here_judges_rewards(serving: Callable[..., Any], tmp_path: Path) -> None:
    """The tiny model babbles: whatever it says is a score, by a pattern that takes any letter, and stays the same."""
    prompt = Prompt(index=0, ids=np.array([1], np.int32), text="5+7=", answer="12", fields={"prompt": "5+7="})
    async with serving() as served:
        judge = {
            "url": f"{served.server.url}/v1",
            "model": "tiny",
            "template": "{question} {completion}",
            "pattern": r"(?s)(\A.*\Z)",
            "max_tokens": 8,
            "cache_folder": str(tmp_path),
        }
        said = {
            each.text: (
                await served.chat(
                    messages=[{"role": "user", "content": f"5+7= {each.text}"}], max_tokens=8, temperature=0.0
                )
            )
            for each in WRITTEN
        }
        replies = {text: answer.choices[0].message.content.strip() for text, answer in said.items()}
        worths = {reply: float(number) for number, reply in enumerate(dict.fromkeys(replies.values()))}
        reward = build_reward(RewardConfig(name="judge", judge={**judge, "scores": worths}, timeout_s=60.0))
        scores = await reward.await_group(prompt, WRITTEN, ["judge"], 60.0)
    assert [score.value for score in scores] == [worths[replies[each.text]] for each in WRITTEN]
    costs = [score.costs for score in scores]
    assert sum(cost.get("judge/requests", 0) for cost in costs) == 2
    assert sum(cost.get("judge/cached", 0) for cost in costs) == 1
    tokens = {each.text: said[each.text].usage for each in WRITTEN}
    assert costs[1]["judge/prompt_tokens"] == tokens["thirteen"].prompt_tokens
    assert costs[1]["judge/completion_tokens"] == tokens["thirteen"].completion_tokens
