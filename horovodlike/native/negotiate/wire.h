// Encoding and decoding: the only code that reads the control plane's messages from raw memory or writes them to it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <type_traits>
#include <vector>

namespace hvl {

// The wire is little-endian and so is every machine that this runs on; numbers and lists are plain copies.
static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "the control plane's encoding needs byte swaps here");

class Writer {
 public:
  explicit Writer(std::string* out) : out_(out) {}

  template <typename T>
  void put(T value) {
    put_array(&value, 1);
  }
  template <typename T>
  void put_array(const T* values, size_t count) {
    static_assert(std::is_arithmetic_v<T>);
    if (count > 0) out_->append(reinterpret_cast<const char*>(values), count * sizeof(T));
  }

 private:
  std::string* out_;
};

// Every get function returns false, and reads nothing, if bytes are missing; this is checked before any allocation.
class Reader {
 public:
  Reader(const void* bytes, size_t num_bytes) : next_(static_cast<const char*>(bytes)), remaining_(num_bytes) {}

  size_t remaining() const { return remaining_; }

  template <typename T>
  bool get(T* value) {
    static_assert(std::is_arithmetic_v<T>);
    if (sizeof(T) > remaining_) return false;
    copy(value, sizeof(T));
    return true;
  }
  // `values` is a string or a vector of numbers.
  template <typename C>
  bool get_array(size_t count, C* values) {
    using T = typename C::value_type;
    static_assert(std::is_arithmetic_v<T>);
    if (count > remaining_ / sizeof(T)) return false;
    values->resize(count);
    copy(values->data(), count * sizeof(T));
    return true;
  }
  // An enumeration of one byte on the wire, from `first` to `last`.
  template <typename E>
  bool get_enum(int first, int last, E* value) {
    uint8_t raw = 0;
    if (!get(&raw) || raw < first || raw > last) return false;
    *value = static_cast<E>(raw);
    return true;
  }

 private:
  void copy(void* to, size_t num_bytes) {
    if (num_bytes == 0) return;
    std::memcpy(to, next_, num_bytes);
    next_ += num_bytes;
    remaining_ -= num_bytes;
  }

  const char* next_;
  size_t remaining_;
};

}  // namespace hvl
