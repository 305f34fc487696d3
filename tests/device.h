/* The device under test. SKL_TEST_DEVICE=cuda runs the cases on a GPU: it works on the tests' own guarded memory,
 * which is registered with it, so that poison, gaps and guards watch a GPU as they watch a CPU. */
#ifndef SKL_TESTS_DEVICE_H
#define SKL_TESTS_DEVICE_H

#include "streamkl.h"

skl_device test_device(void);

/* Lets the device reach whole pages of host memory, and takes it away again. */
void device_share(void *pages, size_t size);
void device_unshare(void *pages);

/* Returns when everything that was launched is done; fails the test if it went wrong. */
void device_wait(void);

#endif
