/* The functions that Python calls.
 *
 * Each takes its arguments as an array of int64, because ctypes takes as long to convert an
 * argument as to call a function. Addresses are integers. pinfeed/native/library.py packs the
 * arrays. */
#include "pinfeed.h"

#include <stdlib.h>

#define PF_API __attribute__((visibility("default")))

static inline void *pointer(int64_t address)
{
    return (void *)(intptr_t)address;
}

/* A source is described by the bytes of a row, the number of its parts, and the parts. */
enum { N_PART = sizeof(struct pf_rows) / sizeof(int64_t) };

_Static_assert(sizeof(struct pf_rows) == 7 * sizeof(int64_t), "a part is seven numbers");
_Static_assert(sizeof(struct pf_store) == 8 * sizeof(int64_t), "a store is eight numbers");

static struct pf_source source_of(const int64_t *a)
{
    const struct pf_source source = {(const struct pf_rows *)(a + 2), a[1], a[0]};
    return source;
}

/* Returns the result of a copy, after a look at the sizes of the files. */
static int64_t checked(const struct pf_source *source, int result)
{
    return result || pf_has_shrunk(source) ? -1 : 0;
}

/* Arguments: row indices, first row, number of rows to copy, target (base, number of rows, and
 * bytes from one to the next), target indices, bypass, and the source. Returns 0, or -1 if the
 * source could not be read. */
PF_API int64_t pf_api_copy(const int64_t *a)
{
    const struct pf_source source = source_of(a + 8);
    const struct pf_rows target = {.base = pointer(a[3]), .n = a[4], .stride = a[5]};
    if (source.parts->limit)
        pf_guard_arm();
    return checked(&source, pf_copy_guarded(&source, pointer(a[0]), a[1], &target, pointer(a[6]),
                                            0, a[2], (int)a[7]));
}

/* Arguments: starts, lengths and places of the runs, number of runs, target (base and number of
 * rows), and the source. Returns as pf_api_copy does. */
PF_API int64_t pf_api_copy_runs(const int64_t *a)
{
    const struct pf_source source = source_of(a + 6);
    const struct pf_rows target = {.base = pointer(a[4]), .n = a[5], .stride = source.row_nbytes};
    if (source.parts->limit)
        pf_guard_arm();
    return checked(&source, pf_copy_runs_guarded(&source, pointer(a[0]), pointer(a[1]),
                                                 pointer(a[2]), a[3], &target));
}

/* Arguments: places, ring_at, bypass, number of sources, and the sources. Returns the engine, or
 * 0. */
PF_API int64_t pf_api_engine_open(const int64_t *a)
{
    const int64_t n = a[3];
    struct pf_source *const sources = calloc((size_t)n, sizeof *sources);
    if (!sources)
        return 0;
    const int64_t *description = a + 4;
    for (int64_t k = 0; k < n; k++) {
        sources[k] = source_of(description);
        description += 2 + sources[k].n_parts * N_PART;
    }
    struct pf_engine *const engine =
        pf_engine_open((int)n, sources, (uint32_t)a[0], (uint32_t)a[1], (int)a[2]);
    free(sources);
    return (intptr_t)engine;
}

/* Arguments: engine, driver, side stream, rows that the GPU reads itself, number of slots, and the
 * staging memory of each. Returns 0 or an error of the driver. */
PF_API int64_t pf_api_engine_use_driver(const int64_t *a)
{
    return pf_engine_use_driver(pointer(a[0]), pointer(a[1]), pointer(a[2]), (uint32_t)a[4],
                                (char *const *)(a + 5), pointer(a[3]));
}

/* Arguments: engine, number of threads. */
PF_API int64_t pf_api_engine_start(const int64_t *a)
{
    pf_engine_start(pointer(a[0]), (int)a[1]);
    return 0;
}

/* Arguments: engine, row indices, first row, rows to gather, stream of the loop, number of sources,
 * where the rows of each source go, and with a driver where each part goes on the GPU. */
PF_API int64_t pf_api_engine_submit(const int64_t *a)
{
    return pf_engine_submit(pointer(a[0]), pointer(a[1]), a[2], a[3], pointer(a[4]), a + 6,
                            (char *const *)(a + 6 + a[5]));
}

/* Arguments: engine, number of the job, stream of the loop, where to write the result. */
PF_API int64_t pf_api_engine_wait(const int64_t *a)
{
    return pf_engine_wait(pointer(a[0]), (uint32_t)a[1], pointer(a[2]), pointer(a[3]));
}

/* Arguments: engine, number of the job, another stream. */
PF_API int64_t pf_api_engine_wait_again(const int64_t *a)
{
    return pf_engine_wait_again(pointer(a[0]), (uint32_t)a[1], pointer(a[2]));
}

/* Arguments: engine, number of the job. Returns whether the job had a piece to gather. */
PF_API int64_t pf_api_engine_help(const int64_t *a)
{
    return pf_engine_help(pointer(a[0]), (uint32_t)a[1]);
}

/* Argument: engine. */
PF_API int64_t pf_api_engine_stop(const int64_t *a)
{
    pf_engine_stop(pointer(a[0]));
    return 0;
}

/* Arguments: engine, and whether this process has its threads, so that they must end first. */
PF_API int64_t pf_api_engine_free(const int64_t *a)
{
    if (a[1])
        pf_engine_stop(pointer(a[0]));
    pf_engine_free(pointer(a[0]), !a[1]);
    return 0;
}

/* Arguments: driver, side stream, both staging memories, places, how the GPU writes rows itself,
 * number of staged parts, where to write the address of the writer, number of parts, and the store
 * of each part. Returns 0 or an error of the driver. */
PF_API int64_t pf_api_writer_open(const int64_t *a)
{
    return pf_writer_open(pointer(a[7]), pointer(a[0]), pointer(a[1]), (char *const *)(a + 2),
                          (uint32_t)a[4], a[8], a[6], (const struct pf_store *)(a + 9),
                          pointer(a[5]));
}

/* Arguments: writer, most threads that help. */
PF_API int64_t pf_api_writer_start(const int64_t *a)
{
    pf_writer_start(pointer(a[0]), (int)a[1]);
    return 0;
}

/* Arguments: writer, stream of the loop, row indices, number of rows, number of parts; the offset,
 * then the values, and then the memory of each part. Returns as pf_writer_write does. */
PF_API int64_t pf_api_writer_write(const int64_t *a)
{
    const int64_t n = a[4];
    return pf_writer_write(pointer(a[0]), pointer(a[1]), pointer(a[2]), a[3], a + 5,
                           (char *const *)(a + 5 + n), (char *const *)(a + 5 + 2 * n));
}

/* Argument: writer. Returns whether there was a step. */
PF_API int64_t pf_api_writer_step(const int64_t *a) { return pf_writer_step(pointer(a[0])); }

/* Arguments: writer, number of the write. Returns as pf_writer_wait does. */
PF_API int64_t pf_api_writer_wait(const int64_t *a)
{
    return pf_writer_wait(pointer(a[0]), (uint32_t)a[1]);
}

/* Argument: writer. Returns as pf_writer_is_computed does. */
PF_API int64_t pf_api_writer_is_computed(const int64_t *a)
{
    return pf_writer_is_computed(pointer(a[0]));
}

/* Argument: writer. */
PF_API int64_t pf_api_writer_stop(const int64_t *a)
{
    pf_writer_stop(pointer(a[0]));
    return 0;
}

/* Arguments: writer, and whether this process has its threads. */
PF_API int64_t pf_api_writer_free(const int64_t *a)
{
    if (a[1])
        pf_writer_stop(pointer(a[0]));
    pf_writer_free(pointer(a[0]), !a[1]);
    return 0;
}

/* ---- calls of the driver ----------------------------------------------------------------------
 *
 * The first argument is the driver. They return 0 or an error, if nothing else is said. */
#define IN_SCOPE(driver, call)                                                                     \
    struct pf_scope scope = pf_enter(driver);                                                      \
    const int error = call;                                                                        \
    pf_leave(driver, &scope)

/* Argument: driver. Returns a new event, or the negative error. */
PF_API int64_t pf_api_event_create(const int64_t *a)
{
    const struct pf_driver *driver = pointer(a[0]);
    void *event = NULL;
    IN_SCOPE(driver, driver->create(&event, PF_EVENT_FLAGS));
    return error ? -error : (intptr_t)event;
}

/* Arguments: driver, event, stream. */
PF_API int64_t pf_api_event_record(const int64_t *a)
{
    const struct pf_driver *driver = pointer(a[0]);
    IN_SCOPE(driver, driver->record(pointer(a[1]), pointer(a[2])));
    return error;
}

/* Arguments: driver, stream, event. */
PF_API int64_t pf_api_event_wait(const int64_t *a)
{
    const struct pf_driver *driver = pointer(a[0]);
    IN_SCOPE(driver, driver->wait(pointer(a[1]), pointer(a[2]), 0));
    return error;
}

/* Arguments: driver, event. Returns PF_NOT_READY if the event has not passed. */
PF_API int64_t pf_api_event_query(const int64_t *a)
{
    const struct pf_driver *driver = pointer(a[0]);
    IN_SCOPE(driver, driver->query(pointer(a[1])));
    return error;
}

/* Arguments: driver, event. */
PF_API int64_t pf_api_event_sync(const int64_t *a)
{
    const struct pf_driver *driver = pointer(a[0]);
    IN_SCOPE(driver, driver->sync(pointer(a[1])));
    return error;
}

/* Arguments: driver, where to, where from, number of bytes, stream. */
PF_API int64_t pf_api_copy_queued(const int64_t *a)
{
    const struct pf_driver *driver = pointer(a[0]);
    IN_SCOPE(driver, driver->copy(pointer(a[1]), pointer(a[2]), (size_t)a[3], pointer(a[4])));
    return error;
}

/* Arguments: driver, stream, how the GPU moves rows, direction, first row or -1, number of rows,
 * and where the parts are on the GPU. Returns as pf_move_rows does. */
PF_API int64_t pf_api_move_rows(const int64_t *a)
{
    const struct pf_driver *driver = pointer(a[0]);
    IN_SCOPE(driver, pf_move_rows(driver, pointer(a[1]), pointer(a[2]), (int)a[3], a[4], a[5],
                                  (char *const *)(a + 6)));
    return error;
}

_Static_assert(sizeof(struct pf_row_copy) == 6 * sizeof(int64_t), "a copy is six numbers");

/* Arguments: driver, kernel, stream, threads of a block, most blocks of a copy, number of copies,
 * and the copies. Returns as pf_copy_rows does. */
PF_API int64_t pf_api_copy_rows(const int64_t *a)
{
    const struct pf_driver *driver = pointer(a[0]);
    IN_SCOPE(driver, pf_copy_rows(driver, pointer(a[1]), pointer(a[2]), a[3], a[4],
                                  (const struct pf_row_copy *)(a + 6), a[5]));
    return error;
}

/* Arguments: those of struct pf_move, in order, to the bytes of each part, then where each part
 * goes, and where it is. Returns as pf_move does. */
PF_API int64_t pf_api_move(const int64_t *a)
{
    const struct pf_move move = {
        pointer(a[0]), pointer(a[1]), pointer(a[2]), pointer(a[3]),
        pointer(a[4]), pointer(a[5]), a[6],          a[7],
        pointer(a[8]), pointer(a[9]), (char *const *)(a + 10),
        (const char *const *)(a + 10 + a[7])};
    return pf_move(&move);
}

_Static_assert(sizeof(struct pf_queue) == 8 * sizeof(int64_t), "a queue is eight numbers");
_Static_assert(sizeof(struct pf_copy) == 3 * sizeof(int64_t), "a copy is three numbers");

/* Arguments: those of struct pf_queue, in order, the copies, and the moves. Returns as pf_queue
 * does. */
PF_API int64_t pf_api_queue(const int64_t *a)
{
    const struct pf_queue *const queue = (const struct pf_queue *)a;
    return pf_queue(queue, (const struct pf_copy *)(a + 8), a + 8 + 3 * queue->n_copies);
}

/* Arguments: driver, stream of the loop, event before the copies, event after them. Returns whether
 * the GPU was idle, or the negative error. */
PF_API int64_t pf_api_receive(const int64_t *a)
{
    const struct pf_move move = {.driver = pointer(a[0]),
                                 .compute = pointer(a[1]),
                                 .released = pointer(a[2]),
                                 .copied = pointer(a[3])};
    int is_idle = 0;
    const int error = pf_receive(&move, &is_idle);
    return error ? -error : is_idle;
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

/* Arguments: descriptor, kind of the requests, number of requests, their addresses, offsets and
 * numbers of bytes, and where to write the results. */
PF_API int64_t pf_api_request_each(const int64_t *a)
{
    pf_request_each((int)a[0], (int)a[1], pointer(a[3]), pointer(a[4]), pointer(a[5]), a[2],
                    pointer(a[6]));
    return 0;
}

/* Arguments of these two: row indices, number of them, and both outputs. They return what the
 * functions of distinct.c return. */
PF_API int64_t pf_api_distinct_rows(const int64_t *a)
{
    return pf_distinct_rows(pointer(a[0]), a[1], pointer(a[2]), pointer(a[3]));
}

PF_API int64_t pf_api_first_occurrences(const int64_t *a)
{
    return pf_first_occurrences(pointer(a[0]), a[1], pointer(a[2]), pointer(a[3]));
}

_Static_assert(sizeof(struct pf_sorted) == 3 * sizeof(int64_t), "a batch is three numbers");

/* Arguments: row indices, spare memory, positions, counts, whether to find unread rows, the batch
 * that receives the rows, number of earlier batches, and these batches. Returns as pf_overlaps
 * does. */
PF_API int64_t pf_api_overlaps(const int64_t *a)
{
    return pf_overlaps(pointer(a[0]), (const struct pf_sorted *)(a + 5),
                       (const struct pf_sorted *)(a + 9), a[8], pointer(a[1]), pointer(a[2]),
                       pointer(a[3]), (int)a[4]);
}

/* Arguments: cache, row indices, number of them, and the outputs. */
PF_API int64_t pf_api_decide(const int64_t *a)
{
    pf_decide(pointer(a[0]), pointer(a[1]), a[2], pointer(a[3]), pointer(a[4]), pointer(a[5]));
    return 0;
}

/* Arguments: values, columns, bounds, target, number of rows, number of columns, bytes of a value,
 * and bytes of a column. Returns as pf_dense does. */
PF_API int64_t pf_api_dense(const int64_t *a)
{
    return pf_dense(pointer(a[0]), pointer(a[1]), pointer(a[2]), pointer(a[3]), a[4], a[5], a[6],
                    a[7]);
}
