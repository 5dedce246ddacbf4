// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <map>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

// A small reader of safetensors files: 8 bytes of header length, a JSON header, then the tensors' bytes.

namespace kvire_test {

struct StoredTensor {
  std::string type;  // "F32", "I64", ...
  std::vector<std::int64_t> shape;
  std::vector<std::byte> bytes;

  std::int64_t elements() const {
    std::int64_t n = 1;
    for (const auto s : shape) n *= s;
    return n;
  }
  /// A copy of the elements as T, whose size must be the stored element's.
  template <class T>
  std::vector<T> as() const {
    std::vector<T> values(bytes.size() / sizeof(T));
    std::memcpy(values.data(), bytes.data(), values.size() * sizeof(T));
    return values;
  }
};

struct Safetensors {
  std::map<std::string, std::string> metadata;
  std::map<std::string, StoredTensor> tensors;
  std::string error;  // empty if the file was read whole

  bool has(const std::string& name) const { return tensors.count(name) != 0; }
  const StoredTensor& at(const std::string& name) const { return tensors.at(name); }
  std::string meta(const std::string& key, const std::string& otherwise = "") const {
    const auto found = metadata.find(key);
    return found == metadata.end() ? otherwise : found->second;
  }
  int meta_int(const std::string& key, int otherwise = 0) const {
    const std::string text = meta(key);
    return text.empty() ? otherwise : std::atoi(text.c_str());
  }
};

inline Safetensors read_safetensors(const std::string& path) {
  Safetensors file;
  std::ifstream in(path, std::ios::binary);
  if (!in) {
    file.error = "cannot open " + path;
    return file;
  }
  const std::string all((std::istreambuf_iterator<char>(in)), std::istreambuf_iterator<char>());
  std::uint64_t header_bytes = 0;
  if (all.size() >= 8) std::memcpy(&header_bytes, all.data(), 8);
  if (all.size() < 8 || header_bytes > all.size() - 8) {
    file.error = path + " is shorter than its header";
    return file;
  }
  const auto header = nlohmann::json::parse(all.begin() + 8, all.begin() + 8 + static_cast<std::ptrdiff_t>(header_bytes), nullptr, false);
  if (header.is_discarded() || !header.is_object()) {
    file.error = path + " has a header that is not JSON";
    return file;
  }
  const std::uint64_t data = 8 + header_bytes;
  for (const auto& [name, value] : header.items()) {
    if (name == "__metadata__") {
      for (const auto& [key, text] : value.items()) file.metadata[key] = text.is_string() ? text.get<std::string>() : text.dump();
      continue;
    }
    StoredTensor tensor;
    tensor.type = value.at("dtype").get<std::string>();
    tensor.shape = value.at("shape").get<std::vector<std::int64_t>>();
    const auto offsets = value.at("data_offsets").get<std::vector<std::uint64_t>>();
    if (offsets.size() != 2 || offsets[0] > offsets[1] || offsets[1] > all.size() - data) {
      file.error = path + ": tensor " + name + " lies outside the file";
      return file;
    }
    const auto* first = reinterpret_cast<const std::byte*>(all.data() + data);
    tensor.bytes.assign(first + offsets[0], first + offsets[1]);
    file.tensors.emplace(name, std::move(tensor));
  }
  return file;
}

}  // namespace kvire_test
