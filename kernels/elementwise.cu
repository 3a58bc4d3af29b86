// Sums and ReLU of whole arrays, of which CuPy's own operations load one element at a time, at half of memory's rate.
// reference_elementwise.py is the specification: same bits, of 16 bits those of its float32 rounded once.
#include "common.cuh"

// `out` may be either.
template <class T> __device__ void add(const T* a, const T* b, T* out, Index count) {
    constexpr int N = 16 / sizeof(T);
    for_packs<N>(count, is_aligned<N>(a, b, out), [&](Index i, auto width) {
        constexpr int n = decltype(width)::value;
        auto pack = load<n>(a + i);
        const auto more = load<n>(b + i);
        for (int k = 0; k < n; ++k) pack.at[k] = narrowed<T>(widened(pack.at[k]) + widened(more.at[k]));
        store(out + i, pack);
    });
}

template <class T> __device__ void relu(const T* x, T* out, Index count) {
    constexpr int N = 16 / sizeof(T);
    for_packs<N>(count, is_aligned<N>(x, out), [&](Index i, auto width) {
        constexpr int n = decltype(width)::value;
        auto pack = load<n>(x + i);
        for (int k = 0; k < n; ++k) pack.at[k] = narrowed<T>(activated(widened(pack.at[k]), true));
        store(out + i, pack);
    });
}

#define KERNELS(T, NAME)                                                                                               \
    extern "C" __global__ void add_##NAME(const T* a, const T* b, T* out, Index count) { add(a, b, out, count); }      \
    extern "C" __global__ void relu_##NAME(const T* x, T* out, Index count) { relu(x, out, count); }

KERNELS(Half, f16)
KERNELS(BFloat16, bf16)
KERNELS(float, f32)
KERNELS(double, f64)
