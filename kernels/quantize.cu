// Encodings of gradients in 2 bits or 1 bit an element, which keep the rest. Specification: hpcdp/kernels/reference.py,
// with the same bits.
#include "common.cuh"
#include "codes.cuh"

template <class Code, class T, class Wide>
__device__ void pack(
    const T* __restrict__ grad, T* __restrict__ residual, Index count, Wide limit, Wide sent, Word* __restrict__ words
) {
    const bool aligned = is_aligned<16 / sizeof(T)>(grad, residual);
    for (Index first = this_warp() * BLOCK; first < count; first += all_warps() * BLOCK) {
        encode<Code>(Own<T>(grad, residual, first, count, aligned), residual, words, limit, sent);
    }
}

template <class T, class Wide>
__device__ void unpack_two_bit(const Word* __restrict__ words, T* __restrict__ out, Index count, Wide sent) {
    constexpr int N = 16 / sizeof(T);  // which divides 16: a pack lies in one word
    for_packs<N>(count, is_aligned<N>(out), [&](Index i, auto width) {
        store(out + i, read_two_bits<T, decltype(width)::value>(words, i, sent));
    });
}

template <class T, class Wide>
__device__ void unpack_one_bit(const Word* __restrict__ words, T* __restrict__ out, Index count, Wide sent) {
    constexpr int N = 16 / sizeof(T);
    for_packs<N>(count, is_aligned<N>(out), [&](Index i, auto width) {
        store(out + i, read_one_bit<T, decltype(width)::value>(words, i, sent));
    });
}

#define KERNELS(T, WIDE, NAME)                                                                                         \
    extern "C" __global__ void pack_two_bit_##NAME(                                                                    \
        const T* grad, T* residual, Index count, WIDE limit, WIDE sent, Word* words                                    \
    ) {                                                                                                                \
        pack<TwoBits>(grad, residual, count, limit, sent, words);                                                      \
    }                                                                                                                  \
    extern "C" __global__ void pack_one_bit_##NAME(                                                                    \
        const T* grad, T* residual, Index count, WIDE limit, WIDE sent, Word* words                                    \
    ) {                                                                                                                \
        pack<OneBit>(grad, residual, count, limit, sent, words);                                                       \
    }                                                                                                                  \
    extern "C" __global__ void unpack_two_bit_##NAME(const Word* words, T* out, Index count, WIDE sent) {              \
        unpack_two_bit(words, out, count, sent);                                                                       \
    }                                                                                                                  \
    extern "C" __global__ void unpack_one_bit_##NAME(const Word* words, T* out, Index count, WIDE sent) {              \
        unpack_one_bit(words, out, count, sent);                                                                       \
    }

KERNELS(Half, float, f16)
KERNELS(float, float, f32)
KERNELS(double, double, f64)
