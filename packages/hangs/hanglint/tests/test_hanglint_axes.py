"""Names of ranks and groups show their axes; the axis rule decides on them."""

import pytest

from offbeat_hanglint._axes import attribute_axes, environment_axes, group_axes, meet, rank_axes


@pytest.mark.parametrize(
    ("name", "axes"),
    [
        ("get_rank", {"world"}),
        ("global_rank", {"world"}),
        ("is_main_process", {"world"}),
        ("is_local_main_process", {"node"}),
        ("local_rank", {"node"}),
        ("dp_rank", {"dp"}),
        ("get_tensor_model_parallel_rank", {"tp"}),
        ("getDataParallelRank", {"dp"}),
        ("get_context_parallel_rank", {"cp"}),
        ("is_pipeline_last_stage", {"pp"}),
        ("is_first_stage", {"pp"}),
        ("get_expert_model_parallel_rank", {"ep"}),
        ("lora_rank", set()),
        ("world_size", set()),
        ("num_ranks", set()),
        ("ranks", set()),
        ("single_rank_consolidation", set()),
        ("frank", set()),
        ("decoder_rank_generator", set()),
        ("get_rank_enum", set()),
    ],
)
def test_a_rank_is_known_by_its_name(name, axes):
    assert rank_axes(name) == axes


@pytest.mark.parametrize(
    ("text", "axes"),
    [
        ("", {"world"}),
        ("None", {"world"}),
        ("dist.group.WORLD", {"world"}),
        ("mpu.get_data_parallel_group()", {"dp"}),
        ("mpu.get_data_parallel_group(with_context_parallel=True)", {"dp", "cp"}),
        ("self.dp_cp_group", {"dp", "cp"}),
        ("mesh.get_group(tp)", {"tp"}),
        ("self.mesh[cp].get_group()", {"cp"}),
        ("mpu.get_model_parallel_group()", {"tp", "pp"}),
        ("self.mesh[exclude_dp].get_group()", {"tp", "pp", "cp"}),
        ("self._model_update_group", {"unknown"}),
        ("group", {"unknown"}),
    ],
)
def test_a_group_is_known_by_the_words_of_its_expression(text, axes):
    assert group_axes(text) == axes


@pytest.mark.parametrize(
    ("guard", "spanned", "expected"),
    [
        ({"pp"}, {"dp", "cp"}, False),
        ({"cp"}, {"dp", "cp"}, True),
        ({"world"}, {"tp"}, True),
        ({"tp"}, {"world"}, True),
        (set(), {"world"}, False),
        ({"tp"}, {"dp"}, False),
        ({"ep"}, {"dp"}, True),
        ({"ep"}, {"pp"}, False),
    ],
)
def test_a_condition_and_a_collective_meet_where_they_share_an_axis(guard, spanned, expected):
    assert meet(guard, spanned) is expected


@pytest.mark.parametrize(
    ("text", "axes"),
    [
        ("self.rank", {"world"}),
        ("config.lora.rank", set()),
        ("self.lora_config.rank", set()),
        ("args.should_save", {"world"}),
        ("control.should_save", set()),
        ("self.state.should_save", set()),
    ],
)
def test_what_holds_a_name_may_say_that_it_is_no_rank(text, axes):
    assert attribute_axes(text) == axes


def test_variables_of_launchers_give_ranks():
    assert environment_axes("RANK") == {"world"}
    assert environment_axes("LOCAL_RANK") == {"node"}
    assert environment_axes("WORLD_SIZE") == set()
