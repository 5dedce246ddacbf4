# SPDX-License-Identifier: Apache-2.0
# Code that must not compile: tests/fail/<layer>.cpp, and .cu for nvcc alone.
#
#   #if KVIRE_FAIL == 1  // expect: layout.cover
#   ...
#   #elif KVIRE_FAIL == 2  // expect: layout.alignment
#   ...
#   #endif
#
# What stands before the variants must compile: it is the control. Each variant must be refused with an error that names `kvire [<rule id>]`
# and leads to the variant's lines; the source that a compiler echoes does not count. A compiler sees each file once, with every variant in a
# namespace of its own. `// not under nvcc` near the top keeps a file from nvcc; `// each rule alone` refuses variants of which a compiler says more than
# the rule.

# kvire_add_fail_test(<name> <label> <compiler> <file>): the test of one file under one compiler.
function(kvire_add_fail_test name label compiler file)
  file(READ "${file}" text)
  string(REGEX MATCHALL "KVIRE_FAIL == [0-9]+[^\n]*" heads "${text}")
  set(variants "")
  foreach(head IN LISTS heads)
    if(NOT head MATCHES "^KVIRE_FAIL == ([0-9]+) *// expect: ([a-z0-9_-]+\\.[a-z0-9_-]+) *$")
      message(FATAL_ERROR "${file}: '${head}' does not read 'KVIRE_FAIL == <n>  // expect: <rule id>'")
    endif()
    if(CMAKE_MATCH_1 IN_LIST variants)
      message(FATAL_ERROR "${file}: variant ${CMAKE_MATCH_1} appears twice")
    endif()
    list(APPEND variants "${CMAKE_MATCH_1}")
  endforeach()
  string(REGEX REPLACE "\n#if KVIRE_FAIL == ([0-9]+)" "\nnamespace variant_\\1 {" text "${text}")
  string(REGEX REPLACE "\n#elif KVIRE_FAIL == ([0-9]+)" "\n} namespace variant_\\1 {" text "${text}")
  string(REGEX REPLACE "\n#endif[ \t\n]*$" "\n}\n" text "${text}")
  if(text MATCHES "\n#(if|elif|endif)")
    message(FATAL_ERROR "${file}: the variants are one #if with #elif and #endif, at the end of the file")
  endif()
  file(RELATIVE_PATH unit "${CMAKE_CURRENT_SOURCE_DIR}" "${file}")
  set(unit "${CMAKE_CURRENT_BINARY_DIR}/${unit}")
  kvire_write_if_different("${unit}" "${text}")
  set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS "${file}")
  add_test(NAME "${name}"
    COMMAND "${CMAKE_COMMAND}" "-DUNIT=${unit}" -P "${PROJECT_SOURCE_DIR}/cmake/KvireRunFailTest.cmake"
      -- ${KVIRE_CHECK_COMMAND_${compiler}} ${KVIRE_CHECK_ALL_ERRORS_${compiler}} "${unit}")
  set_tests_properties("${name}" PROPERTIES LABELS "${label}")
endfunction()

function(kvire_add_fail_tests)
  # Every error, with the whole way to it.
  set(KVIRE_CHECK_ALL_ERRORS_gxx -ftemplate-backtrace-limit=0)
  set(KVIRE_CHECK_ALL_ERRORS_clangxx -ferror-limit=0 -ftemplate-backtrace-limit=0)
  set(KVIRE_CHECK_ALL_ERRORS_nvcc -Xcudafe --error_limit=1000)
  file(GLOB files CONFIGURE_DEPENDS "${CMAKE_CURRENT_SOURCE_DIR}/fail/*.cpp" "${CMAKE_CURRENT_SOURCE_DIR}/fail/*.cu")
  foreach(compiler IN LISTS KVIRE_CHECK_ALL_COMPILERS)
    if(NOT compiler IN_LIST KVIRE_CHECK_COMPILERS)
      kvire_add_skipped_test("kvire.fail.${compiler}" fail "${KVIRE_CHECK_MISSING_${compiler}}")
      continue()
    endif()
    foreach(file IN LISTS files)
      file(READ "${file}" text)
      if(compiler STREQUAL "nvcc" AND text MATCHES "\n// not under nvcc")
        continue()
      elseif(NOT compiler STREQUAL "nvcc" AND file MATCHES "\\.cu$")
        continue()
      endif()
      get_filename_component(layer "${file}" NAME_WE)
      kvire_add_fail_test("kvire.fail.${compiler}.${layer}" fail ${compiler} "${file}")
    endforeach()
    # The framework must itself be able to fail: files that it has to report, and one that it has not.
    file(GLOB cases CONFIGURE_DEPENDS "${CMAKE_CURRENT_SOURCE_DIR}/meta/fail/*.cpp")
    foreach(case IN LISTS cases)
      get_filename_component(name "${case}" NAME_WE)
      kvire_add_fail_test("kvire.meta.fail_framework.${compiler}.${name}" meta ${compiler} "${case}")
      if(NOT name STREQUAL "right")
        set_tests_properties("kvire.meta.fail_framework.${compiler}.${name}" PROPERTIES WILL_FAIL TRUE)
      endif()
    endforeach()
  endforeach()
endfunction()
