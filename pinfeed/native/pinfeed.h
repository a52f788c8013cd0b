/* Copies of rows without the interpreter: what the files of this folder offer each other.
 *
 * copy.c     copies rows from one place in memory to another
 * guard.c    survives pages that cannot be loaded while rows are copied
 * engine.c   threads that gather the rows of the next batches, and move them to a GPU
 * move.c     work of a batch that the loop's thread queues by one call
 * direct.c   rows that the GPU moves itself, over the link or in its own memory
 * write.c    rows that go from a GPU back to their stores
 * shuffle.c  shuffled row indices
 * requests.c reads and writes many parts of a file
 * distinct.c distinct row indices
 * overlap.c  rows that a batch has in common with earlier ones
 * cache.c    rows of a table that the device keeps between batches
 * dense.c    dense rows of a sparse matrix
 * api.c      the functions that Python calls, through ctypes; one library serves every Python
 *
 * The caller keeps all memory alive that it passes here, until the copy has ended. */
#ifndef PINFEED_H
#define PINFEED_H

#include <pthread.h>
#include <stddef.h>
#include <stdint.h>

/* Rows at equal distances in memory, or in a mapped file. */
struct pf_rows {
    char *base;        /* the row with index 0 */
    int64_t n;         /* number of rows, at least one; a larger index means the last row */
    int64_t stride;    /* bytes from one row to the next; less than a row if rows overlap */
    const char *limit; /* end of the mapped file; NULL for memory */
    int64_t size;      /* bytes that the mapped file has at least */
    int64_t fd;        /* its descriptor */
    int64_t first;     /* the index of row 0 among all rows of the store */
};

/* Rows of one store: of an array, or of one or more files. */
struct pf_source {
    const struct pf_rows *parts; /* in the order of their rows */
    int64_t n_parts;
    int64_t row_nbytes;
};

/* copy.c */

/* Copies rows [begin, end) of a list. Row i of the list is row from[i] of `source`, and becomes row
 * to[i] of `target`. Without `from` or `to`, it is row first + i, or row i.
 * `bypass` writes past the caches of the processor, if the rows permit it. */
void pf_copy(const struct pf_rows *source, const int64_t *from, int64_t first,
             const struct pf_rows *target, const int64_t *to, int64_t row_nbytes, int64_t begin,
             int64_t end, int bypass);

/* Does the same with the rows of all parts. */
void pf_copy_parts(const struct pf_source *source, const int64_t *from, int64_t first,
                   const struct pf_rows *target, const int64_t *to, int64_t begin, int64_t end,
                   int bypass);

/* guard.c */

/* Copies as pf_copy_parts does, with `first` = 0. Returns 0, or -1 if a page of a file could not be
 * loaded. */
int pf_copy_guarded(const struct pf_source *source, const int64_t *from,
                    const struct pf_rows *target, const int64_t *to, int64_t begin, int64_t end,
                    int bypass);

/* Copies runs of rows: `lengths[k]` rows from row `starts[k]` of `source` on become those from row
 * `places[k]` of `target` on. Returns as pf_copy_guarded does. */
int pf_copy_runs_guarded(const struct pf_source *source, const int64_t *starts,
                         const int64_t *lengths, const int64_t *places, int64_t n_runs,
                         const struct pf_rows *target);

/* Returns whether a file is shorter than it was. The rest of the last page of a file reads as
 * zeros, so this tells after a copy whether the rows are right. */
int pf_has_shrunk(const struct pf_source *source);

/* Makes sure that the signal handler comes first. Call it before guarded copies of mapped files. */
void pf_guard_arm(void);

/* Notes that files were mapped (1) or unmapped (-1). The handler stays while any file is mapped. */
void pf_guard_count(int change);

/* engine.c */

/* The calls of the CUDA driver that the engine makes. Python looks them up when the first loop on a
 * GPU begins (pinfeed/native/driver.py), so nothing of CUDA is needed to compile this. Tests fill
 * the table with the functions of a simulated driver. Streams and events are the driver's own
 * handles. All functions return 0 or an error number. */
struct pf_driver {
    void *context;                                        /* of the GPU */
    int (*push)(void *context);                           /* cuCtxPushCurrent */
    int (*pop)(void **context);                           /* cuCtxPopCurrent */
    int (*exchange_capture_mode)(int *mode);              /* cuThreadExchangeStreamCaptureMode */
    int (*create)(void **event, unsigned flags);          /* cuEventCreate */
    int (*destroy)(void *event);                          /* cuEventDestroy */
    int (*record)(void *event, void *stream);             /* cuEventRecord */
    int (*wait)(void *stream, void *event, unsigned flags); /* cuStreamWaitEvent */
    int (*query)(void *event);                            /* cuEventQuery */
    int (*sync)(void *event);                             /* cuEventSynchronize */
    int (*copy)(void *to, const void *from, size_t nbytes, void *stream); /* cuMemcpyAsync */
    int (*launch)(void *kernel, unsigned n_blocks, unsigned, unsigned, unsigned n_threads, unsigned,
                  unsigned, unsigned, void *stream, void **arguments, void **); /* cuLaunchKernel */
};

/* For the other files: the time in seconds of CLOCK_MONOTONIC; a sleep while a word has a value,
 * and the end of the sleep of at most `n` threads; and the start of a thread that takes no signals
 * of the program. */
double pf_now_s(void);
long pf_sleep_if(_Atomic uint32_t *word, uint32_t value);
void pf_wake(_Atomic uint32_t *word, int n);
int pf_start_thread(pthread_t *thread, void *(*work)(void *), void *argument);

enum {
    PF_OUT_OF_MEMORY = 2,   /* CUDA_ERROR_OUT_OF_MEMORY */
    PF_NOT_READY = 600,     /* CUDA_ERROR_NOT_READY: the stream has not passed the event */
    PF_EVENT_FLAGS = 3,     /* threads sleep while they wait, and no time is recorded */
    PF_CAPTURE_RELAXED = 2, /* calls of this thread never concern a capture of a CUDA graph */
};

struct pf_engine;
struct pf_direct;

/* Returns an engine without threads, or NULL if memory is missing.
 *
 * sources: the rows that every job gathers; one without parts stands for the row indices of the
 *     job, in the format of `direct`
 * n_places: most jobs that have not ended, or that the loop has not waited for
 * ring_at: jobs with pieces to take at which sleeping threads are woken; the loop gathers fewer
 *     itself, when it needs them
 * bypass: whether rows are written past the caches */
struct pf_engine *pf_engine_open(int n_sources, const struct pf_source *sources, uint32_t n_places,
                                 uint32_t ring_at, int bypass);

/* Makes the engine move every job to a GPU. Call it before the first job, at most once.
 *
 * side: the stream of the copies
 * n_slots: number of slots; the jobs use them in turn
 * staging: page-locked memory of each slot
 * direct: the rows that the GPU reads itself, which the caller keeps; NULL for none
 * Returns 0 or an error of the driver. */
int pf_engine_use_driver(struct pf_engine *engine, const struct pf_driver *driver, void *side,
                         uint32_t n_slots, char *const *staging, const struct pf_direct *direct);

/* Starts as many of `n_threads` threads as the system permits. Without any, only the loop
 * gathers. */
void pf_engine_start(struct pf_engine *engine, int n_threads);

/* Submits a job, and returns its number, or -1 if memory is missing. The place of the job, and its
 * slot, must be free.
 *
 * rows: indices of the rows, shape (n,)
 * compute: with a driver, the stream whose later work may use the memory of the job on the GPU
 * outs: where the rows of each source go: addresses, or with a driver ascending offsets in the
 *     slot's staging memory
 * devices: with a driver, where they go on the GPU, and after them where the rows of each table go
 *     that the GPU reads itself */
int64_t pf_engine_submit(struct pf_engine *engine, const int64_t *rows, int64_t n, void *compute,
                         const int64_t *outs, char *const *devices);

struct pf_result {
    double begin_s; /* when the first piece began, in seconds of CLOCK_MONOTONIC */
    double end_s;   /* when the last piece had ended, and all copies were queued */
    int64_t failed;  /* 1 + the number of a source that could not be read; 0 for none */
    int64_t error;   /* of the driver; 0 for none */
    int64_t is_idle; /* whether the GPU had done all work queued before the last submitted job */
};

/* Waits for a job, and gathers pieces of it while other threads gather the rest. With a driver, the
 * later work of the stream `compute` then sees the rows.
 *
 * Returns 0, or -1 if a signal arrived, after which the caller may wait again. */
int pf_engine_wait(struct pf_engine *engine, uint32_t number, void *compute,
                   struct pf_result *result);

/* Makes another stream see the rows of the last job for which the loop has waited. Returns 0 or an
 * error of the driver. */
int pf_engine_wait_again(const struct pf_engine *engine, uint32_t number, void *compute);

/* Gathers one piece of a job, as a thread of the engine would. Returns whether there was one. */
int pf_engine_help(struct pf_engine *engine, uint32_t number);

/* Ends the threads, and waits for all copies. From now on, only the thread that waits for a job
 * gathers, and it calls this again when it has waited. Any thread may call this. */
void pf_engine_stop(struct pf_engine *engine);

/* Frees an engine without threads: a stopped one, or one of which this process is a fork. */
void pf_engine_free(struct pf_engine *engine, int is_forked);

/* move.c */

/* State of the calling thread that calls of the driver change. */
struct pf_scope {
    int is_entered;
    int mode;
};

/* Makes the context of the GPU current in the calling thread until `pf_leave`, because the program
 * may use another GPU there. Calls in between do not concern a capture of a CUDA graph, in this
 * thread or another one. `driver` may be NULL. */
struct pf_scope pf_enter(const struct pf_driver *driver);
void pf_leave(const struct pf_driver *driver, struct pf_scope *scope);

/* Bytes of one copy of many parts. Each copy costs the host some microseconds, in which the link
 * moves about 200 KB. */
#define PF_COPY_NBYTES (2 << 20)

/* Parts in staging memory, one after the other, that go to the GPU. */
struct pf_staged {
    const struct pf_driver *driver;
    void *side; /* stream of the copies */
    const char *staging;
    const int64_t *offsets; /* of each part in staging memory, ascending */
    const int64_t *nbytes;  /* of each part */
    char *const *devices;   /* where each part goes */
    int64_t n;
};

/* Queues copies of bytes [from, to) of staging memory. Parts that are as far apart on the GPU as in
 * staging memory are one copy. Returns 0 or an error of the driver. */
int pf_copy_staged(const struct pf_staged *staged, int64_t from, int64_t to);

/* Work for one stream, which begins after all work of another one so far. */
struct pf_queue {
    const struct pf_driver *driver;
    void *before;   /* the other stream */
    void *stream;
    void *released; /* event after the work of the other stream */
    void *done;     /* event after this work */
    void *written;  /* event that the moves of rows wait for; NULL for none */
    char *staging;  /* page-locked memory of a slot, whose last work has the same `done` */
    int64_t n_staged; /* number of first copies that go through it */
    int64_t n_copies;
    int64_t n_moves;
};

/* Queues the copies, and then the moves of rows. The caller keeps page-locked memory until `done`
 * has passed.
 *
 * offsets: of each staged part in staging memory, ascending
 * nbytes, devices, from: bytes of each copy, where it goes, and from where
 * moves: for each, the arguments of pf_move_rows from `direct` to `n`, the number of devices, and
 *     the devices
 *
 * Returns 0, an error of the driver, or PF_NOT_READY if the last copies from the slot's staging
 * memory are not done, after which nothing was done. */
int pf_queue(const struct pf_queue *queue, const int64_t *offsets, const int64_t *nbytes,
             char *const *devices, const char *const *from, const int64_t *moves);

/* Makes later work of `compute` see a batch. Returns whether the GPU had done all work queued
 * before the event `released`, or the negative error of the driver. */
int pf_receive(const struct pf_driver *driver, void *compute, void *released, void *done);

/* direct.c */

#define PF_MOST_TABLES 8

/* Rows in page-locked memory. */
struct pf_table {
    char *rows;
    int64_t row_nbytes;
    int64_t part; /* position among the parts of a job on the GPU */
};

/* A kernel, and the tables whose rows one launch reads (pinfeed/devices/kernels.py). */
struct pf_launch {
    void *kernel;
    int64_t n_blocks;  /* most blocks */
    int64_t n_threads; /* threads of a block */
    int64_t width;     /* bytes of a word */
    int64_t n_tables;
    struct pf_table tables[PF_MOST_TABLES];
};

/* Rows that the GPU reads itself, by row indices in its own memory. */
struct pf_direct {
    int64_t index_nbytes; /* 4 or 8 */
    int64_t shift; /* -1; or indices are pairs of a row and its place, sorted by row >> shift */
    int64_t part;  /* position of the row indices among the parts of a job on the GPU */
    int64_t n_tables; /* of all launches together */
    int64_t n_launches;
    struct pf_launch launches[];
};

/* A row index, and the place of its row in the batch. */
struct pf_pair {
    int32_t row;
    int32_t place;
};

/* The argument of the kernels. */
struct pf_moves {
    const void *indices;
    uint32_t n_rows;
    uint32_t n_tables;
    struct {
        char *rows;
        char *packed;
        uint32_t row_nbytes;
    } tables[PF_MOST_TABLES];
};

/* Distinct values of row >> shift. */
#define PF_MOST_BUCKETS 4096

/* Writes the row indices [begin, end) of a job where they are staged; all of them if they are
 * sorted. Returns whether they are the rows from the first one of the job on. */
int pf_stage_indices(const struct pf_direct *direct, const int64_t *rows, int64_t begin,
                     int64_t end, char *staged);

enum { PF_FROM_TABLES, PF_TO_TABLES };

/* Queues reads of rows whose row indices are on the GPU, or writes. Returns 0 or an error of the
 * driver.
 *
 * direction: PF_FROM_TABLES, or PF_TO_TABLES with kernels that write
 * start: first row, if the rows follow each other, which needs no kernel; -1 otherwise
 * devices: where the parts are on the GPU; NULL for a part that is left out */
int pf_move_rows(const struct pf_driver *driver, void *stream, const struct pf_direct *direct,
                 int direction, int64_t start, int64_t n, char *const *devices);

/* Rows that are copied between tensors of the GPU. */
struct pf_row_copy {
    char *source;
    char *target;
    const int32_t *taken; /* positions of the rows in `source`; NULL for all rows in order */
    const int32_t *into;  /* and in `target` */
    int64_t n_rows;
    int64_t row_nbytes;
};

#define PF_MOST_COPIES 16

/* Queues copies of rows, of which none depends on another one, by the kernel of
 * pinfeed/devices/row_copies.py. Returns 0 or an error of the driver.
 *
 * n_threads: threads of a block
 * most_blocks: most blocks of a copy */
int pf_copy_rows(const struct pf_driver *driver, void *kernel, void *stream, int64_t n_threads,
                 int64_t most_blocks, const struct pf_row_copy *copies, int64_t n);

/* write.c */

/* A store whose rows are written. */
struct pf_store {
    struct pf_rows rows; /* without a base for one that is never written from staging memory */
    int64_t row_nbytes;
};

/* Counts of a writer, which begins with them. */
struct pf_written {
    _Atomic uint32_t n_queued; /* writes that were not refused, modulo 2^32 */
    _Atomic uint32_t n_done;   /* those that have ended; their memory is not used any more */
    _Atomic int32_t error;     /* of the driver; 0 for none */
    double seconds;            /* in which rows were written */
};

struct pf_writer;

/* Makes a writer without threads. Returns 0 or an error of the driver.
 *
 * side: the stream of the copies
 * staging: two page-locked memories, each for the largest write
 * n_places: most writes that have not ended
 * n_parts: number of parts of a write: `n_staged` that go through staging memory; and after them
 *     the row indices for the GPU and the parts that it writes itself, if there are any
 * stores: of each part
 * direct: how the GPU writes rows itself, which the caller keeps; NULL if it does not */
int pf_writer_open(struct pf_writer **opened, const struct pf_driver *driver, void *side,
                   char *const *staging, uint32_t n_places, int64_t n_parts, int64_t n_staged,
                   const struct pf_store *stores, const struct pf_direct *direct);

/* Starts the writer's thread, and at most `n_helpers` threads that help it. Without threads, those
 * who wait for a write make it. */
void pf_writer_start(struct pf_writer *writer, int n_helpers);

enum { PF_STOPPED = -1 };

/* Queues a write. The caller keeps its memory until it has ended. At most `n_places` - 1 writes
 * have not ended.
 *
 * compute: the stream that computes the values
 * rows: the row indices, shape (n,), n > 0, all distinct
 * offsets: of each part in staging memory, ascending
 * values: of each part on the GPU; NULL for a store that stays as it is
 * devices: memory of each part on the GPU, where the values are held; the values themselves if they
 *     do not change
 * Returns 0, an error of the driver, or PF_STOPPED, after which nothing is written. */
int pf_writer_write(struct pf_writer *writer, void *compute, const int64_t *rows, int64_t n,
                    const int64_t *offsets, char *const *values, char *const *devices);

/* Makes one step of the writer's thread, if it has none. Returns whether there was one. */
int pf_writer_step(struct pf_writer *writer);

/* Waits until a write has ended. Returns 0, or -1 if a signal arrived. */
int pf_writer_wait(struct pf_writer *writer, uint32_t number);

/* Returns whether the GPU has computed the values of a write that was queued last. */
int pf_writer_is_computed(const struct pf_writer *writer);

/* Makes all queued writes, and ends the threads. Later writes are refused. Any thread may call
 * this. */
void pf_writer_stop(struct pf_writer *writer);

/* Frees a stopped writer, or one of which this process is a fork. */
void pf_writer_free(struct pf_writer *writer, int is_forked);

/* shuffle.c */

#define PF_N_KEYS 6

struct pf_network {
    uint32_t n;     /* numbers to permute */
    uint32_t width; /* of the rectangle of the network, whose area is below 2^31 */
    uint32_t height;
    uint32_t keys[PF_N_KEYS];
};

/* Writes the permuted numbers of `positions`, which are below net->n, to `out`. */
void pf_permute(const struct pf_network *net, const int64_t *positions, int64_t n, int64_t *out);

/* requests.c */

/* PF_READ_CACHED reads only what is in the page cache. */
enum { PF_READ, PF_READ_CACHED, PF_WRITE };

/* Makes n requests, one after another. Each moves nbytes[i] bytes between memory and a file. The
 * results are the bytes moved, or negative error numbers. */
void pf_request_each(int fd, int kind, const int64_t *addresses, const int64_t *offsets,
                     const int64_t *nbytes, int64_t n, int64_t *results);

/* distinct.c: the functions of pinfeed/rows/indices.py.
 *
 * rows: the row indices, shape (n,)
 *
 * The outputs have room for `n` numbers. The functions return the number of distinct rows, or -1 if
 * a row is negative, or the bits of the largest row and of `n` are more than 64 together. */
int64_t pf_distinct_rows(const int64_t *rows, int64_t n, int64_t *distinct, int64_t *positions);
int64_t pf_first_occurrences(const int64_t *rows, int64_t n, int64_t *distinct,
                             int64_t *positions);

/* Writes a sorted key for each row to `keys`, which may be the memory of `rows`. The low bits of a
 * key are the position of the row, and the others are its row index. `spare` has room for as many
 * keys. Returns the number of low bits, or -1 as above. */
int pf_sort_keys(const int64_t *rows, int64_t n, uint64_t *keys, uint64_t *spare);

/* overlap.c */

/* Row indices of a batch, ascending. */
struct pf_sorted {
    int64_t *rows;
    int32_t *order; /* the position of each in the batch */
    int64_t n;
};

/* Sorts the rows of a batch, and finds those that earlier batches have.
 *
 * rows: the rows of the batch in their order; they may repeat
 * batch: receives these rows
 * earlier: other batches, newest first, whose rows are distinct
 * spare: memory of 9 bytes for each row
 * found: receives for each earlier batch the positions of its latest rows, which no batch before it
 *     in the list has, and then those of its other rows; of each, first the positions in the batch,
 *     and then as many in the earlier batch; room for 2 * batch->n * n_earlier numbers
 * counts: receives for each earlier batch the number of latest rows, and that of other rows, and
 *     then the number of unread rows
 * finds_unread: whether to write also the rows that no earlier batch has, after the last position:
 *     a pf_pair for each, in the order of rows, which are below 2^31; room for batch->n more pairs
 *
 * Returns where a row in `batch` equals the one before it; `batch->n` if all are distinct. Returns
 * -1 if the rows do not ascend, and have no keys in distinct.c. */
int64_t pf_overlaps(const int64_t *rows, const struct pf_sorted *batch,
                    const struct pf_sorted *earlier, int64_t n_earlier, uint64_t *spare,
                    int32_t *found, int64_t *counts, int finds_unread);

/* cache.c */

struct pf_cache_slot {
    int64_t row;
    int32_t n_uses;
    uint32_t last_used; /* the last batch that used the row */
};

struct pf_cache {
    int32_t *rows; /* for every row of the table its uses, or ~slot if it is in the cache */
    struct pf_cache_slot *slots;
    int64_t capacity;
    int64_t n_used;    /* slots with a row, before all others */
    int64_t n_batches; /* of the loop, so far */
    int64_t least;     /* uses of a row that enters the cache */
};

/* Decides which rows enter the cache with a batch. No row leaves it.
 *
 * rows: the row indices, shape (n,), all distinct
 * positions: receives the positions in the batch of hits, of admitted rows and of bypassed rows,
 *     and then the slots of hits and of admitted rows; room for 3 * n numbers
 * gathered: receives the admitted rows, and then the bypassed ones; room for n numbers
 * counts: receives the numbers of hits and of admitted rows */
void pf_decide(struct pf_cache *cache, const int64_t *rows, int64_t n, int32_t *positions,
               int64_t *gathered, int64_t *counts);

/* dense.c: rows of a matrix in CSR format, whose columns and bounds have `index_nbytes` (4 or 8).
 *
 * The bounds ascend. Returns -1, or the first row whose columns do not ascend, or are out of range;
 * `out` is then incomplete. */
int64_t pf_dense(const void *values, const void *columns, const void *bounds, void *out,
                 int64_t n_rows, int64_t n_columns, int64_t value_nbytes, int64_t index_nbytes);

#endif
