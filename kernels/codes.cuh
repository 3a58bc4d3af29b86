// Gradients in 2 bits or 1 bit an element. A warp encodes BLOCK elements at once: each of its lanes has several packs,
// and those of all lanes lie one behind the other, so loads and stores are of whole lines. Which elements a lane has
// does not depend on where they begin.

enum { BLOCK = 256 };

// The lane of a thread, and its warp among all.
__device__ inline int this_lane() { return threadIdx.x % WARP; }
__device__ inline Index this_warp() { return this_thread() / WARP; }
__device__ inline Index all_warps() { return all_threads() / WARP; }

// What a lane has of a block.
template <class T> struct Own {
    typedef typename WideOf<T>::Type Wide;
    static constexpr int N = 16 / sizeof(T), PACKS = BLOCK / WARP / N;
    Index first;        // of the block
    int number;         // of elements in it
    bool is_whole;      // BLOCK elements are there, and packs of them can be loaded and stored
    Wide at[PACKS][N];  // elements of `grad` and `residual` together; 0 where there are none

    __device__ Own(const T* grad, const T* residual, Index first, Index count, bool aligned)
        : first(first), number(count - first < BLOCK ? count - first : BLOCK), is_whole(aligned && number == BLOCK) {
        grad += first;
        residual += first;
        Pack<T, N> given[PACKS], kept[PACKS];
        for (int pack = 0; pack < PACKS; ++pack) {
            if (is_whole) {
                given[pack] = load<N>(grad + place(pack));
                kept[pack] = load<N>(residual + place(pack));
            } else {
                for (int k = 0; k < N; ++k) {
                    given[pack].at[k] = is_there(pack, k) ? grad[place(pack) + k] : T{};
                    kept[pack].at[k] = is_there(pack, k) ? residual[place(pack) + k] : T{};
                }
            }
        }
        for (int pack = 0; pack < PACKS; ++pack) {
            for (int k = 0; k < N; ++k) at[pack][k] = added(given[pack].at[k], kept[pack].at[k]);
        }
    }

    // The first element of a pack, counted within the block, and whether one of it exists.
    __device__ static int place(int pack) { return (pack * WARP + this_lane()) * N; }
    __device__ bool is_there(int pack, int k) const { return place(pack) + k < number; }

    __device__ void store_pack(T* to, int pack, const Pack<T, N>& x) const {
        to += first;
        if (is_whole) {
            store(to + place(pack), x);
        } else {
            for (int k = 0; k < N; ++k) {
                if (is_there(pack, k)) to[place(pack) + k] = x.at[k];
            }
        }
    }

    // Stores the word of `width` elements, of which those of this lane's pack are some, by the lane that has the first.
    __device__ void store_word(Word* words, int width, int pack, Word word) const {
        if (place(pack) % width == 0 && is_there(pack, 0)) words[first / width + place(pack) / width] = word;
    }

    // The sum of `each(element)` over the block, in a fixed order; all lanes must call it.
    template <class Each> __device__ auto sum(Each each) const {
        decltype(each(0.0)) total = 0;
        for (int pack = 0; pack < PACKS; ++pack) {
            for (int k = 0; k < N; ++k) total += each(double(at[pack][k]));
        }
        return warp_sum(total);
    }
};

// The bits of one element of which `place` are before it in its word; it leaves `left`.
struct TwoBits {
    enum { WIDTH = 16 };
    template <class Wide> static __device__ Word of(Wide total, Wide limit, Wide sent, int place, Wide& left) {
        const bool plus = total >= limit, minus = total <= -limit;
        left = total - (plus ? sent : minus ? -sent : Wide(0));
        return Word(plus) << place | Word(minus) << (16 + place);
    }
};

struct OneBit {
    enum { WIDTH = 32 };
    template <class Wide> static __device__ Word of(Wide total, Wide limit, Wide sent, int place, Wide& left) {
        const bool plus = total > limit;
        left = total - (plus ? sent : -sent);
        return Word(plus) << place;
    }
};

// Encodes a block by one of these, which all lanes must call: `residual` becomes what is left, and the code goes to
// `words`.
template <class Code, class T, class Wide>
__device__ inline void encode(const Own<T>& own, T* residual, Word* words, Wide limit, Wide sent) {
    constexpr int N = Own<T>::N;
    for (int pack = 0; pack < Own<T>::PACKS; ++pack) {
        Word word = 0;
        Pack<T, N> kept;
        for (int k = 0; k < N; ++k) {
            Wide left;
            const Word bits = Code::of(own.at[pack][k], limit, sent, Own<T>::place(pack) % Code::WIDTH + k, left);
            if (own.is_there(pack, k)) word |= bits;
            kept.at[k] = narrowed<T>(left);
        }
        for (int half = 1; half < Code::WIDTH / N; half *= 2) word |= __shfl_xor_sync(~0u, word, half);
        own.store_word(words, Code::WIDTH, pack, word);
        own.store_pack(residual, pack, kept);
    }
}

// What was sent for the `n` elements from `i` on, which lie in one word.

template <class T, int n, class Wide>
__device__ inline Pack<T, n> read_two_bits(const Word* words, Index i, Wide sent) {
    const Word word = words[i / 16] >> i % 16;
    Pack<T, n> pack;
    for (int k = 0; k < n; ++k) {
        pack.at[k] = narrowed<T>(word >> k & 1 ? sent : word >> (16 + k) & 1 ? -sent : Wide(0));
    }
    return pack;
}

template <class T, int n, class Wide>
__device__ inline Pack<T, n> read_one_bit(const Word* words, Index i, Wide sent) {
    const Word word = words[i / 32] >> i % 32;
    Pack<T, n> pack;
    for (int k = 0; k < n; ++k) pack.at[k] = narrowed<T>(word >> k & 1 ? sent : -sent);
    return pack;
}
