# SPDX-License-Identifier: Apache-2.0
# What the meta checks share. Each check is `cmake -DROOT=<project root> -P check_<name>.cmake` and fails with every finding,
# file by file. CMake alone, so that a machine with the build tools has what it takes.

cmake_minimum_required(VERSION 3.25)

if(NOT ROOT)
  message(FATAL_ERROR "pass -DROOT=<project root>")
endif()
get_filename_component(ROOT "${ROOT}" ABSOLUTE)
set(meta_findings "")

# meta_find(<text>...): remembers one finding.
macro(meta_find)
  string(CONCAT meta_text ${ARGN})
  string(APPEND meta_findings "  ${meta_text}\n")
endmacro()

# meta_finish(<what was checked>): fails when anything was found.
macro(meta_finish what)
  if(meta_findings)
    message(FATAL_ERROR "${what}:\n${meta_findings}")
  endif()
  message(STATUS "${what}: nothing found")
endmacro()

# meta_read(<file> <variable>): a file's text with the characters that CMake's lists trip over replaced:
# ; becomes @E, [ becomes @<, ] becomes >@, a backslash becomes @B.
function(meta_read file variable)
  file(READ "${file}" text)
  string(REPLACE "\\" "@B" text "${text}")
  string(REPLACE ";" "@E" text "${text}")
  string(REPLACE "[" "@<" text "${text}")
  string(REPLACE "]" ">@" text "${text}")
  set(${variable} "${text}" PARENT_SCOPE)
endfunction()

# meta_strip_comments(<variable>): removes // comments; kvire has no others.
function(meta_strip_comments variable)
  string(REGEX REPLACE "//[^\n]*" "" text "${${variable}}")
  set(${variable} "${text}" PARENT_SCOPE)
endfunction()

# meta_headers(<variable> <pattern>...): headers below include/, relative to it.
function(meta_headers variable)
  set(patterns "")
  foreach(pattern IN LISTS ARGN)
    list(APPEND patterns "${ROOT}/include/kvire/${pattern}")
  endforeach()
  file(GLOB_RECURSE files RELATIVE "${ROOT}/include" ${patterns})
  set(${variable} "${files}" PARENT_SCOPE)
endfunction()
