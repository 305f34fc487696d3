#include "bench/cpu/blas.h"

#include <assert.h>
#include <dlfcn.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { CBLAS_ROW_MAJOR = 101, CBLAS_NO_TRANSPOSE = 111, CBLAS_TRANSPOSE = 112 };

typedef void sgemm_call(int order, int transpose_a, int transpose_b, int rows, int columns, int inner, float alpha,
                        const float *a, int stride_a, const float *b, int stride_b, float beta, float *c,
                        int stride_c);
typedef void set_threads_call(int threads);
typedef char *text_call(void);

struct blas {
    void *library;
    sgemm_call *sgemm;
    set_threads_call *set_threads;
    text_call *core_name, *config;
    char description[160];
};

/* ---- Loading ------------------------------------------------------------------------------------------------ */

/* ISO C does not allow a cast from void * to a function pointer: copy the bits. */
static bool find_call(void *library, const char *name, void *call)
{
    void *const symbol = dlsym(library, name);
    memcpy(call, &symbol, sizeof symbol);
    return symbol != NULL;
}

static bool load(blas *found)
{
    static const char *const files[] = {"libopenblas.so.0", "libopenblas.so"};
    found->library = NULL;
    for (size_t i = 0; found->library == NULL && i < sizeof files / sizeof files[0]; i++)
        found->library = dlopen(files[i], RTLD_NOW | RTLD_LOCAL);
    if (found->library == NULL)
        return false;
    if (find_call(found->library, "cblas_sgemm", &found->sgemm) &&
        find_call(found->library, "openblas_set_num_threads", &found->set_threads) &&
        find_call(found->library, "openblas_get_corename", &found->core_name) &&
        find_call(found->library, "openblas_get_config", &found->config))
        return true;
    dlclose(found->library);
    return false;
}

/* ---- Choice of kernels -------------------------------------------------------------------------------------- */

#define CORE_TYPE_VARIABLE "OPENBLAS_CORETYPE"

/* OpenBLAS falls back to SSE kernels on a CPU that is newer than the library: a sixth of the speed on a Xeon of 2023
 * with OpenBLAS 0.3.21. Such a baseline would be unfair. Returns a core type whose kernels this CPU can run, or NULL
 * if the library's choice is good or the user has set one. */
static const char *better_core(const blas *found)
{
#if defined(__x86_64__)
    static const char *const cores_before_avx2[] = {"Prescott", "Core2",   "Penryn",    "Dunnington", "Nehalem",
                                                    "Athlon",   "Opteron", "Barcelona", "Generic",    "Unknown"};
    if (getenv(CORE_TYPE_VARIABLE))
        return NULL;
    for (size_t i = 0; i < sizeof cores_before_avx2 / sizeof cores_before_avx2[0]; i++) {
        if (strcmp(found->core_name(), cores_before_avx2[i]) != 0)
            continue;
        if (__builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl"))
            return "SkylakeX";
        return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") ? "Haswell" : NULL;
    }
#else
    (void)found;
#endif
    return NULL;
}

blas *blas_open(void)
{
    blas *const found = calloc(1, sizeof *found);
    bool loaded = found && load(found);
    const char *const core = loaded ? better_core(found) : NULL;
    if (core) {
        /* OpenBLAS chooses its kernels when it is loaded, so load it again. */
        dlclose(found->library);
        setenv(CORE_TYPE_VARIABLE, core, 1);
        loaded = load(found);
    }
    if (!loaded) {
        free(found);
        return NULL;
    }
    /* The configuration reads "OpenBLAS 0.3.21 NO_LAPACKE ...": take the first two words. */
    char name[32] = "", version[32] = "";
    sscanf(found->config(), "%31s %31s", name, version);
    snprintf(found->description, sizeof found->description, "%s %s, %s kernels", name, version, found->core_name());
    return found;
}

void blas_close(blas *library)
{
    if (library == NULL)
        return;
    dlclose(library->library);
    free(library);
}

/* ---- Calls -------------------------------------------------------------------------------------------------- */

const char *blas_description(const blas *library)
{
    return library->description;
}

void blas_set_threads(const blas *library, int threads)
{
    library->set_threads(threads);
}

static int transpose_code(blas_operand operand)
{
    return operand.transposed ? CBLAS_TRANSPOSE : CBLAS_NO_TRANSPOSE;
}

void blas_multiply(const blas *library, float scale, blas_operand a, blas_operand b, float *c, int64_t rows,
                   int64_t columns, int64_t inner)
{
    assert(rows <= INT_MAX && columns <= INT_MAX && inner <= INT_MAX);
    assert(a.stride <= INT_MAX && b.stride <= INT_MAX);
    library->sgemm(CBLAS_ROW_MAJOR, transpose_code(a), transpose_code(b), (int)rows, (int)columns, (int)inner, scale,
                   a.data, (int)a.stride, b.data, (int)b.stride, 0.0F, c, (int)columns);
}
