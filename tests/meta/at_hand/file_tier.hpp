// SPDX-License-Identifier: Apache-2.0
#include <kvire/kvire.hpp>
#include <kvire/tier.hpp>

using Model = kvire::preset::deepseek_v4::Flash<>;
extern kvire::HostBundlePool<Model, kvire::Host>& host_pool;
extern kvire::FileTier<Model, kvire::Host>::Refs pages, fresh_pages;
extern const kvire::RecordKey& key;
extern kvire::Deadline deadline;
