// Average and max pooling. reference.py is the specification: same order of additions, same bits. A thread computes one
// element of the result, or of the gradient, for which it collects from all windows that it lies in: no atomics.
#include "common.cuh"
#include "windows.cuh"

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
        int place = -1;
        for_window(w, at_y, at_x, [&](Index at, int number) {
            if (place < 0 || from[at] > largest || from[at] != from[at]) {  // no NaN is lost
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
