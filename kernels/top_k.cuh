// Of all elements the k of largest magnitude, of equal ones the first, in the order in which they lie.
//
// A sample tells two digits of a magnitude that somewhat more than k elements reach: one digit is not enough, since what
// is kept of gradients gathers just below what is sent. Those are candidates, which every warp sets aside from its own
// stretch of elements while it adds them up: memory is passed over once. Should they be fewer than k, all elements but
// zeros become candidates, and of zeros, of which the first are sent, those that lie among the first k elements. Among
// candidates the magnitude of the last that is sent is found digit by digit (radix select); then every warp writes its
// own behind those of the warps before it, which are counted, so that none waits for another. Counting is in integers,
// so that its order does not matter, with atomic additions.

typedef unsigned long long Bits;

enum { DIGIT_BITS = 11, DIGITS = 1 << DIGIT_BITS };  // as many as leave room for other blocks in shared memory

// What is known of the magnitude of the last element that is sent, and how many of just that magnitude are sent; less
// than none where there are too few elements (`next_limit`).
struct Limit {
    Bits digits;
    Index ties;
};

struct Search {
    Limit limit;
    Bits floor;  // of candidates
    Word again;  // whether there were fewer than k of them
    Word ended;  // blocks of the launch that is under way
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

// Of a magnitude of this type, without its highest digit.
template <class T> constexpr int LOWER_BITS = 8 * sizeof(T) - 1 - DIGIT_BITS;

// How many elements of a block have each digit; all threads must call its functions.
struct Digits {
    Word* of_block;

    __device__ explicit Digits(Word* shared) : of_block(shared) {
        for (int digit = threadIdx.x; digit < DIGITS; digit += THREADS) of_block[digit] = 0;
        __syncthreads();
    }

    __device__ void count(Bits digit) { atomicAdd(&of_block[digit], 1u); }

    // Adds them to those of all blocks; returns whether this block is the last to do so, which then finds all.
    __device__ bool is_last_to_add(Word* counts, Word* ended) {
        __shared__ bool is_last;
        __syncthreads();
        for (int digit = threadIdx.x; digit < DIGITS; digit += THREADS) {
            if (of_block[digit] > 0) atomicAdd(&counts[digit], of_block[digit]);
        }
        __threadfence();
        __syncthreads();
        if (threadIdx.x == 0) {
            is_last = atomicAdd(ended, 1u) == gridDim.x - 1;
            if (is_last) *ended = 0;  // for the next launch
        }
        __syncthreads();
        __threadfence();
        return is_last;
    }
};

// The limit with a digit of `bits` more, by the counts of elements that have what was known; its `ties` are negative
// where those are fewer than are to be sent. All threads of a block must call it, and get it.
__device__ inline Limit next_limit(const volatile Word* counts, Limit before, int bits) {
    enum { EACH = DIGITS / THREADS };
    __shared__ Index from_here[THREADS];  // how many have the digits of this thread or higher ones
    __shared__ Limit found;
    const int thread = threadIdx.x;
    if (thread == 0) found = {before.digits << bits | (DIGITS - 1), before.ties > 0 ? -1 : 0};
    Index own = 0;
    for (int each = 0; each < EACH; ++each) own += counts[thread * EACH + each];
    from_here[thread] = own;
    for (int step = 1; step < THREADS; step *= 2) {
        __syncthreads();
        const Index more = thread + step < THREADS ? from_here[thread + step] : 0;
        __syncthreads();
        from_here[thread] += more;
    }
    Index above = from_here[thread] - own;
    for (int digit = thread * EACH + EACH - 1; digit >= thread * EACH; --digit) {
        const Index here = counts[digit];
        if (above < before.ties && before.ties <= above + here) {
            found = {before.digits << bits | digit, before.ties - above};
        }
        above += here;
    }
    __syncthreads();
    return found;
}

// Of every `stride` packs one, not always in the same place, since elements may repeat themselves with the stride: a
// digit, of `bits` at `shift`, of the magnitude that `wanted` of its elements reach, which as far as it is known becomes
// the floor; where there are not as many, all but zeros reach it, of which sparse gradients have too many. What is not
// finite must be a candidate, whatever there is of it.
template <class T>
__device__ void sample_floor(
    const T* __restrict__ grad, const T* __restrict__ residual, Index count, Index stride, Index wanted, bool first,
    int shift, int bits, Search* search, Word* counts
) {
    __shared__ Word of_block[DIGITS];
    Digits digits(of_block);
    constexpr int N = 16 / sizeof(T);
    const bool aligned = is_aligned<N>(grad, residual);
    const Limit before = first ? Limit{0, wanted} : search->limit;
    for (Index of = this_thread(); of * stride < count / N; of += all_threads()) {
        const Index pack = of * stride + (Word(of) * 2654435761u >> 8) % stride;
        if (pack >= count / N) continue;
        const auto given = load_from<N>(grad + pack * N, aligned);
        const auto kept = load_from<N>(residual + pack * N, aligned);
        for (int k = 0; k < N; ++k) {
            const Bits found = magnitude_of(narrowed<T>(added(given.at[k], kept.at[k]))) >> shift;
            if (found >> bits == before.digits) digits.count(found & ((1u << bits) - 1));
        }
    }
    if (!digits.is_last_to_add(counts, &search->ended)) return;
    const Limit limit = next_limit(counts, before, bits);
    const Bits found = limit.ties > 0 ? limit.digits << shift : 0, floor = found > 0 ? found : 1;
    const Bits infinity = infinity_of(T());
    if (threadIdx.x > 0) return;
    search->limit = limit;
    search->floor = floor < infinity ? floor : infinity;
}

// The elements of this thread's warp, of which each has as many, a multiple of what it has in packs of a lane each.
struct Stretch {
    Index warp, warps, first, last;
};

__device__ inline Stretch stretch_of_warp(Index count, Index length) {
    const Index warp = this_warp(), first = warp * length, last = first + length;
    return {warp, all_warps(), first < count ? first : count, last < count ? last : count};
}

// What the lanes of the warp before this one have, and all.
struct Place {
    Word before, all;
};

__device__ inline Place place_in_warp(Word own) {
    Word up_to_here = own;
    for (int step = 1; step < WARP; step *= 2) {
        const Word more = __shfl_up_sync(~0u, up_to_here, step);
        if (this_lane() >= step) up_to_here += more;
    }
    return {up_to_here - own, __shfl_sync(~0u, up_to_here, WARP - 1)};
}

// `residual += grad`, but 0 where candidates were, and those of each warp to where its stretch begins in `indices` and
// `values`, their number to `numbers`; the first digit of the limit. `again`: what there is without a floor, if that is
// needed, once what was set aside is where it was.
template <class T>
__device__ void collect(
    const T* __restrict__ grad, T* __restrict__ residual, Index count, Index length, Index wanted, bool again,
    Search* search, Word* counts, Word* __restrict__ numbers, Word* __restrict__ indices, T* __restrict__ values
) {
    if (again && !search->again) return;
    __shared__ Word of_block[DIGITS];
    Digits digits(of_block);
    constexpr int N = 16 / sizeof(T), AT_ONCE = 2, HALF = 16;
    const Stretch own = stretch_of_warp(count, length);
    const bool aligned = is_aligned<N>(grad, residual);
    const Word begin = Word(own.first), size = Word(own.last - own.first);  // from here on places are in the stretch
    grad += own.first;
    residual += own.first;
    indices += own.first;
    values += own.first;
    if (again) {
        for (Word at = this_lane(); at < numbers[own.warp]; at += WARP) residual[indices[at] - begin] = values[at];
        __syncwarp();
    }
    const Bits floor = again ? 1 : search->floor;
    const Word zeros = again && wanted > begin ? Word(wanted) - begin : 0;  // so many elements may be that, too
    Word number = 0;
    for (Word first = 0; first < size; first += AT_ONCE * WARP * N) {
        Pack<T, N> given[AT_ONCE], kept[AT_ONCE];
        for (int p = 0; p < AT_ONCE; ++p) {
            const Word i = first + (p * WARP + this_lane()) * N;
            if (i + N <= size) {
                kept[p] = load_from<N>(residual + i, aligned);
                if (!again) given[p] = load_from<N>(grad + i, aligned);
            } else {
                for (int k = 0; k < N; ++k) {
                    kept[p].at[k] = i + k < size ? residual[i + k] : T{};
                    given[p].at[k] = i + k < size ? grad[i + k] : T{};
                }
            }
        }
        Word marked[AT_ONCE], own_numbers = 0;  // those of a pack in half a word each
#pragma unroll  // else packs of eight elements go to memory, to be indexed there
        for (int p = 0; p < AT_ONCE; ++p) {
            const Word i = first + (p * WARP + this_lane()) * N;
            Pack<T, N> left;
            marked[p] = 0;
            for (int k = 0; k < N; ++k) {
                if (!again) kept[p].at[k] = narrowed<T>(added(given[p].at[k], kept[p].at[k]));
                const bool is_candidate = magnitude_of(kept[p].at[k]) >= floor;
                left.at[k] = is_candidate ? T{} : kept[p].at[k];
                marked[p] |= Word(is_candidate) << k;
            }
            for (int k = 0; k < N && i < zeros; ++k) {
                if (i + k < zeros) left.at[k] = T{};
                marked[p] |= Word(i + k < zeros) << k;
            }
            if (i + N <= size) {
                store_to(residual + i, left, aligned);
            } else {
                marked[p] &= i < size ? (1u << (size - i)) - 1 : 0;
                for (int k = 0; k < N; ++k) {
                    if (i + k < size) residual[i + k] = left.at[k];
                }
            }
            own_numbers |= Word(__popc(marked[p])) << HALF * p;
        }
        if (!__ballot_sync(~0u, own_numbers > 0)) continue;
        const Place place = place_in_warp(own_numbers);
#pragma unroll
        for (int p = 0; p < AT_ONCE; ++p) {
            Word to = number + (place.before >> HALF * p & 0xFFFF);
            for (int k = 0; k < N; ++k) {
                if (!(marked[p] >> k & 1)) continue;
                indices[to] = begin + first + (p * WARP + this_lane()) * N + k;
                values[to] = kept[p].at[k];
                digits.count(magnitude_of(kept[p].at[k]) >> LOWER_BITS<T>);
                ++to;
            }
            number += place.all >> HALF * p & 0xFFFF;
        }
    }
    if (this_lane() == 0) numbers[own.warp] = number;
    if (!digits.is_last_to_add(counts, &search->ended)) return;
    const Limit found = next_limit(counts, {0, wanted}, DIGIT_BITS);
    if (threadIdx.x > 0) return;
    search->again = found.ties < 0;
    search->limit = found;
}

// What collected a warp's candidates, and what reads them.
template <class T> struct Candidates {
    Stretch own;
    Index number;
    const Word* indices;
    const T* values;

    __device__ Candidates(Index count, Index length, const Word* numbers, const Word* indices, const T* values)
        : own(stretch_of_warp(count, length)), number(numbers[own.warp]), indices(indices + own.first),
          values(values + own.first) {}
};

// The next digit of the limit, of `bits`, at `shift`.
template <class T>
__device__ void find_digit(const Candidates<T>& among, int shift, int bits, Search* search, Word* counts) {
    __shared__ Word of_block[DIGITS];
    Digits digits(of_block);
    const Limit before = search->limit;
    for (Index at = this_lane(); at < among.number; at += WARP) {
        const Bits found = magnitude_of(among.values[at]) >> shift;
        if (found >> bits == before.digits) digits.count(found & ((1u << bits) - 1));
    }
    if (!digits.is_last_to_add(counts, &search->ended)) return;
    const Limit limit = next_limit(counts, before, bits);
    if (threadIdx.x == 0) search->limit = limit;
}

// How many candidates of each warp and of each block are above the limit, and just at it: `of_warps` has shape
// (2, warps), `of_blocks` (2, blocks).
template <class T>
__device__ void count_chosen(const Candidates<T>& among, const Search* search, Word* of_warps, Word* of_blocks) {
    const Bits limit = search->limit.digits;
    Word above = 0, ties = 0;
    for (Index at = this_lane(); at < among.number; at += WARP) {
        above += magnitude_of(among.values[at]) > limit;
        ties += magnitude_of(among.values[at]) == limit;
    }
    const Word all_above = block_sum(above), all_ties = block_sum(ties);
    above = warp_sum(above);
    ties = warp_sum(ties);
    if (threadIdx.x == 0) {
        of_blocks[blockIdx.x] = all_above;
        of_blocks[gridDim.x + blockIdx.x] = all_ties;
    }
    if (this_lane() > 0) return;
    of_warps[among.own.warp] = above;
    of_warps[among.own.warps + among.own.warp] = ties;
}

// What is sent, which is 0 in `x` already as all candidates are, and of the others what is finite to where it was.
template <class T>
__device__ void write_chosen(
    const Candidates<T>& among, const Search* search, const Word* __restrict__ of_warps,
    const Word* __restrict__ of_blocks, T* __restrict__ x, Word* __restrict__ indices, T* __restrict__ values
) {
    Index above = 0, ties = 0;
    for (Index block = threadIdx.x; block < blockIdx.x; block += blockDim.x) {
        above += of_blocks[block];
        ties += of_blocks[gridDim.x + block];
    }
    above = block_sum(above);
    ties = block_sum(ties);
    for (Index warp = among.own.warp - threadIdx.x / WARP; warp < among.own.warp; ++warp) {
        above += of_warps[warp];
        ties += of_warps[among.own.warps + warp];
    }
    const Limit limit = search->limit;
    const Word lanes_before = (1u << this_lane()) - 1;
    for (Index first = 0; first < among.number; first += WARP) {
        const Index at = first + this_lane();
        const bool is_there = at < among.number;
        const T value = is_there ? among.values[at] : T{};
        const Word index = is_there ? among.indices[at] : 0;
        const Bits magnitude = magnitude_of(value);
        const bool is_above = is_there && magnitude > limit.digits, is_tie = is_there && magnitude == limit.digits;
        const Word all_above = __ballot_sync(~0u, is_above), all_ties = __ballot_sync(~0u, is_tie);
        const Index ties_before = ties + __popc(all_ties & lanes_before);
        if (is_above || (is_tie && ties_before < limit.ties)) {
            const Index tied = ties_before < limit.ties ? ties_before : limit.ties;
            const Index to = above + __popc(all_above & lanes_before) + tied;
            indices[to] = index;
            values[to] = value;
        } else if (is_there && magnitude < infinity_of(T())) {
            x[index] = value;
        }
        above += __popc(all_above);
        ties += __popc(all_ties);
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
