// Softmax and cross-entropy. reference_cross_entropy.py is the specification: the same numbers up to the rounding of
// exp and log, and the same bits of the gradient for the same chances. Sums are in float64, in an order that depends on
// the number of classes and their type alone. Of logits of 16 bits chances and losses are float32, and the gradient is
// that of float32 rounded once. A label that is out of range, which nobody can see without waiting for the device,
// makes the loss and all chances of its row NaN.
#include "common.cuh"

// `lanes` neighbouring threads have a row, so that short rows share a block; see `among_lanes`.
template <class T, class Wide>
__device__ void softmax_cross_entropy(
    const T* __restrict__ logits, const Index* __restrict__ labels, Wide* __restrict__ chances,
    Wide* __restrict__ losses, Index rows, Index classes, int lanes
) {
    constexpr int N = 16 / sizeof(T);
    const int lane = threadIdx.x % lanes;
    const Index at_once = blockDim.x / lanes;
    for (Index first = blockIdx.x * at_once; first < rows; first += gridDim.x * at_once) {
        const Index row = first + threadIdx.x / lanes;
        const Index width = row < rows ? classes : 0;  // what is no row waits with the others
        const T* const x = logits + row * classes;
        Wide largest = -1 / Wide(0);  // a NaN is lost here, and found again in the sum
        for_same_packs<N>(x, width, lane, lanes, [&](Index, const auto& pack) {
            for (int k = 0; k < pack.size; ++k) {
                const Wide each = widened(pack.at[k]);
                largest = each > largest ? each : largest;
            }
        });
        largest = among_lanes(largest, lanes, [](Wide a, Wide b) { return a > b ? a : b; });
        double sum = 0;
        for_same_packs<N>(x, width, lane, lanes, [&](Index, const auto& pack) {
            for (int k = 0; k < pack.size; ++k) sum += exp(widened(pack.at[k]) - largest);
        });
        Wide total = sum_of_lanes(sum, lanes);
        if (width == 0) continue;
        const Index label = labels[row];
        const bool is_class = label >= 0 && label < classes;
        if (!is_class) total = float_of_bits(0x7FC00000);
        Wide* const out = chances + row * classes;
        const bool aligned = is_aligned<N>(out);
        for_same_packs<N>(x, width, lane, lanes, [&](Index i, auto pack) {
            Pack<Wide, decltype(pack)::size> shares;
            for (int k = 0; k < pack.size; ++k) shares.at[k] = exp(widened(pack.at[k]) - largest) / total;
            store_to(out + i, shares, aligned);
        });
        if (lane == 0) losses[row] = log(total) - (is_class ? widened(x[label]) - largest : Wide(0));
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
