// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <dirent.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include <kvire/base/result.hpp>
#include <kvire/tier/record.hpp>

KVIRE_NAMESPACE_BEGIN

/// The first `bytes` bytes of a file. `data` and `bytes` at multiples of `record_alignment` let it go around the system's cache.
struct FileRead {
  std::string path = {};
  std::byte* data = nullptr;
  std::int64_t bytes = 0;
  // Filled in:
  Status status = {};            ///< success also for a file that is shorter or longer than asked for
  bool absent = false;           ///< with an error: there is no such file
  std::int64_t moved = 0;
  std::int64_t file_bytes = 0;   ///< of the whole file
};

/// A new file with these bytes. Fails if there is one of that name.
struct FileWrite {
  std::string path = {};
  const std::byte* data = nullptr;
  std::int64_t bytes = 0;
  bool durable = true;           ///< only done when the bytes would survive a loss of power
  // Filled in:
  Status status = {};
  std::int64_t moved = 0;        ///< fewer than `bytes` without an error: a short write
};

struct FileInfo {
  std::string name = {};
  std::int64_t bytes = 0;
  std::int64_t modified = 0;     ///< nanoseconds of the system's clock; older is smaller
};

/// How files are read and written. A copyable handle, used by several threads at once; every call may block, and the tier's workers call.
///
/// | expression | result |
/// |---|---|
/// | `io.read(reads)` | reads all of them, in any order or at once; each has its own status |
/// | `io.write(writes)` | writes all of them |
/// | `io.publish(from, to, durable)` | `Status`: gives a file its name, in one step, over any file that has it |
/// | `io.remove(path)` | `Status`: success also if there was none |
/// | `io.touch(path)` | marks it as used just now; what fails is ignored |
/// | `io.list(folder)` | `Result<std::vector<FileInfo>>`: its plain files |
/// | `io.lock(folder)` | `Result<std::shared_ptr<void>>`: makes the folder if need be, not what it is in, and owns it until the handle goes, or the process |
/// | `io.name()` | text for messages |
template <class Io>
concept BlockIo = std::copy_constructible<Io> && requires(Io io, std::span<FileRead> reads, std::span<FileWrite> writes, const std::string& path) {
  { io.read(reads) };
  { io.write(writes) };
  { io.publish(path, path, true) } -> std::same_as<Status>;
  { io.remove(path) } -> std::same_as<Status>;
  { io.touch(path) };
  { io.list(path) } -> std::same_as<Result<std::vector<FileInfo>>>;
  { io.lock(path) } -> std::same_as<Result<std::shared_ptr<void>>>;
  { io.name() } -> std::convertible_to<std::string>;
};

namespace detail {

/// An open file, closed at the end.
class FileHandle {
 public:
  FileHandle() = default;
  explicit FileHandle(int file) : file_(file) {}
  FileHandle(FileHandle&& other) noexcept : file_(std::exchange(other.file_, -1)) {}
  FileHandle& operator=(FileHandle&& other) noexcept {
    std::swap(file_, other.file_);
    return *this;
  }
  ~FileHandle() {
    if (file_ >= 0) ::close(file_);
  }
  int get() const { return file_; }
  explicit operator bool() const { return file_ >= 0; }
  /// False if the system reports, only now, that something was lost.
  bool close() { return ::close(std::exchange(file_, -1)) == 0; }

 private:
  int file_ = -1;
};

inline Error system_error(const char* what, const std::string& path) {
  const int code = errno;
  return {code == ENOSPC || code == EDQUOT ? ErrorCode::exhausted : ErrorCode::failed, std::string(what) + " '" + path + "': " + std::strerror(code)};
}

#if defined(O_DIRECT)
inline constexpr int direct_flag = O_DIRECT;
#else
inline constexpr int direct_flag = 0;
#endif

inline bool aligned_for_direct(const std::byte* data, std::int64_t bytes) {
  return (reinterpret_cast<std::uintptr_t>(data) | static_cast<std::uintptr_t>(bytes)) % record_alignment == 0;
}

/// Opens around the system's cache where alignment and file system allow it.
inline FileHandle open_file(const std::string& path, int flags, bool direct) {
  if (direct && direct_flag != 0) {
    FileHandle file(::open(path.c_str(), flags | direct_flag | O_CLOEXEC, 0600));
    if (file || errno != EINVAL) return file;
    if ((flags & O_EXCL) != 0) ::unlink(path.c_str());  // some systems make the file before they refuse the flag
  }
  return FileHandle(::open(path.c_str(), flags | O_CLOEXEC, 0600));
}

/// Calls move(offset) until `bytes` have moved or it returns 0; true unless it fails. What cannot go around the system's cache
/// (an end of file that is not aligned, writes finer than the file system's blocks) goes through it.
template <class Move>
bool move_all(int file, std::int64_t bytes, std::int64_t& moved, Move&& move) {
  while (moved < bytes) {
    const auto n = move(moved);
    if (n > 0) {
      moved += n;
    } else if (n == 0) {
      return true;
    } else if (errno == EINVAL && direct_flag != 0 && (::fcntl(file, F_GETFL) & direct_flag) != 0) {
      if (::fcntl(file, F_SETFL, ::fcntl(file, F_GETFL) & ~direct_flag) != 0) return false;
    } else if (errno != EINTR) {
      return false;
    }
  }
  return true;
}

/// Opens the file of a read and looks at its length; `status` says why not. `wanted`: the bytes to move.
inline FileHandle begin_read(FileRead& r, std::int64_t& wanted) {
  auto file = open_file(r.path, O_RDONLY, aligned_for_direct(r.data, r.bytes));
  struct stat info = {};
  if (!file) {
    r.absent = errno == ENOENT;
    r.status = system_error("opening", r.path);
  } else if (::fstat(file.get(), &info) != 0) {
    r.status = system_error("looking at", r.path);
    file = FileHandle();
  } else {
    r.file_bytes = info.st_size;
    wanted = min_of(r.bytes, align_up<std::int64_t>(r.file_bytes, record_alignment));
  }
  return file;
}
inline FileHandle begin_write(FileWrite& w) {
  auto file = open_file(w.path, O_WRONLY | O_CREAT | O_EXCL, aligned_for_direct(w.data, w.bytes));
  if (!file) w.status = system_error("making", w.path);
  return file;
}
inline void end_write(FileWrite& w, FileHandle& file) {
  if ((w.durable && ::fdatasync(file.get()) != 0) || !file.close()) w.status = system_error("writing", w.path);
}

}  // namespace detail

/// Files through the calls of POSIX, one after the other; the tier's worker threads are what makes it asynchronous.
struct PosixIo {
  std::string name() const { return "posix"; }

  void read(std::span<FileRead> reads) const {
    for (auto& r : reads) {
      std::int64_t wanted = 0;
      const auto file = detail::begin_read(r, wanted);
      if (!file) continue;
      const bool ok = detail::move_all(file.get(), wanted, r.moved, [&](std::int64_t at) {
        return ::pread(file.get(), r.data + at, static_cast<std::size_t>(wanted - at), at);
      });
      if (!ok) r.status = detail::system_error("reading", r.path);
    }
  }
  void write(std::span<FileWrite> writes) const {
    for (auto& w : writes) {
      auto file = detail::begin_write(w);
      if (!file) continue;
      const bool ok = detail::move_all(file.get(), w.bytes, w.moved, [&](std::int64_t at) {
        return ::pwrite(file.get(), w.data + at, static_cast<std::size_t>(w.bytes - at), at);
      });
      if (ok) {
        detail::end_write(w, file);
      } else {
        w.status = detail::system_error("writing", w.path);
      }
    }
  }

  Status publish(const std::string& from, const std::string& to, bool durable) const {
    if (::rename(from.c_str(), to.c_str()) != 0) return detail::system_error("naming", to);
    if (!durable) return {};
    // The name is durable when the folder is.
    const std::size_t slash = to.rfind('/');
    const std::string folder = slash == std::string::npos ? "." : to.substr(0, slash + 1);
    const detail::FileHandle handle(::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
    if (!handle || ::fsync(handle.get()) != 0) return detail::system_error("syncing folder", folder);
    return {};
  }

  Status remove(const std::string& path) const {
    return ::unlink(path.c_str()) == 0 || errno == ENOENT ? Status() : Status(detail::system_error("removing", path));
  }
  void touch(const std::string& path) const { (void)::utimensat(AT_FDCWD, path.c_str(), nullptr, 0); }

  Result<std::vector<FileInfo>> list(const std::string& folder) const {
    DIR* const open = ::opendir(folder.c_str());
    if (open == nullptr) return detail::system_error("listing", folder);
    std::vector<FileInfo> found;
    while (const dirent* entry = ::readdir(open)) {
      struct stat info = {};
      if (::fstatat(::dirfd(open), entry->d_name, &info, AT_SYMLINK_NOFOLLOW) != 0 || !S_ISREG(info.st_mode)) continue;
      found.push_back({entry->d_name, info.st_size, std::int64_t{info.st_mtim.tv_sec} * 1'000'000'000 + info.st_mtim.tv_nsec});
    }
    ::closedir(open);
    return found;
  }

  Result<std::shared_ptr<void>> lock(const std::string& folder) const {
    if (::mkdir(folder.c_str(), 0700) != 0 && errno != EEXIST) return detail::system_error("making folder", folder);
    const std::string path = folder + "/lock";
    auto file = std::make_shared<detail::FileHandle>(::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600));
    if (!*file) return detail::system_error("opening", path);
    // The system lets go of it when the process ends, however it ends.
    if (::flock(file->get(), LOCK_EX | LOCK_NB) != 0) {
      if (errno == EWOULDBLOCK) return Error{ErrorCode::busy, "folder '" + folder + "' is in use by another file tier"};
      return detail::system_error("locking", path);
    }
    return std::shared_ptr<void>(file);
  }
};

KVIRE_NAMESPACE_END
