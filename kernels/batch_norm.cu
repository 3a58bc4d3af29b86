// Batch normalization. Specification: hpcdp/kernels/reference.py. Sums are in float64 (for 16-bit formats, those of a
// pack in float32 after a center was subtracted), in an order that depends on the shape alone. Elementwise results have
// the reference's bits; in 16-bit formats they are float32 results rounded once. Arrays with one element a channel are
// in the wide type.
//
// Mean and variance take one pass: sums of the deviations from a typical element of their channel (`center_of`), and of
// their squares. The cancellation is harmless: where that element is k deviations from the mean, the variance loses a
// factor of k^2 of the precision of a pack's sums (float64; float32 for 16-bit formats), and k is at most the square
// root of n.
#include "common.cuh"
#include "channels.cuh"

template <class T> struct Two {
    T first, second;
};

// What sums of a pack are.
template <class T> struct SumOf { typedef double Type; };
template <> struct SumOf<Half> { typedef float Type; };
template <> struct SumOf<BFloat16> { typedef float Type; };

// Sums the two numbers of `body(elements of all arrays)` over each channel, by as many blocks for each: into `partial`,
// shape (2, channels, pieces). Those of a pack are added up as what they are, since a multiprocessor converts to float64
// a quarter as fast as it computes with that.
template <int ARRAYS, class T, class Body>
__device__ inline void sum_channels(const T* const (&from)[ARRAYS], const Shape& shape, double* partial, Body body) {
    Two<double> total = {0, 0};
    for_packs_of_channel(from, shape, [&](Index, const auto& packs) {
        T elements[ARRAYS];
        decltype(body(elements)) of_pack = {0, 0};
        for (int at = 0; at < packs[0].size; ++at) {
            for (int array = 0; array < ARRAYS; ++array) elements[array] = packs[array].at[at];
            const auto each = body(elements);
            of_pack.first += each.first;
            of_pack.second += each.second;
        }
        total.first += of_pack.first;
        total.second += of_pack.second;
    });
    const double first = block_sum(total.first), second = block_sum(total.second);
    if (threadIdx.x == 0) {
        partial[blockIdx.x] = first;
        partial[gridDim.x + blockIdx.x] = second;
    }
}

// What is subtracted of the elements of a channel before they are added up: the median of its first, middle and last
// element, if that is a number. One that is far from all others, as a first one alone may be, is not it.
template <class T> __device__ inline double center_of(const T* x, const Shape& shape, Index channel) {
    if (shape.batch * shape.size == 0) return 0;
    const Index middle = shape.batch / 2 * shape.channels * shape.size + shape.size / 2;
    const Index last = (shape.batch - 1) * shape.channels * shape.size + shape.size - 1;
    const T* const from = x + channel * shape.size;
    const auto a = widened(from[0]), b = widened(from[middle]), c = widened(from[last]);
    const auto low = a < b ? a : b, high = a < b ? b : a, median = c < low ? low : c > high ? high : c;
    return is_finite(median) ? median : 0;
}

template <class Sum, class T>
__device__ void sums_without(Sum center, const T* __restrict__ x, const Shape& shape, double* partial) {
    sum_channels({x}, shape, partial, [&](const T (&of)[1]) {
        const Sum each = Sum(widened(of[0])) - center;
        return Two<Sum>{each, each * each};
    });
}

// The sums of the elements, or of what is left of them without their `center_of`, and of the squares.
template <class T>
__device__ void channel_sums(const T* __restrict__ x, const Shape& shape, bool centered, double* partial) {
    if (centered) {
        sums_without<typename SumOf<T>::Type>(center_of(x, shape, part_of(shape).channel), x, shape, partial);
    } else {
        sums_without<double>(0, x, shape, partial);
    }
}

// One block for each channel: its sums over all pieces.
__device__ inline Two<double> sums_of_pieces(const double* partial, Index pieces) {
    Two<double> total = {0, 0};
    for (Index i = threadIdx.x; i < pieces; i += blockDim.x) {
        total.first += partial[blockIdx.x * pieces + i];
        total.second += partial[(gridDim.x + blockIdx.x) * pieces + i];
    }
    return {block_sum(total.first), block_sum(total.second)};
}

// Mean and variance of centered sums, and the factor that `normalize` is given.
template <class T, class Wide>
__device__ void statistics(
    const T* x, const double* partial, const Wide* scale, Wide eps, Wide* mean, Wide* variance, Wide* factor,
    const Shape& shape, Index pieces
) {
    const Index channel = blockIdx.x;
    const Two<double> sums = sums_of_pieces(partial, pieces);
    if (threadIdx.x > 0) return;
    const double count = shape.batch * shape.size, off = sums.first / count, rest = sums.second / count - off * off;
    mean[channel] = center_of(x, shape, channel) + off;
    variance[channel] = rest < 0 ? 0 : rest;  // by rounding
    factor[channel] = scale[channel] / sqrt(variance[channel] + eps);
}

// The sums of `gy`, and of its products with elements without `mean`.
template <class T, class Wide>
__device__ void gradient_sums(
    const T* __restrict__ gy, const T* __restrict__ x, const Wide* __restrict__ mean, const Shape& shape,
    double* partial
) {
    const Wide center = mean[part_of(shape).channel];
    sum_channels({gy, x}, shape, partial, [&](const T (&of)[2]) {
        typedef typename SumOf<T>::Type Sum;
        const Sum each = widened(of[0]);
        return Two<Sum>{each, each * Sum(widened(of[1]) - center)};
    });
}

// The gradients of scale and shift, and what `gradient_of_input` is given of channels.
template <class Wide>
__device__ void channel_gradients(
    const double* partial, const Wide* scale, const Wide* variance, Wide eps, Wide* dscale, Wide* dshift,
    Wide* of_channels, Index count, Index pieces
) {
    const Index channel = blockIdx.x, channels = gridDim.x;
    const Two<double> sums = sums_of_pieces(partial, pieces);
    if (threadIdx.x > 0) return;
    const Wide root = sqrt(variance[channel] + eps), inverse = 1 / root;
    const double of_normal = sums.second / root;
    dshift[channel] = sums.first;
    dscale[channel] = of_normal;
    of_channels[channel] = inverse;
    of_channels[channels + channel] = sums.first / count;
    of_channels[2 * channels + channel] = of_normal / count;
    of_channels[3 * channels + channel] = scale[channel] * inverse;
}

template <class T, class Wide>
__device__ void normalize(
    const T* __restrict__ x, const Wide* __restrict__ mean, const Wide* __restrict__ factor,
    const Wide* __restrict__ shift, T* __restrict__ out, const Shape& shape
) {
    constexpr int N = 16 / sizeof(T);
    const bool aligned = is_aligned<N>(x, out) && shape.size % N == 0;  // no pack lies in two channels
    for_packs<N>(shape.batch * shape.channels * shape.size, aligned, [&](Index i, auto width) {
        constexpr int n = decltype(width)::value;
        const Index channel = i / shape.size % shape.channels;
        const Wide center = mean[channel], by = factor[channel], offset = shift[channel];
        auto pack = load<n>(x + i);
        for (int k = 0; k < n; ++k) pack.at[k] = narrowed<T>((widened(pack.at[k]) - center) * by + offset);
        store(out + i, pack);
    });
}

// `of_channels`, shape (4, channels), has what follows in this order.
template <class T, class Wide>
__device__ void gradient_of_input(
    const T* __restrict__ gy, const T* __restrict__ x, const Wide* __restrict__ mean,
    const Wide* __restrict__ of_channels, T* __restrict__ dx, const Shape& shape
) {
    const Wide *inverse = of_channels, *constant = inverse + shape.channels, *slope = constant + shape.channels;
    const Wide* factor = slope + shape.channels;
    constexpr int N = 16 / sizeof(T);
    const bool aligned = is_aligned<N>(gy, x, dx) && shape.size % N == 0;
    for_packs<N>(shape.batch * shape.channels * shape.size, aligned, [&](Index i, auto width) {
        constexpr int n = decltype(width)::value;
        const Index channel = i / shape.size % shape.channels;
        auto pack = load<n>(gy + i);
        const auto given = load<n>(x + i);
        for (int k = 0; k < n; ++k) {
            const Wide normal = (widened(given.at[k]) - mean[channel]) * inverse[channel];
            const Wide rest = widened(pack.at[k]) - constant[channel] - normal * slope[channel];
            pack.at[k] = narrowed<T>(rest * factor[channel]);
        }
        store(dx + i, pack);
    });
}

#define KERNELS(T, WIDE, NAME)                                                                                         \
    extern "C" __global__ void channel_sums_##NAME(const T* x, bool centered, Shape shape, double* partial) {           \
        channel_sums(x, shape, centered, partial);                                                                      \
    }                                                                                                                  \
    extern "C" __global__ void statistics_##NAME(                                                                      \
        const T* x, const double* partial, const WIDE* scale, WIDE eps, WIDE* mean, WIDE* variance, WIDE* factor,      \
        Shape shape, Index pieces                                                                                      \
    ) {                                                                                                                \
        statistics(x, partial, scale, eps, mean, variance, factor, shape, pieces);                                     \
    }                                                                                                                  \
    extern "C" __global__ void gradient_sums_##NAME(                                                                   \
        const T* gy, const T* x, const WIDE* mean, Shape shape, double* partial                                        \
    ) {                                                                                                                \
        gradient_sums(gy, x, mean, shape, partial);                                                                    \
    }                                                                                                                  \
    extern "C" __global__ void channel_gradients_##NAME(                                                               \
        const double* partial, const WIDE* scale, const WIDE* variance, WIDE eps, WIDE* dscale, WIDE* dshift,          \
        WIDE* of_channels, Index count, Index pieces                                                                   \
    ) {                                                                                                                \
        channel_gradients(partial, scale, variance, eps, dscale, dshift, of_channels, count, pieces);                  \
    }                                                                                                                  \
    extern "C" __global__ void normalize_##NAME(                                                                       \
        const T* x, const WIDE* mean, const WIDE* factor, const WIDE* shift, T* out, Shape shape                       \
    ) {                                                                                                                \
        normalize(x, mean, factor, shift, out, shape);                                                                 \
    }                                                                                                                  \
    extern "C" __global__ void gradient_of_input_##NAME(                                                               \
        const T* gy, const T* x, const WIDE* mean, const WIDE* of_channels, T* dx, Shape shape                         \
    ) {                                                                                                                \
        gradient_of_input(gy, x, mean, of_channels, dx, shape);                                                        \
    }

KERNELS(Half, float, f16)
KERNELS(BFloat16, float, bf16)
KERNELS(float, float, f32)
KERNELS(double, double, f64)
