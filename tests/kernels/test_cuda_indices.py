"""CUDA's loops over more than 2^31 elements: single threads of such grids, on this processor, without the elements."""

from types import ModuleType
from typing import Any

import numpy as np
import pytest

from hpcdp.core.files import data_folder
from hpcdp.kernels import cuda

ROOM, BLOCK, PACK = 16, 4, 8
KERNELS = f"""
struct Noted {{
    Index *next, *end;

    template <class... Numbers> void operator()(Numbers... numbers) {{
        if (next + sizeof...(numbers) > end) on_host::end_fiber();  // the loop has no end
        for (Index each : {{Index(numbers)...}}) *next++ = each;
    }}
}};

// The threads of one block take what is theirs in a grid of so many.
static Noted in_grid(Word block, Word blocks, Index* noted) {{
    blockIdx.x = block;
    gridDim.x = blocks;
    noted += threadIdx.x * {ROOM};
    return {{noted, noted + {ROOM}}};
}}

extern "C" __global__ void packs(Index count, bool aligned, Word block, Word blocks, Index* noted) {{
    Noted note = in_grid(block, blocks, noted);
    for_packs<{PACK}>(count, aligned, [&](Index i, auto width) {{ note(i, width.value); }});
}}

extern "C" __global__ void elements(Index planes, int height, int width, Word block, Word blocks, Index* noted) {{
    Noted note = in_grid(block, blocks, noted);
    for_elements(planes, height, width, [&](Index i, Index plane, int y, int x) {{ note(i, plane, y, x); }});
}}
"""
COUNT = (1 << 31) + 1003
GRIDS = [(1 << 28) + 1, 5 << 28]
"""So many blocks: fewer threads than elements, and more than 2^32."""


def noted(on_host: ModuleType, name: str, block: int, blocks: int, *args: np.generic) -> list[list[int]]:
    """What each thread of a block has noted."""
    folder = data_folder("kernels")
    code = "".join((folder / each).read_text() for each in ("common.cuh", "windows.cuh")) + KERNELS
    found = on_host.asarray(np.full((BLOCK, ROOM), -1))
    kernel = on_host.RawModule(code=code, options=cuda.OPTIONS).get_function(name)
    kernel((1,), (BLOCK,), (*args, np.uint32(block), np.uint32(blocks), found))
    return [[int(each) for each in of_thread if each != -1] for of_thread in found.to_host()]


def blocks_to_look_at(blocks: int, count: int) -> list[int]:
    """Those of the grid with the elements, or packs, at its ends and at 2^31."""
    first_threads = 0, (1 << 31) // PACK, 1 << 31, count // PACK - 1, count - 1
    return sorted({thread // BLOCK % blocks for thread in first_threads} | {blocks - 1})


@pytest.mark.parametrize("blocks", GRIDS)
@pytest.mark.parametrize("aligned", [False, True])
def test_packs(aligned: bool, blocks: int, on_host: ModuleType) -> None:
    packs, args = COUNT // PACK if aligned else 0, (np.int64(COUNT), np.bool_(aligned))
    for block in blocks_to_look_at(blocks, COUNT):
        for thread, found in enumerate(noted(on_host, "packs", block, blocks, *args), BLOCK * block):
            wanted = [x for pack in range(thread, packs, BLOCK * blocks) for x in (pack * PACK, PACK)]
            wanted += [x for i in range(packs * PACK + thread, COUNT, BLOCK * blocks) for x in (i, 1)]
            assert found == wanted


@pytest.mark.parametrize("blocks", GRIDS)
def test_elements_of_planes(blocks: int, on_host: ModuleType) -> None:
    planes, height, width = shape = 8200, 511, 513
    count, args = planes * height * width, (np.int64(planes), np.int32(height), np.int32(width))
    assert count > 1 << 31
    for block in blocks_to_look_at(blocks, count):
        for thread, found in enumerate(noted(on_host, "elements", block, blocks, *args), BLOCK * block):
            places: list[Any] = [(i, *np.unravel_index(i, shape)) for i in range(thread, count, BLOCK * blocks)]
            assert found == [x for place in places for x in place]
