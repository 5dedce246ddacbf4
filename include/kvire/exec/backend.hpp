// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <thread>  // durations and clocks, without the calendars of <chrono>, which take longer to parse than all else here
#include <type_traits>

#include <kvire/base/config.hpp>

KVIRE_NAMESPACE_BEGIN

/// Worker threads as streams and ordinary memory. Runs everywhere; what tests, CI and machines without a GPU use.
struct Host {
  static constexpr const char* name = "host";
};

/// CUDA streams, events and device memory (headers under cuda/).
struct Cuda {
  static constexpr const char* name = "cuda";
};

template <class T>
inline constexpr bool is_backend = std::is_same_v<T, Host> || std::is_same_v<T, Cuda>;

/// Host alone. What only the host has is written `template <HostTag Backend> class Stream<Backend>` rather than `template <> class Stream<Host>`:
/// a template is compiled in the files that use it, anything else in every file that includes it.
template <class T>
concept HostTag = std::is_same_v<T, Host>;

/// In-order asynchronous work. Specialised per backend (exec/host/stream.hpp).
template <class Backend>
class Stream;

/// A point in a stream's work, waited for from streams and from the host. Specialised per backend (exec/host/event.hpp).
template <class Backend>
class Event;

enum class EventState : unsigned char {
  unrecorded,  ///< nobody has recorded it: nothing is known about the work it stands for
  pending,     ///< recorded, and the work before it has not finished
  complete,    ///< the work before it has finished
  failed,      ///< the work before it has stopped with an error: nothing of it will run any more
};

/// True for the two final states. Only these prove that the work has stopped touching memory; a timeout proves nothing.
constexpr bool is_final(EventState state) { return state == EventState::complete || state == EventState::failed; }

using Clock = std::chrono::steady_clock;
/// A moment after which waiting ends with ErrorCode::timeout.
using Deadline = Clock::time_point;
/// Wait without end.
inline constexpr Deadline no_deadline = Deadline::max();

/// The moment `d` from now; at once for a negative one, `no_deadline` for one beyond what the clock can count.
template <class Rep, class Period>
Deadline deadline_in(std::chrono::duration<Rep, Period> d) {
  using Seconds = std::chrono::duration<double>;
  const Deadline now = Clock::now();
  if (!(d > d.zero())) return now;
  // In floating point, and a second below the bound, since `d` may not fit the clock's own unit.
  if (Seconds(d) >= Seconds(no_deadline - now) - Seconds(1)) return no_deadline;
  return now + std::chrono::duration_cast<Clock::duration>(d);
}

KVIRE_NAMESPACE_END
