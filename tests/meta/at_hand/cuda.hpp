// SPDX-License-Identifier: Apache-2.0
#include <kvire/kvire.cuh>

using IndexK = kvire::Fp8WithScale<64, 128>;
extern std::vector<kvire::PageRef<kvire::DevicePage>> device_refs;
extern std::vector<kvire::PageRef<kvire::HostPage>> host_refs;
extern kvire::Stream<kvire::Cuda>& compute;
extern const kvire::Gate<kvire::Cuda>& gate;
cudaError_t queue_my_kernel(cudaStream_t stream, const kvire::ConstPageView<IndexK, kvire::Cuda>& keys);
