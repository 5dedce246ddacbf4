# SPDX-License-Identifier: Apache-2.0
# cmake -DDOCUMENT=<file> -DOUTPUT=<file> [-DAT_HAND=<file>] -P document.cmake -- <compiler> <argument>...: the C++ of a document compiles as it
# stands, as one program. Blocks marked ```cpp file stand at file scope, blocks marked ```cpp in a function that has what an engine has at hand;
# AT_HAND declares that where a page that has no whole program takes names for granted.
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

file(READ "${DOCUMENT}" text)
set(head "")
set(body "")
while(TRUE)
  string(FIND "${text}" "\n```cpp" begin)
  if(begin EQUAL -1)
    break()
  endif()
  math(EXPR begin "${begin} + 1")
  string(SUBSTRING "${text}" ${begin} -1 text)
  string(FIND "${text}" "\n" line)
  string(SUBSTRING "${text}" 0 ${line} fence)
  math(EXPR line "${line} + 1")
  string(SUBSTRING "${text}" ${line} -1 text)
  string(FIND "${text}" "```" end)
  string(SUBSTRING "${text}" 0 ${end} block)
  math(EXPR end "${end} + 3")
  string(SUBSTRING "${text}" ${end} -1 text)
  if(fence STREQUAL "```cpp file")
    string(APPEND head "${block}\n")
  else()
    string(APPEND body "${block}\n")
  endif()
endwhile()
if(body STREQUAL "" AND head STREQUAL "")
  message(FATAL_ERROR "${DOCUMENT} has no C++")
endif()

# Includes of a function's block belong above it.
set(includes "")
while(body MATCHES "#include [^\n]*\n")
  string(APPEND includes "${CMAKE_MATCH_0}")
  string(REPLACE "${CMAKE_MATCH_0}" "" body "${body}")
endwhile()
set(parameters "kvire::Stream<kvire::Host>& stream, const kvire::Gate<kvire::Host>& gate, const kvire::Queries& queries,
              kvire::Tensor<const float, 3> weights, kvire::Tensor<const std::int32_t, 2> page_table,
              kvire::Tensor<const std::int32_t, 2> lengths, kvire::Tensor<float, 3> scores, const float* rows, const std::int64_t* slots")
if(AT_HAND)
  string(APPEND includes "#include \"${AT_HAND}\"\n")
  set(parameters "")
endif()
file(WRITE "${OUTPUT}" "${includes}${head}
void document(${parameters}) {
${body}
}
")
execute_process(COMMAND ${command} "${OUTPUT}" OUTPUT_VARIABLE output ERROR_VARIABLE output RESULT_VARIABLE code)
if(NOT code EQUAL 0)
  message(FATAL_ERROR "the C++ of ${DOCUMENT} does not compile:\n${output}")
endif()
