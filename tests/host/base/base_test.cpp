// SPDX-License-Identifier: Apache-2.0
#include <doctest/doctest.h>

#include <memory>
#include <string>
#include <utility>

#include <kvire/base/ids.hpp>
#include <kvire/base/ints.hpp>
#include <kvire/base/result.hpp>
#include <kvire/base/text.hpp>
#include <kvire/base/units.hpp>

using namespace kvire;

TEST_CASE("integer helpers round and divide as they say, at the edges too") {
  static_assert(ceil_div(0, 7) == 0 && ceil_div(1, 7) == 1 && ceil_div(7, 7) == 1 && ceil_div(8, 7) == 2);
  static_assert(align_up(37376, 576) == 37440 && align_up(0, 576) == 0 && align_up(576, 576) == 576);
  static_assert(is_power_of_two(1) && is_power_of_two(64) && !is_power_of_two(0) && !is_power_of_two(-2) && !is_power_of_two(96));
  static_assert(power_of_two_divisor(0, 16) == 16 && power_of_two_divisor(132, 16) == 4 && power_of_two_divisor(7, 16) == 1);
  static_assert(checked_mul(INT64_C(3037000499), INT64_C(3037000499)) > 0 && checked_mul(INT64_C(3037000500), INT64_C(3037000500)) == -1);
  static_assert(checked_mul(0, INT64_C(0x7FFFFFFFFFFFFFFF)) == 0 && checked_mul(1, -1) == -1);
  CHECK(checked_mul(INT64_C(0x7FFFFFFFFFFFFFFF), 1) == INT64_C(0x7FFFFFFFFFFFFFFF));
}

TEST_CASE("a result holds a value or an error, moves what only moves, and says which") {
  Result<int> good = 3;
  CHECK(good.ok());
  CHECK(good.value() == 3);
  Result<int> bad = Error{ErrorCode::out_of_range, "pool index_k: page 11 is not below 8"};
  CHECK(!bad.ok());
  CHECK(bad.error().code == ErrorCode::out_of_range);
  CHECK(std::string(name_of(bad.error().code)) == "out of range");
  Result<std::unique_ptr<int>> owner = std::make_unique<int>(5);
  std::unique_ptr<int> taken = std::move(owner).value();
  CHECK(*taken == 5);
  Status fine;
  CHECK(fine.ok());
  fine.value();
  const Status failed = Error{ErrorCode::timeout, "gate: layer 2 was not issued"};
  CHECK(!failed);
  CHECK(failed.error().message == "gate: layer 2 was not issued");
  CHECK(fine.error().message.empty());  // asked in vain, but not undefined
  CHECK(good.error().message.empty());
}

TEST_CASE("texts are built in constant expressions") {
  constexpr auto text = [] {
    Text<64> t;
    t << "a" << 0 << "," << -17 << "," << INT64_C(9223372036854775807) << "," << INT64_C(-9223372036854775807) - 1;
    return t;
  }();
  CHECK(std::string(text.c_str()) == "a0,-17,9223372036854775807,-9223372036854775808");
}

TEST_CASE("quantities add and compare within their unit") {
  static_assert(Bytes(3) + Bytes(4) == Bytes(7) && Bytes(3) < Bytes(4) && Bytes(3) * 5 == Bytes(15) && Bytes(9) - Bytes(2) >= Bytes(7));
  Bytes total;
  total += Bytes(INT64_C(1) << 40);
  total -= Bytes(1);
  CHECK(total.count == (INT64_C(1) << 40) - 1);
  static_assert(DevicePage().none() && !DevicePage(0).none() && DevicePage(1) < DevicePage(2) && DevicePage(3) == DevicePage(3) && DevicePage(3) != DevicePage(4));
}
