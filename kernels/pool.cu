// Average and max pooling. reference.py is the specification: same order of additions, same bits, of 16 bits those of
// its float32 rounded once. A thread computes one element of the result, or of the gradient, for which it collects from
// all windows that it lies in: no atomics.
#include "common.cuh"
#include "windows.cuh"

template <class T, class Wide>
__device__ void average_pool(const T* __restrict__ x, T* __restrict__ out, const Windows& w, Wide share) {
    for_elements(w.planes, w.out_height, w.out_width, [&](Index i, Index plane, Index at_y, Index at_x) {
        const T* from = x + plane * w.height * w.width;
        Wide total = 0;
        for_window(w, at_y, at_x, [&](Index at, int) { total += widened(from[at]); });
        out[i] = narrowed<T>(total * share);
    });
}

template <class T, class Wide>
__device__ void average_pool_gradient(const T* __restrict__ gy, T* __restrict__ dx, const Windows& w, Wide share) {
    for_elements(w.planes, w.height, w.width, [&](Index i, Index plane, Index y, Index x) {
        const T* from = gy + plane * w.out_height * w.out_width;
        Wide total = 0;
        for_windows_of(w, y, x, [&](Index at, int) { total += widened(from[at]) * share; });
        dx[i] = narrowed<T>(total);
    });
}

template <class T>
__device__ void max_pool(const T* __restrict__ x, T* __restrict__ out, int* __restrict__ chosen, const Windows& w) {
    typedef typename WideOf<T>::Type Wide;
    for_elements(w.planes, w.out_height, w.out_width, [&](Index i, Index plane, Index at_y, Index at_x) {
        const T* from = x + plane * w.height * w.width;
        Wide largest = -1 / Wide(0);
        int place = -1;
        for_window(w, at_y, at_x, [&](Index at, int number) {
            const Wide each = widened(from[at]);
            if (place < 0 || each > largest || each != each) {  // no NaN is lost
                largest = each;
                place = number;
            }
        });
        out[i] = narrowed<T>(largest);
        chosen[i] = place;
    });
}

template <class T>
__device__ void max_pool_gradient(
    const T* __restrict__ gy, const int* __restrict__ chosen, T* __restrict__ dx, const Windows& w
) {
    for_elements(w.planes, w.height, w.width, [&](Index i, Index plane, Index y, Index x) {
        const Index first = plane * w.out_height * w.out_width;
        typename WideOf<T>::Type total = 0;
        for_windows_of(w, y, x, [&](Index at, int number) {
            if (chosen[first + at] == number) total += widened(gy[first + at]);
        });
        dx[i] = narrowed<T>(total);
    });
}

#define KERNELS(T, WIDE, NAME)                                                                                         \
    extern "C" __global__ void average_pool_##NAME(const T* x, T* out, Windows w, WIDE share) {                        \
        average_pool(x, out, w, share);                                                                                \
    }                                                                                                                  \
    extern "C" __global__ void average_pool_gradient_##NAME(const T* gy, T* dx, Windows w, WIDE share) {               \
        average_pool_gradient(gy, dx, w, share);                                                                       \
    }                                                                                                                  \
    extern "C" __global__ void max_pool_##NAME(const T* x, T* out, int* chosen, Windows w) {                           \
        max_pool(x, out, chosen, w);                                                                                   \
    }                                                                                                                  \
    extern "C" __global__ void max_pool_gradient_##NAME(const T* gy, const int* chosen, T* dx, Windows w) {            \
        max_pool_gradient(gy, chosen, dx, w);                                                                          \
    }

KERNELS(Half, float, f16)
KERNELS(BFloat16, float, bf16)
KERNELS(float, float, f32)
KERNELS(double, double, f64)
