# SPDX-License-Identifier: Apache-2.0
# The compilers that the header and fail checks call by themselves, each with the command line that parses one file and
# writes nothing. A check under a compiler that is absent is registered as skipped, with the reason.
#
#   KVIRE_CHECK_COMPILERS                 gxx clangxx nvcc: those that are present
#   KVIRE_CHECK_COMMAND_<c>               the command, up to the file name
#   KVIRE_CHECK_MISSING_<c>               why a compiler is absent
#   KVIRE_CHECK_TOOLKIT                   the CUDA toolkit's include folders, or empty

set(KVIRE_CHECK_ALL_COMPILERS gxx clangxx nvcc)

if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
  set(KVIRE_GXX "${CMAKE_CXX_COMPILER}" CACHE FILEPATH "The g++ of kvire's checks")
endif()
if(CMAKE_CXX_COMPILER_ID STREQUAL "Clang")
  set(KVIRE_CLANGXX "${CMAKE_CXX_COMPILER}" CACHE FILEPATH "The clang++ of kvire's checks")
endif()
find_program(KVIRE_GXX NAMES g++ DOC "The g++ of kvire's checks")
find_program(KVIRE_CLANGXX NAMES clang++ clang++-14 DOC "The clang++ of kvire's checks")

set(KVIRE_CHECK_COMPILERS "")
set(KVIRE_CHECK_TOOLKIT "")

# g++ checks without exceptions and RTTI, clang++ with them: each header is seen both ways.
if(KVIRE_GXX)
  list(APPEND KVIRE_CHECK_COMPILERS gxx)
  set(KVIRE_CHECK_COMMAND_gxx "${KVIRE_GXX}" -std=c++20 -fsyntax-only -fno-exceptions -fno-rtti ${KVIRE_WARNINGS_GNU} -Werror
    "-I${PROJECT_SOURCE_DIR}/include" -x c++)
else()
  set(KVIRE_CHECK_MISSING_gxx "g++ was not found")
endif()

if(KVIRE_CLANGXX)
  list(APPEND KVIRE_CHECK_COMPILERS clangxx)
  set(KVIRE_CHECK_COMMAND_clangxx "${KVIRE_CLANGXX}" -std=c++20 -fsyntax-only ${KVIRE_WARNINGS_CLANG} -Werror
    "-I${PROJECT_SOURCE_DIR}/include" -x c++)
else()
  set(KVIRE_CHECK_MISSING_clangxx "clang++ was not found")
endif()

# For nvcc the pass that makes device code parses the whole file, and is the cheap one (0.7 s).
kvire_find_nvcc(nvcc reason)
if(nvcc)
  list(APPEND KVIRE_CHECK_COMPILERS nvcc)
  set(KVIRE_CHECK_COMMAND_nvcc "${nvcc}" -std=c++20 -arch=sm_90a -cubin -o /dev/null -Werror all-warnings
    "-I${PROJECT_SOURCE_DIR}/include" -x cu)
  get_filename_component(toolkit "${nvcc}" REALPATH)
  get_filename_component(toolkit "${toolkit}" DIRECTORY)
  get_filename_component(toolkit "${toolkit}" DIRECTORY)
  if(EXISTS "${toolkit}/include/cuda_runtime_api.h")
    set(KVIRE_CHECK_TOOLKIT "${toolkit}/include")
    if(EXISTS "${toolkit}/include/cccl")
      list(APPEND KVIRE_CHECK_TOOLKIT "${toolkit}/include/cccl")
    endif()
  endif()
else()
  set(KVIRE_CHECK_MISSING_nvcc "${reason}")
endif()

# kvire_add_skipped_test(<name> <label> <reason>): an entry that ctest shows as skipped.
function(kvire_add_skipped_test name label reason)
  add_test(NAME "${name}" COMMAND "${CMAKE_COMMAND}" -E echo "skipped: ${reason}")
  set_tests_properties("${name}" PROPERTIES LABELS "${label}" SKIP_REGULAR_EXPRESSION "skipped:")
  message(STATUS "kvire: skipped ${name}: ${reason}")
endfunction()
