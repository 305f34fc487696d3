/* A libcuda.so.1 of CUDA 12.4, as far as the CUDA runtime asks before it gives up: see test_old_driver.c. */
#include <string.h>

int cuDriverGetVersion(int *version);
int cuGetProcAddress_v2(const char *name, void **function, int version, unsigned long long flags, int *status);

int cuDriverGetVersion(int *version)
{
    *version = 12040;
    return 0;
}

int cuGetProcAddress_v2(const char *name, void **function, int version, unsigned long long flags, int *status)
{
    const struct {
        const char *name;
        void (*function)(void);
    } known[] = {{"cuDriverGetVersion", (void (*)(void))cuDriverGetVersion},
                 {"cuGetProcAddress", (void (*)(void))cuGetProcAddress_v2}};
    (void)version, (void)flags;
    for (size_t i = 0; i < sizeof known / sizeof known[0]; i++)
        if (strcmp(name, known[i].name) == 0) {
            memcpy(function, &known[i].function, sizeof *function);
            return 0;
        }
    if (status != NULL)
        *status = 1; /* no such symbol */
    return 500;      /* CUDA_ERROR_NOT_FOUND */
}
