# x86_64 from another host: Debian's cross compiler, programs run under qemu-user.
# qemu has AVX2 from version 7.2 on, and no AVX-512: that kernel is only compiled.
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR x86_64)
include(${CMAKE_CURRENT_LIST_DIR}/cross.cmake)
