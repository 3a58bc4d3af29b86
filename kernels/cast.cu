// Casts between float32 and the 16-bit formats, and scaling. reference_cast.py is the specification: same bits, but for
// those of a NaN's payload in float16.
#include "common.cuh"

template <class From, class To, class Cast>
__device__ void cast(const From* __restrict__ x, To* __restrict__ out, Index count, Cast cast_one) {
    constexpr int N = 8;  // of 16 bits in 16 bytes; those of float32 are loaded in two halves
    for_packs<N>(count, is_aligned<N>(x, out), [&](Index i, auto width) {
        constexpr int n = decltype(width)::value;
        const auto from = load<n>(x + i);
        Pack<To, n> to;
        for (int k = 0; k < n; ++k) to.at[k] = cast_one(from.at[k]);
        store(out + i, to);
    });
}

extern "C" __global__ void to_float16_f32(const float* x, Half* out, Index count) {
    cast(x, out, count, [](float each) { return half_from(each); });
}

extern "C" __global__ void to_float16_f64(const double* x, Half* out, Index count) {
    cast(x, out, count, [](double each) { return half_from(each); });
}

extern "C" __global__ void from_float16(const Half* x, float* out, Index count) {
    cast(x, out, count, [](Half each) { return float_from_half(each); });
}

extern "C" __global__ void to_bfloat16(const float* x, Half* out, Index count) {
    cast(x, out, count, [](float each) { return bfloat16_from(each); });
}

extern "C" __global__ void from_bfloat16(const Half* x, float* out, Index count) {
    cast(x, out, count, [](Half each) { return float_from_bfloat16(each); });
}

// `x` and `out` may be one array, so neither is __restrict__.
template <class T> __device__ void scale(const T* x, T* out, Index count, typename WideOf<T>::Type factor) {
    constexpr int N = 16 / sizeof(T);
    for_packs<N>(count, is_aligned<N>(x, out), [&](Index i, auto width) {
        constexpr int n = decltype(width)::value;
        auto pack = load<n>(x + i);
        for (int k = 0; k < n; ++k) pack.at[k] = narrowed<T>(widened(pack.at[k]) * factor);
        store(out + i, pack);
    });
}

extern "C" __global__ void scale_f16(const Half* x, Half* out, Index count, float factor) {
    scale(x, out, count, factor);
}

extern "C" __global__ void scale_bf16(const BFloat16* x, BFloat16* out, Index count, float factor) {
    scale(x, out, count, factor);
}

extern "C" __global__ void scale_f32(const float* x, float* out, Index count, float factor) {
    scale(x, out, count, factor);
}

extern "C" __global__ void scale_f64(const double* x, double* out, Index count, double factor) {
    scale(x, out, count, factor);
}
