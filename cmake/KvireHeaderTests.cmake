# SPDX-License-Identifier: Apache-2.0
# Every header compiles alone, under every compiler it is meant for, and links twice.
# CMake's own header-set verification leaves out .cuh files, so these translation units are generated here.
#
#   .hpp              g++ and clang++ with nothing but include/ on the path, and nvcc (above the kernels through kvire.hpp only)
#   cuda/*.hpp        g++ and clang++ with the toolkit's headers beside it, and nvcc
#   .cuh              nvcc

function(kvire_glob_headers variable)
  file(GLOB_RECURSE headers CONFIGURE_DEPENDS RELATIVE "${PROJECT_SOURCE_DIR}/include"
    "${PROJECT_SOURCE_DIR}/include/kvire/*.hpp" "${PROJECT_SOURCE_DIR}/include/kvire/*.cuh")
  set(${variable} "${headers}" PARENT_SCOPE)
endfunction()

# kvire_write_link_units(<folder variable>): link_a and link_b, .cpp with every host header and .cu with every header.
function(kvire_write_link_units variable)
  kvire_glob_headers(headers)
  set(folder "${CMAKE_CURRENT_BINARY_DIR}/header")
  set(host_includes "")
  set(cuda_includes "")
  foreach(header IN LISTS headers)
    string(APPEND cuda_includes "#include <${header}>\n")
    if(header MATCHES "\\.hpp$" AND NOT header MATCHES "/cuda/")
      string(APPEND host_includes "#include <${header}>\n")
    endif()
  endforeach()
  kvire_write_if_different("${folder}/link_a.cpp" "${host_includes}int main() { return 0; }\n")
  kvire_write_if_different("${folder}/link_b.cpp" "${host_includes}")
  kvire_write_if_different("${folder}/link_a.cu" "${cuda_includes}int main() { return 0; }\n")
  kvire_write_if_different("${folder}/link_b.cu" "${cuda_includes}")
  set(${variable} "${folder}" PARENT_SCOPE)
endfunction()

function(kvire_add_header_tests)
  kvire_glob_headers(headers)
  set(folder "${CMAKE_CURRENT_BINARY_DIR}/header")
  foreach(header IN LISTS headers)
    string(REGEX REPLACE "^kvire/" "" name "${header}")
    set(unit "${folder}/${name}.cpp")
    string(REPLACE "/" "." name "${name}")
    # Twice: the second inclusion proves the guard.
    kvire_write_if_different("${unit}" "#include <${header}>\n#include <${header}>\n")

    if(header MATCHES "\\.cuh$")
      set(compilers nvcc)
    elseif(header MATCHES "/cuda/")
      set(compilers ${KVIRE_CHECK_ALL_COMPILERS})
      if(NOT KVIRE_CHECK_TOOLKIT)
        set(compilers "")
      endif()
    elseif(header MATCHES "^kvire/(exec|memory|pool|sync|transfer|transport|tier)/")
      # What kernels never see reaches nvcc through the umbrellas.
      set(compilers gxx clangxx)
    else()
      set(compilers ${KVIRE_CHECK_ALL_COMPILERS})
    endif()

    foreach(compiler IN LISTS compilers)
      if(NOT compiler IN_LIST KVIRE_CHECK_COMPILERS)
        continue()
      endif()
      set(command ${KVIRE_CHECK_COMMAND_${compiler}})
      if(header MATCHES "/cuda/" AND NOT compiler STREQUAL "nvcc")
        foreach(include IN LISTS KVIRE_CHECK_TOOLKIT)
          list(INSERT command 1 -isystem "${include}")
        endforeach()
      endif()
      add_test(NAME "kvire.header.${compiler}.${name}" COMMAND ${command} "${unit}")
      set_tests_properties("kvire.header.${compiler}.${name}" PROPERTIES LABELS header)
    endforeach()
  endforeach()
  foreach(compiler IN LISTS KVIRE_CHECK_ALL_COMPILERS)
    if(NOT compiler IN_LIST KVIRE_CHECK_COMPILERS)
      kvire_add_skipped_test("kvire.header.${compiler}" header "${KVIRE_CHECK_MISSING_${compiler}}")
    endif()
  endforeach()

  # Two translation units with every header: whatever is defined twice does not link. The cuda preset does the same with nvcc.
  kvire_write_link_units(folder)
  kvire_own_executable(kvire_link_twice "${folder}/link_a.cpp" "${folder}/link_b.cpp")
  add_test(NAME kvire.header.link_twice COMMAND kvire_link_twice)
  set_tests_properties(kvire.header.link_twice PROPERTIES LABELS header)
endfunction()

# tests/static/*.cpp: files of static_asserts, which need no program to run.
function(kvire_add_static_tests)
  file(GLOB files CONFIGURE_DEPENDS "${CMAKE_CURRENT_SOURCE_DIR}/static/*.cpp")
  foreach(file IN LISTS files)
    get_filename_component(name "${file}" NAME_WE)
    foreach(compiler IN LISTS KVIRE_CHECK_COMPILERS)
      add_test(NAME "kvire.static.${compiler}.${name}" COMMAND ${KVIRE_CHECK_COMMAND_${compiler}} "${file}")
      set_tests_properties("kvire.static.${compiler}.${name}" PROPERTIES LABELS header)
    endforeach()
  endforeach()
endfunction()

# The policy core through NVRTC, which has no host standard library: needs the toolkit's library, no GPU.
function(kvire_add_nvrtc_test)
  find_package(CUDAToolkit QUIET)
  if(NOT CUDAToolkit_FOUND OR NOT TARGET CUDA::nvrtc OR NOT KVIRE_CHECK_TOOLKIT)
    kvire_add_skipped_test(kvire.header.nvrtc header "NVRTC was not found")
    return()
  endif()
  kvire_own_executable(kvire_nvrtc_check "${CMAKE_CURRENT_SOURCE_DIR}/header/nvrtc.cpp")
  target_link_libraries(kvire_nvrtc_check PRIVATE CUDA::nvrtc)
  add_test(NAME kvire.header.nvrtc
    COMMAND kvire_nvrtc_check "${PROJECT_SOURCE_DIR}/include" ${KVIRE_CHECK_TOOLKIT})
  set_tests_properties(kvire.header.nvrtc PROPERTIES LABELS header)
endfunction()

# Keeps the time stamp of what did not change.
function(kvire_write_if_different path text)
  set(old "")
  if(EXISTS "${path}")
    file(READ "${path}" old)
  endif()
  if(NOT old STREQUAL text)
    file(WRITE "${path}" "${text}")
  endif()
endfunction()
