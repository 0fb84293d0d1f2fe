"""Models and sequences with images are refused with a reason: this engine trains models for text."""

from types import SimpleNamespace

import pytest

from offbeat_engine_megatron._shape import shape_of
from offbeat_types import ModelError


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen2_5_vl"])
def test_a_model_with_a_vision_tower_is_refused_with_the_engine_that_trains_it(family: str) -> None:
    config = SimpleNamespace(model_type=family, vision_config=SimpleNamespace(depth=2))
    with pytest.raises(ModelError, match=f'no vision tower, which {family} has; use engine.backend = "torch"'):
        shape_of(config)
