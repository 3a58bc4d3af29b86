// Addition of rows to those of a table. Specification: hpcdp/kernels/reference.py, with the same bits: additions to one
// row run in the given order, by one thread for each column. Atomic additions would run in another order in each run.
//
// To find the additions to each row, the numbers of the rows are sorted digit by digit from the last (radix sort); each
// pass keeps the order of equal digits. The sort moves places in the list: `order` says which comes at each.
#include "common.cuh"

enum { DIGITS = THREADS, AHEAD = 8 };  // one for each thread; so many values are on their way at once

// The row that comes at a place; one that is not in the table comes behind all others, and is left out in the end.
__device__ inline Index row_at(const Index* __restrict__ rows, Index at, Index number) {
    const Index row = rows[at];
    return row >= 0 && row < number ? row : number;
}

// The digits at `shift` of a block's `chunk` places: `counts` has shape (blocks, DIGITS).
extern "C" __global__ void count_digits(
    const Index* rows, Index count, Index number, const Index* order, Index chunk, int shift, bool is_first, Word* counts
) {
    __shared__ Word of_block[DIGITS];
    of_block[threadIdx.x] = 0;
    __syncthreads();
    const Index first = blockIdx.x * chunk, last = first + chunk < count ? first + chunk : count;
    for (Index i = first + threadIdx.x; i < last; i += blockDim.x) {
        const Index row = row_at(rows, is_first ? i : order[i], number);
        atomicAdd(&of_block[(row >> shift) % DIGITS], 1u);
    }
    __syncthreads();
    counts[Index(blockIdx.x) * DIGITS + threadIdx.x] = of_block[threadIdx.x];
}

// One block: where each block puts the first place of each digit, behind all smaller ones and those of blocks before.
extern "C" __global__ void find_starts(const Word* counts, Index blocks, Index* starts) {
    __shared__ Index of_all[DIGITS];
    Index total = 0;
    for (Index block = 0; block < blocks; ++block) total += counts[block * DIGITS + threadIdx.x];
    of_all[threadIdx.x] = total;
    __syncthreads();
    Index start = 0;
    for (unsigned digit = 0; digit < threadIdx.x; ++digit) start += of_all[digit];
    for (Index block = 0; block < blocks; ++block) {
        starts[block * DIGITS + threadIdx.x] = start;
        start += counts[block * DIGITS + threadIdx.x];
    }
}

// Each thread has one digit, and looks for it at all places of its block in turn.
extern "C" __global__ void sort_by_digit(
    const Index* rows, Index count, Index number, const Index* order, Index chunk, int shift, bool is_first,
    const Index* starts, Index* sorted
) {
    __shared__ Index places[THREADS];
    __shared__ unsigned digits[THREADS];
    Index next = starts[Index(blockIdx.x) * DIGITS + threadIdx.x];
    const Index first = blockIdx.x * chunk, last = first + chunk < count ? first + chunk : count;
    for (Index at = first; at < last; at += blockDim.x) {
        const Index i = at + threadIdx.x;
        if (i < last) {
            places[threadIdx.x] = is_first ? i : order[i];
            digits[threadIdx.x] = (row_at(rows, places[threadIdx.x], number) >> shift) % DIGITS;
        }
        __syncthreads();
        const int here = last - at < THREADS ? int(last - at) : THREADS;
        for (int k = 0; k < here; ++k) {
            if (digits[k] == threadIdx.x) sorted[next++] = places[k];
        }
        __syncthreads();  // before the next ones overwrite them
    }
}

// The first place of each row adds up all of them, in a column.
template <class T>
__device__ void add_sorted(
    const Index* __restrict__ rows, Index count, Index number, const Index* __restrict__ order,
    const T* __restrict__ values, Index features, T* __restrict__ table
) {
    for (Index i = this_thread(); i < count * features; i += all_threads()) {
        const Index begin = i / features, column = i % features, row = row_at(rows, order[begin], number);
        if (row == number || (begin > 0 && row_at(rows, order[begin - 1], number) == row)) continue;
        T total = table[row * features + column];
        bool is_over = false;
        for (Index at = begin; !is_over; at += AHEAD) {
            T ahead[AHEAD];
            int found = 0;
            for (int k = 0; k < AHEAD; ++k) {
                const Index place = at + k < count ? order[at + k] : -1;
                const bool is_same = place >= 0 && row_at(rows, place, number) == row;
                if (is_same) ahead[k] = values[place * features + column];
                found += is_same;
            }
            for (int k = 0; k < found; ++k) total = narrowed<T>(added(total, ahead[k]));
            is_over = found < AHEAD;
        }
        table[row * features + column] = total;
    }
}

#define KERNELS(T, NAME)                                                                                               \
    extern "C" __global__ void add_sorted_##NAME(                                                                      \
        const Index* rows, Index count, Index number, const Index* order, const T* values, Index features, T* table    \
    ) {                                                                                                                \
        add_sorted(rows, count, number, order, values, features, table);                                               \
    }

KERNELS(Half, f16)
KERNELS(BFloat16, bf16)
KERNELS(float, f32)
KERNELS(double, f64)
