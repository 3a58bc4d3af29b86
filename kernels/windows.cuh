// The windows that a kernel of pooling or convolution sees of an image.

// Passed by value. Planes of `height` x `width` elements; windows at `out_height` x `out_width` positions.
struct Windows {
    Index planes, height, width, out_height, out_width;
    Index kernel_y, kernel_x, stride_y, stride_x, padding_y, padding_x;
};

// Calls `body(index into the plane's elements, number in the window)` for what is no padding, along the window's rows.
template <class Body> __device__ inline void for_window(const Windows& w, Index y, Index x, Body body) {
    const Index top = y * w.stride_y - w.padding_y, left = x * w.stride_x - w.padding_x;
    for (Index i = 0; i < w.kernel_y; ++i) {
        for (Index j = 0; j < w.kernel_x; ++j) {
            const bool is_inside = top + i >= 0 && top + i < w.height && left + j >= 0 && left + j < w.width;
            if (is_inside) body((top + i) * w.width + left + j, int(i * w.kernel_x + j));
        }
    }
}

// The first place in a window, along one axis, at which one of `positions` windows has the element `at`, counted from
// where the padding begins. The places after it are `stride` apart, and their windows follow each other backwards.
__device__ inline Index first_place(Index at, Index stride, Index positions) {
    const Index of_last = at - (positions - 1) * stride, smallest = at % stride;
    return of_last > smallest ? of_last : smallest;
}

// Calls `body(index of the window, number of element (y, x) in it)` for all windows of the plane that it lies in, in
// the order of that number. Its loops divide nothing: GPUs have no instruction for that.
template <class Body> __device__ inline void for_windows_of(const Windows& w, Index y, Index x, Body body) {
    const Index down = y + w.padding_y, right = x + w.padding_x;
    const Index i_first = first_place(down, w.stride_y, w.out_height);
    const Index j_first = first_place(right, w.stride_x, w.out_width);
    const Index y_first = (down - i_first) / w.stride_y, x_first = (right - j_first) / w.stride_x;
    for (Index i = i_first, at_y = y_first; i < w.kernel_y && at_y >= 0; i += w.stride_y, --at_y) {
        for (Index j = j_first, at_x = x_first; j < w.kernel_x && at_x >= 0; j += w.stride_x, --at_x) {
            body(at_y * w.out_width + at_x, int(i * w.kernel_x + j));
        }
    }
}

// Calls `body(index, plane, y, x)` for elements of planes of `height` x `width`.
template <class Body> __device__ inline void for_elements(Index planes, Index height, Index width, Body body) {
    const Index size = height * width;
    for (Index i = this_thread(); i < planes * size; i += all_threads()) {
        body(i, i / size, i % size / width, i % width);
    }
}
