# Installs the two libraries, their header, and the files for find_package(streamkl) and pkg-config.
include(GNUInstallDirs)
include(CMakePackageConfigHelpers)

install(TARGETS streamkl streamkl_static EXPORT streamkl-targets INCLUDES DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
install(FILES ${PROJECT_SOURCE_DIR}/include/streamkl.h DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})

set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/streamkl)
install(EXPORT streamkl-targets NAMESPACE streamkl:: DESTINATION ${package_dir})
configure_package_config_file(${CMAKE_CURRENT_LIST_DIR}/streamkl-config.cmake.in streamkl-config.cmake
  INSTALL_DESTINATION ${package_dir})
write_basic_package_version_file(streamkl-config-version.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${CMAKE_CURRENT_BINARY_DIR}/streamkl-config.cmake ${CMAKE_CURRENT_BINARY_DIR}/streamkl-config-version.cmake
  DESTINATION ${package_dir})

# Relative to the .pc file, so that an installed tree can be moved.
file(RELATIVE_PATH pc_to_prefix ${CMAKE_INSTALL_FULL_LIBDIR}/pkgconfig ${CMAKE_INSTALL_PREFIX})
if(STREAMKL_CUDA)
  set(pc_cuda_libraries "-L${CUDAToolkit_LIBRARY_DIR} -lcudart_static -ldl -lrt")
endif()
configure_file(${CMAKE_CURRENT_LIST_DIR}/streamkl.pc.in streamkl.pc @ONLY)
install(FILES ${CMAKE_CURRENT_BINARY_DIR}/streamkl.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)

# The Python package: one library without a version in its name, and the tool next to it. See pyproject.toml.
if(SKBUILD)
  add_custom_target(streamkl_python DEPENDS streamkl)
  install(FILES $<TARGET_FILE:streamkl> DESTINATION streamkl/lib COMPONENT python)
  install(FILES ${PROJECT_SOURCE_DIR}/view/report.html DESTINATION streamkl/distill COMPONENT python) # for streamkl-distill
endif()
