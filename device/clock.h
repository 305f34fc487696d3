/* The host's monotonic clock. */
#ifndef STREAMKL_DEVICE_CLOCK_H
#define STREAMKL_DEVICE_CLOCK_H

/* Seconds since an arbitrary moment: only differences are meaningful. */
double clock_seconds(void);

#endif
