// Softmax and cross-entropy. Specification: hpcdp/kernels/reference.py, with the same numbers up to the rounding of
// exp, log and a quotient, and the same bits of the gradient for the same chances. Sums are in float64, in an order
// that depends on the number of classes and their type alone. For 16-bit logits, chances and losses are float32, and
// the gradient is that of float32 rounded once. A label that is out of range makes the loss and all chances of its row
// NaN, because the host could see it only by waiting for the device.
#include "common.cuh"

// Packs of its row that a thread keeps in shared memory, where exp is computed once of each; others it reads again.
enum { KEPT = 8 };

// Up to N elements of a row from `i` on; none is larger than those that are missing in it.
template <int N, class T> __device__ inline Pack<T, N> read_row(const T* x, Index i, Index width, bool aligned) {
    if (i + N <= width) return load_from<N>(x + i, aligned);
    Pack<T, N> pack;
    for (int k = 0; k < N; ++k) pack.at[k] = i + k < width ? x[i + k] : narrowed<T>(-1 / typename WideOf<T>::Type(0));
    return pack;
}

// `lanes` neighboring threads have a row, so that short rows share a block; see `among_lanes`.
template <class T, class Wide>
__device__ void softmax_cross_entropy(
    const T* __restrict__ logits, const Index* __restrict__ labels, Wide* __restrict__ chances,
    Wide* __restrict__ losses, Index rows, Index classes, int lanes
) {
    constexpr int N = 16 / sizeof(Wide), AT_ONCE = 4;
    __shared__ Pack<Wide, N> kept[KEPT][THREADS];
    const int lane = threadIdx.x % lanes;
    const Index at_once = blockDim.x / lanes, step = Index(lanes) * N;
    for (Index first = blockIdx.x * at_once; first < rows; first += gridDim.x * at_once) {
        const Index row = first + threadIdx.x / lanes;
        const Index width = row < rows ? classes : 0;  // what is no row waits with the others
        const T* const x = logits + row * classes;
        Wide* const out = chances + row * classes;
        const bool aligned = is_aligned<N>(x, out);
        const Index label = width > 0 ? labels[row] : 0;
        const bool is_class = label >= 0 && label < width;
        const Wide of_label = lane == 0 && is_class ? widened(x[label]) : Wide(0);
        Wide largest = -1 / Wide(0);  // a NaN is lost here, and found again in the sum
#pragma unroll 1
        for (Index i = lane * N, own = 0; i < width; i += AT_ONCE * step, own += AT_ONCE) {
            Pack<T, N> packs[AT_ONCE];  // all are on their way before the first is used
            for (int p = 0; p < AT_ONCE; ++p) packs[p] = read_row<N>(x, i + p * step, width, aligned);
            for (int p = 0; p < AT_ONCE; ++p) {
                Pack<Wide, N> wide;
                for (int k = 0; k < N; ++k) {
                    wide.at[k] = widened(packs[p].at[k]);
                    largest = wide.at[k] > largest ? wide.at[k] : largest;
                }
                if (own + p < KEPT) kept[own + p][threadIdx.x] = wide;
            }
        }
        largest = among_lanes(largest, lanes, [](Wide a, Wide b) { return a > b ? a : b; });
        const auto exponentials = [&](const auto& pack) {
            Pack<Wide, N> found;
            for (int k = 0; k < N; ++k) found.at[k] = exp(widened(pack.at[k]) - largest);
            return found;
        };
        double sum = 0;
#pragma unroll 1
        for (Index i = lane * N, own = 0; i < width; i += step, ++own) {
            Pack<Wide, N> pack;
            if (own < KEPT) {
                pack = kept[own][threadIdx.x] = exponentials(kept[own][threadIdx.x]);
            } else {
                pack = exponentials(read_row<N>(x, i, width, aligned));
            }
            for (int k = 0; k < N; ++k) sum += pack.at[k];
        }
        Wide total = sum_of_lanes(sum, lanes);
        if (width == 0) continue;
        if (!is_class) total = float_of_bits(0x7FC00000);
        const Wide share = 1 / total;
#pragma unroll 1
        for (Index i = lane * N, own = 0; i < width; i += step, ++own) {
            auto pack = own < KEPT ? kept[own][threadIdx.x] : exponentials(read_row<N>(x, i, width, aligned));
            for (int k = 0; k < N; ++k) pack.at[k] *= share;
            if (i + N <= width) {
                store_to(out + i, pack, aligned);
            } else {
                for (int k = 0; i + k < width; ++k) out[i + k] = pack.at[k];
            }
        }
        if (lane == 0) losses[row] = log(total) - (of_label - largest);
    }
}

template <class T, class Wide>
__device__ void softmax_cross_entropy_gradient(
    const Wide* __restrict__ gy, const Index* __restrict__ labels, const Wide* __restrict__ chances,
    T* __restrict__ dx, Index count, Index classes
) {
    constexpr int N = 16 / sizeof(T);
    const bool aligned = is_aligned<N>(chances, dx) && classes % N == 0;  // no pack lies in two rows
    for_packs<N>(count, aligned, [&](Index i, auto width) {
        constexpr int n = decltype(width)::value;
        const Index row = i / classes;
        const Index place = labels[row] - i % classes;  // of the label in the pack
        const Wide of_row = gy[row];
        const auto shares = load<n>(chances + i);
        Pack<T, n> pack;
        for (int k = 0; k < n; ++k) {
            const Wide share = shares.at[k] * of_row;
            pack.at[k] = narrowed<T>(place == k ? share - of_row : share);
        }
        store(dx + i, pack);
    });
}

#define KERNELS(T, WIDE, NAME)                                                                                         \
    extern "C" __global__ void softmax_cross_entropy_##NAME(                                                           \
        const T* logits, const Index* labels, WIDE* chances, WIDE* losses, Index rows, Index classes, int lanes        \
    ) {                                                                                                                \
        softmax_cross_entropy(logits, labels, chances, losses, rows, classes, lanes);                                  \
    }                                                                                                                  \
    extern "C" __global__ void softmax_cross_entropy_gradient_##NAME(                                                  \
        const WIDE* gy, const Index* labels, const WIDE* chances, T* dx, Index count, Index classes                    \
    ) {                                                                                                                \
        softmax_cross_entropy_gradient(gy, labels, chances, dx, count, classes);                                       \
    }

KERNELS(Half, float, f16)
KERNELS(BFloat16, float, bf16)
KERNELS(float, float, f32)
KERNELS(double, double, f64)
