// Of all elements the k of largest magnitude, of equal ones the first, in the order in which they lie. The magnitude of
// the last of them is found digit by digit (radix select); then every block writes its own behind those of the blocks
// before it, which it counts. Counting is in integers, so that its order does not matter.

typedef unsigned long long Bits;

enum { DIGITS = 256 };  // one for each thread

// What is known of the magnitude of the last element that is sent, and how many of just that magnitude are sent.
struct Limit {
    Bits digits;
    Index ties;
};

// Without the sign; a NaN is larger than all others, which are equal.
__device__ inline Bits magnitude_of(Half x) { return (x & 0x7FFF) > 0x7C00 ? 0x7FFF : x & 0x7FFF; }
__device__ inline Bits magnitude_of(BFloat16 x) { return (x.bits & 0x7FFF) > 0x7F80 ? 0x7FFF : x.bits & 0x7FFF; }
__device__ inline Bits magnitude_of(float x) { return x != x ? 0x7FFFFFFF : bits_of_float(x) & 0x7FFFFFFF; }
__device__ inline Bits magnitude_of(double x) { return x != x ? ~0ull >> 1 : bits_of_double(x) & ~0ull >> 1; }

// Each block counts the digits at `shift` of elements whose higher digits are those that are known: `counts` has shape
// (blocks, DIGITS). First of all, where `adds`, `residual += grad`.
template <class T>
__device__ void count_digits(
    const T* __restrict__ grad, T* __restrict__ residual, Index count, int shift, bool adds,
    const Limit* __restrict__ limit, Word* __restrict__ counts
) {
    __shared__ Word of_block[DIGITS];
    of_block[threadIdx.x] = 0;
    __syncthreads();
    const Bits known = adds ? 0 : limit->digits;
    constexpr int N = 16 / sizeof(T);
    for_packs<N>(count, is_aligned<N>(grad, residual), [&](Index i, auto width) {
        constexpr int n = decltype(width)::value;
        auto kept = load<n>(residual + i);
        if (adds) {
            const auto given = load<n>(grad + i);
            for (int k = 0; k < n; ++k) kept.at[k] = narrowed<T>(added(given.at[k], kept.at[k]));
            store(residual + i, kept);
        }
        for (int k = 0; k < n; ++k) {
            const Bits digits = magnitude_of(kept.at[k]) >> shift;
            if (digits / DIGITS == known) atomicAdd(&of_block[digits % DIGITS], 1u);
        }
    });
    __syncthreads();
    counts[Index(blockIdx.x) * DIGITS + threadIdx.x] = of_block[threadIdx.x];
}

// One block: from the counts of all `blocks` one digit more of `limit`, which the first call sets for `k` elements.
__device__ inline void choose_next_digit(const Word* counts, Index blocks, Index k, bool is_first, Limit* limit) {
    __shared__ Index of_all[DIGITS];
    Index total = 0;
    for (Index block = 0; block < blocks; ++block) total += counts[block * DIGITS + threadIdx.x];
    of_all[threadIdx.x] = total;
    __syncthreads();
    if (threadIdx.x != 0) return;
    Limit found = is_first ? Limit{0, k} : *limit;
    int digit = DIGITS - 1;
    for (; of_all[digit] < found.ties; --digit) found.ties -= of_all[digit];
    *limit = {found.digits * DIGITS + digit, found.ties};
}

// How many of its `chunk` elements each block has above the limit, and just at it: `numbers` has shape (2, blocks).
template <class T>
__device__ void count_chosen(
    const T* __restrict__ x, Index count, Index chunk, const Limit* __restrict__ limit, Word* __restrict__ numbers
) {
    const Index first = blockIdx.x * chunk, last = first + chunk < count ? first + chunk : count;
    Word above = 0, ties = 0;
    for (Index i = first + threadIdx.x; i < last; i += blockDim.x) {
        const Bits magnitude = magnitude_of(x[i]);
        above += magnitude > limit->digits;
        ties += magnitude == limit->digits;
    }
    above = block_sum(above);
    ties = block_sum(ties);
    if (threadIdx.x == 0) {
        numbers[blockIdx.x] = above;
        numbers[gridDim.x + blockIdx.x] = ties;
    }
}

// How many threads of the block before this one say yes, and how many in all; all threads must call it.
struct Votes {
    int before, all;
};

__device__ inline Votes votes_of_block(bool yes) {
    __shared__ int of_warp[THREADS / WARP];
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const Word votes = __ballot_sync(~0u, yes);
    if (lane == 0) of_warp[warp] = __popc(votes);
    __syncthreads();
    Votes found = {__popc(votes & ((1u << lane) - 1)), 0};
    for (int each = 0; each < THREADS / WARP; ++each) {
        if (each < warp) found.before += of_warp[each];
        found.all += of_warp[each];
    }
    __syncthreads();  // before a next vote overwrites it
    return found;
}

// What is sent becomes 0 in `x`, and what is not finite, of which there may be more.
template <class T>
__device__ void write_chosen(
    T* __restrict__ x, Index count, Index chunk, const Limit* __restrict__ limit, const Word* __restrict__ numbers,
    Word* __restrict__ indices, T* __restrict__ values
) {
    Index above = 0, ties = 0;
    for (Index block = threadIdx.x; block < blockIdx.x; block += blockDim.x) {
        above += numbers[block];
        ties += numbers[gridDim.x + block];
    }
    above = block_sum(above);
    ties = block_sum(ties);
    const Index first = blockIdx.x * chunk, last = first + chunk < count ? first + chunk : count;
    for (Index at = first; at < last; at += blockDim.x) {
        const Index i = at + threadIdx.x;
        const T value = i < last ? x[i] : T{};
        const Bits magnitude = magnitude_of(value);
        const bool is_above = i < last && magnitude > limit->digits, is_tie = i < last && magnitude == limit->digits;
        const Votes of_above = votes_of_block(is_above), of_ties = votes_of_block(is_tie);
        const Index ties_before = ties + of_ties.before;
        if (is_above || (is_tie && ties_before < limit->ties)) {
            const Index place = above + of_above.before + (ties_before < limit->ties ? ties_before : limit->ties);
            indices[place] = Word(i);
            values[place] = value;
            x[i] = T{};
        } else if (i < last && !is_finite(widened(value))) {
            x[i] = T{};
        }
        above += of_above.all;
        ties += of_ties.all;
    }
}

// The other way; what is not sent is 0 before.
template <class T>
__device__ void decode_top_k(
    const Word* __restrict__ indices, const T* __restrict__ values, Index k, T* __restrict__ out, Index count
) {
    for (Index i = this_thread(); i < k; i += all_threads()) {
        if (indices[i] < count) out[indices[i]] = values[i];
    }
}
