// N-way reductions of arrays of one size, such as buckets that the ranks of a node have mapped. Specification:
// hpcdp/kernels/reference.py, with the same order and the same bits.
#include "common.cuh"

enum { MAX_ROWS = 32 };
enum { SUM, PROD, MIN, MAX, MEAN };

// Passed by value: the rows of ranks lie in memory of their own.
struct Rows {
    void* at[MAX_ROWS];
};

template <class Wide> __device__ inline Wide combined(Wide a, Wide b, int op) {
    switch (op) {
        case PROD: return a * b;
        case MIN: return a < b || a != a ? a : b;
        case MAX: return a > b || a != a ? a : b;
        default: return a + b;
    }
}

// All rows are read before any is written, element by element, so targets may be rows.
template <class T> __device__ void combine(const Rows& rows, int n, const Rows& targets, int m, Index count, int op) {
    typedef typename WideOf<T>::Type Wide;
    constexpr int N = 16 / sizeof(T);
    bool aligned = true;
    for (int row = 0; row < n; ++row) aligned = aligned && is_aligned<N>(static_cast<const T*>(rows.at[row]));
    for (int row = 0; row < m; ++row) aligned = aligned && is_aligned<N>(static_cast<const T*>(targets.at[row]));
    for_packs<N>(count, aligned, [&](Index i, auto width) {
        constexpr int k_end = decltype(width)::value;
        auto pack = load<k_end>(static_cast<const T*>(rows.at[0]) + i);
        Wide total[k_end];
        for (int k = 0; k < k_end; ++k) total[k] = widened(pack.at[k]);
        for (int row = 1; row < n; ++row) {
            pack = load<k_end>(static_cast<const T*>(rows.at[row]) + i);
            for (int k = 0; k < k_end; ++k) total[k] = combined(total[k], Wide(widened(pack.at[k])), op);
        }
        for (int k = 0; k < k_end; ++k) pack.at[k] = narrowed<T>(op == MEAN ? total[k] / Wide(n) : total[k]);
        for (int row = 0; row < m; ++row) store(static_cast<T*>(targets.at[row]) + i, pack);
    });
}

#define KERNEL(T, NAME)                                                                                                \
    extern "C" __global__ void combine_##NAME(Rows rows, int n, Rows targets, int m, Index count, int op) {            \
        combine<T>(rows, n, targets, m, count, op);                                                                    \
    }

KERNEL(Half, f16)
KERNEL(BFloat16, bf16)
KERNEL(float, f32)
KERNEL(double, f64)
KERNEL(int, i32)
KERNEL(Index, i64)
