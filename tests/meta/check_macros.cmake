# SPDX-License-Identifier: Apache-2.0
# Only base/config.hpp reads the compiler's macros; everything else asks the KVIRE_ names that it defines.
include("${CMAKE_CURRENT_LIST_DIR}/common.cmake" NO_POLICY_SCOPE)

meta_headers(headers *.hpp *.cuh)
foreach(header IN LISTS headers)
  if(header STREQUAL "kvire/base/config.hpp")
    continue()
  endif()
  meta_read("${ROOT}/include/${header}" text)
  meta_strip_comments(text)
  string(REPLACE "@B\n" " " text "${text}")
  string(REGEX MATCHALL "\n *# *(if|ifdef|ifndef|elif)[^\n]*" conditions "\n${text}")
  foreach(condition IN LISTS conditions)
    string(STRIP "${condition}" condition)
    string(REGEX REPLACE "^# *(ifdef|ifndef|if|elif)|defined|KVIRE_[A-Z0-9_]+" " " rest "${condition}")
    # Macros of the compiler and of its target start with an underscore, but for a few; those of system headers are not its.
    if(rest MATCHES "(^|[^A-Za-z0-9_])(_[A-Za-z0-9_]+|NDEBUG|WIN32|linux|unix)($|[^A-Za-z0-9_])")
      meta_find("${header}: '${condition}' reads ${CMAKE_MATCH_2}: add a KVIRE_ macro to base/config.hpp")
    endif()
  endforeach()
  if(text MATCHES "(__CUDACC__|__CUDA_ARCH__|__CUDACC_RTC__|__GNUC__|__clang__|_MSC_VER|__x86_64__|__aarch64__|__AVX[0-9A-Z_]*__)")
    meta_find("${header}: names ${CMAKE_MATCH_1}")
  endif()
endforeach()

meta_finish("compiler macros")
