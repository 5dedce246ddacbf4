# SPDX-License-Identifier: Apache-2.0
# Installs BUILD, moves the result to FOLDER/moved, and packs what a release archive of SOURCE would hold.
cmake_minimum_required(VERSION 3.25)

file(REMOVE_RECURSE "${FOLDER}/installed" "${FOLDER}/moved")
execute_process(COMMAND "${CMAKE_COMMAND}" --install "${BUILD}" --prefix "${FOLDER}/installed" OUTPUT_QUIET COMMAND_ERROR_IS_FATAL ANY)
file(RENAME "${FOLDER}/installed" "${FOLDER}/moved")
file(GLOB_RECURSE files "${FOLDER}/moved/*.cmake")
foreach(file IN LISTS files)
  file(READ "${file}" text)
  foreach(place IN ITEMS "${FOLDER}" "${BUILD}" "${SOURCE}")
    string(FIND "${text}" "${place}" at)
    if(NOT at EQUAL -1)
      message(FATAL_ERROR "${file} names ${place}; the package could not be moved")
    endif()
  endforeach()
endforeach()
execute_process(COMMAND "${CMAKE_COMMAND}" -E tar czf "${FOLDER}/kvire.tar.gz" CMakeLists.txt LICENSE cmake include adapt
  WORKING_DIRECTORY "${SOURCE}" COMMAND_ERROR_IS_FATAL ANY)
