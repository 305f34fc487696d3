# Cross-compiles for x86_64 with Debian's compiler; programs run under qemu-user.
# qemu supports AVX2 since version 7.2, but not AVX-512: that kernel is compiled and not run.
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR x86_64)
include(${CMAKE_CURRENT_LIST_DIR}/cross.cmake)
