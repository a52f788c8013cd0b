/* Dense rows of a sparse matrix.
 *
 * Each row is set to 0 just before its elements are written, while it is in the caches of the
 * processor. */
#include "pinfeed.h"

#include <string.h>

/* Makes `n_rows` rows whose columns ascend. The compiler makes a loop of its own for each constant
 * `nbytes`. */
static inline __attribute__((always_inline)) int64_t
dense(const char *values, const void *columns, const void *bounds, char *out, int64_t n_rows,
      int64_t n_columns, int64_t nbytes, int is_wide)
{
    const int32_t *const columns_32 = columns, *const bounds_32 = bounds;
    const int64_t *const columns_64 = columns, *const bounds_64 = bounds;
    for (int64_t row = 0; row < n_rows; row++) {
        char *const target = out + row * n_columns * nbytes;
        const int64_t end = is_wide ? bounds_64[row + 1] : bounds_32[row + 1];
        int64_t previous = -1;
        memset(target, 0, (size_t)(n_columns * nbytes));
        for (int64_t i = is_wide ? bounds_64[row] : bounds_32[row]; i < end; i++) {
            const int64_t at = is_wide ? columns_64[i] : columns_32[i];
            if (at <= previous || at >= n_columns)
                return row;
            memcpy(target + at * nbytes, values + i * nbytes, (size_t)nbytes);
            previous = at;
        }
    }
    return -1;
}

int64_t pf_dense(const void *values, const void *columns, const void *bounds, void *out,
                 int64_t n_rows, int64_t n_columns, int64_t value_nbytes, int64_t index_nbytes)
{
    const int is_wide = index_nbytes == 8;
    switch (value_nbytes) {
    case 1: return dense(values, columns, bounds, out, n_rows, n_columns, 1, is_wide);
    case 2: return dense(values, columns, bounds, out, n_rows, n_columns, 2, is_wide);
    case 4: return dense(values, columns, bounds, out, n_rows, n_columns, 4, is_wide);
    default: return dense(values, columns, bounds, out, n_rows, n_columns, 8, is_wide);
    }
}
