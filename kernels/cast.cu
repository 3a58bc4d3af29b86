// Casts between float32 and the 16-bit formats, and scaling. Specification: hpcdp/kernels/reference.py, with the same
// bits, except for the payload of a NaN in float16.
#include "common.cuh"

template <class From, class To, class Cast>
__device__ void cast(const From* __restrict__ x, To* __restrict__ out, Index count, Cast cast_one) {
    constexpr int N = 16 / sizeof(To);  // of two stores a pack, each would leave gaps for the other
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

__device__ inline bool have_same_bits(Half a, Half b) { return a == b; }
__device__ inline bool have_same_bits(BFloat16 a, BFloat16 b) { return a.bits == b.bits; }

// Elements of `wide` that are not rounded to those of `x` become these; nothing is stored where there are none.
template <class T> __device__ void follow(float* __restrict__ wide, const T* __restrict__ x, Index count) {
    constexpr int N = 8;
    for_packs<N>(count, is_aligned<N>(wide, x), [&](Index i, auto width) {
        constexpr int n = decltype(width)::value;
        auto pack = load<n>(wide + i);
        const auto rounded = load<n>(x + i);
        bool differs = false;
        for (int k = 0; k < n; ++k) {
            if (have_same_bits(narrowed<T>(pack.at[k]), rounded.at[k])) continue;
            pack.at[k] = widened(rounded.at[k]);
            differs = true;
        }
        if (differs) store(wide + i, pack);
    });
}

extern "C" __global__ void follow_f16(float* wide, const Half* x, Index count) { follow(wide, x, count); }

extern "C" __global__ void follow_bf16(float* wide, const BFloat16* x, Index count) { follow(wide, x, count); }

// `x` and `out` may be one array, so neither is __restrict__.
template <class T> __device__ void scale(const T* x, T* out, Index count, typename WideOf<T>::Type factor) {
    map_packs(out, count, [=](T each) { return narrowed<T>(widened(each) * factor); }, x);
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
