# SPDX-License-Identifier: Apache-2.0
# Every relative link of a document leads to a file.
include("${CMAKE_CURRENT_LIST_DIR}/common.cmake" NO_POLICY_SCOPE)

file(GLOB documents RELATIVE "${ROOT}" "${ROOT}/*.md" "${ROOT}/docs/*.md" "${ROOT}/examples/*/*.md")
foreach(document IN LISTS documents)
  meta_read("${ROOT}/${document}" text)
  get_filename_component(folder "${ROOT}/${document}" DIRECTORY)
  string(REGEX MATCHALL ">@\\([^)\n]+\\)" links "${text}")
  foreach(link IN LISTS links)
    string(REGEX REPLACE "^>@\\((.*)\\)$" "\\1" link "${link}")
    string(REGEX REPLACE "#.*$" "" path "${link}")
    if(link MATCHES "^[a-z]+:" OR path STREQUAL "")
      continue()
    endif()
    if(NOT EXISTS "${folder}/${path}")
      meta_find("${document}: links to ${link}, which does not exist")
    endif()
  endforeach()
endforeach()

meta_finish("links of documents")
