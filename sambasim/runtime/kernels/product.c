/* The product of two matrices, with the bits of MKL's product on non-Intel CPUs.

   There, MKL splits the inner dimension into blocks, sums the products of a block one after another with fused
   multiply-adds, and then adds the sums of the blocks. Only this order decides the bits of an element, so wider vectors
   and other tile shapes than MKL's give the same bits.

   A tile of ROWS x COLUMNS elements stays in registers for a block. A panel of COLUMNS columns of the second operand is
   copied to contiguous memory, because all tiles of a column read it. A band of rows of the first operand is used for
   all panels before the next band, so its BAND_BYTES stay in a cache. The result's elements and the next panel are
   prefetched while tiles are computed. */

#include <immintrin.h>
#include <stdint.h>
#include <string.h>

#define ROWS 14
#define BAND_BYTES (2 << 20)
#define LANES 16
#define COLUMNS (2 * LANES)
#define LINE 16 /* floats per cache line */

static inline __attribute__((always_inline)) void tile(int rows, const float *a, int64_t row_stride, int64_t stride,
                                                       const float *panel, int64_t block, const float *bias,
                                                       float *out, int64_t out_stride, int is_first)
{
    __m512 sums[ROWS][2];
    for (int row = 0; row < rows; row++) {
        sums[row][0] = sums[row][1] = _mm512_setzero_ps();
        for (int number = 0; number < COLUMNS; number += LINE)
            __builtin_prefetch(out + row * out_stride + number, 1);
    }
    for (int64_t k = 0; k < block; k++) {
        __m512 left = _mm512_loadu_ps(panel + COLUMNS * k), right = _mm512_loadu_ps(panel + COLUMNS * k + LANES);
        for (int row = 0; row < rows; row++) {
            __m512 factor = _mm512_set1_ps(a[row * row_stride + k * stride]);
            sums[row][0] = _mm512_fmadd_ps(factor, left, sums[row][0]);
            sums[row][1] = _mm512_fmadd_ps(factor, right, sums[row][1]);
        }
    }
    for (int row = 0; row < rows; row++)
        for (int half = 0; half < 2; half++) {
            float *place = out + row * out_stride + half * LANES;
            const float *before = is_first ? bias : out + row * out_stride;
            __m512 sum = sums[row][half];
            if (before != NULL)
                sum = _mm512_add_ps(_mm512_loadu_ps(before + half * LANES), sum);
            _mm512_storeu_ps(place, sum);
        }
}

/* The compiler makes a loop of its own for each number of rows, and for either layout of `a`. */
#define CASE(N)                                                                                                        \
    case N:                                                                                                            \
        tile(N, a, row_stride, stride, panel, block, bias, out, out_stride, is_first);                                 \
        break;

static inline __attribute__((always_inline)) void tile_of(int64_t rows, const float *a, int64_t row_stride,
                                                          int64_t stride, const float *panel, int64_t block,
                                                          const float *bias, float *out, int64_t out_stride,
                                                          int is_first)
{
    switch (rows) {
        CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8) CASE(9) CASE(10) CASE(11) CASE(12) CASE(13)
    default:
        tile(ROWS, a, row_stride, stride, panel, block, bias, out, out_stride, is_first);
    }
}

/* 16 rows of 16 numbers, `from_stride` apart, become 16 columns. Pairs of rows change what lies off their diagonals: first
   single numbers, then squares of 2, 4 and 8. */
static inline __attribute__((always_inline)) void turn(const float *from, int64_t from_stride, float *to)
{
    __m512 rows[LANES];
    __m512i lanes = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0), other = _mm512_set1_epi32(LANES);
    for (int row = 0; row < LANES; row++)
        rows[row] = _mm512_loadu_ps(from + row * from_stride);
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
    for (int row = 0; row < LANES; row++)
        _mm512_storeu_ps(to + row * COLUMNS, rows[row]);
}

/* A panel of b: `length` rows of COLUMNS numbers. Either rows or columns of b are dense. */
static void copy(const float *b, int64_t row_stride, int64_t stride, int64_t length, float *panel)
{
    if (stride == 1) {
        for (int64_t k = 0; k < length; k++)
            memcpy(panel + COLUMNS * k, b + k * row_stride, COLUMNS * sizeof(float));
        return;
    }
    int64_t k = 0;
    for (; k + LANES <= length; k += LANES)
        for (int half = 0; half < 2; half++)
            turn(b + k + half * LANES * stride, stride, panel + COLUMNS * k + half * LANES);
    for (; k < length; k++)
        for (int column = 0; column < COLUMNS; column++)
            panel[COLUMNS * k + column] = b[k + column * stride];
}

/* Of a panel that is copied later: part `part` of `parts` comes to the second cache. */
static void fetch(const float *b, int64_t row_stride, int64_t stride, int64_t length, int64_t part, int64_t parts)
{
    int64_t dense = stride == 1 ? COLUMNS : length, others = stride == 1 ? length : COLUMNS;
    int64_t apart = stride == 1 ? row_stride : stride;
    for (int64_t other = others * part / parts; other < others * (part + 1) / parts; other++)
        for (int64_t number = 0; number < dense; number += LINE)
            __builtin_prefetch(b + other * apart + number, 0, 2);
}

/* out = a b, or bias + a b

   a [rows, inner], b [inner, columns]: each by its two strides, of which one is 1
   bias [columns], or NULL; it comes before the sums of the blocks
   out [rows, columns]: dense; columns is a multiple of COLUMNS
   block: how many products are added up before the sums of blocks are
   panel: room for block * COLUMNS numbers */
void product(const float *a, int64_t row_stride, int64_t stride, const float *b, int64_t b_row_stride, int64_t b_stride,
             const float *bias, float *out, int64_t rows, int64_t inner, int64_t columns, int64_t block, float *panel)
{
    int64_t tiles = BAND_BYTES / (inner * ROWS * (int64_t)sizeof(float)), band = ROWS * (tiles > 8 ? tiles : 8);
    for (int64_t top = 0; top < rows; top += band) {
        int64_t end = rows - top < band ? rows : top + band;
        for (int64_t column = 0; column < columns; column += COLUMNS)
            for (int64_t start = 0; start < inner; start += block) {
                const float *of_panel = bias == NULL ? NULL : bias + column;
                int64_t length = inner - start < block ? inner - start : block;
                copy(b + start * b_row_stride + column * b_stride, b_row_stride, b_stride, length, panel);
                int is_last = start + block >= inner;
                int64_t next = is_last ? 0 : start + block, next_column = is_last ? column + COLUMNS : column;
                int64_t next_length = next_column == columns ? 0 : inner - next < block ? inner - next : block;
                const float *next_panel = next_length == 0 ? b : b + next * b_row_stride + next_column * b_stride;
                int64_t parts = (end - top + ROWS - 1) / ROWS;
                for (int64_t row = top; row < end; row += ROWS) {
                    fetch(next_panel, b_row_stride, b_stride, next_length, (row - top) / ROWS, parts);
                    const float *corner = a + row * row_stride + start * stride;
                    float *place = out + row * columns + column;
                    if (row_stride == 1)
                        tile_of(end - row, corner, 1, stride, panel, length, of_panel, place, columns, start == 0);
                    else
                        tile_of(end - row, corner, row_stride, 1, panel, length, of_panel, place, columns, start == 0);
                }
            }
    }
}
