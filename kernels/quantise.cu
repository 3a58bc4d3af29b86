// Gradients in 2 bits or 1 bit an element, the rest being kept. reference_quantise.py is the specification: same bits.
// A warp takes 32 neighbouring elements and votes: the votes are the packed words.
#include "common.cuh"

// The first of the 32 elements of this thread's warp; whole warps go round a loop together, as a vote demands.
__device__ inline Index first_of_warp() { return this_thread() / WARP * WARP; }

// Adds `grad` to what was kept, rounded as an element.
template <class T> __device__ inline typename WideOf<T>::Type added(const T& grad, const T& residual) {
    return widened(narrowed<T>(widened(residual) + widened(grad)));
}

template <class T, class Wide>
__device__ void pack_two_bit(
    const T* __restrict__ grad, T* __restrict__ residual, Index count, Wide limit, Wide sent, Word* __restrict__ words
) {
    const int lane = threadIdx.x % WARP;
    for (Index first = first_of_warp(); first < count; first += all_threads()) {
        const Index i = first + lane;
        bool plus = false, minus = false;
        if (i < count) {
            const Wide total = added(grad[i], residual[i]);
            plus = total >= limit;
            minus = total <= -limit;
            residual[i] = narrowed<T>(total - (plus ? sent : minus ? -sent : Wide(0)));
        }
        const Word up = __ballot_sync(~0u, plus), down = __ballot_sync(~0u, minus);
        if (lane == 0) words[first / 16] = (up & 0xFFFF) | (down << 16);
        if (lane == 1 && first + 16 < count) words[first / 16 + 1] = (up >> 16) | (down & 0xFFFF0000);
    }
}

template <class T, class Wide>
__device__ void pack_one_bit(
    const T* __restrict__ grad, T* __restrict__ residual, Index count, Wide limit, Wide sent, Word* __restrict__ words
) {
    const int lane = threadIdx.x % WARP;
    for (Index first = first_of_warp(); first < count; first += all_threads()) {
        const Index i = first + lane;
        bool plus = false;
        if (i < count) {
            const Wide total = added(grad[i], residual[i]);
            plus = total > limit;
            residual[i] = narrowed<T>(total - (plus ? sent : -sent));
        }
        const Word up = __ballot_sync(~0u, plus);
        if (lane == 0) words[first / 32] = up;
    }
}

template <class T, class Wide>
__device__ void unpack_two_bit(const Word* __restrict__ words, T* __restrict__ out, Index count, Wide sent) {
    constexpr int N = 16 / sizeof(T);  // which divides 16: a pack lies in one word
    for_packs<N>(count, is_aligned<N>(out), [&](Index i, auto width) {
        constexpr int n = decltype(width)::value;
        const Word word = words[i / 16] >> i % 16;
        Pack<T, n> pack;
        for (int k = 0; k < n; ++k) {
            pack.at[k] = narrowed<T>(word >> k & 1 ? sent : word >> (16 + k) & 1 ? -sent : Wide(0));
        }
        store(out + i, pack);
    });
}

template <class T, class Wide>
__device__ void unpack_one_bit(const Word* __restrict__ words, T* __restrict__ out, Index count, Wide sent) {
    constexpr int N = 16 / sizeof(T);
    for_packs<N>(count, is_aligned<N>(out), [&](Index i, auto width) {
        constexpr int n = decltype(width)::value;
        const Word word = words[i / 32] >> i % 32;
        Pack<T, n> pack;
        for (int k = 0; k < n; ++k) pack.at[k] = narrowed<T>(word >> k & 1 ? sent : -sent);
        store(out + i, pack);
    });
}

#define KERNELS(T, WIDE, NAME)                                                                                         \
    extern "C" __global__ void pack_two_bit_##NAME(                                                                    \
        const T* grad, T* residual, Index count, WIDE limit, WIDE sent, Word* words                                    \
    ) {                                                                                                                \
        pack_two_bit(grad, residual, count, limit, sent, words);                                                       \
    }                                                                                                                  \
    extern "C" __global__ void pack_one_bit_##NAME(                                                                    \
        const T* grad, T* residual, Index count, WIDE limit, WIDE sent, Word* words                                    \
    ) {                                                                                                                \
        pack_one_bit(grad, residual, count, limit, sent, words);                                                       \
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
