import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbeat_dist import AXES, Mesh
from offbeat_types import ConfigError


@given(st.lists(st.sampled_from(AXES)))
def test_every_group_of_one_process_is_itself(axes):
    group = Mesh().group(*axes)
    assert (group.size, group.rank) == (1, 0)
    assert set(group.axes) == set(axes)
    assert list(group.axes) == sorted(group.axes, key=AXES.index)


def test_mesh_of_one_process():
    mesh = Mesh()
    assert mesh.size == 1
    assert mesh.axes == dict.fromkeys(AXES, 1)
    assert mesh.coordinates == dict.fromkeys(AXES, 0)


@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("size", [0, 2])
def test_larger_meshes_are_refused_by_axis(axis, size):
    with pytest.raises(ConfigError, match=f"'{axis}': {size}"):
        Mesh(**{axis: size})


def test_unknown_axis_is_refused():
    with pytest.raises(ConfigError, match="etp"):
        Mesh().group("dp", "etp")
