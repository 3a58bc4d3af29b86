// Average and max pooling. reference.py is the specification: same order of additions, same bits. A thread computes one
// element of the result, or of the gradient, for which it collects from all windows that it lies in: no atomics.
#include "common.cuh"

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

template <class T>
__device__ void average_pool(const T* __restrict__ x, T* __restrict__ out, const Windows& w, T share) {
    for_elements(w.planes, w.out_height, w.out_width, [&](Index i, Index plane, Index at_y, Index at_x) {
        const T* from = x + plane * w.height * w.width;
        T total = 0;
        for_window(w, at_y, at_x, [&](Index at, int) { total += from[at]; });
        out[i] = total * share;
    });
}

template <class T>
__device__ void average_pool_gradient(const T* __restrict__ gy, T* __restrict__ dx, const Windows& w, T share) {
    for_elements(w.planes, w.height, w.width, [&](Index i, Index plane, Index y, Index x) {
        const T* from = gy + plane * w.out_height * w.out_width;
        T total = 0;
        for_windows_of(w, y, x, [&](Index at, int) { total += from[at] * share; });
        dx[i] = total;
    });
}

template <class T>
__device__ void max_pool(const T* __restrict__ x, T* __restrict__ out, int* __restrict__ chosen, const Windows& w) {
    for_elements(w.planes, w.out_height, w.out_width, [&](Index i, Index plane, Index at_y, Index at_x) {
        const T* from = x + plane * w.height * w.width;
        T largest = -1 / T(0);
        int place = 0;
        for_window(w, at_y, at_x, [&](Index at, int number) {
            if (from[at] > largest) {
                largest = from[at];
                place = number;
            }
        });
        out[i] = largest;
        chosen[i] = place;
    });
}

template <class T>
__device__ void max_pool_gradient(
    const T* __restrict__ gy, const int* __restrict__ chosen, T* __restrict__ dx, const Windows& w
) {
    for_elements(w.planes, w.height, w.width, [&](Index i, Index plane, Index y, Index x) {
        const Index first = plane * w.out_height * w.out_width;
        T total = 0;
        for_windows_of(w, y, x, [&](Index at, int number) {
            if (chosen[first + at] == number) total += gy[first + at];
        });
        dx[i] = total;
    });
}

#define KERNELS(T, NAME)                                                                                               \
    extern "C" __global__ void average_pool_##NAME(const T* x, T* out, Windows w, T share) {                           \
        average_pool(x, out, w, share);                                                                                \
    }                                                                                                                  \
    extern "C" __global__ void average_pool_gradient_##NAME(const T* gy, T* dx, Windows w, T share) {                  \
        average_pool_gradient(gy, dx, w, share);                                                                       \
    }                                                                                                                  \
    extern "C" __global__ void max_pool_##NAME(const T* x, T* out, int* chosen, Windows w) {                           \
        max_pool(x, out, chosen, w);                                                                                   \
    }                                                                                                                  \
    extern "C" __global__ void max_pool_gradient_##NAME(const T* gy, const int* chosen, T* dx, Windows w) {            \
        max_pool_gradient(gy, chosen, dx, w);                                                                          \
    }

KERNELS(float, f32)
KERNELS(double, f64)
