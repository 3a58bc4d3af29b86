// Of all elements the k of largest magnitude, of equal ones the first, in the order in which they lie. The magnitude of
// the last of them is found digit by digit (radix select); then every block writes its own behind those of the blocks
// before it, which it counts. Counting is in integers, so that its order does not matter, with atomic additions.

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

// That of an infinity of this type.
__device__ inline Bits infinity_of(Half) { return 0x7C00; }
__device__ inline Bits infinity_of(BFloat16) { return 0x7F80; }
__device__ inline Bits infinity_of(float) { return 0x7F800000; }
__device__ inline Bits infinity_of(double) { return 0x7FFull << 52; }

// Adds to `counts`, shape (DIGITS,), zeros before, the digits at `shift` of elements whose higher digits are those that
// are known. First of all, where `adds`, `residual += grad`.
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
    if (of_block[threadIdx.x] > 0) atomicAdd(&counts[threadIdx.x], of_block[threadIdx.x]);
}

// One block: from the counts one digit more of `limit`, which the first call sets for `k` elements.
__device__ inline void choose_next_digit(const Word* counts, Index k, bool is_first, Limit* limit) {
    __shared__ Index from_here[DIGITS];  // how many have this digit or a higher one
    const Limit before = is_first ? Limit{0, k} : *limit;
    const int digit = threadIdx.x;
    from_here[digit] = counts[digit];
    for (int step = 1; step < DIGITS; step *= 2) {
        __syncthreads();
        const Index more = digit + step < DIGITS ? from_here[digit + step] : 0;
        __syncthreads();
        from_here[digit] += more;
    }
    const Index above = from_here[digit] - counts[digit];
    const bool is_here = above < before.ties && before.ties <= from_here[digit];
    if (before.ties > 0 ? is_here : digit == DIGITS - 1) *limit = {before.digits * DIGITS + digit, before.ties - above};
}

// How many of its `chunk` elements each block has above the limit, and just at it: `numbers` has shape (2, blocks).
template <class T>
__device__ void count_chosen(
    const T* __restrict__ x, Index count, Index chunk, const Limit* __restrict__ limit, Word* __restrict__ numbers
) {
    const Index first = blockIdx.x * chunk, last = first + chunk < count ? first + chunk : count;
    const Bits digits = limit->digits;
    Word above = 0, ties = 0;
    for_same_packs<16 / sizeof(T), 4>(x + first, last - first, threadIdx.x, THREADS, [&](Index, const auto& pack) {
        for (int k = 0; k < pack.size; ++k) {
            above += magnitude_of(pack.at[k]) > digits;
            ties += magnitude_of(pack.at[k]) == digits;
        }
    });
    above = block_sum(above);
    ties = block_sum(ties);
    if (threadIdx.x == 0) {
        numbers[blockIdx.x] = above;
        numbers[gridDim.x + blockIdx.x] = ties;
    }
}

// Two numbers in one word, each below 2^16: of elements above the limit, and just at it.
struct Chosen {
    Word both;
    __device__ Index above() const { return both & 0xFFFF; }
    __device__ Index ties() const { return both >> 16; }
};

// What the threads of the block before this one have, and all; all threads must call it.
struct Place {
    Chosen before, all;
};

__device__ inline Place place_in_block(Chosen own) {
    __shared__ Word of_warp[THREADS / WARP];
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    Word up_to_here = own.both;
    for (int step = 1; step < WARP; step *= 2) {
        const Word more = __shfl_up_sync(~0u, up_to_here, step);
        if (lane >= step) up_to_here += more;
    }
    if (lane == WARP - 1) of_warp[warp] = up_to_here;
    __syncthreads();
    Place found = {{up_to_here - own.both}, {0}};
    for (int each = 0; each < THREADS / WARP; ++each) {
        if (each < warp) found.before.both += of_warp[each];
        found.all.both += of_warp[each];
    }
    __syncthreads();  // before the next call overwrites it
    return found;
}

// What is sent becomes 0 in `x`, and what is not finite, of which there may be more. `chunk` is a multiple of what a
// block has in packs of a thread each.
template <class T>
__device__ void write_chosen(
    T* __restrict__ x, Index count, Index chunk, const Limit* __restrict__ limit, const Word* __restrict__ numbers,
    Word* __restrict__ indices, T* __restrict__ values
) {
    constexpr int N = 16 / sizeof(T);
    Index above = 0, ties = 0;
    for (Index block = threadIdx.x; block < blockIdx.x; block += blockDim.x) {
        above += numbers[block];
        ties += numbers[gridDim.x + block];
    }
    above = block_sum(above);
    ties = block_sum(ties);
    const Limit at_least = *limit;
    const bool aligned = is_aligned<N>(x);
    const Index last = (blockIdx.x + 1) * chunk < count ? (blockIdx.x + 1) * chunk : count;
    const auto load_some = [&](Index i) {
        if (i + N <= last) return load_from<N>(x + i, aligned);
        Pack<T, N> pack = {};
        for (int k = 0; k < N && i + k < last; ++k) pack.at[k] = x[i + k];
        return pack;
    };
    Index i = blockIdx.x * chunk + threadIdx.x * N;
    Pack<T, N> following = load_some(i);
    for (Index at = blockIdx.x * chunk; at < last; at += THREADS * N, i += THREADS * N) {
        const Pack<T, N> pack = following;
        following = load_some(i + THREADS * N);  // comes while the threads count
        Chosen own = {0};
        Word marked = 0;  // those of the pack that are sent, perhaps, or are not finite
        for (int k = 0; k < N; ++k) {
            const Bits magnitude = i + k < last ? magnitude_of(pack.at[k]) : 0;
            const bool is_above = magnitude > at_least.digits, is_tie = i + k < last && magnitude == at_least.digits;
            own.both += Word(is_above) | Word(is_tie) << 16;
            marked |= Word(is_above || is_tie || magnitude >= infinity_of(T())) << k;
        }
        const Place place = place_in_block(own);
        Index above_before = above + place.before.above(), ties_before = ties + place.before.ties();
        for (; marked > 0; marked &= marked - 1) {
            const Index here = i + __ffs(marked) - 1;
            const T value = x[here];
            const Bits magnitude = magnitude_of(value);
            const bool is_above = magnitude > at_least.digits, is_tie = magnitude == at_least.digits;
            if (is_above || (is_tie && ties_before < at_least.ties)) {
                const Index to = above_before + (ties_before < at_least.ties ? ties_before : at_least.ties);
                indices[to] = Word(here);
                values[to] = value;
                x[here] = T{};
            } else if (magnitude >= infinity_of(T())) {
                x[here] = T{};
            }
            above_before += is_above;
            ties_before += is_tie;
        }
        above += place.all.above();
        ties += place.all.ties();
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
