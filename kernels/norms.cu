// Sums of squares, and the scale that clips a gradient. Specification: hpcdp/kernels/reference.py, with sums equal up
// to rounding in float64. Blocks write partial sums, which `add_partials` adds. The order of additions depends on the
// number of elements alone, not on addresses or the kind of GPU.
#include "common.cuh"

enum { PIECES = 128 };  // blocks that sum one layer; also in hpcdp/kernels/cuda/kernels.py

// The sum of squares of what thread `thread` of `threads` is to read of `count` elements; `x` may begin anywhere.
template <class T> __device__ double squares(const T* __restrict__ x, Index count, Index thread, Index threads) {
    double total = 0;
    for_same_packs<16 / sizeof(T), 4>(x, count, thread, threads, [&](Index, const auto& pack) {
        for (int k = 0; k < pack.size; ++k) {
            const double each = widened(pack.at[k]);
            total += each * each;
        }
    });
    return total;
}

template <class T> __device__ void sum_of_squares(const T* x, Index count, double* partial) {
    const double total = block_sum(squares(x, count, this_thread(), all_threads()));
    if (threadIdx.x == 0) partial[blockIdx.x] = total;
}

// PIECES blocks a layer: `partial` has shape (layers, 2, PIECES), of weights and of gradients.
template <class T>
__device__ void segment_squares(const T* params, const T* grads, const Index* bounds, double* partial) {
    const Index layer = blockIdx.x / PIECES, piece = blockIdx.x % PIECES;
    const Index first = bounds[layer], count = bounds[layer + 1] - first;
    const Index thread = piece * blockDim.x + threadIdx.x, threads = Index(PIECES) * blockDim.x;
    const double weights = block_sum(squares(params + first, count, thread, threads));
    const double gradients = block_sum(squares(grads + first, count, thread, threads));
    if (threadIdx.x == 0) {
        partial[2 * layer * PIECES + piece] = weights;
        partial[(2 * layer + 1) * PIECES + piece] = gradients;
    }
}

// One block for each row of `partial`, shape (rows, width).
template <class T> __device__ void add_partials(const double* partial, Index width, T* out) {
    double total = 0;
    for (Index i = threadIdx.x; i < width; i += blockDim.x) total += partial[blockIdx.x * width + i];
    total = block_sum(total);
    if (threadIdx.x == 0) out[blockIdx.x] = narrowed<T>(typename WideOf<T>::Type(total));
}

// The scale is `*scale_at`, if that is not null. One thread of one block.
extern "C" __global__ void clipped_scale(
    const double* squares, Index count, double scale, const double* scale_at, double most, double* out
) {
    if (threadIdx.x) return;
    double total = 0;
    for (Index i = 0; i < count; ++i) total += squares[i];
    const double norm = sqrt(total);
    if (scale_at) scale = *scale_at;
    *out = is_finite(norm) && norm * scale > most ? most / norm : scale;
}

#define KERNELS(T, NAME)                                                                                               \
    extern "C" __global__ void sum_of_squares_##NAME(const T* x, Index count, double* partial) {                       \
        sum_of_squares(x, count, partial);                                                                             \
    }                                                                                                                  \
    extern "C" __global__ void segment_squares_##NAME(                                                                 \
        const T* params, const T* grads, const Index* bounds, double* partial                                          \
    ) {                                                                                                                \
        segment_squares(params, grads, bounds, partial);                                                               \
    }                                                                                                                  \
    extern "C" __global__ void add_partials_##NAME(const double* partial, Index width, T* out) {                       \
        add_partials(partial, width, out);                                                                             \
    }

KERNELS(Half, f16)
KERNELS(BFloat16, bf16)
KERNELS(float, f32)
KERNELS(double, f64)
