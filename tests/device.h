/* The device under test. SKL_TEST_DEVICE=cuda runs the cases on a GPU. It works on the guarded host memory of the
 * tests, registered with CUDA, so that poison, gaps and guard pages detect stray accesses of a GPU as they do on a
 * CPU. */
#ifndef SKL_TESTS_DEVICE_H
#define SKL_TESTS_DEVICE_H

#include "case_support.h"

/* Registers pages of host memory with the device, and unregisters them. */
void device_share(void *pages, size_t size);
void device_unshare(void *pages);

/* Synchronizes with the device. Fails the test if a launch failed. */
void device_wait(void);

#endif
