// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvire/pool/bundle_pool.hpp>
#include <kvire/tier/file_migrate.hpp>
#include <kvire/tier/file_seals.hpp>
#include <kvire/tier/file_store.hpp>

KVIRE_NAMESPACE_BEGIN

/// Host pages of a bundle that outlive the process: one record a file, all entries of a page-id space together, in a folder that the tier owns
/// while it lives. Thread-safe; nothing blocks but `make`, `erase` and the destructor, which finishes what is queued. Move-only.
///
/// Stores and loads are asynchronous: the event is final when the pages have been copied and the tier has let go of their references. A load
/// writes its pages only when all of the record has proven right; if its event fails, they hold what they held. Events fail with: stale (not
/// there, or gone since); mismatch (the record is damaged, cut or of something else: it is removed, so that it can be stored anew); failed (the
/// system reported an error: the record stays); busy and exhausted (no room); invalid_argument. Never with a wrong hit.
///
/// A transfer of the same pages is not waited for: pages with unfinished transfers are refused (busy), and transfers of pages under a load or
/// store are to be issued once its event is complete.
template <class Bundle, class Backend, Checksum Sum = Xxh64, BlockIo Io = PosixIo>
class FileTier {
  static_assert(require_bundle<Bundle>());

 public:
  using bundle = Bundle;
  using Options = FileTierOptions<Io>;
  using Pool = HostBundlePool<Bundle, Backend>;
  using Refs = BundleRefs<Bundle, HostPage>;

  /// Opens the folder, made if need be, but not what it is in: removes what a crash left under temporary names, finds the records that are there, and evicts those
  /// beyond the budget. `layers`: of the model, as in the pools. Errors: invalid_argument; busy if another tier has the folder; exhausted
  /// without a thread to be had; the system's.
  static Result<FileTier> make(Options options, int layers = Bundle::layers) {
    if (layers < 1 || layers > Bundle::layers) {
      return Error{ErrorCode::invalid_argument, options.name + ": " + std::to_string(layers) + " layers; the model has " + std::to_string(Bundle::layers)};
    }
    auto store = Store::make(std::move(options));
    if (!store.ok()) return store.error();
    return FileTier(std::move(store).value(), layers);
  }

  int layers() const { return layers_; }
  const std::string& name() const { return store_->options().name; }

  /// Writes the pages as one record, unless it is there or under way already. The pages must not change until the event is final; those that a transfer has
  /// failed to write are refused (failed). Other errors: as load. With `seals` of the pool's pages, pages that are not what their seals say are not written; their event fails with
  /// mismatch, and no other does. Refused as busy at once, without an event to wait for, where as many are under way as may be.
  Event<Host> store(const RecordKey& key, const Pool& pool, Refs pages, std::shared_ptr<PageSeals> seals = {}) {
    if (Status ok = check_key(key); !ok.ok()) return failed(ok.error());
    auto shape = shape_;
    auto pointers = gather<const std::byte*>(pool, pages, shape);
    if (!pointers.ok()) return failed(pointers.error());
    auto sealed = detail::RecordSeals::make(pool, pages, shape, std::move(seals));
    if (!sealed.ok()) return failed(sealed.error());
    shape.place(key);
    return store_->store({key, std::move(shape), std::move(pointers).value(), std::make_shared<Refs>(std::move(pages)), std::move(sealed).value()});
  }

  struct Wanted {
    RecordKey key = {};
    Refs pages = {};  ///< to be filled; spaces without pages are not asked for
    std::shared_ptr<PageSeals> seals = {};  ///< of the pool's pages, to be set; none: no seals
  };

  /// Fills pages from a record, which the caller may own beside the references given here, and nobody else. Records named together are read together. Errors
  /// before anything is read, of the record concerned alone: invalid_argument for a key that check_key refuses, no pages, a pool of other layers, or pages or
  /// seals of another pool; duplicate for a page that is named twice; busy for one that has a third owner.
  std::vector<Event<Host>> load(Pool& pool, std::vector<Wanted> wanted) {
    return issue(pool, std::move(wanted), shape_, [](std::vector<std::byte*> pointers, RecordShape shape, detail::RecordSeals seals) {
      return [pointers = std::move(pointers), shape = std::move(shape), seals = std::move(seals)](const std::byte* record, const RecordHeader& header) {
        std::size_t next = 0;
        for (std::size_t i = 0; i < shape.sections.size(); ++i) {
          const RecordSection& section = header.shape.sections[i];
          if (shape.sections[i].pages == 0) continue;
          for (std::int64_t slot = 0; slot < section.slots; ++slot) {
            for (std::int64_t page = 0; page < section.pages; ++page) {
              const std::byte* const bytes = record + section.page_offset(slot, page);
              if (seals) seals.set(next, bytes, section.page_bytes);
              std::memcpy(pointers[next++], bytes, static_cast<std::size_t>(section.page_bytes));
            }
          }
        }
      };
    });
  }
  Event<Host> load(const RecordKey& key, Pool& pool, Refs pages, std::shared_ptr<PageSeals> seals = {}) {
    return one({key, std::move(pages), std::move(seals)}, [&](auto wanted) { return load(pool, std::move(wanted)); });
  }

  /// The one way from a record of another layout, only ever by this name: fills the pages from a record of `Old`, a bundle with the same entries
  /// and other policies, as `kvire::migrate` would between pools (errors of the numbers included). The old record stays: `store` the pages under
  /// their own layout and `erase<Old>` it. Otherwise as `load`.
  template <class Old>
  Event<Host> migrate(const RecordKey& key, Pool& pool, Refs pages, const RowOptions& row = {}) {
    static_assert(detail::require_migrate_bundle<Old, Bundle>());
    return one({key, std::move(pages)}, [&](auto wanted) {
      return issue(pool, std::move(wanted), detail::record_shape<Old>(layers_), [row](std::vector<std::byte*> pointers, RecordShape shape, const detail::RecordSeals&) {
        return [pointers = std::move(pointers), shape = std::move(shape), row](const std::byte* record, const RecordHeader& header) {
          detail::migrate_record<Old, Bundle>(record, header.shape, shape, pointers, row);
        };
      });
    });
  }

  /// Pages by space of a record that is there, without reading it; nothing if it is not.
  template <class Other = Bundle>
  std::optional<BundlePages<Other>> find(const RecordKey& key) const {
    if (!check_key(key).ok()) return {};
    const auto found = store_->find(record_id(key, bundle_fingerprint128<Other>, layers_));
    if (!found) return {};
    BundlePages<Other> pages;
    for (std::size_t i = 0; i < found->size() && i < static_cast<std::size_t>(Other::space_count); ++i) pages.count[i] = (*found)[i];
    return pages;
  }
  template <class Other = Bundle>
  bool contains(const RecordKey& key) const {
    return find<Other>(key).has_value();
  }
  /// Forgets a record and removes its file; one that is being stored goes when it has been. True if it was there.
  template <class Other = Bundle>
  bool erase(const RecordKey& key) {
    return check_key(key).ok() && store_->erase(record_id(key, bundle_fingerprint128<Other>, layers_));
  }

  /// Bytes in the folder: records, and temporary files of stores under way. Never more than the budget.
  Bytes bytes() const { return store_->bytes(); }
  Bytes budget() const { return store_->options().budget; }
  std::int64_t records() const { return store_->records(); }
  /// Host memory that the workers keep for what they move.
  Bytes workspace() const { return store_->workspace(); }
  FileTierStats stats() const { return store_->stats(); }

  /// Bytes of the record that these pages would make.
  Bytes record_bytes(const RecordKey& key, const BundlePages<Bundle>& pages) const {
    auto shape = shape_;
    for (int i = 0; i < Bundle::space_count; ++i) shape.set_pages(i, static_cast<std::int32_t>(pages.count[i]));
    return Bytes(shape.place(key));
  }

 private:
  using Store = detail::FileStore<Sum, Io>;

  FileTier(std::unique_ptr<Store> store, int layers) : store_(std::move(store)), layers_(layers), shape_(detail::record_shape<Bundle>(layers)) {}

  static Event<Host> failed(const Error& error) {
    auto event = Event<Host>::make();
    event.complete(Status(error));
    return event;
  }

  // Addresses of the pages in the order of a record's sections, whose pages are set.
  template <class Pointer, class SomePool>
  Result<std::vector<Pointer>> gather(SomePool& pool, const Refs& refs, RecordShape& shape) const {
    constexpr bool writes_pages = std::is_same_v<Pointer, std::byte*>;
    if (pool.layers() != layers_) {
      return Error{ErrorCode::invalid_argument, name() + ": pool " + pool.name() + " has " + std::to_string(pool.layers()) + " layers, the tier " + std::to_string(layers_)};
    }
    Status status;
    bool any = false;
    Bundle::for_each([&]<class Entry>() {
      if constexpr (Bundle::template first_of_space<Entry>) {
        using Space = typename Entry::space;
        const auto& list = refs.template of<Space>();
        if (!status.ok()) return;
        any = any || !list.empty();
        shape.set_pages(Bundle::template space_index<Space>(), static_cast<std::int32_t>(list.size()));
        status = check(pool.template ledger<Space>(), list, writes_pages);
      }
    });
    if (!status.ok()) return status.error();
    if (!any) return Error{ErrorCode::invalid_argument, name() + ": a record of no pages"};
    std::vector<Pointer> pointers;
    for (const RecordSection& section : shape.sections) {
      Bundle::for_each([&]<class Entry>() {
        if (section.entry != Bundle::template index_of<Entry>()) return;
        for (int slot = 0; slot < section.slots; ++slot) {
          for (const auto& ref : refs.template of<typename Entry::space>()) {
            if constexpr (writes_pages) {
              pointers.push_back(pool_access::view(pool.template entry<Entry>(), EntrySlot(slot)).page(ref.id().value));
            } else {
              pointers.push_back(pool_access::const_view(pool.template entry<Entry>(), EntrySlot(slot)).page(ref.id().value));
            }
          }
        }
      });
    }
    return pointers;
  }

  template <class Ledger>
  Status check(const Ledger& ledger, const std::vector<PageRef<HostPage>>& refs, bool writes_pages) const {
    const auto bad = [&](ErrorCode code, std::int32_t page, const std::string& what) {
      return Error{code, name() + ": pool " + ledger.name() + ": host page " + std::to_string(page) + what};
    };
    std::vector<std::int32_t> ids;
    for (const auto& ref : refs) {
      const std::int32_t page = ref.id().value;
      if (ref.ledger() != ledger.identity()) return bad(ErrorCode::invalid_argument, page, " is of another pool or space; pass pages that this pool allocated for this space");
      // The caller's own reference and the one given here.
      const std::int32_t owners = writes_pages ? ledger.owners(ref.id()) : 0;
      if (owners > 2) return bad(ErrorCode::busy, page, " has " + std::to_string(owners) + " owners: a load would change it under the others");
      ids.push_back(page);
    }
    detail::sort(ids);
    for (std::size_t i = 1; i < ids.size(); ++i) {
      if (ids[i] == ids[i - 1]) return bad(ErrorCode::duplicate, ids[i], " is named twice in one record");
    }
    for (const auto& [page, work] : ledger.in_flight(std::span<const std::int32_t>(ids))) {
      if (writes_pages || writes(work.use)) {
        return bad(ErrorCode::busy, page, std::string(" is under a ") + name_of(work.use));
      }
    }
    if (writes_pages) return {};
    const auto unwritten = ledger.failed_writes(ids);
    return unwritten.empty() ? Status() : Status(Error{unwritten.front().error.code, name() + ": " + unwritten.front().error.message});
  }

  template <class MakeConsumer>
  std::vector<Event<Host>> issue(Pool& pool, std::vector<Wanted> wanted, const RecordShape& stored, MakeConsumer&& make_consumer) {
    std::vector<Event<Host>> events(wanted.size());
    std::vector<typename Store::Load> loads;
    std::vector<std::size_t> position;
    for (std::size_t i = 0; i < wanted.size(); ++i) {
      if (Status ok = check_key(wanted[i].key); !ok.ok()) {
        events[i] = failed(ok.error());
        continue;
      }
      auto shape = stored;
      auto pointers = gather<std::byte*>(pool, wanted[i].pages, shape);
      if (!pointers.ok()) {
        events[i] = failed(pointers.error());
        continue;
      }
      auto seals = detail::RecordSeals::make(pool, wanted[i].pages, shape, std::move(wanted[i].seals));
      if (!seals.ok()) {
        events[i] = failed(seals.error());
        continue;
      }
      position.push_back(i);
      loads.push_back({std::move(wanted[i].key), shape, make_consumer(std::move(pointers).value(), shape, std::move(seals).value()),
                       std::make_shared<Refs>(std::move(wanted[i].pages))});
    }
    auto issued = store_->load(std::move(loads));
    for (std::size_t i = 0; i < issued.size(); ++i) events[position[i]] = std::move(issued[i]);
    return events;
  }

  template <class Issue>
  static Event<Host> one(Wanted record, Issue&& issue) {
    std::vector<Wanted> wanted;
    wanted.push_back(std::move(record));
    return std::move(issue(std::move(wanted)).front());
  }

  std::unique_ptr<Store> store_;
  int layers_;
  RecordShape shape_;
};

KVIRE_NAMESPACE_END
