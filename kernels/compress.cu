// Gradients encoded for the wire, what is not sent being kept. reference_compress.py is the specification: the scales
// of blocks are the same up to rounding, and everything else has the same bits for the same scales.
#include "common.cuh"
#include "codes.cuh"
#include "top_k.cuh"

enum { BLOCK = 256 };  // elements with a scale of their own, one for each thread
constexpr double SHARE = 0.6, LARGEST = 3.4028234e38;

// Rounded as an element, in the type that it is computed in.
template <class T> __device__ inline typename WideOf<T>::Type rounded(double x) { return T(x); }
template <> __device__ inline float rounded<Half>(double x) { return widened(half_from(x)); }
template <> __device__ inline float rounded<BFloat16>(double x) { return widened(narrowed<BFloat16>(float(x))); }

// What elements of a block must reach to be sent, and what is sent; none of it where something is not finite.
struct Choice {
    double limit, sent;
    bool is_finite;
};

// All blocks of elements: `choose(total, how many)` takes what this thread is to send of one, 0 behind the last
// element, and `vote` is one of those of codes.cuh, for words of WIDTH elements.
template <int WIDTH, class T, class Choose, class Vote>
__device__ inline void encode_blocks(
    const T* grad, T* residual, Index count, float* scales, Word* words, Choose choose, Vote vote
) {
    for (Index block = blockIdx.x; block * BLOCK < count; block += gridDim.x) {
        const Index i = block * BLOCK + threadIdx.x, left = count - block * BLOCK;
        const bool is_there = i < count;
        const auto total = is_there ? added(grad[i], residual[i]) : typename WideOf<T>::Type(0);
        const Choice choice = choose(double(total), double(left < BLOCK ? left : BLOCK));
        const float scale = choice.sent;
        if (choice.is_finite && choice.sent <= LARGEST) {
            if (threadIdx.x == 0) scales[block] = scale;
            vote(i, total, rounded<T>(choice.limit), rounded<T>(scale));
        } else {
            if (threadIdx.x == 0) scales[block] = float_of_bits(0x7FC00000);
            if (is_there) residual[i] = T{};
            if (is_there && i % WIDTH == 0) words[i / WIDTH] = Word(~0ull >> (64 - WIDTH));
        }
    }
}

template <class T>
__device__ void encode_two_bit(
    const T* __restrict__ grad, T* __restrict__ residual, Index count, double threshold, float* __restrict__ scales,
    Word* __restrict__ words
) {
    const auto choose = [&](double total, double number) {
        const double squares = block_sum(total * total);
        Choice choice = {threshold, threshold, is_finite(squares)};
        if (threshold == 0 && choice.is_finite) {
            choice.limit = SHARE * sqrt(squares / number);
            const double size = total < 0 ? -total : total;
            const bool is_sent = size >= choice.limit;
            choice.sent = block_sum(is_sent ? size : 0.0) / block_sum(is_sent ? 1.0 : 0.0);
        }
        return choice;
    };
    encode_blocks<16>(grad, residual, count, scales, words, choose, [&](Index i, auto total, auto limit, auto sent) {
        vote_in_two_bits(residual, words, i, count, total, limit, sent);
    });
}

template <class T>
__device__ void encode_one_bit(
    const T* __restrict__ grad, T* __restrict__ residual, Index count, double threshold, double magnitude,
    float* __restrict__ scales, Word* __restrict__ words
) {
    const auto choose = [&](double total, double number) {
        const double sum = block_sum(total < 0 ? -total : total);
        return Choice{threshold, magnitude > 0 ? magnitude : sum / number, is_finite(sum)};
    };
    encode_blocks<32>(grad, residual, count, scales, words, choose, [&](Index i, auto total, auto limit, auto sent) {
        vote_in_one_bit(residual, words, i, count, total, limit, sent);
    });
}

template <class T>
__device__ void decode_two_bit(
    const float* __restrict__ scales, const Word* __restrict__ words, T* __restrict__ out, Index count
) {
    constexpr int N = 16 / sizeof(T);  // which divides 16: a pack lies in one word
    for_packs<N>(count, is_aligned<N>(out), [&](Index i, auto width) {
        store(out + i, read_two_bits<T, decltype(width)::value>(words, i, rounded<T>(scales[i / BLOCK])));
    });
}

template <class T>
__device__ void decode_one_bit(
    const float* __restrict__ scales, const Word* __restrict__ words, T* __restrict__ out, Index count
) {
    constexpr int N = 16 / sizeof(T);
    for_packs<N>(count, is_aligned<N>(out), [&](Index i, auto width) {
        store(out + i, read_one_bit<T, decltype(width)::value>(words, i, rounded<T>(scales[i / BLOCK])));
    });
}

// `to` and `back` are casts; what does not arrive as a finite number is not kept.
template <class T, class To, class Back>
__device__ inline void encode_halves(
    const T* __restrict__ grad, T* __restrict__ residual, Half* __restrict__ halves, Index count, To to, Back back
) {
    constexpr int N = 16 / sizeof(T);
    for_packs<N>(count, is_aligned<N>(grad, residual, halves), [&](Index i, auto width) {
        constexpr int n = decltype(width)::value;
        const auto given = load<n>(grad + i);
        auto kept = load<n>(residual + i);
        Pack<Half, n> sent;
        for (int k = 0; k < n; ++k) {
            const auto total = added(given.at[k], kept.at[k]);
            sent.at[k] = to(total);
            const float arrives = back(sent.at[k]);
            kept.at[k] = is_finite(arrives) ? narrowed<T>(total - decltype(total)(arrives)) : T{};
        }
        store(residual + i, kept);
        store(halves + i, sent);
    });
}

template <class T> __device__ void encode_float16(const T* grad, T* residual, Half* halves, Index count) {
    const auto to = [](typename WideOf<T>::Type x) { return half_from(x); };
    encode_halves(grad, residual, halves, count, to, [](Half x) { return float_from_half(x); });
}

template <class T> __device__ void encode_bfloat16(const T* grad, T* residual, Half* halves, Index count) {
    const auto to = [](typename WideOf<T>::Type x) { return bfloat16_from(float(x)); };
    encode_halves(grad, residual, halves, count, to, [](Half x) { return float_from_bfloat16(x); });
}

extern "C" __global__ void choose_digit(const Word* counts, Index blocks, Index k, bool is_first, Limit* limit) {
    choose_next_digit(counts, blocks, k, is_first, limit);
}

#define KERNELS(T, NAME)                                                                                               \
    extern "C" __global__ void encode_two_bit_##NAME(                                                                  \
        const T* grad, T* residual, Index count, double threshold, float* scales, Word* words                          \
    ) {                                                                                                                \
        encode_two_bit(grad, residual, count, threshold, scales, words);                                               \
    }                                                                                                                  \
    extern "C" __global__ void encode_one_bit_##NAME(                                                                  \
        const T* grad, T* residual, Index count, double threshold, double magnitude, float* scales, Word* words        \
    ) {                                                                                                                \
        encode_one_bit(grad, residual, count, threshold, magnitude, scales, words);                                    \
    }                                                                                                                  \
    extern "C" __global__ void decode_two_bit_##NAME(const float* scales, const Word* words, T* out, Index count) {    \
        decode_two_bit(scales, words, out, count);                                                                     \
    }                                                                                                                  \
    extern "C" __global__ void decode_one_bit_##NAME(const float* scales, const Word* words, T* out, Index count) {    \
        decode_one_bit(scales, words, out, count);                                                                     \
    }                                                                                                                  \
    extern "C" __global__ void encode_float16_##NAME(const T* grad, T* residual, Half* halves, Index count) {          \
        encode_float16(grad, residual, halves, count);                                                                 \
    }                                                                                                                  \
    extern "C" __global__ void encode_bfloat16_##NAME(const T* grad, T* residual, Half* halves, Index count) {         \
        encode_bfloat16(grad, residual, halves, count);                                                                \
    }                                                                                                                  \
    extern "C" __global__ void count_digits_##NAME(                                                                    \
        const T* grad, T* residual, Index count, int shift, bool adds, const Limit* limit, Word* counts                \
    ) {                                                                                                                \
        count_digits(grad, residual, count, shift, adds, limit, counts);                                               \
    }                                                                                                                  \
    extern "C" __global__ void count_chosen_##NAME(                                                                    \
        const T* x, Index count, Index chunk, const Limit* limit, Word* numbers                                        \
    ) {                                                                                                                \
        count_chosen(x, count, chunk, limit, numbers);                                                                 \
    }                                                                                                                  \
    extern "C" __global__ void write_chosen_##NAME(                                                                    \
        T* x, Index count, Index chunk, const Limit* limit, const Word* numbers, Word* indices, T* values              \
    ) {                                                                                                                \
        write_chosen(x, count, chunk, limit, numbers, indices, values);                                                \
    }                                                                                                                  \
    extern "C" __global__ void decode_top_k_##NAME(                                                                    \
        const Word* indices, const T* values, Index k, T* out, Index count                                             \
    ) {                                                                                                                \
        decode_top_k(indices, values, k, out, count);                                                                  \
    }

KERNELS(Half, f16)
KERNELS(BFloat16, bf16)
KERNELS(float, f32)
KERNELS(double, f64)
