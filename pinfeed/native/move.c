/* Moves a batch that the loop's thread has, such as a batch of a loader, to a GPU.
 *
 * The parts come from tensors of the host. Small ones, and those in pageable memory, are copied
 * into the page-locked staging memory of a slot, one after the other, as they lie on the GPU. So
 * they are one copy, or, if they are long, one for each 2 MiB, which runs while the next ones are
 * staged.
 * Other parts are copied from where they are.
 *
 *     move:    copied.query()  of the slot's last batch                                    (1)
 *              released = record(compute)
 *              wait(side, released)                                                        (2)
 *              parts -> staging;  copy(staging or part -> GPU, side)
 *              copied = record(side)
 *     receive: wait(compute, copied)                                                       (4)
 *
 * The numbers are those of the hazards in engine.c. */
#include "pinfeed.h"

#include <string.h>

#define COPY_NBYTES (2 << 20)

/* Queues a copy of staged bytes [sent, end). */
static int send(const struct pf_move *move, int64_t sent, int64_t end)
{
    return move->driver->copy(move->device + sent, move->staging + sent, (size_t)(end - sent),
                              move->side);
}

/* Stages the first parts, and queues their copies. */
static int stage(const struct pf_move *move)
{
    int error = 0;
    int64_t sent = 0, end = 0;
    for (int64_t i = 0; i < move->n_staged && !error; i++) {
        const struct pf_part *part = &move->parts[i];
        for (int64_t done = 0; done < part->nbytes && !error;) {
            const int64_t left = part->nbytes - done;
            const int64_t step = left < COPY_NBYTES ? left : COPY_NBYTES;
            memcpy(move->staging + part->offset + done, move->from[i] + done, (size_t)step);
            done += step;
            end = part->offset + done;
            if (end - sent >= COPY_NBYTES) {
                error = send(move, sent, end);
                sent = end;
            }
        }
    }
    return error || end == sent ? error : send(move, sent, end);
}

int pf_move(const struct pf_move *move)
{
    const struct pf_driver *driver = move->driver;
    /* An event that was never recorded has passed. */
    int error = driver->query(move->copied); /* (1) */
    if (error)
        return error;
    void *context;
    driver->push(driver->context);
    error = driver->record(move->released, move->compute);
    if (!error)
        error = driver->wait(move->side, move->released, 0); /* (2) */
    if (!error)
        error = stage(move);
    for (int64_t i = move->n_staged; i < move->n && !error; i++)
        error = driver->copy(move->device + move->parts[i].offset, move->from[i],
                             (size_t)move->parts[i].nbytes, move->side);
    /* After an error, too, the next batch of the slot waits for the copies that were queued. */
    const int recorded = driver->record(move->copied, move->side);
    driver->pop(&context);
    return error ? error : recorded;
}

int pf_receive(const struct pf_move *move, int *is_idle)
{
    const struct pf_driver *driver = move->driver;
    void *context;
    driver->push(driver->context);
    *is_idle = driver->query(move->released) != PF_NOT_READY;
    const int error = driver->wait(move->compute, move->copied, 0); /* (4) */
    driver->pop(&context);
    return error;
}
