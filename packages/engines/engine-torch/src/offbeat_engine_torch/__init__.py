"""The default trainer of offbeat: packed, prefix-sharing updates of Hugging Face causal language models."""

from offbeat_engine_torch._engine import TorchTrainEngine
from offbeat_engine_torch._layout import TorchEngineOptions
from offbeat_training import token_logprobs

__all__ = ["TorchEngineOptions", "TorchTrainEngine", "token_logprobs"]
