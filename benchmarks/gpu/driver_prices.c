/* The host's time of single calls of the CUDA driver: `driver_prices LIBRARY`.
 *
 * LIBRARY is libcuda.so.1. It is loaded at run time, so no CUDA header is needed. A line has the
 * name of a call, its median and its 90th percentile in microseconds. Calls are made in groups of
 * 64, and the stream is empty before each group, so no call waits for room in the stream. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

enum { GROUP = 64, GROUPS = 40, LONG = 320 * 1000 };

typedef void *handle;

static void *driver;
static handle stream, event, function, host;
static uint64_t device_memory;

#define FUNCTION(name, ...) ((int (*)(__VA_ARGS__))find(name))

/* Calls a function of the driver, and ends the program if it fails. */
#define CHECKED(name, types, ...)                                                                  \
    do {                                                                                           \
        int code = ((int(*) types)find(name))(__VA_ARGS__);                                        \
        if (code) {                                                                                \
            fprintf(stderr, "%s failed with CUDA error %d\n", name, code);                         \
            exit(1);                                                                               \
        }                                                                                          \
    } while (0)

static void *find(const char *name)
{
    void *found = dlsym(driver, name);
    if (!found) {
        fprintf(stderr, "%s is missing: %s\n", name, dlerror());
        exit(1);
    }
    return found;
}

static double now_us(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1e6 + t.tv_nsec / 1e3;
}

static int by_size(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static int (*record_event)(handle, handle);
static int (*wait_event)(handle, handle, unsigned);
static int (*query_event)(handle);
static int (*sync_event)(handle);
static int (*create_event)(handle *, unsigned);
static int (*destroy_event)(handle);
static int (*copy_to_device)(uint64_t, const void *, size_t, handle);
static int (*launch_kernel)(handle, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                            unsigned, handle, void **, void **);
static int (*sync_stream)(handle);

static int record(void) { return record_event(event, stream); }
static int wait(void) { return wait_event(stream, event, 0); }
static int query(void) { return query_event(event); }
static int sync(void) { return sync_event(event); }
static int create_and_destroy(void)
{
    handle one;
    /* 2: without times. */
    return create_event(&one, 2) || destroy_event(one);
}
static int copy_short(void) { return copy_to_device(device_memory, host, 4, stream); }
static int copy_long(void) { return copy_to_device(device_memory, host, LONG, stream); }
static int launch(void)
{
    return launch_kernel(function, 1, 1, 1, 32, 1, 1, 0, stream, NULL, NULL);
}

static void price(const char *name, int (*call)(void))
{
    static double times[GROUP * GROUPS];
    for (int i = 0; i < GROUP * GROUPS; i++) {
        if (i % GROUP == 0)
            sync_stream(stream);
        double begin = now_us();
        int code = call();
        times[i] = now_us() - begin;
        if (code) {
            fprintf(stderr, "%s failed with CUDA error %d\n", name, code);
            exit(1);
        }
    }
    qsort(times, GROUP * GROUPS, sizeof *times, by_size);
    printf("%s %.3f %.3f\n", name, times[GROUP * GROUPS / 2], times[GROUP * GROUPS * 9 / 10]);
}

static const char *ptx = ".version 6.3\n.target sm_70\n.address_size 64\n"
                         ".visible .entry nothing()\n{\n    ret;\n}\n";

int main(int argc, char **argv)
{
    handle context, module;
    int device;
    driver = dlopen(argc > 1 ? argv[1] : "libcuda.so.1", RTLD_NOW);
    if (!driver) {
        fprintf(stderr, "%s\n", dlerror());
        return 1;
    }
    CHECKED("cuInit", (unsigned), 0);
    CHECKED("cuDeviceGet", (int *, int), &device, 0);
    CHECKED("cuDevicePrimaryCtxRetain", (handle *, int), &context, device);
    CHECKED("cuCtxSetCurrent", (handle), context);
    /* 1: the stream does not wait for the default stream. */
    CHECKED("cuStreamCreate", (handle *, unsigned), &stream, 1);
    CHECKED("cuEventCreate", (handle *, unsigned), &event, 2);
    CHECKED("cuMemHostAlloc", (handle *, size_t, unsigned), &host, LONG, 0);
    CHECKED("cuMemAlloc_v2", (uint64_t *, size_t), &device_memory, LONG);
    CHECKED("cuModuleLoadData", (handle *, const void *), &module, ptx);
    CHECKED("cuModuleGetFunction", (handle *, handle, const char *), &function, module, "nothing");
    record_event = FUNCTION("cuEventRecord", handle, handle);
    wait_event = FUNCTION("cuStreamWaitEvent", handle, handle, unsigned);
    query_event = FUNCTION("cuEventQuery", handle);
    sync_event = FUNCTION("cuEventSynchronize", handle);
    create_event = FUNCTION("cuEventCreate", handle *, unsigned);
    destroy_event = FUNCTION("cuEventDestroy_v2", handle);
    copy_to_device = FUNCTION("cuMemcpyHtoDAsync_v2", uint64_t, const void *, size_t, handle);
    launch_kernel = FUNCTION("cuLaunchKernel", handle, unsigned, unsigned, unsigned, unsigned,
                             unsigned, unsigned, unsigned, handle, void **, void **);
    sync_stream = FUNCTION("cuStreamSynchronize", handle);
    price("record", record);
    price("wait", wait);
    /* The event is done from here on. */
    sync_stream(stream);
    price("query_of_done_event", query);
    price("sync_of_done_event", sync);
    price("create_and_destroy", create_and_destroy);
    price("copy_of_4_B", copy_short);
    price("copy_of_320_KB", copy_long);
    price("launch", launch);
    return sync_stream(stream);
}
