"""The default trainer of offbeat: packed, prefix-sharing updates of Hugging Face causal language models."""

from offbeat_engine_torch._engine import TorchTrainEngine
from offbeat_engine_torch._logprobs import token_logprobs
from offbeat_engine_torch._options import TorchEngineOptions

__all__ = ["TorchEngineOptions", "TorchTrainEngine", "token_logprobs"]
