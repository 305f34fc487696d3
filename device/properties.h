/* What a GPU is, and how much of its memory is in use by all processes. */
#ifndef STREAMKL_DEVICE_PROPERTIES_H
#define STREAMKL_DEVICE_PROPERTIES_H

#include <stddef.h>

typedef struct device_properties {
    char name[96]; /* "" on the CPU */
    int sm_count;
    size_t memory_used, memory_total;
} device_properties;

#endif
