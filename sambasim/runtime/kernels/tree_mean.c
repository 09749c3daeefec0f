/* The mean of flat operands, in one pass over memory.

   The operators of torch would add, write, read and divide. Here a sum is divided before it is written, and of more than
   two operands all sums but the last stay in the first cache. Each element goes through the same additions and the same
   division as there, each rounded for itself, so the bits are the same; for that, no product may be contracted with an
   addition (-ffp-contract=off).

   From the command line of the compiler come REAL, the type of the elements; BLOCK, how many are added up at a time; and
   KEEP, MULTIPLY and DIVIDE, what is done with the last sum. */

#include <stdint.h>

/* The processor fetches ahead by itself, but not far enough for operands that come from memory: with this, adding takes no
   longer than reading does. An address behind the last element is as good: a fetch reads nothing that the program sees.
   It is computed as a number, for a pointer may not lie there. */
#define AHEAD_BYTES 2048
#define LINE_BYTES 64

static void fetch(const REAL *block)
{
    for (int64_t byte = 0; byte < BLOCK * (int64_t)sizeof(REAL); byte += LINE_BYTES)
        __builtin_prefetch((const void *)((uintptr_t)block + AHEAD_BYTES + (uintptr_t)byte));
}

/* out may be x or y, so none is restrict; but no element is read after it has been written. */
#define EACH(VALUE) _Pragma("GCC ivdep") for (int64_t i = 0; i < numel; i++) out[i] = (VALUE)

static void add(const REAL *x, const REAL *y, REAL *out, int64_t numel, int32_t finish, REAL number)
{
    if (finish == MULTIPLY)
        EACH((x[i] + y[i]) * number);
    else if (finish == DIVIDE)
        EACH((x[i] + y[i]) / number);
    else
        EACH(x[i] + y[i]);
}

/* operands: pointers to numel elements each
   additions: of each of the addition_count additions, the places of its two summands and of its sum. Places from 0 up
       are operands, those from -1 down are rows of `sums`; the sum of the last addition goes to `out`
   near: whether all operands lie in a core's own cache, where to fetch ahead and to read from both halves would only be
       in the way
   sums: rows of BLOCK elements
   finish, number: whether the last sum is kept, multiplied by `number`, or divided by it */
void tree_mean(const REAL *const *operands, const int32_t *additions, int32_t addition_count, int32_t near,
               REAL *sums, REAL *out, int64_t numel, int32_t finish, REAL number)
{
    if (addition_count == 1 && near) {
        add(operands[additions[0]], operands[additions[1]], out, numel, finish, number);
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
            for (int side = 0; side < 2; side++) {
                int is_operand = places[side] >= 0;
                summands[side] = is_operand ? operands[places[side]] + start : sums + BLOCK * (-1 - places[side]);
                if (is_operand && !near)
                    fetch(summands[side]);
            }
            if (n == addition_count - 1)
                add(summands[0], summands[1], out + start, length, finish, number);
            else
                add(summands[0], summands[1], sums + BLOCK * (-1 - places[2]), length, KEEP, 1);
        }
    }
}
