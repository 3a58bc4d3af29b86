// Bias and activation after a product, in one pass over memory. reference.py is the specification: same bits.
#include "common.cuh"

// `y` has `count` elements in rows of `features`.
template <class T>
__device__ void add_bias(T* __restrict__ y, const T* __restrict__ bias, Index count, Index features, bool relu) {
    constexpr int N = 16 / sizeof(T);
    const bool aligned = is_aligned<N>(y, bias) && features % N == 0;  // no pack lies in two rows
    for_packs<N>(count, aligned, [&](Index i, auto width) {
        constexpr int n = decltype(width)::value;
        auto pack = load<n>(y + i);
        const auto added = load<n>(bias + i % features);
        for (int k = 0; k < n; ++k) {
            const T value = pack.at[k] + added.at[k];
            pack.at[k] = !relu || value > T(0) || value != value ? value : T(0);  // a NaN stays
        }
        store(y + i, pack);
    });
}

// `gy` and `dx` may be one array.
template <class T> __device__ void relu_gradient(const T* gy, const T* y, T* dx, Index count) {
    constexpr int N = 16 / sizeof(T);
    for_packs<N>(count, is_aligned<N>(gy, y, dx), [&](Index i, auto width) {
        constexpr int n = decltype(width)::value;
        auto pack = load<n>(gy + i);
        const auto result = load<n>(y + i);
        for (int k = 0; k < n; ++k) pack.at[k] = result.at[k] > T(0) ? pack.at[k] : T(0);
        store(dx + i, pack);
    });
}

#define KERNELS(T, NAME)                                                                                               \
    extern "C" __global__ void add_bias_##NAME(T* y, const T* bias, Index count, Index features, bool relu) {          \
        add_bias(y, bias, count, features, relu);                                                                      \
    }                                                                                                                  \
    extern "C" __global__ void relu_gradient_##NAME(const T* gy, const T* y, T* dx, Index count) {                     \
        relu_gradient(gy, y, dx, count);                                                                               \
    }

KERNELS(float, f32)
KERNELS(double, f64)
