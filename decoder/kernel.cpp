// One pass of a Llama-shaped model over a few tokens, on the CPU, in one parallel region.
//
// A token's numbers never depend on how many tokens are computed beside it: each dot product adds in one fixed order,
// and attention goes through the slots in fixed chunks. So checking five drafts gives bit for bit the logits that
// decoding them one by one gives. Values are rounded to the weights' type where transformers rounds them.
//
// Compiled by decoder/kernel.py with WEIGHT_BF16=0 or 1 for the processor at hand. No header of torch is used.

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <new>
#include <vector>

#include <omp.h>
#if defined(__AVX512F__)
#include <immintrin.h>
#endif
#if defined(__linux__)
#include <sched.h>
#endif

#if WEIGHT_BF16
typedef uint16_t W;
#else
typedef float W;
#endif

#if WEIGHT_BF16 && defined(__AVX512BF16__)
#define PAIRS 1
typedef W X;  // what a weight is multiplied with: the instruction takes pairs of bfloat16
#else
#define PAIRS 0
typedef float X;
#endif

typedef int64_t i64;
// Sixteen numbers at a time, of any processor: the compiler splits them into what it has.
typedef float f16 __attribute__((vector_size(64), aligned(4)));
typedef int32_t s16 __attribute__((vector_size(64), aligned(4)));
typedef uint32_t u16 __attribute__((vector_size(64), aligned(4)));
typedef uint8_t b16 __attribute__((vector_size(16), aligned(1)));
typedef uint16_t h16 __attribute__((vector_size(32), aligned(2)));

static const int WIDE = 6;      // tokens that share one reading of the weights' registers
static const i64 BLOCK = 64;    // rows of a matrix whose sums are kept until they are rounded
static const i64 CHUNK = 64;    // slots of the cache that are mixed at a time
static const i64 LINE = 16;     // floats of a cache line

extern "C" {

// Matrices are [out, in], row by row; what a model does not have is null.
struct Layer {
    const W *attention_norm, *qkv, *qkv_bias, *q_norm, *k_norm, *out, *out_bias, *mlp_norm, *gate_up, *down;
};

struct Model {
    i64 hidden, heads, kv_heads, head_dim, inner, vocab, words;  // words: rows of the embedding
    float eps, embedding_scale;
    int32_t gelu, shifted;
    const W *embedding, *norm, *head, *head_bias, *cos, *sin;
    const Layer* layers;
};

// A whole model: from ids to logits. Logits null: layers alone, from `residual` to `normed` (not normed then), the first of
// them reading `read` instead of the normed residual.
struct Pass {
    i64 layers, rows, each;  // each: tokens of a row; there are rows * each = width
    i64 width, seen, layer_stride, row_stride, head_stride, first_logit, logit_count, taps, threads;
    const i64 *ids, *positions, *slots, *tap_layers;  // [width], the last one [taps]
    const uint8_t* mask;                              // [width, seen]
    W *keys, *values;    // [layers, rows, kv_heads, capacity, head_dim] with the strides above
    float* logits;       // [logit_count, vocab] of the tokens from first_logit on, rounded as the weights' type would
    W* normed;           // [width, hidden] or null
    W* const* tapped;    // [width, hidden] each
    i64 inputs;          // values of a token in `read`
    const W *read, *residual;  // [width, inputs], [width, hidden]; null in a whole model
};
}

// --- numbers ---------------------------------------------------------------------------------------------------------

static inline float bits_to_float(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

static inline float widen(float value) { return value; }
static inline float widen(uint16_t value) { return bits_to_float((uint32_t)value << 16); }

static inline uint16_t to_bf16(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    return (bits & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : (uint16_t)rounded;
}

static inline void narrow(float value, float& to) { to = value; }
static inline void narrow(float value, uint16_t& to) { to = to_bf16(value); }

// Rounded to what the weights' type can hold.
static inline float fit(float value) {
#if WEIGHT_BF16
    return bits_to_float((uint32_t)to_bf16(value) << 16);
#else
    return value;
#endif
}

static inline f16 load(const float* at) { return *(const f16*)at; }
static inline f16 load(const uint16_t* at) {
    u16 wide = __builtin_convertvector(*(const h16*)at, u16) << 16;
    return (f16)wide;
}

// The first `count` of sixteen, and zeros: what is left over is added like everything else, so that it does not depend
// on how a compiler unrolls a loop.
template <class T>
static inline f16 load_some(const T* at, i64 count) {
    T all[16] = {};
    std::memcpy(all, at, count * sizeof(T));
    return load(all);
}

static inline float total(f16 v) {
#if defined(__AVX512F__)
    return _mm512_reduce_add_ps((__m512)v);
#else
    float a[16];
    std::memcpy(a, &v, 64);
    for (int step = 8; step; step /= 2)
        for (int i = 0; i < step; i++) a[i] += a[i + step];
    return a[0];
#endif
}

#if defined(__AVX512F__)
static inline __m512 lanes(__m512 a, __m512 b) {
    return _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
}

// The sums of 16 vectors, in their order.
static inline __m512 totals(const __m512* v) {
    __m512 a[8], b[4], c[2];
    for (int i = 0; i < 8; i++)
        a[i] = _mm512_add_ps(_mm512_unpacklo_ps(v[2 * i], v[2 * i + 1]), _mm512_unpackhi_ps(v[2 * i], v[2 * i + 1]));
    for (int i = 0; i < 4; i++) {
        __m512d x = _mm512_castps_pd(a[2 * i]), y = _mm512_castps_pd(a[2 * i + 1]);
        b[i] = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(x, y)), _mm512_castpd_ps(_mm512_unpackhi_pd(x, y)));
    }
    for (int i = 0; i < 2; i++)
        c[i] = lanes(b[2 * i], b[2 * i + 1]);
    return lanes(c[0], c[1]);
}

// The sums of 4 vectors, added in the same order.
static inline __m128 totals_of_four(const __m512* v) {
    __m512 a = _mm512_add_ps(_mm512_unpacklo_ps(v[0], v[1]), _mm512_unpackhi_ps(v[0], v[1]));
    __m512 b = _mm512_add_ps(_mm512_unpacklo_ps(v[2], v[3]), _mm512_unpackhi_ps(v[2], v[3]));
    __m512d x = _mm512_castps_pd(a), y = _mm512_castps_pd(b);
    __m512 sum = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(x, y)), _mm512_castpd_ps(_mm512_unpackhi_pd(x, y)));
    sum = _mm512_add_ps(sum, _mm512_shuffle_f32x4(sum, sum, 0xb1));
    return _mm512_castps512_ps128(_mm512_add_ps(sum, _mm512_shuffle_f32x4(sum, sum, 0x4e)));
}
#endif

static inline f16 fit(f16 value) {
#if WEIGHT_BF16
    u16 bits = (u16)value, rounded = (bits + 0x7fff + ((bits >> 16) & 1)) & 0xffff0000u;
    return (f16)((bits & 0x7fffffff) > 0x7f800000 ? bits | 0x400000 : rounded);
#else
    return value;
#endif
}

static inline f16 exponential(f16 x) {
    x = x < -87.0f ? (f16){} - 87.0f : x;
    x = x > 88.0f ? (f16){} + 88.0f : x;
    const float magic = 12582912.0f;
    f16 n = (x * 1.44269504088896341f + magic) - magic;
    f16 r = x - n * 0.693359375f;
    r = r - n * -2.12194440e-4f;
    f16 p = (f16){} + 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    s16 power = (__builtin_convertvector(n, s16) + 127) << 23;
    return p * (f16)power;
}

// --- threads ---------------------------------------------------------------------------------------------------------

// All threads of a pass wait here for each other some 200 times: spinning, since a wait is shorter than a wake-up. A
// thread that lost its core gets it back by the others' yielding.
struct Barrier {
    alignas(64) std::atomic<int> waiting{0};
    alignas(64) std::atomic<int> turn{0};

    void wait(int threads) {
        if (threads == 1) return;
        int now = turn.load(std::memory_order_acquire);
        if (waiting.fetch_add(1, std::memory_order_acq_rel) == threads - 1) {
            waiting.store(0, std::memory_order_relaxed);
            turn.store(now + 1, std::memory_order_release);
            return;
        }
        for (int spins = 0; turn.load(std::memory_order_acquire) == now; spins++) {
#if defined(__x86_64__) || defined(__i386__)
            __builtin_ia32_pause();
#endif
#if defined(__linux__)
            if (spins > 20000) sched_yield();
#endif
        }
    }
};

struct Share {
    i64 from, to;
};

// Thread `me`'s part of `count` things, in multiples of `unit`.
static Share share(i64 count, i64 unit, int me, int threads) {
    i64 units = (count + unit - 1) / unit;
    i64 from = units * me / threads * unit, to = units * (me + 1) / threads * unit;
    return {std::min(from, count), std::min(to, count)};
}

// --- products --------------------------------------------------------------------------------------------------------

// out[r * T + t] = sum over k of w[r, k] x[t, k], for R rows and T tokens, always added in the same order.
template <int R, int T>
static inline void dots(const W* w, i64 size, const X* x, i64 stride, float* out) {
#if PAIRS
    __m512 sum[R][T];
    for (int r = 0; r < R; r++)
        for (int t = 0; t < T; t++) sum[r][t] = _mm512_setzero_ps();
    i64 k = 0;
    for (; k + 32 <= size; k += 32) {
        __m512bh rows[R];
        for (int r = 0; r < R; r++) {
            rows[r] = (__m512bh)_mm512_loadu_si512(w + r * size + k);
            // What comes behind these rows; the more there is to compute, the longer ahead.
            const W* ahead = T <= 2 ? w + (R + r) * size + k : w + 2 * R * size + k * R + r * 32;
            _mm_prefetch((const char*)ahead, _MM_HINT_NTA);
        }
        for (int t = 0; t < T; t++) {
            __m512bh token = (__m512bh)_mm512_loadu_si512(x + t * stride + k);
            for (int r = 0; r < R; r++) sum[r][t] = _mm512_dpbf16_ps(sum[r][t], rows[r], token);
        }
    }
    if (k < size) {
        __mmask32 left = ((uint32_t)1 << (size - k)) - 1;
        for (int t = 0; t < T; t++) {
            __m512bh token = (__m512bh)_mm512_maskz_loadu_epi16(left, x + t * stride + k);
            for (int r = 0; r < R; r++) {
                __m512bh row = (__m512bh)_mm512_maskz_loadu_epi16(left, w + r * size + k);
                sum[r][t] = _mm512_dpbf16_ps(sum[r][t], row, token);
            }
        }
    }
    const __m512* sums = &sum[0][0];
    int done = 0;
    for (; done + 16 <= R * T; done += 16) _mm512_storeu_ps(out + done, totals(sums + done));
    if (R * T - done > 8) {
        __m512 some[16];
        for (int i = 0; i < 16; i++) some[i] = done + i < R * T ? sums[done + i] : _mm512_setzero_ps();
        _mm512_storeu_ps(out + done, totals(some));
        done = R * T;
    }
    for (; done < R * T; done += 4) {
        __m512 some[4];
        for (int i = 0; i < 4; i++) some[i] = done + i < R * T ? sums[done + i] : _mm512_setzero_ps();
        _mm_storeu_ps(out + done, totals_of_four(some));
    }
#else
    f16 sum[R][T] = {};
    i64 k = 0;
    for (; k + 16 <= size; k += 16) {
        f16 rows[R];
        for (int r = 0; r < R; r++) rows[r] = load(w + r * size + k);
        for (int t = 0; t < T; t++) {
            f16 token = load(x + t * stride + k);
            for (int r = 0; r < R; r++) sum[r][t] += rows[r] * token;
        }
    }
    if (k < size)
        for (int t = 0; t < T; t++) {
            f16 token = load_some(x + t * stride + k, size - k);
            for (int r = 0; r < R; r++) sum[r][t] += load_some(w + r * size + k, size - k) * token;
        }
    for (int r = 0; r < R; r++)
        for (int t = 0; t < T; t++) out[r * T + t] = total(sum[r][t]);
#endif
}

template <int T>
struct Rows {
    static const int value = T <= 2 ? 8 : T == 3 ? 5 : 4;  // their sums fill the registers
};

// out[t * BLOCK + r]: `count` rows of w, at most BLOCK, for T tokens.
template <int T>
static void rows_for(const W* w, i64 size, i64 count, const X* x, i64 stride, float* out) {
    const int R = Rows<T>::value;
    float some[(R * T + 15) / 16 * 16];
    i64 row = 0;
    for (; row + R <= count; row += R) {
        dots<R, T>(w + row * size, size, x, stride, some);
        for (int r = 0; r < R; r++)
            for (int t = 0; t < T; t++) out[t * BLOCK + row + r] = some[r * T + t];
    }
    for (; row < count; row++) {
        dots<1, T>(w + row * size, size, x, stride, some);
        for (int t = 0; t < T; t++) out[t * BLOCK + row] = some[t];
    }
}

// The rows of w [.., size] for `width` tokens x: emit(first row, how many, token, their sums), for some rows at a time.
template <class Emit>
static void product(const W* w, i64 size, Share rows, const X* x, i64 stride, int width, const Emit& emit) {
    alignas(64) float out[WIDE * BLOCK];
    // More than WIDE tokens go in equal groups through rows that stay in the cache meanwhile.
    const int groups = (width + WIDE - 1) / WIDE;
    for (i64 row = rows.from; row < rows.to; row += BLOCK) {
        const i64 some = std::min(BLOCK, rows.to - row);
        const W* part = w + row * size;
        for (int g = 0; g < groups; g++) {
            const int first = width * g / groups, count = width * (g + 1) / groups - first;
            const X* at = x + first * stride;
            switch (count) {
                case 1: rows_for<1>(part, size, some, at, stride, out); break;
                case 2: rows_for<2>(part, size, some, at, stride, out); break;
                case 3: rows_for<3>(part, size, some, at, stride, out); break;
                case 4: rows_for<4>(part, size, some, at, stride, out); break;
                case 5: rows_for<5>(part, size, some, at, stride, out); break;
                case 6: rows_for<6>(part, size, some, at, stride, out); break;
            }
            for (int t = 0; t < count; t++) emit(row, some, first + t, out + t * BLOCK);
        }
    }
}

// --- the pass --------------------------------------------------------------------------------------------------------

static void norm_row(const float* from, const W* weight, i64 size, float eps, int shifted, float* to) {
    f16 sum = {};
    i64 k = 0;
    for (; k + 16 <= size; k += 16) sum += load(from + k) * load(from + k);
    f16 rest = load_some(from + k, size - k);
    float squares = total(sum + rest * rest);
    float scale = 1.0f / std::sqrt(squares / (float)size + eps);
    if (shifted)
        for (i64 i = 0; i < size; i++) to[i] = fit(from[i] * scale * (1.0f + widen(weight[i])));
    else
        for (i64 i = 0; i < size; i++) to[i] = fit(fit(from[i] * scale) * widen(weight[i]));
}

// Rotary positions, rounded after each operation as the eager pass does; in and out may be the same.
static void rotate(float* x, const W* cos, const W* sin, i64 size) {
    i64 half = size / 2;
    for (i64 i = 0; i < half; i++) {
        float a = x[i], b = x[i + half];
        x[i] = fit(fit(a * widen(cos[i])) + fit(-b * widen(sin[i])));
        x[i + half] = fit(fit(b * widen(cos[i + half])) + fit(a * widen(sin[i + half])));
    }
}

static void activate(const float* gate, const float* up, i64 size, int gelu, X* to) {
    for (i64 i = 0; i < size; i += 16) {
        i64 count = std::min<i64>(16, size - i);
        f16 g = fit(load_some(gate + i, count)), u = fit(load_some(up + i, count)), inside = g;
        if (gelu) inside = 1.59576912160573071f * (g + 0.044715f * g * g * g);
        f16 value = fit(fit(g / (1.0f + exponential(-inside))) * u);
        for (i64 j = 0; j < count; j++) narrow(value[j], to[i + j]);
    }
}

struct Work {
    std::vector<float> floats;
    i64 own_size;
    float *own, *hidden, *qkv, *gate_up, *part, *top, *mass;
    X *queries, *mixed, *inner;

    void make(const Model& m, i64 width, i64 seen, i64 inputs, i64 threads) {
        i64 chunks = (seen + CHUNK - 1) / CHUNK;
        i64 q = m.heads * m.head_dim, all = q + 2 * m.kv_heads * m.head_dim;
        own_size = width * std::max(m.hidden, inputs) + std::max(m.hidden, m.head_dim) + LINE;
        own_size = (own_size + LINE - 1) / LINE * LINE;
        i64 sizes[10] = {width * m.hidden, width * all, width * 2 * m.inner, chunks * width * q,
                         chunks * width * m.heads, chunks * width * m.heads, width * q, width * q,
                         width * m.inner, own_size * threads};
        i64 sum = LINE;
        for (i64& size : sizes) sum += size = (size + LINE - 1) / LINE * LINE;
        if ((i64)floats.size() < sum) floats.resize(sum);
        float* at = floats.data();
        at += (64 - (uintptr_t)at % 64) % 64 / 4;
        float** parts[6] = {&hidden, &qkv, &gate_up, &part, &top, &mass};
        for (int i = 0; i < 6; i++) *parts[i] = at, at += sizes[i];
        queries = (X*)at, at += sizes[6];
        mixed = (X*)at, at += sizes[7];
        inner = (X*)at, at += sizes[8];
        own = at;
    }
};

// part[b] = sum over n of weights[b][n] values[n], for B rows and Z * 16 columns.
template <int B, int Z>
static inline void blend(const float* weights, const W* values, i64 count, i64 d, float* const* parts, i64 column) {
    f16 sum[B][Z] = {};
    for (i64 n = 0; n < count; n++) {
        f16 v[Z];
        for (int z = 0; z < Z; z++) v[z] = load(values + n * d + column + 16 * z);
        for (int b = 0; b < B; b++)
            for (int z = 0; z < Z; z++) sum[b][z] += weights[b * CHUNK + n] * v[z];
    }
    for (int b = 0; b < B; b++)
        for (int z = 0; z < Z; z++) *(f16*)(parts[b] + column + 16 * z) = sum[b][z];
}

template <int B>
static void blend_rows(const float* weights, const W* values, i64 count, i64 d, float* const* parts) {
    i64 column = 0;
    for (; column + 64 <= d; column += 64) blend<B, 4>(weights, values, count, d, parts, column);
    for (; column + 16 <= d; column += 16) blend<B, 1>(weights, values, count, d, parts, column);
    if (column == d) return;
    f16 sum[B] = {};
    for (i64 n = 0; n < count; n++) {
        f16 v = load_some(values + n * d + column, d - column);
        for (int b = 0; b < B; b++) sum[b] += weights[b * CHUNK + n] * v;
    }
    for (int b = 0; b < B; b++) std::memcpy(parts[b] + column, &sum[b], (d - column) * 4);
}

static const float NEVER = -std::numeric_limits<float>::infinity();

// Mix chunk `chunk` of a row's slots for key-value head `kv`: for each of its tokens and each query head the largest
// score, the sum of the weights and the weighted sum of values.
static void mix_chunk(const Model& m, const Pass& p, const Work& w, i64 layer, i64 row, i64 kv, i64 chunk) {
    const i64 d = m.head_dim, group = m.heads / m.kv_heads;
    const i64 from = chunk * CHUNK, count = std::min(CHUNK, p.seen - from);
    const i64 place = layer * p.layer_stride + row * p.row_stride + kv * p.head_stride + from * d;
    const W *keys = p.keys + place, *values = p.values + place;
    const i64 room = p.head_stride / d - from;  // slots up to the end of the cache
    const float scale = 1.0f / std::sqrt((float)d);
    alignas(64) float weights[4 * CHUNK] = {};
    float* parts[4];
    const i64 rows = p.each * group;
    for (i64 first = 0; first < rows; first += 4) {
        const i64 some = std::min<i64>(4, rows - first);
        for (i64 b = 0; b < some; b++) {
            const i64 t = row * p.each + (first + b) / group, h = kv * group + (first + b) % group;
            const i64 at = (chunk * p.width + t) * m.heads + h;
            alignas(64) uint8_t sees[CHUNK] = {};
            std::memcpy(sees, p.mask + t * p.seen + from, count);
            const X* q = w.queries + (t * m.heads + h) * d;
            float* wide = weights + b * CHUNK;
            parts[b] = w.part + at * d;
            i64 n = 0;
            // Sixteen slots at a time, also where fewer are in use: nothing is made of the rest.
            for (; n < count && n + 16 <= room; n += 16) dots<16, 1>(keys + n * d, d, q, 0, wide + n);
            for (; n < count; n++) {
                float one[16];
                dots<1, 1>(keys + n * d, d, q, 0, one);
                wide[n] = one[0];
            }
            f16 most = (f16){} + NEVER;
            for (n = 0; n < CHUNK; n += 16) {
                s16 seen = __builtin_convertvector(*(const b16*)(sees + n), s16);
                f16 score = seen != 0 ? load(wide + n) * scale : (f16){} + NEVER;
                *(f16*)(wide + n) = score;
                most = score > most ? score : most;
            }
            float best = NEVER;
            for (int i = 0; i < 16; i++) best = std::max(best, most[i]);
            w.top[at] = best;
            f16 sums = {};
            for (n = 0; n < CHUNK; n += 16) {
                f16 score = load(wide + n);
                f16 weight = score == NEVER ? (f16){} : exponential(score - best);
                *(f16*)(wide + n) = weight;
                sums += weight;
            }
            w.mass[at] = total(sums);
        }
        switch (some) {
            case 1: blend_rows<1>(weights, values, count, d, parts); break;
            case 2: blend_rows<2>(weights, values, count, d, parts); break;
            case 3: blend_rows<3>(weights, values, count, d, parts); break;
            default: blend_rows<4>(weights, values, count, d, parts);
        }
    }
}

// What the chunks gave for token t and head h, put together in their order.
static void merge(const Model& m, const Pass& p, const Work& w, i64 chunks, i64 t, i64 h, float* sum) {
    const i64 d = m.head_dim, step = p.width * m.heads, at = t * m.heads + h;
    float best = -std::numeric_limits<float>::infinity(), mass = 0;
    for (i64 c = 0; c < chunks; c++) best = std::max(best, w.top[at + c * step]);
    std::fill(sum, sum + d, 0.0f);
    for (i64 c = 0; c < chunks; c++) {
        float top = w.top[at + c * step];
        if (top == -std::numeric_limits<float>::infinity()) continue;
        float factor = std::exp(top - best);
        mass += factor * w.mass[at + c * step];
        const float* part = w.part + (at + c * step) * d;
        for (i64 k = 0; k < d; k++) sum[k] += factor * part[k];
    }
    for (i64 k = 0; k < d; k++) narrow(fit(sum[k] / mass), w.mixed[(t * m.heads + h) * d + k]);
}

static void run(const Model& m, const Pass& p, const Work& w, Barrier& barrier, int me, int threads) {
    const i64 H = m.hidden, d = m.head_dim, q_size = m.heads * d, kv_size = m.kv_heads * d;
    const i64 all = q_size + 2 * kv_size, width = p.width, chunks = (p.seen + CHUNK - 1) / CHUNK;
    float* row = w.own + me * w.own_size;
    X* x = (X*)(row + (std::max(H, d) + LINE - 1) / LINE * LINE);
    auto normed = [&](const W* weight) {
        for (i64 t = 0; t < width; t++) {
            norm_row(w.hidden + t * H, weight, H, m.eps, m.shifted, row);
            for (i64 i = 0; i < H; i++) narrow(row[i], x[t * H + i]);
        }
    };
    auto copy_hidden = [&](const float* from, W* to) {
        for (i64 i = 0; i < width * H; i++) narrow(from[i], to[i]);
    };
    if (me == 0)
        for (i64 t = 0; t < width; t++) {
            const W* from = p.residual ? p.residual + t * H : m.embedding + p.ids[t] * H;
            for (i64 i = 0; i < H; i++) {
                float value = widen(from[i]);
                w.hidden[t * H + i] = m.embedding_scale != 1.0f ? fit(value * m.embedding_scale) : value;
            }
        }
    barrier.wait(threads);
    for (i64 layer = 0; layer < p.layers; layer++) {
        const Layer& l = m.layers[layer];
        if (me == 0)
            for (i64 i = 0; i < p.taps; i++)
                if (p.tap_layers[i] == layer) copy_hidden(w.hidden, p.tapped[i]);
        const i64 inputs = layer == 0 && p.read ? p.inputs : H;
        if (layer == 0 && p.read)
            for (i64 i = 0; i < width * inputs; i++) narrow(widen(p.read[i]), x[i]);
        else
            normed(l.attention_norm);
        product(l.qkv, inputs, share(all, 16, me, threads), x, inputs, width, [&](i64 r, i64 count, int t, const float* v) {
            float* to = w.qkv + t * all + r;
            if (l.qkv_bias)
                for (i64 i = 0; i < count; i++) to[i] = fit(v[i] + widen(l.qkv_bias[r + i]));
            else
                for (i64 i = 0; i < count; i++) to[i] = fit(v[i]);
        });
        barrier.wait(threads);
        // A head of q or k, of one token: its norm, its position; keys and values go to the cache.
        Share items = share(width * (m.heads + 2 * m.kv_heads), 1, me, threads);
        for (i64 item = items.from; item < items.to; item++) {
            i64 t = item / (m.heads + 2 * m.kv_heads), h = item % (m.heads + 2 * m.kv_heads);
            float* at = w.qkv + t * all + h * d;
            bool query = h < m.heads, value = h >= m.heads + m.kv_heads;
            const W* weight = query ? l.q_norm : l.k_norm;
            if (!value && weight) {
                norm_row(at, weight, d, m.eps, m.shifted, row);
                std::memcpy(at, row, d * 4);
            }
            if (!value) rotate(at, m.cos + p.positions[t] * d, m.sin + p.positions[t] * d, d);
            if (query) {
                for (i64 k = 0; k < d; k++) narrow(at[k], w.queries[(t * m.heads + h) * d + k]);
                continue;
            }
            i64 kv = h - m.heads - (value ? m.kv_heads : 0);
            W* to = (value ? p.values : p.keys) + layer * p.layer_stride + t / p.each * p.row_stride;
            to += kv * p.head_stride + p.slots[t] * d;
            for (i64 k = 0; k < d; k++) narrow(at[k], to[k]);
        }
        barrier.wait(threads);
        Share parts = share(chunks * p.rows * m.kv_heads, 1, me, threads);
        for (i64 part = parts.from; part < parts.to; part++)
            mix_chunk(m, p, w, layer, part / m.kv_heads % p.rows, part % m.kv_heads, part / m.kv_heads / p.rows);
        barrier.wait(threads);
        Share heads = share(width * m.heads, 1, me, threads);
        for (i64 item = heads.from; item < heads.to; item++)
            merge(m, p, w, chunks, item / m.heads, item % m.heads, row);
        barrier.wait(threads);
        Share rows = share(H, 16, me, threads);
        product(l.out, q_size, rows, w.mixed, q_size, width, [&](i64 r, i64 count, int t, const float* v) {
            float* to = w.hidden + t * H + r;
            if (l.out_bias)
                for (i64 i = 0; i < count; i++) to[i] = fit(to[i] + fit(v[i] + widen(l.out_bias[r + i])));
            else
                for (i64 i = 0; i < count; i++) to[i] = fit(to[i] + fit(v[i]));
        });
        barrier.wait(threads);
        normed(l.mlp_norm);
        Share inner = share(m.inner, 16, me, threads);
        auto keep = [&](i64 r, i64 count, int t, const float* v) {
            std::memcpy(w.gate_up + t * 2 * m.inner + r, v, count * 4);
        };
        product(l.gate_up, H, inner, x, H, width, keep);
        product(l.gate_up, H, {inner.from + m.inner, inner.to + m.inner}, x, H, width, keep);
        for (i64 t = 0; t < width; t++) {
            const float* gate = w.gate_up + t * 2 * m.inner + inner.from;
            activate(gate, gate + m.inner, inner.to - inner.from, m.gelu, w.inner + t * m.inner + inner.from);
        }
        barrier.wait(threads);
        product(l.down, m.inner, rows, w.inner, m.inner, width, [&](i64 r, i64 count, int t, const float* v) {
            float* to = w.hidden + t * H + r;
            for (i64 i = 0; i < count; i++) to[i] = fit(to[i] + fit(v[i]));
        });
        barrier.wait(threads);
    }
    if (!p.logits) {
        if (me == 0) copy_hidden(w.hidden, p.normed);
        return;
    }
    normed(m.norm);
    if (me == 0 && p.normed)
        for (i64 i = 0; i < width * H; i++) narrow(widen(x[i]), p.normed[i]);
    i64 first = p.first_logit;
    Share words = share(m.vocab, 16, me, threads);
    product(m.head, H, words, x + first * H, H, p.logit_count, [&](i64 r, i64 count, int t, const float* v) {
        float* to = p.logits + t * m.vocab + r;
        if (m.head_bias)
            for (i64 i = 0; i < count; i++) to[i] = fit(v[i] + widen(m.head_bias[r + i]));
        else
            for (i64 i = 0; i < count; i++) to[i] = fit(v[i]);
    });
}

// 0, or 1: a token that the embedding does not have; 2: there is no memory.
extern "C" int redline_pass(const Model* m, const Pass* p) {
    static thread_local Work work;
    const int threads = (int)p->threads;
    if (!p->residual)
        for (i64 t = 0; t < p->width; t++)
            if (p->ids[t] < 0 || p->ids[t] >= m->words) return 1;
    try {
        work.make(*m, p->width, p->seen, p->inputs, threads);
    } catch (const std::bad_alloc&) {
        return 2;
    }
    const Work& w = work;
    Barrier barrier;
#pragma omp parallel num_threads(threads)
    run(*m, *p, w, barrier, omp_get_thread_num(), omp_get_num_threads());
    return 0;
}

// out[t, r] = the product of row r of a matrix [rows, size] with token t of x [count, size], rounded as the weights' type
// would, plus bias (or null). 2: there is no memory.
extern "C" int redline_matrix(const W* weight, const W* bias, const W* x, float* out, i64 rows, i64 size, i64 count,
                              i64 threads) {
#if PAIRS
    const X* tokens = x;
#else
    static thread_local std::vector<float> wide;
    try {
        if ((i64)wide.size() < count * size) wide.resize(count * size);
    } catch (const std::bad_alloc&) {
        return 2;
    }
    for (i64 i = 0; i < count * size; i++) wide[i] = widen(x[i]);
    const X* tokens = wide.data();
#endif
#pragma omp parallel num_threads((int)threads)
    {
        Share mine = share(rows, 16, omp_get_thread_num(), omp_get_num_threads());
        product(weight, size, mine, tokens, size, (int)count, [&](i64 r, i64 some, int t, const float* v) {
            float* to = out + t * rows + r;
            for (i64 i = 0; i < some; i++) to[i] = fit(bias ? v[i] + widen(bias[r + i]) : v[i]);
        });
    }
    return 0;
}
