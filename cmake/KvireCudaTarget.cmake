# SPDX-License-Identifier: Apache-2.0
# kvire_define_cuda_target(): kvire::cuda, in kvire's own build or from the installed package.
# The runtime follows the consumer's CUDA_RUNTIME_LIBRARY, so that a program never gets both the static and the shared one.
function(kvire_define_cuda_target)
  if(TARGET kvire::cuda)
    return()
  endif()
  find_package(CUDAToolkit 12.8 REQUIRED)
  if(PROJECT_NAME STREQUAL "kvire" AND TARGET kvire)
    add_library(kvire_cuda INTERFACE)
    add_library(kvire::cuda ALIAS kvire_cuda)
    set(target kvire_cuda)
  else()
    add_library(kvire::cuda INTERFACE IMPORTED GLOBAL)
    set(target kvire::cuda)
  endif()
  target_link_libraries(${target} INTERFACE
    kvire::kvire
    "$<IF:$<STREQUAL:$<UPPER_CASE:$<TARGET_PROPERTY:CUDA_RUNTIME_LIBRARY>>,SHARED>,CUDA::cudart,CUDA::cudart_static>")
  # CMake 3.25 does not know how nvcc spells C++20; where the consumer sets CUDA_STANDARD, that stands.
  target_compile_options(${target} INTERFACE
    "$<$<AND:$<COMPILE_LANGUAGE:CUDA>,$<NOT:$<BOOL:$<TARGET_PROPERTY:CUDA_STANDARD>>>>:-std=c++20>")
  target_include_directories(${target} SYSTEM INTERFACE ${CUDAToolkit_INCLUDE_DIRS})
endfunction()
