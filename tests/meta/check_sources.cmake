# SPDX-License-Identifier: Apache-2.0
# Each source says its licence in its first two lines, and none names a folder of one person's machine.
include("${CMAKE_CURRENT_LIST_DIR}/common.cmake" NO_POLICY_SCOPE)

set(license "SPDX-License-Identifier: Apache-2.0")
# Spelled in halves, so that this file passes its own check.
set(homes "/ho" "/ro" "/wo")
set(tails "me/" "ot/" "rk/")

set(files "")
foreach(folder IN ITEMS include adapt tests examples benchmarks cmake docs .ci)
  file(GLOB_RECURSE found RELATIVE "${ROOT}" "${ROOT}/${folder}/*")
  list(APPEND files ${found})
endforeach()
file(GLOB found RELATIVE "${ROOT}" "${ROOT}/*.txt" "${ROOT}/*.md" "${ROOT}/*.json")
list(APPEND files ${found})

foreach(file IN LISTS files)
  if(NOT file MATCHES "\\.(hpp|cpp|cuh|cu|cmake|py|sh|md|json|txt|in|yml)$|^\\.ci/run$")
    continue()
  endif()
  meta_read("${ROOT}/${file}" text)
  if(file MATCHES "\\.(hpp|cpp|cuh|cu|cmake|py|sh|in)$|CMakeLists\\.txt$|^\\.ci/run$")
    if(NOT text MATCHES "^([^\n]*\n)?[^\n]*${license}")
      meta_find("${file}: has no '${license}' at its top")
    endif()
  endif()
  foreach(home tail IN ZIP_LISTS homes tails)
    if(text MATCHES "[^A-Za-z0-9.~}>@]${home}${tail}")
      meta_find("${file}: names a machine's folder, ${home}${tail}")
    endif()
  endforeach()
endforeach()

meta_finish("licence lines and machine paths")
