// The windows that a kernel of pooling or convolution sees of an image.

// Passed by value. Planes of `height` x `width` elements; windows at `out_height` x `out_width` positions.
struct Windows {
    Index planes, height, width, out_height, out_width;
    Index kernel_y, kernel_x, stride_y, stride_x, padding_y, padding_x;
};

// Calls `body(index into the plane's elements, number in the window)` for what is no padding, along the window's rows.
template <class Body> __device__ inline void for_window(const Windows& w, Index y, Index x, Body body) {
    const Index top = y * w.stride_y - w.padding_y, left = x * w.stride_x - w.padding_x;
    const int i_first = top < 0 ? -top : 0, i_last = top + w.kernel_y < w.height ? w.kernel_y : w.height - top;
    const int j_first = left < 0 ? -left : 0, j_last = left + w.kernel_x < w.width ? w.kernel_x : w.width - left;
    for (int i = i_first; i < i_last; ++i) {
        const Index row = (top + i) * w.width + left;
#pragma unroll 1  // most windows are 2 or 3 wide: a loop by fours would take registers, and do nothing
        for (int j = j_first; j < j_last; ++j) body(row + j, i * int(w.kernel_x) + j);
    }
}

// Along one axis: a place in a window, and the number of the window, which has there some element.
struct Place {
    int in_window, window;
};

// The first place in a window at which one of `positions` windows has the element `at`, counted from where the padding
// begins. The places after it are `stride` apart, and their windows follow each other backwards.
__device__ inline Place first_place(Index at, Index stride, Index positions) {
    const int last = positions - 1, nearest = Word(at) / Word(stride), window = nearest < last ? nearest : last;
    return {int(at) - window * int(stride), window};
}

// Calls `body(index of the window, number of element (y, x) in it)` for all windows of the plane that it lies in, in
// the order of that number. Its loops divide nothing: GPUs have no instruction for that.
template <class Body> __device__ inline void for_windows_of(const Windows& w, Index y, Index x, Body body) {
    const Place down = first_place(y + w.padding_y, w.stride_y, w.out_height);
    const Place right = first_place(x + w.padding_x, w.stride_x, w.out_width);
    for (int i = down.in_window, at_y = down.window; i < w.kernel_y && at_y >= 0; i += w.stride_y, --at_y) {
        for (int j = right.in_window, at_x = right.window; j < w.kernel_x && at_x >= 0; j += w.stride_x, --at_x) {
            body(at_y * w.out_width + at_x, i * int(w.kernel_x) + j);
        }
    }
}

// Calls `body(index, plane, y, x)` for elements of planes of `height` x `width`. From one to the next of a thread it is
// as far each time, along each axis, so nothing is divided for.
template <class Body> __device__ inline void for_elements(Index planes, Index height, Index width, Body body) {
    const Index size = height * width, count = planes * size, on = all_threads();
    Index i = this_thread();
    if (i >= count) return;
    Index plane = i / size, on_planes = 0;
    int y = i % size / width, x = i % width, on_y = 0, on_x = 0;
    if (i + on < count) {
        on_planes = on / size;
        on_y = on % size / width;
        on_x = on % width;
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
