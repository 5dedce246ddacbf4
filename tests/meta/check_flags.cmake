# SPDX-License-Identifier: Apache-2.0
# No build file hands an experimental flag to nvcc.
include("${CMAKE_CURRENT_LIST_DIR}/common.cmake" NO_POLICY_SCOPE)

# Spelled in two halves, so that this file passes its own check.
set(flag "-exp")
string(APPEND flag "(t|erimental)-")

file(GLOB_RECURSE files RELATIVE "${ROOT}" "${ROOT}/cmake/*" "${ROOT}/tests/*.cmake" "${ROOT}/tests/*.sh" "${ROOT}/tests/*CMakeLists.txt"
  "${ROOT}/examples/*CMakeLists.txt" "${ROOT}/examples/*.sh" "${ROOT}/benchmarks/*CMakeLists.txt")
foreach(file IN ITEMS CMakeLists.txt CMakePresets.json .ci/run)
  if(EXISTS "${ROOT}/${file}")
    list(APPEND files "${file}")
  endif()
endforeach()
foreach(file IN LISTS files)
  meta_read("${ROOT}/${file}" text)
  if(text MATCHES "[^\n]*-?${flag}[^\n]*")
    meta_find("${file}: ${CMAKE_MATCH_0}")
  endif()
endforeach()

meta_finish("experimental compiler flags")
