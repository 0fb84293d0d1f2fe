"""Data sets, tokenizers, chat templates, rewards and verifiers. No torch."""

from offbeat_data._arithmetic import (
    ARITHMETIC_ALPHABET,
    build_character_tokenizer,
    draw_additions,
    draw_products,
)
from offbeat_data._assistant_turns import mark_assistant_turns
from offbeat_data._calculator import calculate, calculator
from offbeat_data._chat_template import (
    ChatTemplate,
    Message,
    RenderedChat,
)
from offbeat_data._config import ConversationConfig, DataConfig
from offbeat_data._conversations import (
    ConversationSet,
    load_conversations,
)
from offbeat_data._environment import (
    Environment,
    EnvironmentConfig,
    EnvironmentFactory,
    EnvironmentFailedError,
)
from offbeat_data._environments import build_environment
from offbeat_data._episode import EpisodeLimits, play_episode
from offbeat_data._episode_host import EpisodeHost
from offbeat_data._guard import GuardedReward
from offbeat_data._image_rules import ImageRules, load_image_rules
from offbeat_data._order import EpochOrder
from offbeat_data._pictures import Picture
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
from offbeat_data._reward_pool import RewardPool
from offbeat_data._reward_trial import try_reward
from offbeat_data._tokenizer import (
    Tokenizer,
    load_tokenizer,
)
from offbeat_data._tools import ToolCall, ToolEnvironment, read_tool_calls
from offbeat_data._turn_template import TurnTemplate

__all__ = [
    "ARITHMETIC_ALPHABET",
    "ChatTemplate",
    "ConversationConfig",
    "ConversationSet",
    "DataConfig",
    "Environment",
    "EnvironmentConfig",
    "EnvironmentFactory",
    "EnvironmentFailedError",
    "EpisodeHost",
    "EpisodeLimits",
    "EpochOrder",
    "GuardedReward",
    "ImageRules",
    "Message",
    "Picture",
    "Prompt",
    "PromptSet",
    "RenderedChat",
    "Reward",
    "RewardConfig",
    "RewardError",
    "RewardPool",
    "RewardScore",
    "RowCounts",
    "Tokenizer",
    "ToolCall",
    "ToolEnvironment",
    "TurnTemplate",
    "build_character_tokenizer",
    "build_environment",
    "build_reward",
    "calculate",
    "calculator",
    "draw_additions",
    "draw_products",
    "load_conversations",
    "load_image_rules",
    "load_prompts",
    "load_tokenizer",
    "mark_assistant_turns",
    "play_episode",
    "read_tool_calls",
    "try_reward",
]
