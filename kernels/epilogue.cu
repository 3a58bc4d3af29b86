// Bias and activation after a product or a convolution, in one pass over memory, and their gradients. Specification:
// hpcdp/kernels/reference.py, with the same bits; 16-bit results are those of float32 rounded once. Sums are in
// float64, in an order that depends on the shape alone.
#include "common.cuh"
#include "channels.cuh"

// `y` has `count` elements, `size` neighboring ones of each channel. A pack may lie in several channels.
template <class T>
__device__ void add_bias(
    T* __restrict__ y, const T* __restrict__ bias, Index count, Index channels, Index size, bool relu
) {
    constexpr int N = 16 / sizeof(T);
    for_packs<N>(count, is_aligned<N>(y), [&](Index i, auto width) {
        constexpr int n = decltype(width)::value;
        Index channel = i / size % channels, in_plane = i % size;
        auto pack = load<n>(y + i);
        for (int k = 0; k < n; ++k) {
            pack.at[k] = narrowed<T>(activated(widened(pack.at[k]) + widened(bias[channel]), relu));
            if (++in_plane < size) continue;
            in_plane = 0;
            if (++channel == channels) channel = 0;
        }
        store(y + i, pack);
    });
}

// The gradient of ReLU for one element, of which `y` is the result.
template <class T> __device__ inline T behind_relu(T gy, T y) { return widened(y) > 0 ? gy : T{}; }

// `gy` and `dx` may be one array.
template <class T> __device__ void relu_gradient(const T* gy, const T* y, T* dx, Index count) {
    map_packs(dx, count, behind_relu<T>, gy, y);
}

// The sum of a channel, where one block has summed all of it; else of its piece, for add_partials of norms.cu.
template <class T>
__device__ void store_sum(double total, Index channel, Index piece, Index pieces, double* partial, T* sums) {
    if (pieces == 1) {
        sums[channel] = narrowed<T>(typename WideOf<T>::Type(total));
    } else {
        partial[channel * pieces + piece] = total;
    }
}

// With `relu`, `dx` becomes relu_gradient, and that is summed, else `gy`.
template <class T>
__device__ void bias_gradient_of_images(
    const T* __restrict__ gy, const T* __restrict__ y, T* __restrict__ dx, const Shape& shape, bool relu,
    double* partial, T* sums
) {
    double total = 0;
    if (relu) {
        for_packs_of_channel({gy, y}, shape, [&](Index i, auto& packs) {
            auto& pack = packs[0];
            constexpr int n = sizeof pack.at / sizeof(T);
            for (int k = 0; k < n; ++k) {
                pack.at[k] = behind_relu(pack.at[k], packs[1].at[k]);
                total += widened(pack.at[k]);
            }
            store_to(dx + i, pack, is_aligned<n>(dx));
        });
    } else {
        for_packs_of_channel({gy}, shape, [&](Index, const auto& packs) {
            for (const T& each : packs[0].at) total += widened(each);
        });
    }
    total = block_sum(total);
    const Part part = part_of(shape);
    if (threadIdx.x == 0) store_sum(total, part.channel, part.piece, part.pieces, partial, sums);
}

// Columns of a block: 32 bytes of float16, which memory reads at once. Also in hpcdp/kernels/cuda/kernels.py.
enum { COLUMNS = 16 };

// The same of rows: neighboring threads have the columns of a row, and a block's pieces those rows between the others.
template <class T>
__device__ void bias_gradient_of_rows(
    const T* __restrict__ gy, const T* __restrict__ y, T* __restrict__ dx, const Shape& shape, bool relu,
    double* partial, T* sums
) {
    constexpr int ROWS = THREADS / COLUMNS;
    __shared__ double of_thread[THREADS];
    const Index groups = (shape.channels + COLUMNS - 1) / COLUMNS, pieces = gridDim.x / groups;
    const Index column = blockIdx.x / pieces * COLUMNS + threadIdx.x % COLUMNS, piece = blockIdx.x % pieces;
    const Index first = (piece * ROWS + threadIdx.x / COLUMNS) * shape.channels + column;
    double total = 0;
    if (column < shape.channels) {
        const Index count = shape.batch * shape.channels;
        for_same_packs<1, 8>(gy, count, first, pieces * ROWS * shape.channels, [&](Index i, auto pack) {
            if (relu) {
                pack.at[0] = behind_relu(pack.at[0], y[i]);
                dx[i] = pack.at[0];
            }
            total += widened(pack.at[0]);
        });
    }
    of_thread[threadIdx.x] = total;
    __syncthreads();
    if (threadIdx.x >= COLUMNS || column >= shape.channels) return;
    for (int row = 1; row < ROWS; ++row) total += of_thread[row * COLUMNS + threadIdx.x];
    store_sum(total, column, piece, pieces, partial, sums);
}

#define KERNELS(T, NAME)                                                                                               \
    extern "C" __global__ void add_bias_##NAME(                                                                       \
        T* y, const T* bias, Index count, Index channels, Index size, bool relu                                        \
    ) {                                                                                                                \
        add_bias(y, bias, count, channels, size, relu);                                                                \
    }                                                                                                                  \
    extern "C" __global__ void relu_gradient_##NAME(const T* gy, const T* y, T* dx, Index count) {                     \
        relu_gradient(gy, y, dx, count);                                                                               \
    }                                                                                                                  \
    extern "C" __global__ void bias_gradient_of_images_##NAME(                                                         \
        const T* gy, const T* y, T* dx, Shape shape, bool relu, double* partial, T* sums                               \
    ) {                                                                                                                \
        bias_gradient_of_images(gy, y, dx, shape, relu, partial, sums);                                                \
    }                                                                                                                  \
    extern "C" __global__ void bias_gradient_of_rows_##NAME(                                                           \
        const T* gy, const T* y, T* dx, Shape shape, bool relu, double* partial, T* sums                               \
    ) {                                                                                                                \
        bias_gradient_of_rows(gy, y, dx, shape, relu, partial, sums);                                                  \
    }

KERNELS(Half, f16)
KERNELS(BFloat16, bf16)
KERNELS(float, f32)
KERNELS(double, f64)
