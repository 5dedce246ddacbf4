# SPDX-License-Identifier: Apache-2.0
# A layout is said once: no byte size of a known page, row or bundle is spelled out outside presets and codecs.
include("${CMAKE_CURRENT_LIST_DIR}/common.cmake" NO_POLICY_SCOPE)

# Rows: fp8 index key, V4.1 rows, latent values, V4 and V3.2 latents. Pages: fp4, fp8, bf16, V4 latents of 2, 64 and 256 tokens.
# Bundles: V4-Flash bytes a full page by policy, a window page, its states.
set(known 132 288 528 576 584 656 4352 8448 16384 1728 37440 149760 998208 1164864 912192 6439680 1720320)
list(JOIN known "|" known)

meta_headers(headers *.hpp *.cuh)
foreach(header IN LISTS headers)
  if(header MATCHES "^kvire/(preset|codec)/")
    continue()
  endif()
  meta_read("${ROOT}/include/${header}" text)
  meta_strip_comments(text)
  string(REGEX REPLACE "([0-9])'([0-9])" "\\1\\2" text "${text}")
  string(REGEX MATCHALL "[^\n]*(^|[^A-Za-z0-9_.])(${known})[uUlLzZ]*([^A-Za-z0-9_.]|\n)[^\n]*" lines "${text}")
  foreach(line IN LISTS lines)
    string(STRIP "${line}" line)
    meta_find("${header}: spells a byte size: ${line}")
  endforeach()
endforeach()

meta_finish("byte sizes spelled as literals")
