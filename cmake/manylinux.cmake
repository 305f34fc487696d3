# For Linux distributions with glibc 2.28 or later, on x86_64 or 64-bit Arm, wherever this runs. Debian's gcc compiles, as
# in the builds that are tested and measured. Zig links: it knows the symbols of every glibc, so that a function that
# 2.28 lacks is an error. scripts/build-wheel prepares the folder STREAMKL_WHEEL_TOOLS.
set(tools $ENV{STREAMKL_WHEEL_TOOLS})
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR $ENV{STREAMKL_WHEEL_PROCESSOR})
set(CMAKE_C_COMPILER ${CMAKE_SYSTEM_PROCESSOR}-linux-gnu-gcc)
set(CMAKE_CUDA_COMPILER ${tools}/cuda/bin/nvcc)
set(CMAKE_CUDA_COMPILER_FORCED ON) # else CMake starts a test program to find GPUs, and that may be for another processor
set(CMAKE_CUDA_HOST_COMPILER ${CMAKE_SYSTEM_PROCESSOR}-linux-gnu-g++)

# Without symbol tables: they name temporary files, and no two builds would be equal. A shared library, too, must find
# every function that it calls.
set(CMAKE_SHARED_LINKER_FLAGS_INIT "-s -Wl,-z,defs")
set(CMAKE_EXE_LINKER_FLAGS_INIT -s)

# The libraries of the CUDA runtime are named where they are linked. Zig has librt.
set(CMAKE_CUDA_RUNTIME_LIBRARY None)
set(CUDA_rt_LIBRARY -lrt)

# What gcc's code calls, such as the detection of instruction sets on x86_64.
execute_process(COMMAND ${CMAKE_C_COMPILER} -print-libgcc-file-name OUTPUT_VARIABLE libgcc OUTPUT_STRIP_TRAILING_WHITESPACE)
set(CMAKE_C_LINK_EXECUTABLE
  "${tools}/zig-cc <FLAGS> <CMAKE_C_LINK_FLAGS> <LINK_FLAGS> <OBJECTS> -o <TARGET> <LINK_LIBRARIES> ${libgcc}")
set(CMAKE_C_CREATE_SHARED_LIBRARY
  "${tools}/zig-cc -shared <LINK_FLAGS> <SONAME_FLAG><TARGET_SONAME> -o <TARGET> <OBJECTS> <LINK_LIBRARIES> ${libgcc}")

set(CMAKE_FIND_ROOT_PATH ${tools} ${tools}/cuda)
set(CMAKE_FIND_ROOT_PATH_MODE_PROGRAM NEVER)
set(CMAKE_FIND_ROOT_PATH_MODE_LIBRARY ONLY)
set(CMAKE_FIND_ROOT_PATH_MODE_INCLUDE ONLY)
set(CMAKE_FIND_ROOT_PATH_MODE_PACKAGE ONLY)
set(ENV{PKG_CONFIG_LIBDIR} ${tools}/lib/pkgconfig)
