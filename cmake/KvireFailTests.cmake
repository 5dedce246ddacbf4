# SPDX-License-Identifier: Apache-2.0
# Code that must not compile: tests/fail/<layer>.cpp.
#
#   #if KVIRE_FAIL == 1  // expect: layout.cover
#   ...
#   #elif KVIRE_FAIL == 2  // expect: layout.alignment
#   ...
#   #endif
#
# Variant 0, which is none of these, must compile: it is the control. Every other one must be refused with an error whose
# own line holds `kvire [<rule id>]`; the source that a compiler echoes does not count. `// not under nvcc` near the top
# keeps a file from nvcc.

function(kvire_add_fail_tests)
  file(GLOB files CONFIGURE_DEPENDS "${CMAKE_CURRENT_SOURCE_DIR}/fail/*.cpp")
  foreach(file IN LISTS files)
    set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS "${file}")
    get_filename_component(layer "${file}" NAME_WE)
    file(READ "${file}" text)
    set(compilers ${KVIRE_CHECK_ALL_COMPILERS})
    if(text MATCHES "\n// not under nvcc")
      list(REMOVE_ITEM compilers nvcc)
    endif()
    string(REGEX MATCHALL "KVIRE_FAIL == [0-9]+[^\n]*" heads "${text}")
    set(variants 0)
    set(expected_0 "")
    foreach(head IN LISTS heads)
      if(NOT head MATCHES "^KVIRE_FAIL == ([0-9]+) *// expect: ([a-z0-9_-]+\\.[a-z0-9_-]+) *$")
        message(FATAL_ERROR "${file}: '${head}' does not read 'KVIRE_FAIL == <n>  // expect: <rule id>'")
      endif()
      set(variant "${CMAKE_MATCH_1}")
      set(id "${CMAKE_MATCH_2}")
      if(variant IN_LIST variants)
        message(FATAL_ERROR "${file}: variant ${variant} appears twice")
      endif()
      list(APPEND variants "${variant}")
      set(expected_${variant} "${id}")
    endforeach()

    foreach(compiler IN LISTS compilers)
      if(NOT compiler IN_LIST KVIRE_CHECK_COMPILERS)
        continue()
      endif()
      foreach(variant IN LISTS variants)
        if(variant EQUAL 0)
          set(name "kvire.fail.${compiler}.${layer}.control")
        else()
          set(name "kvire.fail.${compiler}.${layer}.${variant}.${expected_${variant}}")
        endif()
        add_test(NAME "${name}"
          COMMAND "${CMAKE_COMMAND}" "-DEXPECTED=${expected_${variant}}"
            -P "${PROJECT_SOURCE_DIR}/cmake/KvireRunFailTest.cmake"
            -- ${KVIRE_CHECK_COMMAND_${compiler}} "-DKVIRE_FAIL=${variant}" "${file}")
        set_tests_properties("${name}" PROPERTIES LABELS fail)
      endforeach()
    endforeach()
  endforeach()
  foreach(compiler IN LISTS KVIRE_CHECK_ALL_COMPILERS)
    if(NOT compiler IN_LIST KVIRE_CHECK_COMPILERS)
      kvire_add_skipped_test("kvire.fail.${compiler}" fail "${KVIRE_CHECK_MISSING_${compiler}}")
    endif()
  endforeach()

  # The framework must itself be able to fail: three files that it has to report.
  set(self "${CMAKE_CURRENT_SOURCE_DIR}/meta/fail_self_test.cpp")
  foreach(case IN ITEMS 1:layout.right:pass 2:layout.right:fail 3:layout.right:fail 4:layout.right:fail 0::pass 5::fail)
    string(REPLACE ":" ";" parts "${case}")
    list(GET parts 0 variant)
    list(GET parts 1 id)
    list(GET parts 2 outcome)
    foreach(compiler IN LISTS KVIRE_CHECK_COMPILERS)
      set(name "kvire.meta.fail_framework.${compiler}.${variant}")
      add_test(NAME "${name}"
        COMMAND "${CMAKE_COMMAND}" "-DEXPECTED=${id}" -P "${PROJECT_SOURCE_DIR}/cmake/KvireRunFailTest.cmake"
          -- ${KVIRE_CHECK_COMMAND_${compiler}} "-DKVIRE_FAIL=${variant}" "${self}")
      set_tests_properties("${name}" PROPERTIES LABELS meta)
      if(outcome STREQUAL "fail")
        set_tests_properties("${name}" PROPERTIES WILL_FAIL TRUE)
      endif()
    endforeach()
  endforeach()
endfunction()
