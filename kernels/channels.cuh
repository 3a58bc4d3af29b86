// What kernels share that add up each channel of images (batch, channels, positions), by several blocks for each.

// Passed by value.
struct Shape {
    Index batch, channels, size;
};

// The channel of this block, and which of its `pieces` it has.
struct Part {
    Index channel, piece, pieces;
};

__device__ inline Part part_of(const Shape& shape) {
    const Index pieces = gridDim.x / shape.channels;
    return {blockIdx.x / pieces, blockIdx.x % pieces, pieces};
}

// Calls `body(place of its first element, packs of all arrays)` for this thread's packs of N of its block's channel. The
// threads of all pieces take neighboring packs; the place in a plane is kept, not divided for. Several packs are
// loaded before the first of them is used, as many as leave room for other threads, which add up meanwhile.
template <int N, int ARRAYS, class T, class Body>
__device__ inline void for_packs_of_thread(
    const T* const (&from)[ARRAYS], const Shape& shape, bool aligned, Body body
) {
    constexpr int AT_ONCE = (N == 1 ? 8 : N < 8 ? 4 : 2) / ARRAYS;
    const Part part = part_of(shape);
    const Index plane = shape.size / N, count = shape.batch * plane, stride = part.pieces * THREADS;
    Index pack = part.piece * THREADS + threadIdx.x;
    if (pack >= count) return;
    const Index to_next_plane = (shape.channels - 1) * shape.size, on = stride % plane;
    const Index step = stride / plane * shape.channels * shape.size + on * N;
    Index in_plane = pack % plane, i = (pack / plane * shape.channels + part.channel) * shape.size + in_plane * N;
    while (pack < count) {
        Pack<T, N> packs[AT_ONCE][ARRAYS];
        Index places[AT_ONCE];
        bool is_there[AT_ONCE];
        for (int k = 0; k < AT_ONCE; ++k) {
            is_there[k] = pack < count;
            places[k] = i;
            for (int array = 0; array < ARRAYS; ++array) {
                if (is_there[k]) packs[k][array] = load_from<N>(from[array] + i, aligned);
            }
            pack += stride;
            i += step;
            in_plane += on;
            if (in_plane >= plane) {
                in_plane -= plane;
                i += to_next_plane;
            }
        }
        for (int k = 0; k < AT_ONCE; ++k) {
            if (is_there[k]) body(places[k], packs[k]);
        }
    }
}

// The same with packs of 16 bytes, or of one element: by the shape alone, as the order of what is added up.
template <int ARRAYS, class T, class Body>
__device__ inline void for_packs_of_channel(const T* const (&from)[ARRAYS], const Shape& shape, Body body) {
    constexpr int N = 16 / sizeof(T);
    bool aligned = true;
    for (const T* each : from) aligned = aligned && is_aligned<N>(each);
    if (shape.size % N == 0) {
        for_packs_of_thread<N>(from, shape, aligned, body);
    } else {
        for_packs_of_thread<1>(from, shape, true, body);
    }
}
