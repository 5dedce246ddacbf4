# SPDX-License-Identifier: Apache-2.0
# Other projects, built by ctest: kvire installed, moved, and found; as a subdirectory; fetched as an archive.

# kvire_add_consumer(<name> <source folder> [WITH_CUDA] [OPTIONS <-D...>...]): configure, build and ctest of one project.
function(kvire_add_consumer name source)
  cmake_parse_arguments(PARSE_ARGV 2 consumer "" "TEST_COMMAND" "OPTIONS")
  set(binary "${CMAKE_CURRENT_BINARY_DIR}/consumer/${name}")
  if(NOT consumer_TEST_COMMAND)
    set(consumer_TEST_COMMAND "${CMAKE_CTEST_COMMAND}" --output-on-failure --no-tests=error)
  endif()
  add_test(NAME "kvire.consumer.${name}"
    COMMAND "${CMAKE_CTEST_COMMAND}" --build-and-test "${source}" "${binary}"
      --build-generator "${CMAKE_GENERATOR}" --build-makeprogram "${CMAKE_MAKE_PROGRAM}" --build-project consumer --build-noclean
      --build-options "-DCMAKE_CXX_COMPILER=${CMAKE_CXX_COMPILER}" "-DCMAKE_BUILD_TYPE=Debug" "-DCMAKE_CXX_FLAGS=-Wall -Wextra -Werror"
        ${consumer_OPTIONS}
      --test-command ${consumer_TEST_COMMAND})
  set_tests_properties("kvire.consumer.${name}" PROPERTIES LABELS consumer)
endfunction()

function(kvire_add_consumer_tests)
  set(folder "${CMAKE_CURRENT_BINARY_DIR}/consumer")
  set(prefix "${folder}/moved")
  set(source "${CMAKE_CURRENT_SOURCE_DIR}/consumer")

  # Installed, then moved: whatever names the first place breaks.
  add_test(NAME kvire.consumer.install
    COMMAND "${CMAKE_COMMAND}" "-DBUILD=${PROJECT_BINARY_DIR}" "-DSOURCE=${PROJECT_SOURCE_DIR}" "-DFOLDER=${folder}"
      -P "${source}/install.cmake")
  set_tests_properties(kvire.consumer.install PROPERTIES LABELS consumer FIXTURES_SETUP kvire_installed)

  kvire_add_consumer(find_package "${source}/find_package" OPTIONS "-DCMAKE_PREFIX_PATH=${prefix}")
  kvire_add_consumer(layout_check "${PROJECT_SOURCE_DIR}/examples/layout_check" OPTIONS "-DCMAKE_PREFIX_PATH=${prefix}"
    TEST_COMMAND "${CMAKE_COMMAND}" --build . --target my_layouts_report)
  kvire_add_consumer(fetch_content "${source}/fetch_content" OPTIONS "-DKVIRE_ARCHIVE=${folder}/kvire.tar.gz")
  kvire_add_consumer(add_subdirectory "${source}/add_subdirectory" OPTIONS "-DKVIRE_SOURCE=${PROJECT_SOURCE_DIR}")
  set_tests_properties(kvire.consumer.find_package kvire.consumer.layout_check kvire.consumer.fetch_content
    PROPERTIES FIXTURES_REQUIRED kvire_installed)

  # The check must also refuse: the same example against numbers that are not its own.
  add_test(NAME kvire.consumer.layout_check_refuses
    COMMAND "${CMAKE_COMMAND}" "-DSOURCE=${PROJECT_SOURCE_DIR}/examples/layout_check" "-DFOLDER=${folder}/refuses"
      "-DPREFIX=${prefix}" "-DGENERATOR=${CMAKE_GENERATOR}" "-DCOMPILER=${CMAKE_CXX_COMPILER}" -P "${source}/layout_check_refuses.cmake")
  set_tests_properties(kvire.consumer.layout_check_refuses PROPERTIES LABELS consumer FIXTURES_REQUIRED kvire_installed)

  find_package(CUDAToolkit 12.8 QUIET)
  if(CUDAToolkit_FOUND)
    kvire_add_consumer(cuda "${source}/cuda"
      OPTIONS "-DCMAKE_PREFIX_PATH=${prefix}" "-DCUDAToolkit_ROOT=${CUDAToolkit_TARGET_DIR}")
    set_tests_properties(kvire.consumer.cuda PROPERTIES FIXTURES_REQUIRED kvire_installed)
  else()
    kvire_add_skipped_test(kvire.consumer.cuda consumer "no CUDA toolkit from 12.8 on was found")
  endif()
endfunction()
