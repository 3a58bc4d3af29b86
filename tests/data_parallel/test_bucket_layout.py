import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from raises import raises

from hpcdp.data_parallel.bucket_layout import LINE_NBYTES, MIB, plan
from hpcdp.errors import ConfigError

F4, F8 = np.dtype("f4"), np.dtype("f8")
models = st.lists(
    st.tuples(st.lists(st.integers(0, 40), max_size=3), st.sampled_from([F4, F8])), min_size=1, max_size=20
)


@given(models, st.floats(1e-4, 0.01))
def test_every_parameter_has_a_place_of_its_own(shapes, cap_mb):
    params = [(f"p{i}", tuple(shape), dtype) for i, (shape, dtype) in enumerate(shapes)]
    layout = plan(params, cap_mb, cap_mb / 2)
    used = [np.zeros(count, int) for count in layout.counts]
    for (name, shape, dtype), slot in zip(params, layout.slots, strict=True):
        assert (slot.name, slot.shape, layout.dtypes[slot.bucket]) == (name, shape, dtype)
        assert slot.offset * dtype.itemsize % LINE_NBYTES == 0
        used[slot.bucket][slot.offset : slot.offset + slot.count] += 1
        assert slot.offset + slot.count <= layout.counts[slot.bucket]
    assert all((bucket <= 1).all() for bucket in used)
    for number, count in enumerate(layout.counts):
        members = [slot for slot in layout.slots if slot.bucket == number]
        limit = (cap_mb / 2 if number == 0 else cap_mb) * MIB
        assert count * layout.dtypes[number].itemsize <= limit or sum(slot.count > 0 for slot in members) == 1


@given(models, st.integers(1, 9))
def test_shards_tile_a_bucket_on_whole_lines(shapes, parts):
    layout = plan([(f"p{i}", tuple(shape), dtype) for i, (shape, dtype) in enumerate(shapes)])
    for number, count in enumerate(layout.counts):
        bounds = [layout.shard(number, parts, part) for part in range(parts)]
        assert bounds[0][0] == 0
        assert bounds[-1][1] == count
        assert all(a[1] == b[0] for a, b in itertools.pairwise(bounds))
        sizes = [(hi - lo) * layout.dtypes[number].itemsize for lo, hi in bounds]
        assert max(sizes) - min(sizes) <= LINE_NBYTES


def test_the_last_parameter_comes_first_and_the_first_bucket_is_small():
    params = [(name, (100, 1024), F4) for name in "abcdefg"]  # 400 KiB each
    layout = plan(params, bucket_cap_mb=1.3, first_cap_mb=1)
    assert [slot.bucket for slot in layout.slots] == [2, 2, 1, 1, 1, 0, 0] or [
        slot.bucket for slot in layout.slots
    ] == [2, 2, 1, 1, 1, 0, 0]
    assert layout.slots[6].offset == 0
    assert layout.slots[5].offset == 102400


def test_dtypes_do_not_share_a_bucket():
    layout = plan([("a", (3,), F4), ("b", (3,), F8), ("c", (3,), F4)])
    assert layout.slots[0].bucket == layout.slots[2].bucket != layout.slots[1].bucket


def test_the_digest_depends_on_the_model_alone():
    params = [("a", (3, 4), F4), ("b", (5,), F4)]
    assert plan(params).digest == plan(params).digest
    for other in ([("a", (4, 3), F4), ("b", (5,), F4)], [("a", (3, 4), F8), ("b", (5,), F4)], params[::-1]):
        assert plan(other).digest != plan(params).digest


@pytest.mark.parametrize(("params", "cap", "fields"), [
    ([("a", (1,), F4), ("a", (2,), F4)], 1, {"where": "params", "got": "a"}),
    ([("a", (1,), F4)], 0, {"where": "bucket_cap_mb", "got": 0}),
    ([("a", (1,), F4)], float("nan"), {"where": "bucket_cap_mb", "got": "nan"}),
])  # fmt: skip
def test_what_cannot_be_planned_is_refused(params, cap, fields):
    with raises(ConfigError, operation="bucket plan", **fields):
        plan(params, cap)


@pytest.mark.parametrize(("layers", "expected_mib"), [(4, 1), (64, 4), (1024, 25)])
def test_a_bucket_is_an_eighth_of_the_model_within_bounds(layers, expected_mib):
    layout = plan([(str(i), (2**17,), F4) for i in range(layers)])  # 0.5 MiB each
    sizes = {count * 4 / MIB for count in layout.counts[1:-1]}
    assert sizes <= {expected_mib}
    assert layout.counts[0] * 4 == MIB
    assert sizes or len(layout.counts) == 2


def test_with_room_for_the_largest_part_all_parts_have_their_parameters_at_the_same_places():
    parts = [[("a", (5,), F4), ("b", (3, rows), F4), ("c", (700,), F4)] for rows in (100, 131)]
    layouts = [plan(params, 0.003, 0.002, room_for=[5, 393, 700]) for params in parts]
    first, second = ([(slot.bucket, slot.offset) for slot in layout.slots] for layout in layouts)
    assert first == second and layouts[0].counts == layouts[1].counts == plan(parts[1], 0.003, 0.002).counts
    assert [slot.shape for slot in layouts[0].slots] == [(5,), (3, 100), (700,)]
    assert plan(parts[0], 0.003, 0.002).counts != layouts[0].counts
