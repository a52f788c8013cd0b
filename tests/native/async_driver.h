/* A simulated driver of a GPU, whose streams do their work late: see async_driver.c. */
#ifndef ASYNC_DRIVER_H
#define ASYNC_DRIVER_H

#include "../../pinfeed/native/pinfeed.h"

extern const struct pf_driver async_driver;

/* Starts the thread that does the work of all streams; its order is a function of the seed and of
 * the times of the calls. */
void async_start(uint32_t seed);

/* Does all queued work, ends the thread, and frees the streams. */
void async_stop(void);

/* Returns a new stream. */
void *async_stream(void);

/* Kernels that read rows by row indices of int32, or by pairs, and that write rows. */
enum { ASYNC_GATHER, ASYNC_PAIRED, ASYNC_SCATTER };

/* Returns the handle of a kernel. */
void *async_kernel(int kind);

/* Makes every later call of the driver fail with an error, or none with 0. */
void async_fail(int error);

#endif
