/* A driver that is older than the CUDA runtime of the build. CTest starts this with tests/fake_driver.c as the
 * driver. */
#include "support.h"

#include <string.h>

static void test_kernels_name_both_releases(void **state)
{
    (void)state;
    skl_kernel_info info = {.struct_size = sizeof info};
    int cpu_count = 0, gpu_count = 0;
    for (int32_t i = 0; skl_kernel_at(i, &info); i++) {
        cpu_count += info.device == SKL_CPU && info.usable;
        if (info.device != SKL_CUDA)
            continue;
        gpu_count++;
        assert_false(info.usable);
        assert_non_null(
            strstr(info.detail, "the driver supports CUDA 12.4 at most, this build needs a driver for CUDA"));
    }
    assert_true(cpu_count > 0);
    assert_true(gpu_count > 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_kernels_name_both_releases)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
