/* The mean of flat operands, in one pass over memory.

   torch's operators would add, write, read and divide. This kernel divides a sum before it writes it, and all sums but
   the last stay in the L1 cache. Each element has the same additions and the same division, each rounded separately, so
   the bits are the same; therefore no product may be contracted with an addition (-ffp-contract=off).

   Defined on the compiler's command line: REAL, the type of the elements; BLOCK, the number of elements added at a
   time; perhaps ROUNDS: then REAL is float, and each summand is rounded to bfloat16, to nearest even. */

#include <stdint.h>

/* The hardware does not prefetch far enough for operands in memory; with these prefetches, adding is as fast as
   reading. A prefetch beyond the last element is harmless. The address is computed as an integer, because a pointer
   there would be undefined. */
#define AHEAD_BYTES 2048
#define LINE_BYTES 64

static void fetch(const REAL *block)
{
    for (int64_t byte = 0; byte < BLOCK * (int64_t)sizeof(REAL); byte += LINE_BYTES)
        __builtin_prefetch((const void *)((uintptr_t)block + AHEAD_BYTES + (uintptr_t)byte));
}

#ifdef ROUNDS
#define IS_NARROW(place) narrow[place]

typedef union { float number; uint32_t bits; } word;

static inline float operand(float x)
{
    word from = {x}, rounded = {.bits = (from.bits + 0x7fff + (from.bits >> 16 & 1)) & 0xffff0000};
    return x == x ? rounded.number : x; /* NaN stays: the sum might carry it to a number */
}

static void widen(const uint16_t *x, float *out, int64_t numel)
{
    for (int64_t i = 0; i < numel; i++)
        out[i] = ((word){.bits = (uint32_t)x[i] << 16}).number;
}
#else
#define IS_NARROW(place) 0 /* a test for each block takes 4 % of the time of four operands */
#define operand(x) (x)
#define widen(x, out, numel) ((void)(out))
#endif

/* out may be x or y, so none is restrict; but no element is read after it has been written. */
#define EACH(VALUE) _Pragma("GCC ivdep") for (int64_t i = 0; i < numel; i++) out[i] = (VALUE)

static void add(const REAL *x, const REAL *y, REAL *out, int64_t numel, int32_t divides, REAL number)
{
    if (divides)
        EACH((operand(x[i]) + operand(y[i])) / number);
    else if (number != 1)
        EACH((operand(x[i]) + operand(y[i])) * number);
    else
        EACH(operand(x[i]) + operand(y[i]));
}

/* operands: pointers to numel elements each
   additions: for each of the addition_count additions, the indices of its two summands and of its sum. Indices from 0
       up are operands, those from -1 down are rows of `sums`; the sum of the last addition goes to `out`
   near: all operands are in the core's own cache, so prefetching and reading from both halves would only cost time
   narrow: for each operand, whether its elements are of bfloat16, which takes ROUNDS
   sums: rows of BLOCK elements
   divides, number: whether the last sum is divided by `number`, or multiplied by it */
void tree_mean(const REAL *const *operands, const int32_t *additions, int32_t addition_count, int32_t near,
               const uint8_t *narrow, REAL *sums, REAL *out, int64_t numel, int32_t divides, REAL number)
{
    if (addition_count == 1 && near && !IS_NARROW(additions[0]) && !IS_NARROW(additions[1])) {
        add(operands[additions[0]], operands[additions[1]], out, numel, divides, number);
        return;
    }
    /* By turns from both halves: of two operands, that keeps twice as many reads on their way from memory. */
    int64_t blocks = (numel + BLOCK - 1) / BLOCK, half = (blocks + 1) / 2;
    for (int64_t turn = 0; turn < blocks; turn++) {
        int64_t start = (turn / 2 + turn % 2 * half) * BLOCK;
        int64_t length = numel - start < BLOCK ? numel - start : BLOCK;
        for (int32_t n = 0; n < addition_count; n++) {
            const int32_t *places = additions + 3 * n;
            const REAL *summands[2];
            REAL wide[2][BLOCK];
            for (int side = 0; side < 2; side++) {
                int is_operand = places[side] >= 0;
                summands[side] = is_operand ? operands[places[side]] + start : sums + BLOCK * (-1 - places[side]);
                if (is_operand && IS_NARROW(places[side])) {
                    widen((const uint16_t *)operands[places[side]] + start, wide[side], length);
                    summands[side] = wide[side];
                } else if (is_operand && !near)
                    fetch(summands[side]);
            }
            if (n == addition_count - 1)
                add(summands[0], summands[1], out + start, length, divides, number);
            else
                add(summands[0], summands[1], sums + BLOCK * (-1 - places[2]), length, 0, 1);
        }
    }
}
