# SPDX-License-Identifier: Apache-2.0
# The package holds headers and CMake files only, and may be moved after installation: nothing in it names a folder of the build.
include(GNUInstallDirs)
include(CMakePackageConfigHelpers)

set(kvire_package_folder "${CMAKE_INSTALL_DATADIR}/cmake/kvire")

install(DIRECTORY "${PROJECT_SOURCE_DIR}/include/" DESTINATION "${CMAKE_INSTALL_INCLUDEDIR}"
  FILES_MATCHING PATTERN "*.hpp" PATTERN "*.cuh")
install(DIRECTORY "${PROJECT_SOURCE_DIR}/adapt/" DESTINATION "${CMAKE_INSTALL_INCLUDEDIR}")
install(TARGETS kvire EXPORT kvire-targets INCLUDES DESTINATION "${CMAKE_INSTALL_INCLUDEDIR}")
install(EXPORT kvire-targets NAMESPACE kvire:: DESTINATION "${kvire_package_folder}")

configure_package_config_file("${CMAKE_CURRENT_LIST_DIR}/kvire-config.cmake.in" "${PROJECT_BINARY_DIR}/kvire-config.cmake"
  INSTALL_DESTINATION "${kvire_package_folder}" NO_SET_AND_CHECK_MACRO)
# Before 1.0 a minor version may break; ARCH_INDEPENDENT because headers fit every word size.
write_basic_package_version_file("${PROJECT_BINARY_DIR}/kvire-config-version.cmake"
  COMPATIBILITY SameMinorVersion ARCH_INDEPENDENT)
install(FILES
  "${PROJECT_BINARY_DIR}/kvire-config.cmake"
  "${PROJECT_BINARY_DIR}/kvire-config-version.cmake"
  "${CMAKE_CURRENT_LIST_DIR}/KvireAdaptors.cmake"
  "${CMAKE_CURRENT_LIST_DIR}/KvireCudaTarget.cmake"
  "${CMAKE_CURRENT_LIST_DIR}/KvireLayoutCheck.cmake"
  DESTINATION "${kvire_package_folder}")
install(FILES "${PROJECT_SOURCE_DIR}/LICENSE" DESTINATION "${CMAKE_INSTALL_DATADIR}/licenses/kvire")
