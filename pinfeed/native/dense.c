/* Dense rows of a sparse matrix.
 *
 * Each row is set to 0 just before its elements are written, while it is in the caches of the
 * processor. */
#include "pinfeed.h"

#include <string.h>

/* Makes `n_rows` rows whose columns ascend. Returns -1, or the first row with other columns. */
#define DENSE(name, value_t, index_t)                                                              \
    static int64_t name(const void *values, const void *columns, const void *bounds, void *out,   \
                        int64_t n_rows, int64_t n_columns)                                         \
    {                                                                                              \
        const value_t *const value = values;                                                       \
        const index_t *const column = columns, *const bound = bounds;                              \
        for (int64_t row = 0; row < n_rows; row++) {                                               \
            value_t *const target = (value_t *)out + row * n_columns;                              \
            int64_t previous = -1;                                                                 \
            memset(target, 0, (size_t)n_columns * sizeof *target);                                 \
            for (index_t i = bound[row]; i < bound[row + 1]; i++) {                                \
                const int64_t at = column[i];                                                      \
                if (at <= previous || at >= n_columns)                                             \
                    return row;                                                                    \
                target[at] = value[i];                                                             \
                previous = at;                                                                     \
            }                                                                                      \
        }                                                                                          \
        return -1;                                                                                 \
    }

DENSE(dense_1_4, uint8_t, int32_t)
DENSE(dense_2_4, uint16_t, int32_t)
DENSE(dense_4_4, uint32_t, int32_t)
DENSE(dense_8_4, uint64_t, int32_t)
DENSE(dense_1_8, uint8_t, int64_t)
DENSE(dense_2_8, uint16_t, int64_t)
DENSE(dense_4_8, uint32_t, int64_t)
DENSE(dense_8_8, uint64_t, int64_t)

int64_t pf_dense(const void *values, const void *columns, const void *bounds, void *out,
                 int64_t n_rows, int64_t n_columns, int64_t value_nbytes, int64_t index_nbytes)
{
    const int wide = index_nbytes == 8;
    switch (value_nbytes) {
    case 1:
        return (wide ? dense_1_8 : dense_1_4)(values, columns, bounds, out, n_rows, n_columns);
    case 2:
        return (wide ? dense_2_8 : dense_2_4)(values, columns, bounds, out, n_rows, n_columns);
    case 4:
        return (wide ? dense_4_8 : dense_4_4)(values, columns, bounds, out, n_rows, n_columns);
    default:
        return (wide ? dense_8_8 : dense_8_4)(values, columns, bounds, out, n_rows, n_columns);
    }
}
