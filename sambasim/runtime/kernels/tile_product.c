/* The product of two matrices of 32-bit floats by a processor's tiles, which multiply 16-bit ones (Intel's AMX).

   A 32-bit float has 24 significant bits; a bfloat16 has 8, and the same range. So each number is split into three that
   add up to it: the nearest one, the nearest to what is left, and what is left then. Of the nine products of parts the
   six largest are added up in 32-bit floats, in each step the largest last. Those that are left out are below 2^-23 of
   the product, and far below where signs are mixed. Tiles multiply 16 times as many numbers as vectors do in the same
   time; this takes 6 times as many.

   At the ends of the range it is not float32's own arithmetic. Parts, their products and their sums below 2^-126 count
   as 0, so that what is below about 2^-102 loses bits. Infinities become NaN, and so do numbers from 2^128 - 2^119 on;
   a product within 2^-8 of the largest float may become infinite.

   A block of SIDE x SIDE elements is computed in four tiles, from zero, for DEPTH of the inner dimension, and then
   added to what is there: fewer roundings follow one another than in one long sum. What is split is used for many
   blocks. Of the first operand, SIDE rows stay in the first cache; of the second, up to WIDTH columns stay in the
   second. What will be split next, and where the block goes, is fetched from memory meanwhile. */

#define _GNU_SOURCE /* for syscall */

#include <immintrin.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#define LANES 16 /* of a vector; and a tile has 16 rows of 16 times two numbers */
#define STEP (2 * LANES) /* of the inner dimension: what tiles multiply at once */
#define SIDE (2 * LANES)
#define DEPTH 128
#define WIDTH 1536
#define TILE (LANES * STEP) /* numbers in a tile */
#define PART (2 * TILE) /* of SIDE rows or columns, and one STEP */
#define PARTS 3
#define ROW_BYTES 64 /* of a tile */

typedef uint16_t bfloat16; /* the upper half of a float */

/* Where operands are split to. */
struct room {
    bfloat16 a[DEPTH / STEP * PARTS * PART], b[WIDTH / SIDE * DEPTH / STEP * PARTS * PART];
    float sums[SIDE * SIDE], edge[SIDE * DEPTH];
};

/* Part `part` of the numbers `x`, in upper halves; what is left of them stays in `x`. The last part is all that is
   left. It is not rounded, which could make a number of a NaN. */
static inline __attribute__((always_inline)) __m512i take(__m512 *x, int part)
{
    __m512i bits = _mm512_castps_si512(*x);
    if (part < PARTS - 1)
        bits = _mm512_add_epi32(bits, _mm512_set1_epi32(0x8000));
    bits = _mm512_and_si512(bits, _mm512_set1_epi32(0xffff0000));
    *x = _mm512_sub_ps(*x, _mm512_castsi512_ps(bits));
    return bits;
}

/* 32 numbers of a row of the first operand, split. */
static inline __attribute__((always_inline)) void put_row(__m512 x, __m512 y, bfloat16 *to)
{
    const __m512i upper = _mm512_set_epi16(63, 61, 59, 57, 55, 53, 51, 49, 47, 45, 43, 41, 39, 37, 35, 33, 31, 29, 27,
                                           25, 23, 21, 19, 17, 15, 13, 11, 9, 7, 5, 3, 1);
#pragma GCC unroll 3
    for (int part = 0; part < PARTS; part++) {
        __m512i left = take(&x, part), right = take(&y, part);
        _mm512_store_si512(to + part * PART, _mm512_permutex2var_epi16(left, upper, right));
    }
}

/* 16 numbers of each of two rows of the second operand, split. Tiles want those of one column together. */
static inline __attribute__((always_inline)) void put_pairs(__m512 x, __m512 y, bfloat16 *to)
{
#pragma GCC unroll 3
    for (int part = 0; part < PARTS; part++) {
        __m512i first = take(&x, part), second = take(&y, part);
        _mm512_store_si512(to + part * PART, _mm512_or_si512(_mm512_srli_epi32(first, 16), second));
    }
}

/* 16 rows of 16 numbers, `stride` apart, become 16 columns. Pairs of rows change what lies off their diagonals: first
   single numbers, then squares of 2, 4 and 8. */
static inline __attribute__((always_inline)) void turn(const float *from, int64_t stride, __m512 rows[LANES])
{
    const __m512i lanes = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    const __m512i other = _mm512_set1_epi32(LANES);
    for (int row = 0; row < LANES; row++)
        rows[row] = _mm512_loadu_ps(from + row * stride);
#pragma GCC unroll 4
    for (int side = 1; side < LANES; side *= 2) {
        __m512i swapped = _mm512_xor_si512(lanes, _mm512_set1_epi32(side));
        __mmask16 is_right = _mm512_test_epi32_mask(lanes, _mm512_set1_epi32(side));
        __m512i upper = _mm512_mask_blend_epi32(is_right, lanes, _mm512_or_si512(swapped, other));
        __m512i lower = _mm512_mask_blend_epi32(is_right, swapped, _mm512_or_si512(lanes, other));
#pragma GCC unroll 16
        for (int row = 0; row < LANES; row++)
            if (!(row & side)) {
                __m512 above = rows[row], below = rows[row + side];
                rows[row] = _mm512_permutex2var_ps(above, upper, below);
                rows[row + side] = _mm512_permutex2var_ps(above, lower, below);
            }
    }
}

/* One operand: numbers `across` apart along the result's rows or columns, and `along` apart in the inner dimension. */
struct operand {
    const float *numbers;
    int64_t across, along;
};

static inline struct operand at(struct operand from, int64_t across, int64_t along)
{
    from.numbers += across * from.across + along * from.along;
    return from;
}

static inline int64_t least(int64_t one, int64_t other)
{
    return one < other ? one : other;
}

/* SIDE rows or columns of `operand`, from `across` on, and `length` of the inner dimension, from `along` on. `side` of
   them are there. If the rest is read too, all is copied to `edge`, and zeros behind it. */
static struct operand panel_of(struct operand operand, int64_t across, int64_t along, int64_t side, int64_t length,
                               float *edge)
{
    struct operand corner = at(operand, across, along);
    if (side == SIDE && length % STEP == 0)
        return corner;
    memset(edge, 0, SIDE * DEPTH * sizeof(float));
    for (int64_t row = 0; row < side; row++)
        for (int64_t k = 0; k < length; k++)
            edge[row * DEPTH + k] = corner.numbers[row * operand.across + k * operand.along];
    return (struct operand){edge, DEPTH, 1};
}

/* Tiles of SIDE rows of the first operand. */
static void split_rows(struct operand from, int64_t steps, bfloat16 *panel)
{
    for (int64_t step = 0; step < steps; step++, panel += PARTS * PART)
        for (int half = 0; half < 2; half++) {
            struct operand corner = at(from, half * LANES, step * STEP), next = at(corner, SIDE, 0);
            bfloat16 *to = panel + half * TILE;
            if (from.along == 1)
                for (int row = 0; row < LANES; row++) {
                    const float *numbers = corner.numbers + row * from.across;
                    const float *ahead = next.numbers + row * from.across;
                    __builtin_prefetch(ahead, 0, 2);
                    __builtin_prefetch(ahead + LANES, 0, 2);
                    put_row(_mm512_loadu_ps(numbers), _mm512_loadu_ps(numbers + LANES), to + row * STEP);
                }
            else {
                __m512 left[LANES], right[LANES];
                for (int k = 0; k < STEP; k++)
                    __builtin_prefetch(next.numbers + k * from.along, 0, 2);
                turn(corner.numbers, from.along, left);
                turn(corner.numbers + LANES * from.along, from.along, right);
                for (int row = 0; row < LANES; row++)
                    put_row(left[row], right[row], to + row * STEP);
            }
        }
}

/* Tiles of SIDE columns of the second operand. */
static void split_columns(struct operand from, int64_t steps, bfloat16 *panel)
{
    for (int64_t step = 0; step < steps; step++, panel += PARTS * PART)
        for (int half = 0; half < 2; half++) {
            struct operand corner = at(from, half * LANES, step * STEP), next = at(corner, SIDE, 0);
            bfloat16 *to = panel + half * TILE;
            if (from.across == 1)
                for (int pair = 0; pair < LANES; pair++) {
                    const float *numbers = corner.numbers + 2 * pair * from.along, *ahead = numbers + SIDE;
                    __builtin_prefetch(ahead, 0, 2);
                    __builtin_prefetch(ahead + from.along, 0, 2);
                    put_pairs(_mm512_loadu_ps(numbers), _mm512_loadu_ps(numbers + from.along), to + pair * STEP);
                }
            else
                for (int k = 0; k < STEP; k += LANES) {
                    __m512 rows[LANES];
                    for (int column = 0; column < LANES; column++)
                        __builtin_prefetch(next.numbers + column * from.across + k, 0, 2);
                    turn(corner.numbers + k, from.across, rows);
                    for (int pair = 0; pair < LANES / 2; pair++)
                        put_pairs(rows[2 * pair], rows[2 * pair + 1], to + (k / 2 + pair) * STEP);
                }
        }
}

/* Tiles 0 to 3 are the block; 4 and 5 hold a part of the first operand, 6 and 7 one of the second. */
#define LOAD_A(part)                                                                                                   \
    _tile_loadd(4, a + (part) * PART, ROW_BYTES);                                                                      \
    _tile_loadd(5, a + (part) * PART + TILE, ROW_BYTES)
#define LOAD_B(part)                                                                                                   \
    _tile_loadd(6, b + (part) * PART, ROW_BYTES);                                                                      \
    _tile_loadd(7, b + (part) * PART + TILE, ROW_BYTES)
#define MULTIPLY                                                                                                       \
    _tile_dpbf16ps(0, 4, 6);                                                                                           \
    _tile_dpbf16ps(1, 4, 7);                                                                                           \
    _tile_dpbf16ps(2, 5, 6);                                                                                           \
    _tile_dpbf16ps(3, 5, 7)

/* The next two rows of a block come nearer. All of them at once would keep memory from what tiles wait for. */
static inline __attribute__((always_inline)) const float *fetch(const float *place, int64_t stride)
{
    for (int row = 0; row < 2; row++, place += stride) {
        __builtin_prefetch(place, 1);
        __builtin_prefetch(place + LANES, 1);
    }
    return place;
}

/* A block that will be added to what is at `place`. */
static void block(const bfloat16 *a, const bfloat16 *b, int64_t steps, const float *place, int64_t stride, float *sums)
{
    __asm__ volatile("" ::: "memory"); /* compilers are not told that tiles read what was split */
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t step = 0; step < steps; step++, a += PARTS * PART, b += PARTS * PART) {
        LOAD_A(0);
        LOAD_B(2);
        MULTIPLY;
        place = fetch(place, stride);
        LOAD_B(1);
        MULTIPLY;
        place = fetch(place, stride);
        LOAD_A(1);
        MULTIPLY;
        place = fetch(place, stride);
        LOAD_B(0);
        MULTIPLY;
        place = fetch(place, stride);
        LOAD_A(2);
        MULTIPLY;
        LOAD_A(0);
        MULTIPLY;
    }
    _tile_stored(0, sums, 2 * ROW_BYTES);
    _tile_stored(1, sums + LANES, 2 * ROW_BYTES);
    _tile_stored(2, sums + LANES * SIDE, 2 * ROW_BYTES);
    _tile_stored(3, sums + LANES * SIDE + LANES, 2 * ROW_BYTES);
}

/* out = before + sums; rows of `before` are `before_stride` apart */
static void add(const float *sums, const float *before, int64_t before_stride, float *out, int64_t out_stride,
                int64_t rows, int64_t columns)
{
    __mmask16 left = columns >= LANES ? 0xffff : (1 << columns) - 1;
    __mmask16 right = columns >= SIDE ? 0xffff : columns > LANES ? (1 << (columns - LANES)) - 1 : 0;
    for (int64_t row = 0; row < rows; row++, sums += SIDE, out += out_stride) {
        __m512 first = _mm512_load_ps(sums), second = _mm512_load_ps(sums + LANES);
        if (before != NULL) {
            first = _mm512_add_ps(_mm512_maskz_loadu_ps(left, before), first);
            second = _mm512_add_ps(_mm512_maskz_loadu_ps(right, before + LANES), second);
            before += before_stride;
        }
        _mm512_mask_storeu_ps(out, left, first);
        _mm512_mask_storeu_ps(out + LANES, right, second);
    }
}

/* Room for this thread, 1.2 MB which stay; NULL where tiles may not be used, or memory is out. */
static struct room *room_of_thread(void)
{
    enum { REQUEST = 0x1023, TILE_DATA = 18 }; /* of arch_prctl(2): a process must ask for tiles, once */
    static __thread struct room *room;
    if (room == NULL && syscall(SYS_arch_prctl, REQUEST, TILE_DATA) == 0)
        room = aligned_alloc(ROW_BYTES, (sizeof(struct room) + ROW_BYTES - 1) / ROW_BYTES * ROW_BYTES);
    return room;
}

/* Whether products can be computed here, by this thread. */
int can_multiply(void)
{
    return room_of_thread() != NULL;
}

/* All tiles are whole. The shapes lie in memory for good: of what is made for the call, a compiler that takes the
   instruction to read less than it does may leave out a part (gcc 12 does, unless it puts this into its caller). */
static void configure(void)
{
    static const struct {
        uint8_t palette, start_row, reserved[14];
        uint16_t row_bytes[16];
        uint8_t rows[16];
    } shapes = {
        .palette = 1,
        .row_bytes = {ROW_BYTES, ROW_BYTES, ROW_BYTES, ROW_BYTES, ROW_BYTES, ROW_BYTES, ROW_BYTES, ROW_BYTES},
        .rows = {LANES, LANES, LANES, LANES, LANES, LANES, LANES, LANES},
    };
    _tile_loadconfig(&shapes);
}

/* out = a b, or bias + a b; 0, or 1 if there is no room

   a [rows, inner], b [inner, columns]: each by its two strides, of which one is 1; inner is at least 1
   bias [columns], or NULL
   out [rows, columns]: dense */
int product(const float *a, int64_t a_row_stride, int64_t a_stride, const float *b, int64_t b_row_stride,
            int64_t b_stride, const float *bias, float *out, int64_t rows, int64_t inner, int64_t columns)
{
    struct room *room = room_of_thread();
    if (room == NULL)
        return 1;
    struct operand left = {a, a_row_stride, a_stride}, right = {b, b_stride, b_row_stride};
    configure();
    for (int64_t first = 0; first < columns; first += WIDTH) {
        int64_t width = least(columns - first, WIDTH);
        for (int64_t k = 0; k < inner; k += DEPTH) {
            int64_t length = least(inner - k, DEPTH), steps = (length + STEP - 1) / STEP, size = steps * PARTS * PART;
            for (int64_t column = 0; column < width; column += SIDE) {
                int64_t side = least(width - column, SIDE);
                struct operand panel = panel_of(right, first + column, k, side, length, room->edge);
                split_columns(panel, steps, room->b + column / SIDE * size);
            }
            for (int64_t row = 0; row < rows; row += SIDE) {
                int64_t side = least(rows - row, SIDE);
                split_rows(panel_of(left, row, k, side, length, room->edge), steps, room->a);
                for (int64_t column = 0; column < width; column += SIDE) {
                    float *place = out + row * columns + first + column;
                    const float *before = k > 0 ? place : bias == NULL ? NULL : bias + first + column;
                    block(room->a, room->b + column / SIDE * size, steps, place, columns, room->sums);
                    add(room->sums, before, k > 0 ? columns : 0, place, columns, side, width - column);
                }
            }
        }
    }
    _tile_release();
    return 0;
}
