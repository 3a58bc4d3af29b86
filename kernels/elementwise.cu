// Sums and ReLU of whole arrays: CuPy's own operations load one element at a time, at half of memory's rate.
// Specification: hpcdp/kernels/reference.py, with the same bits; 16-bit results are those of float32 rounded once.
#include "common.cuh"

// `out` may be either.
template <class T> __device__ void add(const T* a, const T* b, T* out, Index count) {
    map_packs(out, count, [](T x, T y) { return narrowed<T>(widened(x) + widened(y)); }, a, b);
}

template <class T> __device__ void relu(const T* x, T* out, Index count) {
    map_packs(out, count, [](T each) { return narrowed<T>(activated(widened(each), true)); }, x);
}

#define KERNELS(T, NAME)                                                                                               \
    extern "C" __global__ void add_##NAME(const T* a, const T* b, T* out, Index count) { add(a, b, out, count); }      \
    extern "C" __global__ void relu_##NAME(const T* x, T* out, Index count) { relu(x, out, count); }

KERNELS(Half, f16)
KERNELS(BFloat16, bf16)
KERNELS(float, f32)
KERNELS(double, f64)
