/* The functions that Python calls.
 *
 * Each takes its arguments as an array of int64, because ctypes takes as long to convert an argument
 * as to call a function. Addresses are integers. pinfeed/native/library.py packs the arrays. */
#include "pinfeed.h"

#include <stdlib.h>

#define PF_API __attribute__((visibility("default")))

static inline void *pointer(int64_t address)
{
    return (void *)(intptr_t)address;
}

/* The description of rows: base, n, stride, limit, size, fd, and bytes of a row. */
enum { N_DESCRIPTION = 7, ROW_NBYTES = 6 };

static struct pf_rows rows_of(const int64_t *a)
{
    const struct pf_rows rows = {pointer(a[0]), a[1], a[2], pointer(a[3]), a[4], (int)a[5]};
    return rows;
}

static struct pf_rows target_of(const int64_t *a)
{
    const struct pf_rows rows = {.base = pointer(a[0]), .n = a[1], .stride = a[2]};
    return rows;
}

/* Arguments: description of the source, row indices, first row, number of rows to copy, target
 * (base, n, stride), target indices, bypass. Returns 0, or -1 if the source could not be read. */
PF_API int64_t pf_api_copy(const int64_t *a)
{
    const struct pf_rows source = rows_of(a);
    const int64_t *const b = a + N_DESCRIPTION;
    const struct pf_rows target = target_of(b + 3);
    if (source.limit)
        pf_guard_arm();
    return pf_copy_guarded(&source, pointer(b[0]), b[1], &target, pointer(b[6]), a[ROW_NBYTES], 0,
                           b[2], (int)b[7]);
}

/* Arguments: description of the source, starts, lengths and places of the runs, number of runs,
 * target (base, n, stride). Returns as pf_api_copy does. */
PF_API int64_t pf_api_copy_runs(const int64_t *a)
{
    const struct pf_rows source = rows_of(a);
    const int64_t *const b = a + N_DESCRIPTION;
    const struct pf_rows target = target_of(b + 4);
    if (source.limit)
        pf_guard_arm();
    return pf_copy_runs_guarded(&source, pointer(b[0]), pointer(b[1]), pointer(b[2]), b[3],
                                &target, a[ROW_NBYTES]);
}

/* Arguments: places, ring_at, bypass, number of sources, and their descriptions. Returns the crew, or
 * 0. */
PF_API int64_t pf_api_crew_open(const int64_t *a)
{
    const int64_t n = a[3];
    struct pf_rows *const sources = calloc((size_t)n, sizeof *sources);
    int64_t *const row_nbytes = calloc((size_t)n, sizeof *row_nbytes);
    struct pf_crew *crew = NULL;
    if (sources && row_nbytes) {
        for (int64_t k = 0; k < n; k++) {
            const int64_t *const description = a + 4 + k * N_DESCRIPTION;
            sources[k] = rows_of(description);
            row_nbytes[k] = description[ROW_NBYTES];
        }
        crew = pf_crew_open((int)n, sources, row_nbytes, (uint32_t)a[0], (uint32_t)a[1],
                            (int)a[2]);
    }
    free(sources);
    free(row_nbytes);
    return (intptr_t)crew;
}

/* Arguments: crew, number of threads. */
PF_API int64_t pf_api_crew_start(const int64_t *a)
{
    pf_crew_start(pointer(a[0]), (int)a[1]);
    return 0;
}

/* Arguments: crew, row indices, first row, rows to copy, and the target of each source. */
PF_API int64_t pf_api_crew_submit(const int64_t *a)
{
    return pf_crew_submit(pointer(a[0]), pointer(a[1]), a[2], a[3], (char *const *)(a + 4));
}

/* Arguments: crew, number of the job, where to write the two times. */
PF_API int64_t pf_api_crew_wait(const int64_t *a)
{
    return pf_crew_wait(pointer(a[0]), (uint32_t)a[1], pointer(a[2]));
}

/* Argument: crew. */
PF_API int64_t pf_api_crew_stop(const int64_t *a)
{
    pf_crew_stop(pointer(a[0]));
    return 0;
}

/* Arguments: crew, and whether this process has its threads, so that they must end first. */
PF_API int64_t pf_api_crew_free(const int64_t *a)
{
    if (a[1])
        pf_crew_stop(pointer(a[0]));
    pf_crew_free(pointer(a[0]));
    return 0;
}

/* Argument: 1 if a file was mapped, -1 if one was unmapped. */
PF_API int64_t pf_api_guard_count(const int64_t *a)
{
    pf_guard_count((int)a[0]);
    return 0;
}

/* Arguments: positions, number of positions, where to write the results, size of the permutation,
 * width and height of the network, and its keys. */
PF_API int64_t pf_api_permute(const int64_t *a)
{
    struct pf_network network = {(uint32_t)a[3], (uint32_t)a[4], (uint32_t)a[5], {0}};
    for (int k = 0; k < PF_N_KEYS; k++)
        network.keys[k] = (uint32_t)a[6 + k];
    pf_permute(&network, pointer(a[0]), a[1], pointer(a[2]));
    return 0;
}
