/* Work for a batch that the loop's thread queues by one call, after all work of another stream.
 *
 * Parts of a batch of a loader that are small, or in pageable memory, are copied into the
 * page-locked staging memory of a slot, one after the other. Small ones lie next to each other on
 * the GPU, too, so they are one copy. Long ones are a copy for each 2 MiB, which runs while the
 * next ones are staged. Other parts are copied from where they are, and the GPU moves rows itself.
 *
 *     queue:   done.query()  of the slot's last batch, before parts are staged             (1)
 *              released = record(before)
 *              wait(stream, released)                                                 (2), (7)
 *              parts -> staging; copy(staging or part -> GPU, stream)
 *              wait(stream, written)                                                      (13)
 *              reads or writes of rows(stream)
 *              done = record(stream)
 *     receive: wait(compute, done)                                                         (4)
 *
 * The numbers are those of the hazards in engine.c, transfer.py and row_window.py. */
#include "pinfeed.h"

#include <string.h>

struct pf_scope pf_enter(const struct pf_driver *driver)
{
    struct pf_scope scope = {0, PF_CAPTURE_RELAXED};
    if (driver && !driver->push(driver->context)) {
        scope.is_entered = 1;
        driver->exchange_capture_mode(&scope.mode);
    }
    return scope;
}

void pf_leave(const struct pf_driver *driver, struct pf_scope *scope)
{
    void *context;
    if (scope->is_entered) {
        driver->exchange_capture_mode(&scope->mode);
        driver->pop(&context);
    }
}

int pf_copy_staged(const struct pf_staged *staged, int64_t from, int64_t to)
{
    const int64_t *const offsets = staged->offsets;
    int error = 0;
    for (int64_t k = 0; from < to && !error;) {
        while (k + 1 < staged->n && offsets[k + 1] <= from)
            k++;
        char *const device = staged->devices[k] + (from - offsets[k]);
        int64_t end = to, next = to;
        for (; k + 1 < staged->n && offsets[k + 1] < to; k++)
            if (staged->devices[k + 1] - staged->devices[k] != offsets[k + 1] - offsets[k]) {
                next = offsets[k + 1];
                /* The memory of this part may end before the gap. */
                end = offsets[k] + staged->nbytes[k];
                break;
            }
        if (end > from)
            error = staged->driver->copy(device, staged->staging + from, (size_t)(end - from),
                                         staged->side);
        from = next;
    }
    return error;
}

/* Stages the first parts, and queues their copies. */
static int stage(const struct pf_queue *queue, const int64_t *offsets, const int64_t *nbytes,
                 char *const *devices, const char *const *from)
{
    const struct pf_staged staged = {queue->driver, queue->stream, queue->staging, offsets,
                                     nbytes,        devices,       queue->n_staged};
    int error = 0;
    int64_t sent = 0, end = 0;
    for (int64_t i = 0; i < queue->n_staged && !error; i++) {
        for (int64_t done = 0; done < nbytes[i] && !error;) {
            const int64_t left = nbytes[i] - done;
            const int64_t step = left < PF_COPY_NBYTES ? left : PF_COPY_NBYTES;
            memcpy(queue->staging + offsets[i] + done, from[i] + done, (size_t)step);
            done += step;
            end = offsets[i] + done;
            if (end - sent >= PF_COPY_NBYTES) {
                error = pf_copy_staged(&staged, sent, end);
                sent = end;
            }
        }
    }
    return error ? error : pf_copy_staged(&staged, sent, end);
}

int pf_queue(const struct pf_queue *queue, const int64_t *offsets, const int64_t *nbytes,
             char *const *devices, const char *const *from, const int64_t *moves)
{
    const struct pf_driver *driver = queue->driver;
    struct pf_scope scope = pf_enter(driver);
    /* An event without a record has passed. */
    int error = queue->n_staged ? driver->query(queue->done) : 0; /* (1) */
    if (error) {
        pf_leave(driver, &scope);
        return error;
    }
    error = driver->record(queue->released, queue->before);
    if (!error)
        error = driver->wait(queue->stream, queue->released, 0); /* (2), (7) */
    if (!error)
        error = stage(queue, offsets, nbytes, devices, from);
    for (int64_t i = queue->n_staged; i < queue->n_copies && !error; i++)
        if (nbytes[i])
            error = driver->copy(devices[i], from[i], (size_t)nbytes[i], queue->stream);
    if (queue->written && !error)
        error = driver->wait(queue->stream, queue->written, 0); /* (13) */
    for (int64_t i = 0; i < queue->n_moves && !error; i++) {
        error = pf_move_rows(driver, queue->stream, (const struct pf_direct *)(intptr_t)moves[0],
                             (int)moves[1], moves[2], moves[3], (char *const *)(moves + 5));
        moves += 5 + moves[4];
    }
    /* After an error, too, the caller waits for the work that was queued. */
    const int recorded = driver->record(queue->done, queue->stream);
    pf_leave(driver, &scope);
    return error ? error : recorded;
}

int pf_receive(const struct pf_driver *driver, void *compute, void *released, void *done)
{
    struct pf_scope scope = pf_enter(driver);
    const int is_idle = driver->query(released) != PF_NOT_READY;
    const int error = driver->wait(compute, done, 0); /* (4) */
    pf_leave(driver, &scope);
    return error ? -error : is_idle;
}
