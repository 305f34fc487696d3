# Included by aarch64.cmake and x86_64.cmake, which set CMAKE_SYSTEM_PROCESSOR.
set(cross_triple ${CMAKE_SYSTEM_PROCESSOR}-linux-gnu)
set(cross_root /usr/${cross_triple})
set(CMAKE_C_COMPILER ${cross_triple}-gcc)
set(CMAKE_CROSSCOMPILING_EMULATOR qemu-${CMAKE_SYSTEM_PROCESSOR} -cpu max -L ${cross_root})

# Find libraries and headers only in the target's trees, of which scripts/cross-cmocka installs the second, and programs
# only on the host.
get_filename_component(cross_built ${CMAKE_CURRENT_LIST_DIR}/../build/cross/${CMAKE_SYSTEM_PROCESSOR} ABSOLUTE)
set(CMAKE_FIND_ROOT_PATH ${cross_root} ${cross_built})
set(CMAKE_FIND_ROOT_PATH_MODE_PROGRAM NEVER)
set(CMAKE_FIND_ROOT_PATH_MODE_LIBRARY ONLY)
set(CMAKE_FIND_ROOT_PATH_MODE_INCLUDE ONLY)
set(CMAKE_FIND_ROOT_PATH_MODE_PACKAGE ONLY)
set(ENV{PKG_CONFIG_LIBDIR} ${cross_built}/lib/pkgconfig)
