# Decides whether this build has the CUDA backend, and for which GPUs. Sets STREAMKL_CUDA, cuda_architectures and
# cuda_without_sm90.

set(STREAMKL_CUDA_ARCHITECTURES native CACHE STRING
  "GPUs to compile for: native (those of this machine), all, or a list such as 80-real;90a-real")

# What code for a GPU is compiled for, by the major number of its compute capability. Code for 8.0 also runs on 8.6 and
# 8.9, code for 10.0 on 10.3, code for 12.0 on 12.1. Hopper kernels need 9.0a. The PTX of the last is for GPUs to come.
set(cuda_code_8 80-real)
set(cuda_code_9 90a-real)
set(cuda_code_10 100-real)
set(cuda_code_12 120)
set(cuda_all ${cuda_code_8} ${cuda_code_9} ${cuda_code_10} ${cuda_code_12})

# Sets `result` to what code for the GPUs of this machine is compiled for: nothing if it has none that the kernels run
# on, everything if the driver does not answer.
function(find_native_architectures result)
  set(${result} "" PARENT_SCOPE)
  file(GLOB devices /dev/nvidia[0-9]* /dev/dxg) # the second is that of Windows' subsystem for Linux
  if(NOT devices)
    return()
  endif()
  execute_process(COMMAND nvidia-smi --query-gpu=compute_cap --format=csv,noheader
    OUTPUT_VARIABLE capabilities ERROR_QUIET RESULT_VARIABLE status)
  if(NOT status EQUAL 0)
    set(${result} "${cuda_all}" PARENT_SCOPE)
    return()
  endif()
  string(REGEX MATCHALL "[0-9]+\\." majors "${capabilities}")
  set(architectures)
  foreach(major ${majors})
    string(REPLACE "." "" major ${major})
    list(APPEND architectures ${cuda_code_${major}})
  endforeach()
  list(REMOVE_DUPLICATES architectures)
  set(${result} "${architectures}" PARENT_SCOPE)
endfunction()

if(STREAMKL_CUDA_ARCHITECTURES STREQUAL "native")
  find_native_architectures(cuda_architectures)
elseif(STREAMKL_CUDA_ARCHITECTURES STREQUAL "all")
  set(cuda_architectures ${cuda_all})
else()
  set(cuda_architectures ${STREAMKL_CUDA_ARCHITECTURES})
endif()

# By default the backend is built for the GPUs that are here or that were named, if there is an nvcc; with sanitizers
# and for another processor only on request.
set(cuda_default OFF)
if(cuda_architectures AND NOT CMAKE_CROSSCOMPILING AND NOT STREAMKL_SANITIZE)
  find_program(STREAMKL_NVCC NAMES ${CMAKE_CUDA_COMPILER} $ENV{CUDACXX} nvcc) # check_language(CUDA) takes 2 s
  mark_as_advanced(STREAMKL_NVCC)
  if(STREAMKL_NVCC)
    set(cuda_default ON)
  else()
    message(WARNING "No nvcc in CUDACXX or PATH: the build has no GPU kernels")
  endif()
endif()
option(STREAMKL_CUDA "Build the CUDA backend (needs nvcc)" ${cuda_default})
if(NOT STREAMKL_CUDA)
  return()
endif()
option(STREAMKL_CUDA_QUICK "Compile GPU kernels in an eighth of the time to slow code: only tells whether they compile" OFF)

if(NOT cuda_architectures) # ON by request, and no GPU here
  set(cuda_architectures ${cuda_all})
endif()
# A build for the GPUs of this machine leaves out what they cannot run. One for named GPUs has every kernel.
set(cuda_without_sm90 OFF)
if(STREAMKL_CUDA_ARCHITECTURES STREQUAL "native" AND NOT cuda_code_9 IN_LIST cuda_architectures)
  set(cuda_without_sm90 ON)
endif()
message(STATUS "GPU kernels for ${cuda_architectures}")

# Sets `result` to nvcc's options for a list of architectures. Half of a compilation turns C++ into PTX, so it is
# shared: architectures below `own_from` are compiled from PTX of 8.0. Code for 9.0a from it is the same as from its own.
function(cuda_code_options result own_from)
  set(options)
  foreach(architecture ${ARGN})
    string(REGEX MATCH "^([0-9]+)a?" name ${architecture})
    set(ptx ${name})
    if(CMAKE_MATCH_1 LESS own_from)
      set(ptx 80)
    endif()
    list(APPEND options --generate-code=arch=compute_${ptx},code=sm_${name})
    if(NOT architecture MATCHES "-real$")
      list(APPEND options --generate-code=arch=compute_${ptx},code=compute_${ptx})
    endif()
  endforeach()
  set(${result} "${options}" PARENT_SCOPE)
endfunction()
enable_language(CUDA)
find_package(CUDAToolkit REQUIRED)
