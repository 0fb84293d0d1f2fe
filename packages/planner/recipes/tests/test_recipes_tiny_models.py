"""Tiny models: of the recipe's family, made in a moment, and small."""

import pytest

from offbeat_recipes import tiny_family


@pytest.mark.parametrize(
    ("name", "has_experts", "family", "says"),
    [
        ("Qwen3-8B", False, "qwen3", False),
        ("Qwen3-VL-8B-Instruct", False, "qwen3_vl", False),
        ("Qwen2.5-VL-3B-Instruct", True, "qwen2_5_vl", False),
        ("Qwen3.5-9B", False, "qwen3_5", False),
        ("Qwen3-30B-A3B", False, "qwen3", True),
        ("Qwen3-30B-A3B", True, "qwen3_moe", False),
        ("SmolLM2-135M-Instruct", False, "llama", False),
        ("some-model", False, "qwen3", True),
    ],
)
def test_the_family_is_told_by_the_folder(tmp_path, name, has_experts, family, says):
    made, notice = tiny_family(str(tmp_path / name), has_experts=has_experts, can_see=True)
    assert (made, bool(notice)) == (family, says)


def test_the_family_is_told_by_the_config_first(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "qwen2_5_vl"}')
    assert tiny_family(str(tmp_path), has_experts=False, can_see=True)[0] == "qwen2_5_vl"
