# SPDX-License-Identifier: Apache-2.0
# What kvire's own tests, examples and benchmarks have in common; consumers never see it.

find_package(Threads REQUIRED)

if(PROJECT_IS_TOP_LEVEL)
  find_program(KVIRE_CCACHE ccache)
  if(KVIRE_CCACHE)
    foreach(language IN ITEMS CXX CUDA)
      if(NOT CMAKE_${language}_COMPILER_LAUNCHER)
        set(CMAKE_${language}_COMPILER_LAUNCHER "${KVIRE_CCACHE}")
      endif()
    endforeach()
  endif()
endif()

# The nvcc that was looked at is the one that is used, whatever comes first on the path; kernels are tuned for Hopper.
if(KVIRE_ENABLE_CUDA AND kvire_nvcc)
  if(NOT DEFINED CMAKE_CUDA_COMPILER AND NOT DEFINED ENV{CUDACXX})
    set(CMAKE_CUDA_COMPILER "${kvire_nvcc}")
  endif()
  if(NOT DEFINED CMAKE_CUDA_ARCHITECTURES)
    set(CMAKE_CUDA_ARCHITECTURES 90a)
  endif()
endif()

# The warnings that kvire's headers must survive. Also used by the header checks, which call compilers themselves.
set(KVIRE_WARNINGS_GNU -Wall -Wextra -Wpedantic -Wconversion -Wshadow=local -Wno-psabi)
set(KVIRE_WARNINGS_CLANG -Wall -Wextra -Wpedantic -Wconversion -Wno-sign-conversion)

add_library(kvire_own INTERFACE)
target_link_libraries(kvire_own INTERFACE kvire::kvire Threads::Threads)
target_compile_options(kvire_own INTERFACE
  "$<$<COMPILE_LANG_AND_ID:CXX,GNU>:${KVIRE_WARNINGS_GNU}>"
  "$<$<COMPILE_LANG_AND_ID:CXX,Clang,AppleClang>:${KVIRE_WARNINGS_CLANG}>")
if(KVIRE_WARNINGS_AS_ERRORS)
  target_compile_options(kvire_own INTERFACE "$<$<COMPILE_LANGUAGE:CXX>:-Werror>")
endif()

set(KVIRE_LIGHT_OPTIONS "" CACHE STRING "Further compiler options of tests and examples that compute little and instantiate much, behind those of the build type")

# kvire_own_executable(<name> <source>...): an executable of kvire's own, C++20 without extensions.
function(kvire_own_executable name)
  add_executable(${name} ${ARGN})
  target_link_libraries(${name} PRIVATE kvire_own)
  set_target_properties(${name} PROPERTIES CXX_EXTENSIONS OFF)
endfunction()

# kvire_own_adaptors(<target> <PUBLIC|PRIVATE>): links the adaptors whose libraries are here; KVIRE_HAVE_XXHASH and KVIRE_HAVE_LIBURING say which.
function(kvire_own_adaptors target scope)
  foreach(adaptor IN ITEMS xxhash liburing)
    string(TOUPPER "${adaptor}" upper)
    if(TARGET kvire::${adaptor})
      target_link_libraries(${target} ${scope} kvire::${adaptor})
      target_compile_definitions(${target} ${scope} KVIRE_HAVE_${upper}=1)
    else()
      target_compile_definitions(${target} ${scope} KVIRE_HAVE_${upper}=0)
    endif()
  endforeach()
endfunction()
