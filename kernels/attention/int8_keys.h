// The functions of a kernel that differs from another one only in its products with int8 keys.
#pragma once

#include "attention_impl.h"

namespace lowbit {
namespace {

template <const Table<AttentionKernel>& Other>
void attend_int8_keys(const AttentionArgs& args) {
  key_type(args.cache) == CacheType::i8 ? attention<Vector, true>(args) : Other.entries[0].run(args);
}

template <const Table<AttentionKernel>& Other>
void write_as(const AttentionWriteArgs& args) {
  Other.entries[0].write(args);
}

template <const Table<AttentionKernel>& Other>
void join_as(const AttentionJoinArgs& args) {
  Other.entries[0].join(args);
}

template <const Table<AttentionKernel>& Other>
constexpr AttentionKernel with_int8_keys(const char* name, IsaBits isa) {
  return {name, isa, attend_int8_keys<Other>, write_as<Other>, join_as<Other>, nullptr, true};
}

}  // namespace
}  // namespace lowbit
