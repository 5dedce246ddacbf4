// SPDX-License-Identifier: Apache-2.0
#pragma once

/// Version of the headers: one integer (major * 1'000'000 + minor * 1'000 + patch) and its parts. Includes nothing.
#define KVIRE_VERSION_MAJOR 0
#define KVIRE_VERSION_MINOR 1
#define KVIRE_VERSION_PATCH 0
#define KVIRE_VERSION (KVIRE_VERSION_MAJOR * 1000000 + KVIRE_VERSION_MINOR * 1000 + KVIRE_VERSION_PATCH)

/// Inline namespace of every symbol: objects built against incompatible headers do not link together by accident.
#define KVIRE_ABI_NAMESPACE v0
