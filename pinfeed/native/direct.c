/* Rows that the GPU moves itself: those in page-locked memory, and those in its own memory.
 *
 * Of the first, the host only writes row indices into staging memory, which go to the GPU like any
 * part of a job. Kernels then move the rows over the link (pinfeed/devices/kernels.py). Rows that
 * follow each other are one copy.
 *
 * On one NVIDIA H200, rows of 64 to 256 B took the same time, probably that of translating their
 * addresses. So short rows of a large table are read in the order of their pages: the indices are
 * pairs of a row and its place in the batch, in buckets of rows that are close to each other. No
 * GPU has shown yet that this helps. */
#include "pinfeed.h"

/* A launch moves at most this many bytes, because the kernels count words in 32 bits. Tests choose
 * fewer. */
#ifndef LAUNCH_NBYTES
#define LAUNCH_NBYTES (64 << 20)
#endif

static void sort_by_page(const int64_t *rows, int64_t n, int64_t shift, struct pf_pair *pairs)
{
    uint32_t begins[PF_MOST_BUCKETS + 1] = {0};
    for (int64_t i = 0; i < n; i++)
        begins[(rows[i] >> shift) + 1]++;
    for (int k = 1; k < PF_MOST_BUCKETS; k++)
        begins[k] += begins[k - 1];
    for (int64_t i = 0; i < n; i++)
        pairs[begins[rows[i] >> shift]++] = (struct pf_pair){(int32_t)rows[i], (int32_t)i};
}

int pf_stage_indices(const struct pf_direct *direct, const int64_t *rows, int64_t begin,
                     int64_t end, char *staged)
{
    const int64_t start = rows[0];
    int64_t differs = 0;
    for (int64_t i = begin; i < end; i++) {
        differs |= rows[i] ^ (start + i);
        if (direct->shift >= 0)
            continue;
        if (direct->index_nbytes == 4)
            ((int32_t *)staged)[i] = (int32_t)rows[i];
        else
            ((int64_t *)staged)[i] = rows[i];
    }
    if (direct->shift >= 0 && differs)
        sort_by_page(rows, end, direct->shift, (struct pf_pair *)staged);
    return !differs;
}

static int launch(const struct pf_driver *driver, void *stream, const struct pf_direct *direct,
                  const struct pf_launch *launch, int64_t n, char *const *devices)
{
    const int is_sorted = direct->shift >= 0;
    const int64_t index_nbytes = is_sorted ? (int64_t)sizeof(struct pf_pair) : direct->index_nbytes;
    const struct pf_table *tables[PF_MOST_TABLES];
    uint32_t n_tables = 0;
    int64_t row_nbytes = 0, widest = 0;
    for (int64_t t = 0; t < launch->n_tables; t++) {
        const int64_t nbytes = launch->tables[t].row_nbytes;
        if (!devices[launch->tables[t].part])
            continue;
        tables[n_tables++] = &launch->tables[t];
        row_nbytes += nbytes;
        widest = widest < nbytes ? nbytes : widest;
    }
    if (!n_tables)
        return 0;
    const int64_t step = row_nbytes < LAUNCH_NBYTES ? LAUNCH_NBYTES / row_nbytes : 1;
    for (int64_t begin = 0; begin < n; begin += step) {
        const int64_t n_rows = n - begin < step ? n - begin : step;
        struct pf_moves moves = {devices[direct->part] + begin * index_nbytes, (uint32_t)n_rows,
                                 n_tables, {{0}}};
        for (uint32_t t = 0; t < n_tables; t++) {
            char *const packed = devices[tables[t]->part];
            moves.tables[t].rows = tables[t]->rows;
            moves.tables[t].packed = is_sorted ? packed : packed + begin * tables[t]->row_nbytes;
            moves.tables[t].row_nbytes = (uint32_t)tables[t]->row_nbytes;
        }
        const int64_t n_words = n_rows * (widest / launch->width);
        int64_t n_blocks = (n_words + launch->n_threads - 1) / launch->n_threads;
        if (n_blocks > launch->n_blocks)
            n_blocks = launch->n_blocks;
        void *arguments[] = {&moves};
        const int error = driver->launch(launch->kernel, (unsigned)n_blocks, 1, 1,
                                         (unsigned)launch->n_threads, 1, 1, 0, stream, arguments,
                                         NULL);
        if (error)
            return error;
    }
    return 0;
}

int pf_move_rows(const struct pf_driver *driver, void *stream, const struct pf_direct *direct,
                 int direction, int64_t start, int64_t n, char *const *devices)
{
    int error = 0;
    for (int64_t i = 0; i < direct->n_launches && n && !error; i++) {
        const struct pf_launch *const one = &direct->launches[i];
        if (start < 0) {
            error = launch(driver, stream, direct, one, n, devices);
            continue;
        }
        for (int64_t t = 0; t < one->n_tables && !error; t++) {
            const struct pf_table *const table = &one->tables[t];
            char *const rows = table->rows + start * table->row_nbytes;
            char *const packed = devices[table->part];
            const int is_read = direction == PF_FROM_TABLES;
            if (packed)
                error = driver->copy(is_read ? packed : rows, is_read ? rows : packed,
                                     (size_t)(n * table->row_nbytes), stream);
        }
    }
    return error;
}

/* The argument of the kernel that copies rows. */
struct copies {
    struct {
        const char *source;
        char *target;
        const int32_t *taken;
        const int32_t *into;
        uint32_t n_rows;
        uint32_t n_words;
        uint32_t width;   /* bytes of a word */
        uint32_t n_lanes; /* threads of a row, a power of two of at most a warp */
    } each[PF_MOST_COPIES];
};

int pf_copy_rows(const struct pf_driver *driver, void *kernel, void *stream, int64_t n_threads,
                 int64_t most_blocks, const struct pf_row_copy *copies, int64_t n)
{
    int error = 0;
    for (int64_t i = 0; i < n && !error;) {
        struct copies argument = {{{0}}};
        int64_t n_copies = 0, n_blocks = 1;
        for (; i < n && n_copies < PF_MOST_COPIES; i++) {
            const struct pf_row_copy *const copy = copies + i;
            if (!copy->n_rows || !copy->row_nbytes)
                continue;
            const uintptr_t divisible = (uintptr_t)copy->source | (uintptr_t)copy->target |
                                        (uintptr_t)copy->row_nbytes | 16;
            const uint32_t width = (uint32_t)(divisible & -divisible);
            const uint32_t n_words = (uint32_t)(copy->row_nbytes / width);
            uint32_t n_lanes = 1;
            while (n_lanes < n_words && n_lanes < 32)
                n_lanes *= 2;
            const int64_t needed = (copy->n_rows * n_lanes + n_threads - 1) / n_threads;
            n_blocks = n_blocks < needed ? needed : n_blocks;
            argument.each[n_copies].source = copy->source;
            argument.each[n_copies].target = copy->target;
            argument.each[n_copies].taken = copy->taken;
            argument.each[n_copies].into = copy->into;
            argument.each[n_copies].n_rows = (uint32_t)copy->n_rows;
            argument.each[n_copies].n_words = n_words;
            argument.each[n_copies].width = width;
            argument.each[n_copies++].n_lanes = n_lanes;
        }
        void *arguments[] = {&argument};
        if (n_copies)
            error = driver->launch(kernel,
                                   (unsigned)(n_blocks < most_blocks ? n_blocks : most_blocks),
                                   (unsigned)n_copies, 1, (unsigned)n_threads, 1, 1, 0, stream,
                                   arguments, NULL);
    }
    return error;
}
