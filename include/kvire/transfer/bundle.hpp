// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <tuple>

#include <kvire/pool/bundle_pool.hpp>
#include <kvire/transfer/transfer.hpp>

KVIRE_NAMESPACE_BEGIN

namespace rule {
template <class FromBundle, class ToBundle, class PlanBundle, bool Same>
struct TransferBundle {
  static_assert(Same,
                "kvire [transfer.same-bundle]: both pools and the plan of a bundle transfer name one CacheBundle. An entry that one side lacks would stay behind. "
                "Fix: make the host pools with mirror_of(device pools), or use the pools' own bundle in BundlePlan.");
};
template <class First, class Second, bool Bundles>
struct TransferWhole {
  static_assert(Bundles,
                "kvire [transfer.whole-bundle]: a bundle is moved whole, by a BundlePlan. A plan of bare pages, or one pool against a bundle, would leave companions "
                "such as the index keys behind. Fix: pass a BundlePlan of the pools' bundle, or name two entry pools with entry<E>() on purpose.");
};
template <class Bundle, int SpacesOfBundle, int SpacesNamed, bool EachOnce>
struct PlanSpaces {
  static_assert(EachOnce,
                "kvire [transfer.every-space]: a BundlePlan names each page-id space of its bundle once. The pages of one that nobody thought of, and with them every "
                "entry that lives there, would stay behind. Fix: name its pages with in_space<Space>(plan), or say without<Space>().");
};
}  // namespace rule

/// What a BundlePlan says of one page-id space: these pages, of all entries there.
template <class Space, class First, class Second>
struct SpacePlan {
  using space = Space;
  PagePlan<First, Second> pages;
};
template <class Space, class First, class Second>
SpacePlan<Space, First, Second> in_space(PagePlan<First, Second> pages) {
  return {std::move(pages)};
}

/// The same, for a space whose pages all stay where they are.
template <class Space>
struct LeftOut {
  using space = Space;
};
template <class Space>
constexpr LeftOut<Space> without() {
  return {};
}

/// What one transfer moves of a bundle: pages of each page-id space, all entries of the space together. Every space is named, in any order:
///
///     BundlePlan<Model> moves(in_space<space::Full>(plan(from, to)), in_space<space::Window>(plan(pairs)), without<space::Request>());
///
/// The plan of a space may have its sides in either order. There is no way to name some entries of a space only. A named space may have no pages this time.
template <class Bundle, class First = HostPage, class Second = DevicePage>
class BundlePlan {
 public:
  using bundle = Bundle;
  using first_id = First;
  using second_id = Second;

  template <class... Spaces>
  explicit BundlePlan(Spaces... named) {
    require_every_space<typename Spaces::space...>();
    (take(std::move(named)), ...);
  }

  template <class Space>
  const PagePlan<First, Second>& of() const {
    return spaces_[index<Space>()];
  }
  /// Pairs of all spaces.
  std::int64_t pages() const {
    std::size_t n = 0;
    for (const auto& space : spaces_) n += space.first.size();
    return static_cast<std::int64_t>(n);
  }

 private:
  template <class Space, class... Named>
  static constexpr int times = (static_cast<int>(std::is_same_v<Space, Named>) + ... + 0);

  template <class... Named>
  static constexpr void require_every_space() {
    (index<Named>(), ...);
    constexpr int named = sizeof...(Named);
    (void)sizeof(rule::PlanSpaces<Bundle, Bundle::space_count, named, named == Bundle::space_count && (true && ... && (times<Named, Named...> == 1))>);
  }

  template <class Space>
  static constexpr int index() {
    return Bundle::template index_of_space<Space>();
  }

  template <class Space, class A, class B>
  void take(SpacePlan<Space, A, B> named) {
    auto& p = named.pages;
    detail::require_sides<A, B, First, Second>();
    if constexpr (detail::source_is_first<A, B, First, Second>) {
      spaces_[index<Space>()] = std::move(p);
    } else if constexpr (detail::sides_fit<A, B, First, Second>) {
      spaces_[index<Space>()] = {std::move(p.second), std::move(p.first), std::move(p.second_generation), std::move(p.first_generation),
                                 std::move(p.second_ledger), std::move(p.first_ledger)};
    }
  }
  template <class Space>
  void take(LeftOut<Space>) {}

  PagePlan<First, Second> spaces_[Bundle::space_count];
};

namespace detail {

template <class T>
inline constexpr bool is_bundle_plan = false;
template <class Bundle, class First, class Second>
inline constexpr bool is_bundle_plan<BundlePlan<Bundle, First, Second>> = true;

/// Whether such a plan moves a bundle between two bundle pools.
template <class From, class To, class Plan>
inline constexpr bool bundle_transfers = [] {
  if constexpr (is_bundle_plan<Plan>) {
    return std::is_same_v<typename From::bundle, typename To::bundle> && std::is_same_v<typename From::bundle, typename Plan::bundle> && same_backend<From, To> &&
           sides_fit<typename Plan::first_id, typename Plan::second_id, typename From::side::page_id, typename To::side::page_id>;
  } else {
    return false;
  }
}();
/// Refuses it, in words, if not.
template <class From, class To, class Plan>
constexpr void require_bundle_transfer() {
  (void)sizeof(rule::TransferWhole<From, To, is_bundle_plan<Plan>>);
  if constexpr (is_bundle_plan<Plan>) {
    constexpr bool same = std::is_same_v<typename From::bundle, typename To::bundle> && std::is_same_v<typename From::bundle, typename Plan::bundle>;
    (void)sizeof(rule::TransferBundle<typename From::bundle, typename To::bundle, typename Plan::bundle, same>);
    require_backend<From, To>();
    require_sides<typename Plan::first_id, typename Plan::second_id, typename From::side::page_id, typename To::side::page_id>();
  }
}

/// All entries of a bundle, layer by layer of the model: whatever a layer owns arrives before its event.
template <class From, class To, class Plan>
Result<PreparedTransfer<typename From::backend>> prepare_bundle(const From& from, To& to, const Plan& plan, CopyDirection direction,
                                                                const TransferOptions<typename From::backend>& options) {
  using Bundle = typename From::bundle;
  using Backend = typename From::backend;
  using Engine = TransferEngine<Backend>;
  constexpr bool first = source_is_first<typename Plan::first_id, typename Plan::second_id, typename From::side::page_id, typename To::side::page_id>;
  if (from.layers() != to.layers()) {
    return Error{ErrorCode::mismatch, "bundle pools " + from.name() + " and " + to.name() + ": " + std::to_string(from.layers()) +
                                          " model layers against " + std::to_string(to.layers())};
  }
  auto labels = layers_of(options.layers, from.layers(), from.name());
  if (!labels.ok()) return labels.error();
  TransferBuilder<Backend> builder(options, labels.value());
  const auto positions = positions_of(labels.value(), from.layers());
  const auto moves = [&]<class Space>() { return !plan.template of<Space>().first.empty() || !plan.template of<Space>().second.empty(); };

  // Before the ledgers have it: from then on any thread that asks them may look.
  Bundle::for_each([&]<class Entry>() {
    if (!moves.template operator()<typename Entry::space>()) return;
    const auto& source = from.template entry<Entry>();
    const auto& destination = to.template entry<Entry>();
    std::vector<int> slot_positions(static_cast<std::size_t>(source.layers()), -1);
    for (int layer = 0; layer < from.layers(); ++layer) {
      if (Entry::owns(LayerId(layer))) slot_positions[static_cast<std::size_t>(Entry::slot(LayerId(layer)).value)] = positions[static_cast<std::size_t>(layer)];
    }
    builder.progress().extent().cover(pool_access::memory(source), slot_positions);
    builder.progress().extent().cover(pool_access::memory(destination), std::move(slot_positions), destination.ledger().identity());
  });

  std::shared_ptr<const CheckedIds<std::int32_t>> ids[Bundle::space_count];
  Status status;
  Bundle::for_each([&]<class Entry>() {
    using Space = typename Entry::space;
    if constexpr (Bundle::template first_of_space<Entry>) {
      const auto& space = plan.template of<Space>();
      if (!status.ok() || !moves.template operator()<Space>()) return;
      auto held = hold_pages(builder, from.template ledger<Space>(), to.template ledger<Space>(), side_of<first>(space), side_of<!first>(space));
      if (held.ok()) {
        ids[Bundle::template space_index<Space>()] = std::move(held).value();
      } else {
        (void)(status = held.error());  // nvcc takes the result of an assignment for a discarded value
      }
    }
  });
  if (!status.ok()) return status.error();

  Bundle::for_each([&]<class Entry>() {
    using P = typename Entry::policy;
    const auto& entry_ids = ids[Bundle::template space_index<typename Entry::space>()];
    if (!entry_ids) return;
    const auto& source = from.template entry<Entry>();
    auto& destination = to.template entry<Entry>();
    for (int layer = 0; layer < from.layers(); ++layer) {
      const int position = positions[static_cast<std::size_t>(layer)];
      if (!Entry::owns(LayerId(layer)) || position < 0) continue;
      const EntrySlot slot = Entry::slot(LayerId(layer));
      typename Engine::Piece piece;
      piece.position = position;
      piece.info = {.entry = Entry::name, .layer = layer, .direction = direction};
      piece.count.entry = Entry::name;
      piece.count.copies = 1;
      auto seal = seal_of_piece(source, destination, slot, entry_ids, options);
      if (!seal.ok()) {
        (void)(status = seal.error());
        return;
      }
      piece.seal = std::move(seal).value();
      const std::uint64_t digest = options.digest ? digest_key(fingerprint64<P> ^ digest_name(Entry::name), layer) | 1 : 0;
      Engine::template pages<P>(piece, pool_access::view(destination, slot), pool_access::const_view(source, slot), entry_ids, digest);
      builder.add(std::move(piece));
    }
  });
  if (!status.ok()) return status.error();
  return Result<PreparedTransfer<Backend>>(builder.finish());
}

}  // namespace detail

/// `prepare_load` and `load` of all entries of a bundle in one ticket, whose layers are the model's. Errors as for single pools.
template <class Bundle, class Bundle2, class B, class C, class Plan>
Result<PreparedTransfer<B>> prepare_load(const BundlePool<Bundle, B, HostSide>& host, BundlePool<Bundle2, C, DeviceSide>& device, const Plan& plan,
                                         const TransferOptions<B>& options = {}) {
  using From = BundlePool<Bundle, B, HostSide>;
  using To = BundlePool<Bundle2, C, DeviceSide>;
  detail::require_bundle_transfer<From, To, Plan>();
  if constexpr (detail::bundle_transfers<From, To, Plan>) {
    return detail::prepare_bundle(host, device, plan, CopyDirection::host_to_device, options);
  } else {
    return Error();
  }
}
template <class Bundle, class Bundle2, class B, class C, class Plan>
Result<PreparedTransfer<B>> prepare_backup(const BundlePool<Bundle, B, DeviceSide>& device, BundlePool<Bundle2, C, HostSide>& host, const Plan& plan,
                                           const TransferOptions<B>& options = {}) {
  using From = BundlePool<Bundle, B, DeviceSide>;
  using To = BundlePool<Bundle2, C, HostSide>;
  detail::require_bundle_transfer<From, To, Plan>();
  if constexpr (detail::bundle_transfers<From, To, Plan>) {
    return detail::prepare_bundle(device, host, plan, CopyDirection::device_to_host, options);
  } else {
    return Error();
  }
}
template <class Bundle, class Bundle2, class B, class C, class Plan>
Result<Ticket<B>> load(const BundlePool<Bundle, B, HostSide>& host, BundlePool<Bundle2, C, DeviceSide>& device, const Plan& plan, Stream<B>& stream,
                       const TransferOptions<B>& options = {}) {
  return detail::issue(prepare_load(host, device, plan, options), stream);
}
template <class Bundle, class Bundle2, class B, class C, class Plan>
Result<Ticket<B>> backup(const BundlePool<Bundle, B, DeviceSide>& device, BundlePool<Bundle2, C, HostSide>& host, const Plan& plan, Stream<B>& stream,
                         const TransferOptions<B>& options = {}) {
  return detail::issue(prepare_backup(device, host, plan, options), stream);
}

KVIRE_NAMESPACE_END
