/* The functions that Python calls.
 *
 * Each takes its arguments as an array of int64, because ctypes takes as long to convert an
 * argument as to call a function. Addresses are integers. pinfeed/native/library.py packs the
 * arrays. A function without a note of its result returns what the function that it calls does. */
#include "pinfeed.h"

#include <stdlib.h>

#define PF_API __attribute__((visibility("default")))

/* Each defines a function that makes a call. That of a PROCEDURE has no result. A DRIVER_CALL takes
 * the driver as its first argument, and makes its context current. */
#define FUNCTION(name, call)                                                                       \
    PF_API int64_t name(const int64_t *a) { return call; }
#define PROCEDURE(name, call)                                                                      \
    PF_API int64_t name(const int64_t *a) { return call, 0; }
#define DRIVER_CALL(name, call)                                                                    \
    PF_API int64_t name(const int64_t *a)                                                          \
    {                                                                                              \
        const struct pf_driver *const driver = pointer(a[0]);                                      \
        struct pf_scope scope = pf_enter(driver);                                                  \
        const int64_t result = call;                                                               \
        pf_leave(driver, &scope);                                                                  \
        return result;                                                                             \
    }

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

/* Arguments: row indices, number of rows to copy, target (base, number of rows, and bytes from one
 * to the next), target indices, bypass, and the source. Returns 0, or -1 if the source could not be
 * read. */
PF_API int64_t pf_api_copy(const int64_t *a)
{
    const struct pf_source source = source_of(a + 7);
    const struct pf_rows target = {.base = pointer(a[2]), .n = a[3], .stride = a[4]};
    if (source.parts->limit)
        pf_guard_arm();
    return checked(&source, pf_copy_guarded(&source, pointer(a[0]), &target, pointer(a[5]), 0, a[1],
                                            (int)a[6]));
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
FUNCTION(pf_api_engine_use_driver,
         pf_engine_use_driver(pointer(a[0]), pointer(a[1]), pointer(a[2]), (uint32_t)a[4],
                              (char *const *)(a + 5), pointer(a[3])))

/* Arguments: engine, number of threads. */
PROCEDURE(pf_api_engine_start, pf_engine_start(pointer(a[0]), (int)a[1]))

/* Arguments: engine, row indices, rows to gather, stream of the loop, number of sources, where the
 * rows of each source go, and with a driver where each part goes on the GPU. */
FUNCTION(pf_api_engine_submit, pf_engine_submit(pointer(a[0]), pointer(a[1]), a[2], pointer(a[3]),
                                                a + 5, (char *const *)(a + 5 + a[4])))

/* Arguments: engine, number of the job, stream of the loop, where to write the result. */
FUNCTION(pf_api_engine_wait,
         pf_engine_wait(pointer(a[0]), (uint32_t)a[1], pointer(a[2]), pointer(a[3])))

/* Arguments: engine, number of the job, another stream. */
FUNCTION(pf_api_engine_wait_again,
         pf_engine_wait_again(pointer(a[0]), (uint32_t)a[1], pointer(a[2])))

/* Arguments: engine, number of the job. Returns whether the job had a piece to gather. */
FUNCTION(pf_api_engine_help, pf_engine_help(pointer(a[0]), (uint32_t)a[1]))

/* Argument: engine. */
PROCEDURE(pf_api_engine_stop, pf_engine_stop(pointer(a[0])))

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
FUNCTION(pf_api_writer_open,
         pf_writer_open(pointer(a[7]), pointer(a[0]), pointer(a[1]), (char *const *)(a + 2),
                        (uint32_t)a[4], a[8], a[6], (const struct pf_store *)(a + 9),
                        pointer(a[5])))

/* Arguments: writer, most threads that help. */
PROCEDURE(pf_api_writer_start, pf_writer_start(pointer(a[0]), (int)a[1]))

/* Arguments: writer, stream of the loop, row indices, number of rows, number of parts; the offset,
 * then the values, and then the memory of each part. */
FUNCTION(pf_api_writer_write,
         pf_writer_write(pointer(a[0]), pointer(a[1]), pointer(a[2]), a[3], a + 5,
                         (char *const *)(a + 5 + a[4]), (char *const *)(a + 5 + 2 * a[4])))

/* Argument: writer. */
FUNCTION(pf_api_writer_step, pf_writer_step(pointer(a[0])))
FUNCTION(pf_api_writer_is_computed, pf_writer_is_computed(pointer(a[0])))
PROCEDURE(pf_api_writer_stop, pf_writer_stop(pointer(a[0])))

/* Arguments: writer, number of the write. */
FUNCTION(pf_api_writer_wait, pf_writer_wait(pointer(a[0]), (uint32_t)a[1]))

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

static int64_t new_event(const struct pf_driver *driver)
{
    void *event = NULL;
    const int error = driver->create(&event, PF_EVENT_FLAGS);
    return error ? -error : (intptr_t)event;
}

/* Argument: driver. Returns a new event, or the negative error. */
DRIVER_CALL(pf_api_event_create, new_event(driver))

/* Arguments: driver, event, stream. */
DRIVER_CALL(pf_api_event_record, driver->record(pointer(a[1]), pointer(a[2])))

/* Arguments: driver, stream, event. */
DRIVER_CALL(pf_api_event_wait, driver->wait(pointer(a[1]), pointer(a[2]), 0))

/* Arguments: driver, event. The first returns PF_NOT_READY if the event has not passed. */
DRIVER_CALL(pf_api_event_query, driver->query(pointer(a[1])))
DRIVER_CALL(pf_api_event_sync, driver->sync(pointer(a[1])))

/* Arguments: driver, where to, where from, number of bytes, stream. */
DRIVER_CALL(pf_api_copy_queued,
            driver->copy(pointer(a[1]), pointer(a[2]), (size_t)a[3], pointer(a[4])))

/* Arguments: driver, stream, how the GPU moves rows, direction, first row or -1, number of rows,
 * and where the parts are on the GPU. */
DRIVER_CALL(pf_api_move_rows, pf_move_rows(driver, pointer(a[1]), pointer(a[2]), (int)a[3], a[4],
                                           a[5], (char *const *)(a + 6)))

_Static_assert(sizeof(struct pf_row_copy) == 6 * sizeof(int64_t), "a copy is six numbers");

/* Arguments: driver, kernel, stream, threads of a block, most blocks of a copy, number of copies,
 * and the copies. */
DRIVER_CALL(pf_api_copy_rows, pf_copy_rows(driver, pointer(a[1]), pointer(a[2]), a[3], a[4],
                                           (const struct pf_row_copy *)(a + 6), a[5]))

_Static_assert(sizeof(struct pf_queue) == 10 * sizeof(int64_t), "a queue is ten numbers");

/* Arguments: those of struct pf_queue, in order, offsets of the staged parts; bytes of each copy,
 * then where each goes, and then from where; and the moves. Returns as pf_queue does. */
PF_API int64_t pf_api_queue(const int64_t *a)
{
    const struct pf_queue *const queue = (const struct pf_queue *)a;
    const int64_t *const offsets = a + 10, n = queue->n_copies;
    const int64_t *const nbytes = offsets + queue->n_staged;
    return pf_queue(queue, offsets, nbytes, (char *const *)(nbytes + n),
                    (const char *const *)(nbytes + 2 * n), nbytes + 3 * n);
}

/* Arguments: driver, stream of the loop, event before the copies, event after them. */
FUNCTION(pf_api_receive, pf_receive(pointer(a[0]), pointer(a[1]), pointer(a[2]), pointer(a[3])))

/* ---- other functions ------------------------------------------------------------------------- */

/* Argument: 1 if a file was mapped, -1 if one was unmapped. */
PROCEDURE(pf_api_guard_count, pf_guard_count((int)a[0]))

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
PROCEDURE(pf_api_request_each, pf_request_each((int)a[0], (int)a[1], pointer(a[3]), pointer(a[4]),
                                               pointer(a[5]), a[2], pointer(a[6])))

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
PROCEDURE(pf_api_decide, pf_decide(pointer(a[0]), pointer(a[1]), a[2], pointer(a[3]), pointer(a[4]),
                                   pointer(a[5])))

/* Arguments: values, columns, bounds, target, number of rows, number of columns, bytes of a value,
 * and bytes of a column. */
FUNCTION(pf_api_dense, pf_dense(pointer(a[0]), pointer(a[1]), pointer(a[2]), pointer(a[3]), a[4],
                                a[5], a[6], a[7]))
