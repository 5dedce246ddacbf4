# SPDX-License-Identifier: Apache-2.0
# Templates of __global__ functions take types, integers, bools and enums. A parameter of class type does not build: the host stub
# that nvcc generates spells its mangled name.
# Kernels that may start while the stream's earlier one ends (ptx::wait_for_earlier_grids) load nothing by __ldg: what never changes, the compiler may ask for in
# front of that wait.
include("${CMAKE_CURRENT_LIST_DIR}/common.cmake" NO_POLICY_SCOPE)

meta_headers(headers *.hpp *.cuh)
list(TRANSFORM headers PREPEND include/)
file(GLOB_RECURSE device_tests RELATIVE "${ROOT}" "${ROOT}/tests/device/*.cu" "${ROOT}/examples/*.cu" "${ROOT}/benchmarks/*.cu")

# The concepts and enums there are: what else may stand before a parameter's name.
set(known class typename bool int unsigned long short char auto)
foreach(header IN LISTS headers device_tests)
  meta_read("${ROOT}/${header}" text)
  string(REGEX MATCHALL "concept [A-Za-z_0-9]+|enum (class )?[A-Za-z_0-9]+" names "${text}")
  foreach(name IN LISTS names)
    string(REGEX REPLACE "^.* " "" name "${name}")
    list(APPEND known "${name}")
  endforeach()
endforeach()

foreach(header IN LISTS headers device_tests)
  meta_read("${ROOT}/${header}" text)
  meta_strip_comments(text)
  string(REGEX REPLACE "[ \n\t]+" " " text "${text}")
  if(text MATCHES "__ldg *[(]" AND NOT header MATCHES "/sm80_")  # which wait for nothing: nobody launches them early
    meta_find("${header}: __ldg, which the compiler may move in front of the wait for earlier kernels: an ordinary load stays behind it")
  endif()
  # From one __global__ to the next; the template head is the last one before it in the same declaration.
  set(rest "${text}")
  while(TRUE)
    string(FIND "${rest}" "__global__" at)
    if(at EQUAL -1)
      break()
    endif()
    string(SUBSTRING "${rest}" 0 ${at} before)
    math(EXPR at "${at} + 10")
    string(SUBSTRING "${rest}" ${at} -1 rest)
    # The declaration starts after the last ; or } before it.
    string(REGEX REPLACE "^.*(@E|})" "" before "${before}")
    if(NOT before MATCHES "template *<(.*)>")
      continue()
    endif()
    set(parameters "${CMAKE_MATCH_1}")
    # Constraints and default arguments may hold commas; neither is a parameter.
    while(parameters MATCHES "<[^<>]*>")
      string(REGEX REPLACE "<[^<>]*>" "" parameters "${parameters}")
    endwhile()
    string(REPLACE "," ";" parameters "${parameters}")
    foreach(parameter IN LISTS parameters)
      string(STRIP "${parameter}" parameter)
      string(REGEX REPLACE " *=.*" "" parameter "${parameter}")
      string(REGEX REPLACE "^(const )?(kvire::|std::|kstd::|detail::|body::)*([A-Za-z_0-9]+).*$" "\\3" kind "${parameter}")
      if(NOT kind IN_LIST known AND NOT kind MATCHES "^u?int(8|16|32|64|ptr)_t$|^size_t$|^ptrdiff_t$")
        meta_find("${header}: a __global__ template takes '${parameter}'; ${kind} is no type, integer, bool, enum or concept")
      endif()
    endforeach()
  endwhile()
endforeach()

meta_finish("template parameters and loads of kernels")
