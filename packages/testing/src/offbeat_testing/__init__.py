"""Conformance suites, fakes and tiny models for whoever writes an offbeat engine."""

from offbeat_testing._fakes import FakeRolloutEngine, FakeWeightStream, Script
from offbeat_testing._reference import changed_weights, reference_logprobs, reference_model
from offbeat_testing._rollout_conformance import RolloutConformance
from offbeat_testing._tiny_models import TinyFamily, tiny_model, tiny_tokenizer
from offbeat_testing._train_conformance import TrainEngineConformance

__all__ = [
    "FakeRolloutEngine",
    "FakeWeightStream",
    "RolloutConformance",
    "Script",
    "TinyFamily",
    "TrainEngineConformance",
    "changed_weights",
    "reference_logprobs",
    "reference_model",
    "tiny_model",
    "tiny_tokenizer",
]
