// Batch normalisation. reference.py is the specification: sums are in float64, in an order that depends on the shape
// alone; what is done element by element has its bits.
#include "common.cuh"

enum { PIECES = 16 };  // of a channel, cuda_batch_norm.py launches as many blocks for each

// Passed by value: the shape of `x`.
struct Shape {
    Index batch, channels, size;
};

struct Two {
    double first, second;
};

// Sums the two numbers of `body(index, channel)` over each channel, by blocks: into `partial`, shape (2, channels,
// PIECES), which add_partials of norms.cu adds.
template <class Body> __device__ inline void sum_channels(const Shape& shape, double* partial, Body body) {
    const Index channel = blockIdx.x / PIECES, piece = blockIdx.x % PIECES;
    double first = 0, second = 0;
    for (Index i = piece * blockDim.x + threadIdx.x; i < shape.batch * shape.size; i += Index(PIECES) * blockDim.x) {
        const Two each = body((i / shape.size * shape.channels + channel) * shape.size + i % shape.size, channel);
        first += each.first;
        second += each.second;
    }
    first = block_sum(first);
    second = block_sum(second);
    if (threadIdx.x == 0) {
        partial[channel * PIECES + piece] = first;
        partial[(shape.channels + channel) * PIECES + piece] = second;
    }
}

// The sums of the elements and of their squares.
template <class T> __device__ void channel_sums(const T* __restrict__ x, const Shape& shape, double* partial) {
    sum_channels(shape, partial, [&](Index i, Index) {
        const double each = x[i];
        return Two{each, each * each};
    });
}

// The sums of what is left of the elements without `mean`, and of its squares, which cancel less.
template <class T>
__device__ void centred_sums(const T* __restrict__ x, const T* __restrict__ mean, const Shape& shape, double* partial) {
    sum_channels(shape, partial, [&](Index i, Index channel) {
        const double each = x[i] - mean[channel];
        return Two{each, each * each};
    });
}

// The sums of `gy`, and of its products with elements without `mean`.
template <class T>
__device__ void gradient_sums(
    const T* __restrict__ gy, const T* __restrict__ x, const T* __restrict__ mean, const Shape& shape, double* partial
) {
    sum_channels(shape, partial, [&](Index i, Index channel) {
        return Two{double(gy[i]), double(gy[i]) * double(x[i] - mean[channel])};
    });
}

template <class T>
__device__ void normalise(
    const T* __restrict__ x, const T* __restrict__ mean, const T* __restrict__ factor, const T* __restrict__ shift,
    T* __restrict__ out, const Shape& shape
) {
    constexpr int N = 16 / sizeof(T);
    const bool aligned = is_aligned<N>(x, out) && shape.size % N == 0;  // no pack lies in two channels
    for_packs<N>(shape.batch * shape.channels * shape.size, aligned, [&](Index i, auto width) {
        constexpr int n = decltype(width)::value;
        const Index channel = i / shape.size % shape.channels;
        const T centre = mean[channel], by = factor[channel], offset = shift[channel];
        auto pack = load<n>(x + i);
        for (int k = 0; k < n; ++k) pack.at[k] = (pack.at[k] - centre) * by + offset;
        store(out + i, pack);
    });
}

template <class T>
__device__ void gradient_of_input(
    const T* __restrict__ gy, const T* __restrict__ x, const T* __restrict__ mean, const T* __restrict__ inverse,
    const T* __restrict__ constant, const T* __restrict__ slope, const T* __restrict__ factor, T* __restrict__ dx,
    const Shape& shape
) {
    constexpr int N = 16 / sizeof(T);
    const bool aligned = is_aligned<N>(gy, x, dx) && shape.size % N == 0;
    for_packs<N>(shape.batch * shape.channels * shape.size, aligned, [&](Index i, auto width) {
        constexpr int n = decltype(width)::value;
        const Index channel = i / shape.size % shape.channels;
        auto pack = load<n>(gy + i);
        const auto given = load<n>(x + i);
        for (int k = 0; k < n; ++k) {
            const T normal = (given.at[k] - mean[channel]) * inverse[channel];
            pack.at[k] = (pack.at[k] - constant[channel] - normal * slope[channel]) * factor[channel];
        }
        store(dx + i, pack);
    });
}

#define KERNELS(T, NAME)                                                                                               \
    extern "C" __global__ void channel_sums_##NAME(const T* x, Shape shape, double* partial) {                         \
        channel_sums(x, shape, partial);                                                                               \
    }                                                                                                                  \
    extern "C" __global__ void centred_sums_##NAME(const T* x, const T* mean, Shape shape, double* partial) {          \
        centred_sums(x, mean, shape, partial);                                                                         \
    }                                                                                                                  \
    extern "C" __global__ void gradient_sums_##NAME(                                                                   \
        const T* gy, const T* x, const T* mean, Shape shape, double* partial                                           \
    ) {                                                                                                                \
        gradient_sums(gy, x, mean, shape, partial);                                                                    \
    }                                                                                                                  \
    extern "C" __global__ void normalise_##NAME(                                                                       \
        const T* x, const T* mean, const T* factor, const T* shift, T* out, Shape shape                                \
    ) {                                                                                                                \
        normalise(x, mean, factor, shift, out, shape);                                                                 \
    }                                                                                                                  \
    extern "C" __global__ void gradient_of_input_##NAME(                                                               \
        const T* gy, const T* x, const T* mean, const T* inverse, const T* constant, const T* slope, const T* factor,  \
        T* dx, Shape shape                                                                                             \
    ) {                                                                                                                \
        gradient_of_input(gy, x, mean, inverse, constant, slope, factor, dx, shape);                                   \
    }

KERNELS(float, f32)
KERNELS(double, f64)
