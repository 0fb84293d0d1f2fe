"""Data sets, tokenizers, chat templates, rewards and verifiers. No torch."""

from offbeat_data._character_tokenizer import ARITHMETIC_ALPHABET, build_character_tokenizer
from offbeat_data._chat.template import ChatTemplate, Message
from offbeat_data._datasets.conversations import ConversationSet, load_conversations, mark_assistant_turns
from offbeat_data._datasets.preferences import Pair, PreferenceSet, Rating, load_pairs, load_ratings
from offbeat_data._datasets.prompts import Prompt, PromptSet, RowCounts, load_prompts
from offbeat_data._environments.built_in import EnvironmentConfig, build_environment, environment_tools
from offbeat_data._environments.environment import Environment, EnvironmentFailedError, EpisodeHost
from offbeat_data._environments.episodes import EpisodeLimits, TurnTemplate, play_episode
from offbeat_data._environments.tools import ToolCall, ToolEnvironment, calculate, calculator, read_tool_calls
from offbeat_data._escaping import escape_messages, escape_tools
from offbeat_data._image_rules import ImageRules, load_image_rules
from offbeat_data._images import Picture
from offbeat_data._scoring.config import RewardConfig, parts_complaint
from offbeat_data._scoring.functions import (
    CompletionText,
    FaultyFunctionError,
    FunctionFailure,
    NotANumberError,
    RewardError,
)
from offbeat_data._scoring.rewards import Reward, RewardScore, build_reward
from offbeat_data._scoring.sandbox.sandbox import Sandbox
from offbeat_data._scoring.sandbox.watching import ProgramLimits, ProgramRun
from offbeat_data._scoring.votes import vote_of
from offbeat_data._sources.known_sets import fill_known_data, fill_known_reward
from offbeat_data._sources.mixture import CurriculumConfig, MixtureOrder, SuccessRates
from offbeat_data._sources.sources import ConversationConfig, DataConfig, EpochOrder, check_data_paths, check_rows
from offbeat_data._tokenizer import Tokenizer, load_tokenizer

__all__ = [
    "ARITHMETIC_ALPHABET",
    "ChatTemplate",
    "CompletionText",
    "ConversationConfig",
    "ConversationSet",
    "CurriculumConfig",
    "DataConfig",
    "Environment",
    "EnvironmentConfig",
    "EnvironmentFailedError",
    "EpisodeHost",
    "EpisodeLimits",
    "EpochOrder",
    "FaultyFunctionError",
    "FunctionFailure",
    "ImageRules",
    "Message",
    "MixtureOrder",
    "NotANumberError",
    "Pair",
    "Picture",
    "PreferenceSet",
    "ProgramLimits",
    "ProgramRun",
    "Prompt",
    "PromptSet",
    "Rating",
    "Reward",
    "RewardConfig",
    "RewardError",
    "RewardScore",
    "RowCounts",
    "Sandbox",
    "SuccessRates",
    "Tokenizer",
    "ToolCall",
    "ToolEnvironment",
    "TurnTemplate",
    "build_character_tokenizer",
    "build_environment",
    "build_reward",
    "calculate",
    "calculator",
    "check_data_paths",
    "check_rows",
    "environment_tools",
    "escape_messages",
    "escape_tools",
    "fill_known_data",
    "fill_known_reward",
    "load_conversations",
    "load_image_rules",
    "load_pairs",
    "load_prompts",
    "load_ratings",
    "load_tokenizer",
    "mark_assistant_turns",
    "parts_complaint",
    "play_episode",
    "read_tool_calls",
    "vote_of",
]
