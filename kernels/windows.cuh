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

// Calls `body(index of the window, number of element (y, x) in it)` for all windows of the plane that it lies in, in the
// order of that number.
template <class Body> __device__ inline void for_windows_of(const Windows& w, Index y, Index x, Body body) {
    for (Index i = 0; i < w.kernel_y; ++i) {
        for (Index j = 0; j < w.kernel_x; ++j) {
            const Index down = y + w.padding_y - i, right = x + w.padding_x - j;
            if (down < 0 || down % w.stride_y != 0 || right < 0 || right % w.stride_x != 0) continue;
            const Index at_y = down / w.stride_y, at_x = right / w.stride_x;
            if (at_y < w.out_height && at_x < w.out_width) body(at_y * w.out_width + at_x, int(i * w.kernel_x + j));
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
