// SPDX-License-Identifier: Apache-2.0
#include "faults.hpp"

namespace detection {

std::vector<Fault> file_faults() {
  using Bytes_ = std::vector<std::byte>;
  return {
      {"wrong shape: fp8 records under the name of bf16 ones", "record", ErrorCode::mismatch,
       [] {
         Stored<ModelOf<Bf16Contiguous<4, 32>>> bf16;
         if (!bf16.put(bf16.key()).ok()) return missed("store");
         Stored<Model> fp8;
         if (!fp8.put(fp8.key()).ok()) return missed("store");
         Bytes_ foreign;
         fp8.damage([&](Bytes_& bytes) { foreign = bytes; });
         bf16.damage([&](Bytes_& bytes) { bytes = foreign; });
         return bf16.get(bf16.key());
       }},
      {"swapped interleave: equal bytes, under the name of the other", "record", ErrorCode::mismatch,
       [] {
         Stored<ModelOf<Fp8WithScaleInterleaved<4, 32>>> other;
         if (!other.put(other.key()).ok()) return missed("store");
         Stored<Model> planar;
         if (!planar.put(planar.key()).ok()) return missed("store");
         Bytes_ foreign;
         planar.damage([&](Bytes_& bytes) { foreign = bytes; });
         other.damage([&](Bytes_& bytes) { bytes = foreign; });
         return other.get(other.key());
       }},
      {"missing entry: records from before the index keys were stored", "record", ErrorCode::stale,
       [] {
         Stored<WithoutIndex> before;
         if (!before.put(before.key()).ok()) return missed("store");
         before.tier.reset();
         Stored<Model> now(before.folder);
         return now.get(now.key());
       }},
      {"wrong rank: another rank's record, by its key", "record", ErrorCode::stale,
       [] {
         Stored<Model> s;
         if (!s.put(s.key(0)).ok()) return missed("store");
         return s.get(s.key(1));
       }},
      {"wrong rank: another rank's file under this rank's name", "record", ErrorCode::mismatch,
       [] {
         Stored<Model> mine;
         Stored<Model> theirs;
         if (!mine.put(mine.key(0)).ok() || !theirs.put(theirs.key(1)).ok()) return missed("store");
         Bytes_ foreign;
         theirs.damage([&](Bytes_& bytes) { foreign = bytes; });
         mine.damage([&](Bytes_& bytes) { bytes = foreign; });
         return mine.get(mine.key(0));
       }},
      {"foreign file: something else under a record's name", "record", ErrorCode::mismatch,
       [] { return damaged([](Bytes_& b) { std::memcpy(b.data(), "PK\3\4 an archive", 15); }); }},
      {"half page: a file that ends early", "record", ErrorCode::mismatch, [] { return damaged([](Bytes_& b) { b.resize(b.size() - 72); }); }},
      {"an empty file, as a marker of existence", "record", ErrorCode::mismatch, [] { return damaged([](Bytes_& b) { b.clear(); }); }},
      {"a longer file", "record", ErrorCode::mismatch, [] { return damaged([](Bytes_& b) { b.resize(b.size() + 4096); }); }},
      {"flipped bit in a stored page", "record", ErrorCode::mismatch, [] { return damaged([](Bytes_& b) { b[4096 + 77] ^= std::byte{1}; }); }},
      {"flipped bit in a stored header", "record", ErrorCode::mismatch, [] { return damaged([](Bytes_& b) { b[30] ^= std::byte{1}; }); }},
      {"a record of a later version", "record", ErrorCode::mismatch, [] { return damaged([](Bytes_& b) { b[8] = std::byte{9}; }); }},
      {"a disk that lies: a write cut without an error", "record", ErrorCode::mismatch,
       [] {
         Stored<Model> s;
         s.io.set([](IoCall call, const std::string&) { return call == IoCall::write ? IoFault::tear(8192) : IoFault::none(); });
         if (!s.put(s.key()).ok()) return missed("store");
         return s.get(s.key());
       }},
      {"a write that fails half way", "file tier", ErrorCode::failed,
       [] {
         Stored<Model> s;
         s.io.set([](IoCall call, const std::string&) { return call == IoCall::write ? IoFault::cut(5000) : IoFault::none(); });
         return s.put(s.key());
       }},
      {"a crash between writing and naming a record", "file tier", ErrorCode::stale,
       [] {
         Stored<Model> s;
         s.io.set([](IoCall call, const std::string&) { return call == IoCall::publish ? IoFault::fail() : IoFault::none(); });
         (void)s.put(s.key());
         s.open();
         return s.get(s.key());
       }},
      {"racing store: a page goes to a file while a load still fills it", "file tier", ErrorCode::busy,
       [] {
         Stored<Model> s;
         auto event = Event<Host>::make("load");
         const std::vector<HostPage> page{s.pages[0].id()};
         auto hold = s.pool.ledger<space::Full>().hold(page, PageUse::load, event);
         auto status = s.put(s.key());
         event.complete();
         return status;
       }},
      {"a page of a backup that failed goes to a file", "file tier", ErrorCode::failed,
       [] {
         Stored<Model> s;
         auto event = Event<Host>::make("save");
         const std::vector<HostPage> page{s.pages[0].id()};
         { auto hold = s.pool.ledger<space::Full>().hold(page, PageUse::load, event); }
         event.complete(Error{ErrorCode::failed, "injected"});
         return s.put(s.key());
       }},
      {"two processes that own one folder", "file tier", ErrorCode::busy,
       [] {
         Stored<Model> s;
         return status_of(Stored<Model>::Tier::make({.folder = s.folder, .budget = Bytes(1 << 20)}));
       }},
  };
}

}  // namespace detection
