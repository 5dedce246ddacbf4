# SPDX-License-Identifier: Apache-2.0
# cmake -DCOMMAND=<program;argument...> -DSTATUS=<n> [-DOUTPUT=<regex>] -P expect_status.cmake
# Fails unless the command leaves with exactly this status and says, on either stream, what it should.
execute_process(COMMAND ${COMMAND} RESULT_VARIABLE status OUTPUT_VARIABLE text ERROR_VARIABLE text)
message("${text}")
if(NOT status EQUAL STATUS)
  message(FATAL_ERROR "exit status ${status}, expected ${STATUS}")
endif()
if(DEFINED OUTPUT AND NOT text MATCHES "${OUTPUT}")
  message(FATAL_ERROR "nothing in the output matches: ${OUTPUT}")
endif()
