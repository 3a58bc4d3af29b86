// The windows that a kernel of pooling or convolution sees of an image.

// Passed by value. Planes of `height` x `width` elements; windows at `out_height` x `out_width` positions. Sides are of
// 32 bits, in which GPUs compute several times as fast, and so is all within a row; what leads to a row is of 64.
struct Windows {
    Index planes;
    int height, width, out_height, out_width;
    int kernel_y, kernel_x, stride_y, stride_x, padding_y, padding_x;
};

// Whether windows are 2 x 2 and lie side by side, and rows consist of packs of N elements. Kernels take such packs at
// once, and else one element: with N = 1.
template <int N> __device__ inline bool are_packs_of_pairs(const Windows& w) {
    const bool are_pairs = w.kernel_y == 2 && w.kernel_x == 2 && w.stride_y == 2 && w.stride_x == 2;
    return are_pairs && w.padding_y == 0 && w.padding_x == 0 && w.width % N == 0;
}

// The windows that N elements of a row lie in.
template <int N> constexpr int PAIRS = (N + 1) / 2;

// Calls `body(index into the plane's elements, number in the window)` for what is no padding, along the window's rows.
// With N > 1 those are of the first of N elements in the PAIRS<N> windows from (y, x) on.
template <int N = 1, class Body> __device__ inline void for_window(const Windows& w, int y, int x, Body body) {
    if (N > 1) {
        for (int i = 0; i < 2; ++i) body(Index(2 * y + i) * w.width + 2 * x, 2 * i);
        return;
    }
    const int top = y * w.stride_y - w.padding_y, left = x * w.stride_x - w.padding_x;
    const int i_first = top < 0 ? -top : 0, i_last = top + w.kernel_y < w.height ? w.kernel_y : w.height - top;
    const int j_first = left < 0 ? -left : 0, j_last = left + w.kernel_x < w.width ? w.kernel_x : w.width - left;
    for (int i = i_first; i < i_last; ++i) {
        const Index row = Index(top + i) * w.width + left;
#pragma unroll 1  // most windows are 2 or 3 wide: a loop by fours would take registers, and do nothing
        for (int j = j_first; j < j_last; ++j) body(row + j, i * w.kernel_x + j);
    }
}

// Along one axis: a place in a window, and the number of the window, which has there some element.
struct Place {
    int in_window, window;
};

// The first place in a window at which one of `positions` windows has the element `at`, counted from where the padding
// begins. The places after it are `stride` apart, and their windows follow each other backwards.
__device__ inline Place first_place(int at, int stride, int positions) {
    const int last = positions - 1, nearest = Word(at) / Word(stride), window = nearest < last ? nearest : last;
    return {at - window * stride, window};
}

// Calls `body(index of the window, number of element (y, x) in it)` for all windows of the plane that it lies in, in
// the order of that number. Its loops divide nothing: GPUs have no instruction for that. With N > 1 those are of the
// first of N elements, which lie in the PAIRS<N> windows from there on.
template <int N = 1, class Body> __device__ inline void for_windows_of(const Windows& w, int y, int x, Body body) {
    if (N > 1) {
        if (y / 2 < w.out_height) body(Index(y / 2) * w.out_width + x / 2, y % 2 * 2);
        return;
    }
    const Place down = first_place(y + w.padding_y, w.stride_y, w.out_height);
    const Place right = first_place(x + w.padding_x, w.stride_x, w.out_width);
    for (int i = down.in_window, at_y = down.window; i < w.kernel_y && at_y >= 0; i += w.stride_y, --at_y) {
        for (int j = right.in_window, at_x = right.window; j < w.kernel_x && at_x >= 0; j += w.stride_x, --at_x) {
            body(Index(at_y) * w.out_width + at_x, i * w.kernel_x + j);
        }
    }
}

// Calls `body(index, plane, y, x)` for elements of planes of `height` x `width`. From one to the next of a thread it is
// as far each time, along each axis, so nothing is divided for.
template <class Body> __device__ inline void for_elements(Index planes, int height, int width, Body body) {
    const Index count = planes * height * width, on = all_threads();
    Index i = this_thread();
    if (i >= count) return;
    const Index row = i / width;
    Index plane = row / height, on_planes = 0;
    int y = row - plane * height, x = i - row * width, on_y = 0, on_x = 0;
    if (i + on < count) {
        const Index on_rows = on / width;
        on_planes = on_rows / height;
        on_y = on_rows - on_planes * height;
        on_x = on - on_rows * width;
    }
    while (true) {
        body(i, plane, y, x);
        i += on;
        if (i >= count) return;
        plane += on_planes;
        y += on_y;
        x += on_x;
        if (x >= width) {
            x -= width;
            ++y;
        }
        if (y >= height) {
            y -= height;
            ++plane;
        }
    }
}
