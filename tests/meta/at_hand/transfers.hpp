// SPDX-License-Identifier: Apache-2.0
#include <kvire/kvire.hpp>

using IndexK = kvire::Fp8WithScale<64, 128>;
extern kvire::DevicePool<IndexK, kvire::Host>& device;
extern kvire::HostPool<IndexK, kvire::Host>& host;
extern std::vector<kvire::PageRef<kvire::DevicePage>> device_refs, my_pages;
extern std::vector<kvire::PageRef<kvire::HostPage>> host_refs;
extern kvire::Stream<kvire::Host>&copies, &compute;
