"""Data sets, tokenizers, chat templates, rewards and verifiers. No torch."""

from offbeat_data._arithmetic import (
    ARITHMETIC_ALPHABET,
    build_character_tokenizer,
    draw_additions,
)
from offbeat_data._assistant_turns import mark_assistant_turns
from offbeat_data._chat_template import (
    ChatTemplate,
    RenderedChat,
)
from offbeat_data._config import ConversationConfig, DataConfig
from offbeat_data._conversations import (
    ConversationSet,
    load_conversations,
)
from offbeat_data._guard import GuardedReward
from offbeat_data._order import EpochOrder
from offbeat_data._prompts import (
    Prompt,
    PromptSet,
    RowCounts,
    load_prompts,
)
from offbeat_data._reward import (
    Reward,
    RewardError,
    RewardScore,
    build_reward,
)
from offbeat_data._reward_config import RewardConfig
from offbeat_data._tokenizer import (
    Tokenizer,
    load_tokenizer,
)

__all__ = [
    "ARITHMETIC_ALPHABET",
    "ChatTemplate",
    "ConversationConfig",
    "ConversationSet",
    "DataConfig",
    "EpochOrder",
    "GuardedReward",
    "Prompt",
    "PromptSet",
    "RenderedChat",
    "Reward",
    "RewardConfig",
    "RewardError",
    "RewardScore",
    "RowCounts",
    "Tokenizer",
    "build_character_tokenizer",
    "build_reward",
    "draw_additions",
    "load_conversations",
    "load_prompts",
    "load_tokenizer",
    "mark_assistant_turns",
]
