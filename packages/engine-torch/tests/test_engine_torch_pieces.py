import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from offbeat_engine_torch._pieces import cut_box
from offbeat_training import num_elements, overlap, slices


@given(
    shape=st.lists(st.integers(1, 9), min_size=1, max_size=3),
    dp=st.integers(1, 5),
    tp=st.sampled_from([(1, None), (2, None), (2, 0), (2, 1)]),
)
def test_boxes_of_all_places_cover_a_tensor_once(shape, dp, tp):
    tp_size, tp_dim = tp
    if tp_dim is not None:
        tp_dim = min(tp_dim, len(shape) - 1)
        shape[tp_dim] *= tp_size
    seen = np.zeros(shape, int)
    places = [(i, j) for i in range(dp) for j in range(tp_size if tp_dim is not None else 1)]
    boxes = [cut_box(tuple(shape), tp_dim, dp=(i, dp), tp=(j, tp_size)) for i, j in places]
    for box in boxes:
        seen[slices(box)] += 1
    assert np.all(seen == 1)
    assert sum(num_elements(overlap(boxes[0], box)) for box in boxes[1:]) == 0
