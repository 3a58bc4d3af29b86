// Encodings of gradients for the wire, which keep what is not sent. Specification: hpcdp/kernels/reference.py. The
// scales of blocks are equal up to rounding, and everything else has the same bits for the same scales.
#include "common.cuh"
#include "codes.cuh"
#include "top_k.cuh"

enum { AT_ONCE = 4 };  // blocks of a multiprocessor that must have room; else the compiler keeps all sums in registers
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

// Of a block that is not sent nothing is kept.
template <int WIDTH, class T> __device__ inline void forget(const Own<T>& own, T* residual, Word* words) {
    for (int pack = 0; pack < Own<T>::PACKS; ++pack) {
        own.store_word(words, WIDTH, pack, Word(~0ull >> (64 - WIDTH)));
        own.store_pack(residual, pack, {});
    }
}

// All blocks of elements, which have a scale each; `choose(what a lane has)` says how it is encoded.
template <class Code, class T, class Choose>
__device__ inline void encode_blocks(
    const T* grad, T* residual, Index count, float* scales, Word* words, Choose choose
) {
    const bool aligned = is_aligned<16 / sizeof(T)>(grad, residual);
    for (Index block = this_warp(); block * BLOCK < count; block += all_warps()) {
        const Own<T> own(grad, residual, block * BLOCK, count, aligned);
        const Choice choice = choose(own);
        const float scale = choice.sent;
        const bool is_sent = choice.is_finite && choice.sent <= LARGEST;
        if (this_lane() == 0) scales[block] = is_sent ? scale : float_of_bits(0x7FC00000);
        if (is_sent) {
            encode<Code>(own, residual, words, rounded<T>(choice.limit), rounded<T>(scale));
        } else {
            forget<Code::WIDTH>(own, residual, words);
        }
    }
}

__device__ inline double size_of(double x) { return x < 0 ? -x : x; }

template <class T>
__device__ void encode_two_bit(
    const T* __restrict__ grad, T* __restrict__ residual, Index count, double threshold, float* __restrict__ scales,
    Word* __restrict__ words
) {
    encode_blocks<TwoBits>(grad, residual, count, scales, words, [&](const Own<T>& own) {
        const double squares = own.sum([](double x) { return x * x; });
        Choice choice = {threshold, threshold, is_finite(squares)};
        if (threshold == 0 && choice.is_finite) {
            const double limit = SHARE * sqrt(squares / own.number);
            const double sizes = own.sum([&](double x) { return size_of(x) >= limit ? size_of(x) : 0.0; });
            choice.sent = sizes / own.sum([&](double x) { return Word(size_of(x) >= limit); });
            choice.limit = limit;
        }
        return choice;
    });
}

template <class T>
__device__ void encode_one_bit(
    const T* __restrict__ grad, T* __restrict__ residual, Index count, double threshold, double magnitude,
    float* __restrict__ scales, Word* __restrict__ words
) {
    encode_blocks<OneBit>(grad, residual, count, scales, words, [&](const Own<T>& own) {
        const double sum = own.sum([](double x) { return size_of(x); });
        return Choice{threshold, magnitude > 0 ? magnitude : sum / own.number, is_finite(sum)};
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

#define KERNELS(T, NAME)                                                                                               \
    extern "C" __global__ void __launch_bounds__(THREADS, AT_ONCE) encode_two_bit_##NAME(                              \
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
    extern "C" __global__ void sample_floor_##NAME(                                                                    \
        const T* grad, const T* residual, Index count, Index stride, Index wanted, bool first, int shift, int bits,    \
        Search* search, Word* counts                                                                                   \
    ) {                                                                                                                \
        sample_floor(grad, residual, count, stride, wanted, first, shift, bits, search, counts);                       \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(THREADS, AT_ONCE) collect_##NAME(                                     \
        const T* grad, T* residual, Index count, Index length, Index k, bool again, Search* search, Word* counts,      \
        Word* numbers, Word* indices, T* values                                                                        \
    ) {                                                                                                                \
        collect(grad, residual, count, length, k, again, search, counts, numbers, indices, values);                    \
    }                                                                                                                  \
    extern "C" __global__ void find_digit_##NAME(                                                                      \
        Index count, Index length, const Word* numbers, const Word* indices, const T* values, int shift, int bits,     \
        Search* search, Word* counts                                                                                   \
    ) {                                                                                                                \
        find_digit(Candidates<T>(count, length, numbers, indices, values), shift, bits, search, counts);               \
    }                                                                                                                  \
    extern "C" __global__ void count_chosen_##NAME(                                                                    \
        Index count, Index length, const Word* numbers, const Word* indices, const T* values, const Search* search,    \
        Word* of_warps, Word* of_blocks                                                                                \
    ) {                                                                                                                \
        count_chosen(Candidates<T>(count, length, numbers, indices, values), search, of_warps, of_blocks);             \
    }                                                                                                                  \
    extern "C" __global__ void write_chosen_##NAME(                                                                    \
        Index count, Index length, const Word* numbers, const Word* indices, const T* values, const Search* search,    \
        const Word* of_warps, const Word* of_blocks, T* x, Word* sent_indices, T* sent_values                          \
    ) {                                                                                                                \
        const Candidates<T> among(count, length, numbers, indices, values);                                            \
        write_chosen(among, search, of_warps, of_blocks, x, sent_indices, sent_values);                                \
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
