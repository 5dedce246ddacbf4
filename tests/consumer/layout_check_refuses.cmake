# SPDX-License-Identifier: Apache-2.0
# A copy of examples/layout_check with one layout changed must no longer build, and must say which rule is broken.
cmake_minimum_required(VERSION 3.25)

file(REMOVE_RECURSE "${FOLDER}")
file(COPY "${SOURCE}/" DESTINATION "${FOLDER}/project")
file(READ "${FOLDER}/project/my_layouts.hpp" text)
# Same bytes, other order: the case that a byte count cannot see.
string(REPLACE "kvire::Fp8WithScale<64, 128>" "kvire::Fp8WithScaleInterleaved<64, 128>" changed "${text}")
if(changed STREQUAL text)
  message(FATAL_ERROR "the example no longer holds the layout that this test changes")
endif()
file(WRITE "${FOLDER}/project/my_layouts.hpp" "${changed}")
execute_process(COMMAND "${CMAKE_COMMAND}" -S "${FOLDER}/project" -B "${FOLDER}/build" -G "${GENERATOR}"
  "-DCMAKE_CXX_COMPILER=${COMPILER}" "-DCMAKE_PREFIX_PATH=${PREFIX}" OUTPUT_QUIET COMMAND_ERROR_IS_FATAL ANY)
execute_process(COMMAND "${CMAKE_COMMAND}" --build "${FOLDER}/build" OUTPUT_VARIABLE output ERROR_VARIABLE output RESULT_VARIABLE code)
if(code EQUAL 0)
  message(FATAL_ERROR "a changed layout passed its check")
endif()
if(NOT output MATCHES "error:[^\n]*kvire \\[layout\\.expected-fingerprint\\]: ")
  message(FATAL_ERROR "the check refused without naming layout.expected-fingerprint:\n${output}")
endif()
if(NOT output MATCHES "Hex<'[0-9a-f]', '")
  message(FATAL_ERROR "the fingerprints are not printed as baselines have them:\n${output}")
endif()

# A change that is meant: the baseline is written anew, says so, and the check passes again.
execute_process(COMMAND "${CMAKE_COMMAND}" --build "${FOLDER}/build" --target my_layouts_update OUTPUT_QUIET COMMAND_ERROR_IS_FATAL ANY)
file(READ "${SOURCE}/layouts.txt" before)
file(READ "${FOLDER}/project/layouts.txt" after)
if(before STREQUAL after)
  message(FATAL_ERROR "the update left the baseline as it was")
endif()
execute_process(COMMAND "${CMAKE_COMMAND}" --build "${FOLDER}/build" OUTPUT_QUIET COMMAND_ERROR_IS_FATAL ANY)

# The first use, without a baseline, and a line that cannot be read: the build says what is wrong, the update mends it.
foreach(fault IN ITEMS "no baseline" "unreadable line" "cut fingerprint")
  file(REMOVE_RECURSE "${FOLDER}/build")
  file(REMOVE "${FOLDER}/project/layouts.txt")
  set(expected "has no line in layouts.txt: build the target my_layouts_update")
  if(fault STREQUAL "unreadable line")
    file(WRITE "${FOLDER}/project/layouts.txt" "8448 my::IndexKey\n")
    set(expected "'8448 my::IndexKey' does not read")
  elseif(fault STREQUAL "cut fingerprint")
    file(WRITE "${FOLDER}/project/layouts.txt" "8448 14c354d30e8259 my::IndexKey\n")
    set(expected "'8448 14c354d30e8259 my::IndexKey' does not read")
  endif()
  execute_process(COMMAND "${CMAKE_COMMAND}" -S "${FOLDER}/project" -B "${FOLDER}/build" -G "${GENERATOR}"
    "-DCMAKE_CXX_COMPILER=${COMPILER}" "-DCMAKE_PREFIX_PATH=${PREFIX}" OUTPUT_QUIET COMMAND_ERROR_IS_FATAL ANY)
  execute_process(COMMAND "${CMAKE_COMMAND}" --build "${FOLDER}/build" OUTPUT_VARIABLE output ERROR_VARIABLE output RESULT_VARIABLE code)
  if(code EQUAL 0 OR NOT output MATCHES "${expected}")
    message(FATAL_ERROR "${fault}: the check should say \"${expected}\", it said:\n${output}")
  endif()
  execute_process(COMMAND "${CMAKE_COMMAND}" --build "${FOLDER}/build" --target my_layouts_update OUTPUT_QUIET COMMAND_ERROR_IS_FATAL ANY)
  execute_process(COMMAND "${CMAKE_COMMAND}" --build "${FOLDER}/build" OUTPUT_QUIET COMMAND_ERROR_IS_FATAL ANY)
endforeach()

# A fingerprint of all 128 bits, where 64 are checked.
file(APPEND "${FOLDER}/project/CMakeLists.txt"
  "kvire_add_layout_check(more EXPECT \"kvire::Bf16Contiguous<64, 128> = 16384 0123456789abcdef0123456789abcdef\")\n")
execute_process(COMMAND "${CMAKE_COMMAND}" -S "${FOLDER}/project" -B "${FOLDER}/build" OUTPUT_VARIABLE output ERROR_VARIABLE output RESULT_VARIABLE code)
string(REGEX REPLACE "[ \n]+" " " output "${output}")
if(code EQUAL 0 OR NOT output MATCHES "has a fingerprint of 32 hex digits")
  message(FATAL_ERROR "a fingerprint of 32 digits was taken:\n${output}")
endif()
