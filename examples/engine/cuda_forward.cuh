// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

#include "cuda_io.cuh"
#include "forward_for.hpp"
#include "queries.hpp"

namespace engine {

/// The forward pass on the GPU, all of it: matrix products by cuBLAS, store, index scores and top-k by kvire, small kernels for the rest. Only the
/// inputs of a step go there and only its logits come back.
///
/// With ReplaySettings::captured the rows of sessions that decode one token are a pass of their own, which is captured in a CUDA graph once and
/// replayed in every step. Its shape is fixed; rows that a step does not need are padding.
template <class IndexKey>
class CudaForward {
  using Io = CudaStepIo<IndexKey>;
  using Entries = typename Io::Entries;
  using WindowLatent = typename Entries::WindowLatent;
  using C4Latent = typename Entries::C4Latent;
  using IndexK = typename Entries::IndexK;
  using C128Latent = typename Entries::C128Latent;
  using C4AttentionState = typename Entries::C4AttentionState;
  using C4IndexerState = typename Entries::C4IndexerState;
  using C128RequestState = typename Entries::C128RequestState;
  static constexpr float attention_scale = 0.044194174F * 4.0F;  // as Forward

  // Leases of the step.
  struct StepAccess {
    Io& io;
    const kvire::Step<kvire::Cuda>& step = io.step();
    void begin_layer(int) {}
    template <class Entry>
    auto read(kvire::LayerId layer) {
      return io.template read<Entry>(layer);
    }
    template <class Entry>
    auto write(kvire::LayerId layer) {
      return io.template write<Entry>(layer);
    }
  };
  // While a graph is captured: the step that replays it has the leases.
  struct GraphAccess {
    Io& io;
    const kvire::Step<kvire::Cuda>& step;  // of what is captured alone
    void begin_layer(int layer) {
      io.check(cudaStreamWaitEvent(io.native(), io.shared.captured.layers[static_cast<std::size_t>(layer)], cudaEventWaitExternal), "capturing a wait");
    }
    template <class Entry>
    auto read(kvire::LayerId layer) {
      return kvire::assume_ready(kvire::ConstPageView<typename Entry::policy, kvire::Cuda>(io.template captured_view<Entry>(layer)));
    }
    template <class Entry>
    auto write(kvire::LayerId layer) {
      return kvire::assume_ready(io.template captured_view<Entry>(layer));
    }
  };

 public:
  CudaForward(const Model& model, Io& io, const Batch& batch, int top_k) : io_(io), batch_(batch), top_k_(top_k) {
    auto& shared = io.shared;
    if (!shared.model && io.ok()) {
      auto made = gpu::DeviceModel::make(model, io.stream());
      io.keep(made);
      if (made.ok()) shared.model = std::move(made).value();
    }
    logits_.resize(batch.spans.size());
  }

  /// Queues the step and waits for its logits.
  void run() {
    if (!io_.ok()) return;
    std::size_t decoding = 0;
    while (io_.settings.captured && decoding < batch_.spans.size() && decoding < most_captured && batch_.spans[decoding].rows == 1) ++decoding;
    const gpu::Part decode{&batch_, 0, decoding};
    const gpu::Part rest{&batch_, decoding, batch_.spans.size()};
    if (!decode.empty()) replay(decode);
    if (!rest.empty()) eager(rest);
    io_.keep(io_.stream().synchronize());
    if (!io_.ok()) return;
    if (!decode.empty()) take_logits(decode, captured_logits_);
    if (!rest.empty()) take_logits(rest, eager_logits_);
  }

  const float* logits(std::size_t span) const { return logits_[span].data(); }

 private:
  static constexpr std::size_t most_captured = gpu::product_rows;

  void take_logits(const gpu::Part& part, const float* from) {
    for (std::size_t s = 0; s < part.spans(); ++s) {
      if (!part.span(s).wants_logits) continue;
      logits_[part.first + s].assign(from, from + vocabulary);
      from += vocabulary;
    }
  }

  // Memory for a pass of the shape, and its inputs on their way to the device.
  struct Pass {
    gpu::Inputs in;
    gpu::Activations a;
    float* logits = nullptr;  // on the host
  };
  Pass prepare(const gpu::Part& part, const gpu::Shape& shape, gpu::CudaBuffer& staging, gpu::CudaBuffer& inputs, gpu::CudaBuffer& activations) {
    gpu::Carver count;
    (void)gpu::Inputs::carve(shape, count);
    const std::size_t input_bytes = count.used();
    (void)count.template take<float>(shape.logits * vocabulary);
    io_.keep(staging.at_least(count.used(), "pinned memory for a step"));
    io_.keep(inputs.at_least(input_bytes, "memory for the inputs of a step"));
    gpu::Carver work;
    (void)gpu::Activations::carve(shape, io_.shared.model->host(), top_k_, work);
    io_.keep(activations.at_least(work.used(), "memory for the activations of a step"));
    if (!io_.ok()) return {};
    gpu::Carver on_host(staging.data());
    gpu::Inputs host = gpu::Inputs::carve(shape, on_host);
    gpu::InputBuilder<Entries>{part, shape, host}.build();
    expect(host, shape);
    Pass pass;
    pass.logits = on_host.template take<float>(shape.logits * vocabulary);
    gpu::Carver on_device(inputs.data());
    pass.in = gpu::Inputs::carve(shape, on_device);
    gpu::Carver at(activations.data());
    pass.a = gpu::Activations::carve(shape, io_.shared.model->host(), top_k_, at);
    io_.check(cudaMemcpyAsync(inputs.data(), staging.data(), input_bytes, cudaMemcpyHostToDevice, io_.native()), "uploading the inputs of a step");
    return pass;
  }

  // What the stores of all layers must write.
  void expect(const gpu::Inputs& host, const gpu::Shape& shape) {
    const auto slots = [](const std::int64_t* p, std::int64_t n) { return std::count_if(p, p + n, [](std::int64_t slot) { return slot >= 0; }); };
    for (const Layer& layer : io_.shared.model->host().layers) {
      io_.expect_stored(slots(host.window_slots, shape.rows));
      if (layer.ratio == 4) io_.expect_stored(2 * slots(host.ring_slots, shape.rows) + 2 * slots(host.group4.slots, shape.groups4));
      if (layer.ratio == 128) io_.expect_stored(slots(host.request_slots, shape.rows) + slots(host.group128.slots, shape.groups128));
    }
  }

  void eager(const gpu::Part& part) {
    auto& shared = io_.shared;
    const gpu::Shape shape = part.template shape<IndexK>(static_cast<bool>(shared.hot));
    const Pass pass = prepare(part, shape, shared.staging, shared.inputs, shared.activations);
    StepAccess access{io_};
    queue(access, shape, pass, io_.kernels(), &part);
    eager_logits_ = pass.logits;
  }

  void replay(const gpu::Part& part) {
    auto& captured = io_.shared.captured;
    const Model& model = io_.shared.model->host();
    auto& latents = io_.shared.hot;
    const std::int64_t hot = latents ? std::min<std::int64_t>(most_captured, latents.set().rows()) : 0;
    const gpu::Shape shape{.rows = most_captured,
                           .groups4 = most_captured,
                           .groups128 = most_captured,
                           .logits = most_captured,
                           .hot = hot,
                           .hot_groups = hot,
                           .pages = blocks_for(model.positions),
                           .keys = std::max<std::int64_t>(1, IndexK::cached(kvire::RawTokens(model.positions)).count)};
    const Pass pass = prepare(part, shape, captured.staging, captured.inputs, captured.activations);
    if (io_.ok() && captured.graph == nullptr) capture(shape, pass);
    captured_logits_ = pass.logits;
    if (!io_.ok()) return;
    // The leases of everything that the graph touches are taken layer by layer, each layer's event recorded behind their waits. They end behind the replay.
    kvire::Stream<kvire::Cuda>& gates = *captured.gates;
    auto step = io_.begin_beside(gates);
    io_.keep(step);
    std::vector<std::shared_ptr<void>> leases;
    const auto hold = [&](auto lease) {
      io_.keep(kvire::launch(gates, [](cudaStream_t, const auto&) {}, lease));
      leases.push_back(std::make_shared<decltype(lease)>(std::move(lease)));
    };
    for (int l = 0; l < static_cast<int>(model.layers.size()) && io_.ok(); ++l) {
      Entries::for_each([&]<class Entry>() {
        if (Entry::owns(kvire::LayerId(l))) io_.template with_leases<Entry>(step.value(), kvire::LayerId(l), hold);
      });
      io_.check(cudaEventRecord(captured.layers[static_cast<std::size_t>(l)], gates.native()), "opening the gate of a layer");
    }
    if (!io_.ok()) return;
    io_.check(cudaGraphLaunch(captured.graph, io_.native()), "replaying the decode graph");
    io_.check(cudaEventRecord(captured.replayed, io_.native()), "recording the end of a replay");
    io_.check(cudaStreamWaitEvent(gates.native(), captured.replayed, 0), "waiting for a replay");
    io_.keep(step.value().status());
    for (const auto& [kernel, calls] : captured.kernels) io_.kernels()[kernel] += calls;
    io_.count_graph_replay();
  }

  void capture(const gpu::Shape& shape, const Pass& pass) {
    auto& captured = io_.shared.captured;
    auto gates = kvire::Stream<kvire::Cuda>::make({.name = "gates"});
    io_.keep(gates);
    if (gates.ok()) captured.gates = std::move(gates).value();
    captured.layers.resize(io_.shared.model->host().layers.size());
    for (cudaEvent_t& event : captured.layers) io_.check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "making an event");
    io_.check(cudaEventCreateWithFlags(&captured.replayed, cudaEventDisableTiming), "making an event");
    const auto step = kvire::Gate<kvire::Cuda>().begin({}, io_.stream());
    io_.keep(step);
    cudaGraph_t graph = nullptr;
    if (io_.ok()) io_.check(cudaStreamBeginCapture(io_.native(), cudaStreamCaptureModeThreadLocal), "beginning a capture");
    if (!io_.ok()) return;
    GraphAccess access{io_, step.value()};
    queue(access, shape, pass, captured.kernels, nullptr);
    io_.check(cudaStreamEndCapture(io_.native(), &graph), "ending a capture");
    if (io_.ok()) io_.check(cudaGraphInstantiate(&captured.graph, graph, 0), "making a graph");
    if (graph != nullptr) (void)cudaGraphDestroy(graph);
  }

  // --- one pass, queued on the step's stream ---

  using Kernels = std::map<std::string, std::int64_t>;

  template <class Access>
  void queue(Access& access, const gpu::Shape& shape, const Pass& pass, Kernels& kernels, const gpu::Part* logged) {
    if (!io_.ok()) return;
    const gpu::DeviceModel& model = *io_.shared.model;
    const gpu::Activations& a = pass.a;
    const auto rows = static_cast<unsigned>(shape.rows);
    gpu::embed_kernel<<<rows, hidden_dim, 0, io_.native()>>>(model.embedding, pass.in.tokens, a.hidden);
    const int layers = static_cast<int>(model.host().layers.size());
    for (int l = 0; l < layers && io_.ok(); ++l) {
      access.begin_layer(l);
      log_input(l, logged, a.hidden);
      layer(access, l, shape, pass, kernels, logged);
    }
    log_input(layers, logged, a.hidden);
    if (shape.logits > 0) {
      gpu::take_rows_kernel<<<static_cast<unsigned>(shape.logits), hidden_dim, 0, io_.native()>>>(a.hidden, pass.in.logit_rows, a.last);
      norm<hidden_dim>(a.last, a.last, model.norm, nullptr, shape.logits, 1);
      io_.keep(model.project(model.head, a.last, shape.logits, a.logits));
      io_.check(cudaMemcpyAsync(pass.logits, a.logits, static_cast<std::size_t>(shape.logits) * vocabulary * sizeof(float), cudaMemcpyDeviceToHost, io_.native()), "reading the logits");
    }
    io_.check(cudaGetLastError(), "launching a pass");
  }

  template <int Dim>
  void norm(const float* in, float* out, const float* gain, const std::int64_t* positions, std::int64_t rows, int per_row) {
    const gpu::DeviceModel& model = *io_.shared.model;
    if (rows == 0) return;
    gpu::norm_kernel<Dim><<<static_cast<unsigned>(rows * per_row), Dim < 128 ? Dim : 128, 0, io_.native()>>>(in, out, gain, positions, per_row, model.cos, model.sin);
  }

  template <class Access>
  void layer(Access& access, int l, const gpu::Shape& shape, const Pass& pass, Kernels& kernels, const gpu::Part* logged) {
    const gpu::DeviceModel& model = *io_.shared.model;
    const Layer& host = model.host().layers[static_cast<std::size_t>(l)];
    const gpu::DeviceLayer& layer = model.layer(l);
    const kvire::LayerId id(l);
    const gpu::Activations& a = pass.a;
    const gpu::Inputs& in = pass.in;
    norm<hidden_dim>(a.hidden, a.normed, layer.norm, nullptr, shape.rows, 1);
    io_.keep(model.project(layer.q, a.normed, shape.rows, a.q));
    io_.keep(model.project(layer.kv, a.normed, shape.rows, a.kv));
    norm<latent_dim>(a.kv, a.kv, layer.kv_gain, in.positions, shape.rows, 1);
    norm<latent_dim>(a.q, a.q, nullptr, in.positions, shape.rows, heads);
    store<WindowLatent>(access, id, a.kv, in.window_slots, shape.rows);
    const auto window = access.template read<WindowLatent>(id);
    if (host.ratio == 0) {
      // The window alone: its own view stands in for compressed latents that no row has.
      attend<gpu::Compressed::none>(host, shape, pass, window, window, window);
    } else if (host.ratio == 4) {
      io_.keep(model.project(layer.compressor.project, a.normed, shape.rows, a.states));
      io_.keep(model.project(layer.index_compressor.project, a.normed, shape.rows, a.index_states));
      if (shape.groups4 > 0) {
        compress<C4AttentionState>(access, id, layer.compressor, host.compressor, 4, a.states, in.group4, shape.groups4, gpu::Inputs::candidates4, a.compressed);
        compress<C4IndexerState>(access, id, layer.index_compressor, host.index_compressor, 4, a.index_states, in.group4, shape.groups4, gpu::Inputs::candidates4, a.index_keys);
        norm<latent_dim>(a.compressed, a.compressed, layer.compressor.gain, in.group4.positions, shape.groups4, 1);
        append(access, id, shape, pass);
        store<C4Latent>(access, id, a.compressed + shape.hot_groups * latent_dim, in.group4.slots + shape.hot_groups, shape.groups4 - shape.hot_groups);
        store<IndexK>(access, id, a.index_keys, in.group4.slots, shape.groups4, layer.index_compressor.gain, in.group4.positions);
      }
      store<C4AttentionState>(access, id, a.states, in.ring_slots, shape.rows);
      store<C4IndexerState>(access, id, a.index_states, in.ring_slots, shape.rows);
      select(access, id, layer, shape, pass, kernels, logged);
      const auto latents = access.template read<C4Latent>(id);  // behind the loads of the layer, on which a look-up depends too
      attend<gpu::Compressed::selected>(host, shape, pass, window, latents, shape.hot > 0 ? resolve(access, id, shape, pass) : latents);
    } else {
      io_.keep(model.project(layer.compressor.project, a.normed, shape.rows, a.states));
      if (shape.groups128 > 0) {
        compress<C128RequestState>(access, id, layer.compressor, host.compressor, 128, a.states, in.group128, shape.groups128, gpu::Inputs::candidates128, a.compressed);
        norm<latent_dim>(a.compressed, a.compressed, layer.compressor.gain, in.group128.positions, shape.groups128, 1);
        store<C128Latent>(access, id, a.compressed, in.group128.slots, shape.groups128);
      }
      store<C128RequestState>(access, id, a.states, in.request_slots, shape.rows);
      const auto latents = access.template read<C128Latent>(id);
      attend<gpu::Compressed::all>(host, shape, pass, window, latents, latents);
    }
    io_.keep(model.project(layer.out, a.mixed, shape.rows, a.added));
    gpu::add_kernel<<<static_cast<unsigned>(shape.rows), hidden_dim, 0, io_.native()>>>(a.added, a.hidden);
  }

  // Encodes rows into the pages that the step may write; an index key's norm, rotary position and Hadamard transform are the store's own.
  template <class Entry, class Access>
  void store(Access& access, kvire::LayerId layer, const float* rows, const std::int64_t* slots, std::int64_t n, const float* gain = nullptr, const std::int64_t* positions = nullptr) {
    using P = typename Entry::policy;
    if (!io_.ok() || n == 0) return;
    kvire::StoreOptions options;
    options.row.bf16_round_trip = std::is_same_v<Entry, C4Latent> || std::is_same_v<Entry, C128Latent>;
    options.counts = io_.counts();
    if (gain != nullptr) {
      const gpu::DeviceModel& model = *io_.shared.model;
      options.prologue.norm = true;
      options.prologue.weight = gain;
      options.prologue.rope_dims = rope_dim;
      options.prologue.cos = model.cos;
      options.prologue.sin = model.sin;
      options.prologue.positions = positions;
      options.prologue.table_rows = model.host().positions;
      options.prologue.hadamard = true;
    }
    const auto lease = access.template write<Entry>(layer);
    if (io_.ok()) io_.keep(kvire::store<P>(kvire::Rows(rows, n), slots, lease, io_.stream(), options));
  }

  // The latents that decoding rows complete: to a slot of the hot set, and from there to their page.
  template <class Access>
  void append(Access& access, kvire::LayerId layer, const gpu::Shape& shape, const Pass& pass) {
    using P = typename C4Latent::policy;
    const std::int64_t n = shape.hot_groups;
    if (!io_.ok() || n == 0) return;
    auto& hot = io_.shared.hot.set();
    const kvire::EntrySlot slot = C4Latent::slot(layer);
    const kvire::HotRows rows{{pass.in.hot_group_rows, {n}}, {pass.in.hot_group_table, {n, shape.pages}}};
    const kvire::Tensor<const std::int32_t, 2> positions{pass.in.hot_group_index, {n, 1}};
    const auto pages = access.template write<C4Latent>(layer);  // held until the copies have run: transfers of these pages come before or behind
    auto lease = hot.append(access.step, slot, rows, positions, {pass.a.hot_places, {n, 1}});
    io_.keep(lease);
    if (!io_.ok()) return;
    kvire::StoreOptions options;
    options.row.bf16_round_trip = true;
    options.counts = io_.counts();
    io_.keep(kvire::store<P>(kvire::Rows(pass.a.compressed, n), pass.a.hot_places, lease.value(), io_.stream(), options));
    io_.keep(hot.backup(access.step, slot, rows, positions, {pass.a.hot_places, {n, 1}}));
    io_.keep(kvire::launch(io_.stream(), [](cudaStream_t, const auto&) {}, pages));
  }
  // The slots of what decoding rows selected, those that had none fetched.
  template <class Access>
  auto resolve(Access& access, kvire::LayerId layer, const gpu::Shape& shape, const Pass& pass) {
    const kvire::HotRows rows{{pass.in.hot_rows, {shape.hot}}, {pass.in.table, {shape.hot, shape.pages}}};
    auto lease = io_.shared.hot.set().resolve(access.step, C4Latent::slot(layer), rows, {pass.a.selected, {shape.hot, 1, top_k_}}, {pass.a.hot_slots, {shape.hot, 1, top_k_}},
                                              io_.hot_counts());
    io_.keep(lease);
    return lease.ok() ? std::move(lease).value() : kvire::assume_ready(kvire::ConstPageView<typename C4Latent::policy, kvire::Cuda>());
  }

  template <class Entry, class Access>
  void compress(Access& access, kvire::LayerId id, const gpu::DeviceCompressor& compressor, const Compressor& host, int ratio, const float* states, const gpu::GroupInputs& groups,
                std::int64_t n, int candidates, float* out) {
    const auto pages = access.template read<Entry>(id);
    if (!io_.ok()) return;
    io_.keep(kvire::launch(
        io_.stream(),
        [&](cudaStream_t native, const auto& view) {
          gpu::compress_kernel<<<static_cast<unsigned>(n), 128, 0, native>>>(view, states, groups.candidates, candidates, compressor.bias, ratio, host.dims, out);
        },
        pages));
  }

  template <class Access>
  void select(Access& access, kvire::LayerId id, const gpu::DeviceLayer& layer, const gpu::Shape& shape, const Pass& pass, Kernels& kernels, const gpu::Part* logged) {
    const gpu::DeviceModel& model = *io_.shared.model;
    const gpu::Activations& a = pass.a;
    const int index_heads = io_.index_heads;
    io_.keep(model.project(layer.index_q, a.normed, shape.rows, a.index_q));
    io_.keep(model.project(layer.index_weight, a.normed, shape.rows, a.head_weights));
    const auto keys = access.template read<IndexK>(id);
    if (!io_.ok()) return;
    gpu::index_query_kernel<EncodedQueries<IndexKey>::fp8><<<static_cast<unsigned>(shape.rows * index_heads), index_dim, 0, io_.native()>>>(
        a.index_q, a.head_weights, layer.index_weight.outputs, index_heads, pass.in.positions, model.cos, model.sin, a.query_codes, a.query_weights);
    const kvire::Queries queries{a.query_codes, EncodedQueries<IndexKey>::element, shape.rows, 1, index_heads, index_dim};
    const kvire::Tensor<const float, 3> weights{a.query_weights, {shape.rows, 1, index_heads}};
    const kvire::Tensor<const std::int32_t, 2> table{pass.in.table, {shape.rows, shape.pages}};
    const kvire::Tensor<const std::int32_t, 2> lengths{pass.in.lengths, {shape.rows, 1}};
    const kvire::Tensor<float, 3> scores{a.scores, {shape.rows, 1, shape.keys}};
    const kvire::Tensor<std::int32_t, 3> selected{a.selected, {shape.rows, 1, top_k_}};
    kvire::KernelServed served;
    const kvire::KernelChoice choice = io_.settings.kernel;
    io_.keep(kvire::sparse_logits<IndexKey, kvire::TunedLogits<64, 1>>(queries, weights, keys, table, lengths, scores, io_.stream(), {.kernel = choice, .served = &served}));
    if (io_.ok()) ++kernels[served.name];
    io_.keep(kvire::top_k(scores, lengths, selected, io_.stream(), {.kernel = choice, .served = &served}));
    if (io_.ok()) ++kernels[served.name];
    log_selections(id, logged, shape, a);
  }

  // For comparisons: what each row selected, and the scores.
  void log_selections(kvire::LayerId id, const gpu::Part* part, const gpu::Shape& shape, const gpu::Activations& a) {
    if (part == nullptr || !io_.settings.log || !io_.ok()) return;
    std::vector<float> scores(static_cast<std::size_t>(shape.rows * shape.keys));
    std::vector<std::int32_t> selected(static_cast<std::size_t>(shape.rows * top_k_));
    copy(scores.data(), a.scores, scores.size());
    copy(selected.data(), a.selected, selected.size());
    if (!io_.ok()) return;
    for (std::int64_t r = 0; r < shape.rows; ++r) {
      io_.settings.log->selection(id.value, batch_, part->first_row() + r, scores.data() + r * shape.keys, selected.data() + r * top_k_, top_k_);
    }
  }
  // The hidden rows that a layer is about to take.
  void log_input(int layer, const gpu::Part* part, float* hidden) {
    if (part == nullptr || !io_.settings.log || !io_.ok()) return;
    std::vector<float> rows(static_cast<std::size_t>(part->rows() * hidden_dim));
    copy(rows.data(), hidden, rows.size());
    if (!io_.ok()) return;
    io_.settings.log->layer_input(layer, batch_, part->first_row(), part->rows(), rows.data());
    copy(hidden, rows.data(), rows.size());
  }
  template <class T>
  void copy(T* to, const T* from, std::size_t n) {
    io_.check(cudaMemcpyAsync(to, from, n * sizeof(T), cudaMemcpyDefault, io_.native()), "copying what is compared");
    io_.keep(io_.stream().synchronize());
  }

  template <gpu::Compressed Kind, class Window, class Latents>
  void attend(const Layer& host, const gpu::Shape& shape, const Pass& pass, const Window& window, const Latents& latents, const Latents& hot) {
    if (!io_.ok()) return;
    gpu::AttendArgs args;
    args.q = pass.a.q;
    args.out = pass.a.mixed;
    args.positions = pass.in.positions;
    args.table = pass.in.table;
    args.pages = shape.pages;
    args.window_table = pass.in.window_table;
    args.selected = pass.a.selected;
    args.hot_slots = pass.a.hot_slots;
    args.hot = shape.hot;
    args.top_k = top_k_;
    args.ratio = host.ratio;
    args.most = window_tokens + (Kind == gpu::Compressed::selected ? top_k_ : Kind == gpu::Compressed::all ? static_cast<int>(shape.pages * page_raw_tokens / 128) : 0);
    std::copy(host.sink, host.sink + heads, args.sink);
    args.scale = attention_scale;
    const std::size_t bytes = static_cast<std::size_t>(args.most) * heads * sizeof(float);
    if (bytes > std::size_t(40) << 10) {
      return io_.keep(kvire::Status(kvire::Error{kvire::ErrorCode::unsupported, "attention on the GPU is written for " + std::to_string((std::size_t(40) << 10) / heads / sizeof(float)) +
                                                                                    " latents a row, " + std::to_string(args.most) + " are needed"}));
    }
    io_.keep(kvire::launch(
        io_.stream(),
        [&]<class W, class L>(cudaStream_t native, const kvire::ConstPageView<W, kvire::Cuda>& raw, const kvire::ConstPageView<L, kvire::Cuda>& compressed,
                                  const kvire::ConstPageView<L, kvire::Cuda>& slots) {
          gpu::attend_kernel<W, L, Kind><<<static_cast<unsigned>(shape.rows), 256, bytes, native>>>(args, raw, compressed, slots);
        },
        window, latents, hot));
  }

  Io& io_;
  const Batch& batch_;
  int top_k_;
  const float* eager_logits_ = nullptr;
  const float* captured_logits_ = nullptr;
  std::vector<std::vector<float>> logits_;
};

template <class IndexKey>
struct ForwardFor<CudaStepIo<IndexKey>> {
  using type = CudaForward<IndexKey>;
};

}  // namespace engine
