// Bias and activation after a product, in one pass over memory. reference.py is the specification: same bits, of 16
// bits those of its float32 rounded once.
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
            pack.at[k] = narrowed<T>(activated(widened(pack.at[k]) + widened(added.at[k]), relu));
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
        for (int k = 0; k < n; ++k) pack.at[k] = widened(result.at[k]) > 0 ? pack.at[k] : T{};
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

KERNELS(Half, f16)
KERNELS(BFloat16, bf16)
KERNELS(float, f32)
KERNELS(double, f64)
