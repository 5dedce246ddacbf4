# SPDX-License-Identifier: Apache-2.0
# cmake -DEXPECTED=<rule id> -P KvireRunFailTest.cmake -- <compiler> <argument>...
# Without EXPECTED the file must compile; with it, it must not, and the compiler must name the rule.
cmake_minimum_required(VERSION 3.25)

set(command "")
set(found FALSE)
math(EXPR last "${CMAKE_ARGC} - 1")
foreach(index RANGE ${last})
  if(found)
    list(APPEND command "${CMAKE_ARGV${index}}")
  elseif(CMAKE_ARGV${index} STREQUAL "--")
    set(found TRUE)
  endif()
endforeach()

execute_process(COMMAND ${command} OUTPUT_VARIABLE output ERROR_VARIABLE output RESULT_VARIABLE code)

if(EXPECTED STREQUAL "")
  if(NOT code EQUAL 0)
    message(FATAL_ERROR "the control does not compile:\n${output}")
  endif()
  return()
endif()

if(code EQUAL 0)
  message(FATAL_ERROR "this compiles, and [${EXPECTED}] says that it must not")
endif()
# The id must stand on a diagnostic's own line, which starts with file and line: compilers echo source, comments and all.
string(REPLACE "." "\\." pattern "${EXPECTED}")
if(NOT output MATCHES "\\.(cpp|hpp|cu|cuh)[:(][0-9]+[^\n]*error:[^\n]*kvire \\[${pattern}\\]: ")
  message(FATAL_ERROR "this is refused, but no error names kvire [${EXPECTED}]:\n${output}")
endif()
