#include "streamkl.h"

#define TEXT_(x) #x
#define TEXT(x)  TEXT_(x)

#if defined(__x86_64__)
#define TARGET "x86_64"
#elif defined(__aarch64__)
#define TARGET "aarch64"
#else
#define TARGET "unknown architecture"
#endif

#if defined(__clang__)
#define COMPILER "clang " TEXT(__clang_major__) "." TEXT(__clang_minor__)
#else
#define COMPILER "gcc " TEXT(__GNUC__) "." TEXT(__GNUC_MINOR__)
#endif

#if defined(SKL_WITH_CUDA)
#define BACKENDS "cpu cuda, CUDA " SKL_CUDA_VERSION ", GPU code: " SKL_CUDA_CODE
#else
#define BACKENDS "cpu"
#endif

const char *skl_version(void)
{
    return TEXT(SKL_VERSION_MAJOR) "." TEXT(SKL_VERSION_MINOR) "." TEXT(SKL_VERSION_PATCH);
}

const char *skl_build_info(void)
{
    return COMPILER ", " TARGET ", backends: " BACKENDS;
}
