// The tables and the choice of kernels, for made-up CPUs, on any machine.

#include "../../kernels/registry.h"

#include <gtest/gtest.h>

#include <cctype>
#include <cstdio>
#include <set>
#include <sstream>
#include <string>
#include <vector>

namespace lowbit::test {
namespace {

std::vector<IsaName> names() {
  size_t count;
  const IsaName* all = isa_names(&count);
  return {all, all + count};
}

// The fields of a layout that the choice reads.
Layout task(int bits, int64_t group_size, Mapping mapping = Mapping::symmetric) {
  Layout layout{};
  layout.mapping = mapping;
  layout.bits = bits;
  layout.group_size = group_size;
  return layout;
}
constexpr int64_t kGroupSizes[] = {0, 16, 32, 48, 64};

std::string name_of(IsaBits bit) {
  for (const IsaName& isa : names()) {
    if (isa.bit == bit) return isa.name;
  }
  return "?";
}

bool has_rows(IsaBits bit) {
  bool found = false;
  for (size_t i = 0; i < linear_kernel_count(); ++i) found = found || (linear_kernel(i).isa & bit) != 0;
  for (size_t i = 0; i < attention_kernel_count(); ++i) found = found || (attention_kernel(i).isa & bit) != 0;
  return found;
}

// Every subset of the ISA bits that have kernels for this processor family.
std::vector<IsaBits> isa_subsets() {
  std::vector<IsaBits> subsets = {kPortable};
  for (const IsaName& isa : names()) {
    if (isa.bit == kPortable || !has_rows(isa.bit)) continue;
    const size_t count = subsets.size();
    for (size_t i = 0; i < count; ++i) subsets.push_back(subsets[i] | isa.bit);
  }
  return subsets;
}

TEST(Isa, NamesAreThoseOfTheBuild) {
  std::stringstream list(LOWBIT_TEST_ISA_NAMES);  // from cmake/isa.cmake
  std::vector<std::string> expected, found;
  for (std::string name; std::getline(list, name, ',');) expected.push_back(name);
  for (const IsaName& isa : names()) found.push_back(isa.name);
  EXPECT_EQ(found, expected);
}

TEST(Isa, NamesAreOrderedAndIncludeThemselves) {
  const std::vector<IsaName> all = names();
  EXPECT_STREQ(all[0].name, "portable");
  EXPECT_EQ(all[0].bit, kPortable);
  for (size_t i = 0; i < all.size(); ++i) {
    EXPECT_EQ(all[i].bit & ~all[i].allows, 0u) << all[i].name;
    const IsaBits before = i > 0 ? all[i - 1].allows : kPortable;
    EXPECT_EQ(before & ~all[i].allows, 0u) << all[i].name << " allows less than the name before it";
  }
}

TEST(Isa, ActiveIsWithinTheCpu) { EXPECT_EQ(active_isa() & ~cpu_isa(), 0u); }

// Names are a grammar: linear_a8w<bits>_<m>x<n>_<isa>, embedding_w<bits>_<isa>, quantize_<isa>, attention_<isa>.
TEST(Tables, NamesSayWhatTheRowsAre) {
  std::set<std::string> seen;
  for (size_t i = 0; i < linear_kernel_count(); ++i) {
    const LinearKernel& row = linear_kernel(i);
    char expected[96];
    std::snprintf(expected, sizeof expected, "linear_a8w%d_%dx%d_%s", row.bits, row.m_least, row.n_step,
                  name_of(row.isa).c_str());
    EXPECT_STREQ(row.name, expected);
    EXPECT_GE(row.m_least, 1);
    EXPECT_GE(row.n_step, 1);
    EXPECT_NE(row.run, nullptr);
    EXPECT_TRUE(row.bits >= 1 && row.bits <= 8) << row.name;
    EXPECT_TRUE(seen.insert(row.name).second) << row.name << " occurs twice";
  }
  for (size_t i = 0; i < embedding_kernel_count(); ++i) {
    const EmbeddingKernel& row = embedding_kernel(i);
    EXPECT_EQ(row.name, "embedding_w" + std::to_string(row.bits) + "_" + name_of(row.isa));
    EXPECT_NE(row.run, nullptr);
    EXPECT_TRUE(row.bits >= 1 && row.bits <= 8) << row.name;
    EXPECT_TRUE(seen.insert(row.name).second) << row.name << " occurs twice";
  }
  for (size_t i = 0; i < quantize_kernel_count(); ++i) {
    const QuantizeKernel& row = quantize_kernel(i);
    EXPECT_EQ(row.name, "quantize_" + name_of(row.isa));
    EXPECT_NE(row.run, nullptr);
    EXPECT_TRUE(seen.insert(row.name).second) << row.name << " occurs twice";
  }
  for (size_t i = 0; i < attention_kernel_count(); ++i) {
    const AttentionKernel& row = attention_kernel(i);
    EXPECT_EQ(row.name, "attention_" + name_of(row.isa));
    EXPECT_NE(row.run, nullptr);
    EXPECT_TRUE(seen.insert(row.name).second) << row.name << " occurs twice";
  }
  EXPECT_FALSE(seen.contains("")) << "a row without a name";
}

// Portable kernels are complete, because every other kernel is compared with one.
TEST(Tables, PortableRowsCoverEverything) {
  for (int bits = 1; bits <= 8; ++bits) {
    for (const int64_t group_size : kGroupSizes) {
      const LinearKernel& linear = choose_linear(task(bits, group_size), 1, kPortable);
      EXPECT_EQ(linear.isa, kPortable);
      EXPECT_EQ(linear.bits, bits);
      EXPECT_EQ(linear.m_least, 1);
      EXPECT_EQ(linear.supports, nullptr);
    }
    const EmbeddingKernel& embedding = choose_embedding(task(bits, 32), kPortable);
    EXPECT_EQ(embedding.isa, kPortable);
    EXPECT_EQ(embedding.bits, bits);
  }
  EXPECT_EQ(choose_quantize(kPortable).isa, kPortable);
  EXPECT_EQ(choose_attention(kPortable).isa, kPortable);
}

constexpr Streams kStreams[] = {Streams::one, Streams::ahead, Streams::several};
constexpr int64_t kRows[] = {1, 2, 3, 4, 5, 6, 7, 8, 16, 100};

// Levels use the same kernels as symmetric weights of their width; if no kernel reads them, none is chosen.
TEST(Choice, LevelsGoWherePlainWeightsGo) {
  for (const IsaBits isa : isa_subsets()) {
    for (int bits = 1; bits <= 8; ++bits) {
      const bool can = bits >= 2 && bits <= 4;
      for (const int64_t group_size : kGroupSizes) {
        for (const int64_t m : kRows) {
          for (const Streams streams : kStreams) {
            const LinearKernel& chosen = choose_linear(task(bits, group_size, Mapping::levels), m, isa, streams);
            EXPECT_EQ(chosen.run != nullptr, can) << chosen.name;
            if (can) {
              EXPECT_STREQ(chosen.name, choose_linear(task(bits, group_size), m, isa, streams).name);
            }
          }
        }
      }
      const EmbeddingKernel& chosen = choose_embedding(task(bits, 32, Mapping::levels), isa);
      EXPECT_EQ(chosen.run != nullptr, can) << chosen.name;
      if (can) {
        EXPECT_STREQ(chosen.name, choose_embedding(task(bits, 32), isa).name);
      }
    }
  }
}

TEST(Choice, StaysWithinTheIsaAndTheTask) {
  for (const IsaBits isa : isa_subsets()) {
    EXPECT_EQ(choose_quantize(isa).isa & ~isa, 0u);
    EXPECT_EQ(choose_attention(isa).isa & ~isa, 0u);
    for (int bits = 1; bits <= 8; ++bits) {
      const EmbeddingKernel& embedding = choose_embedding(task(bits, 32), isa);
      EXPECT_EQ(embedding.isa & ~isa, 0u) << embedding.name;
      EXPECT_EQ(embedding.bits, bits);
      EXPECT_EQ(embedding.format, Format::panel16);
      for (const int64_t group_size : kGroupSizes) {
        for (const int64_t m : kRows) {
          for (const Streams streams : kStreams) {
            const LinearKernel& linear = choose_linear(task(bits, group_size), m, isa, streams);
            EXPECT_EQ(linear.isa & ~isa, 0u) << linear.name;
            EXPECT_EQ(linear.bits, bits);
            EXPECT_EQ(linear.format, Format::panel16);
            EXPECT_LE(linear.m_least, m) << linear.name;
            EXPECT_TRUE(!linear.several_streams || streams == Streams::several) << linear.name;
          }
          EXPECT_EQ(&choose_linear_built_in(task(bits, group_size), m, isa), &choose_linear(task(bits, group_size), m, isa));
        }
      }
    }
  }
}

TEST(Choice, NeverPortableWhereAnotherRowFits) {
  for (const IsaBits isa : isa_subsets()) {
    for (int bits = 1; bits <= 8; ++bits) {
      for (const int64_t m : kRows) {
        for (const int64_t group_size : kGroupSizes) {
          bool fits = false;
          for (size_t i = 0; i < linear_kernel_count(); ++i) {
            const LinearKernel& row = linear_kernel(i);
            const bool takes = row.supports == nullptr || row.supports(row.context, task(bits, group_size), m, isa);
            fits = fits || (row.isa != kPortable && (row.isa & ~isa) == 0 && row.bits == bits && row.m_least <= m && takes);
          }
          const LinearKernel& chosen = choose_linear(task(bits, group_size), m, isa);
          EXPECT_EQ(chosen.isa != kPortable, fits)
              << chosen.name << " for m = " << m << ", groups of " << group_size << " on ISA bits " << isa;
        }
      }
      bool fits = false;
      for (size_t i = 0; i < embedding_kernel_count(); ++i) {
        const EmbeddingKernel& row = embedding_kernel(i);
        fits = fits || (row.isa != kPortable && (row.isa & ~isa) == 0 && row.bits == bits);
      }
      EXPECT_EQ(choose_embedding(task(bits, 32), isa).isa != kPortable, fits);
    }
    bool fits = false;
    for (size_t i = 0; i < quantize_kernel_count(); ++i) {
      const QuantizeKernel& row = quantize_kernel(i);
      fits = fits || (row.isa != kPortable && (row.isa & ~isa) == 0);
    }
    EXPECT_EQ(choose_quantize(isa).isa != kPortable, fits);
    fits = false;
    for (size_t i = 0; i < attention_kernel_count(); ++i) {
      const AttentionKernel& row = attention_kernel(i);
      fits = fits || (row.isa != kPortable && (row.isa & ~isa) == 0);
    }
    EXPECT_EQ(choose_attention(isa).isa != kPortable, fits);
  }
}

// The tables are in order of preference, so more ISA bits or a larger m never select a later kernel.
TEST(Choice, MoreIsaIsNeverWorse) {
  const auto index = [](const LinearKernel& kernel) {
    size_t i = 0;
    while (&linear_kernel(i) != &kernel) ++i;
    return i;
  };
  for (int bits = 1; bits <= 8; ++bits) {
    for (const IsaBits less : isa_subsets()) {
      for (const IsaBits more : isa_subsets()) {
        if ((less & ~more) != 0) continue;
        for (const int64_t group_size : kGroupSizes) {
          const Layout layout = task(bits, group_size);
          for (const int64_t m : kRows) {
            for (const Streams streams : kStreams) {
              EXPECT_LE(index(choose_linear(layout, m, more, streams)), index(choose_linear(layout, m, less, streams)));
            }
            EXPECT_LE(index(choose_linear(layout, m, less, Streams::several)), index(choose_linear(layout, m, less)));
          }
        }
      }
      for (const int64_t group_size : kGroupSizes) {
        const Layout layout = task(bits, group_size);
        for (const int64_t m : {1, 2, 3, 4, 5}) {
          EXPECT_LE(index(choose_linear(layout, m + 1, less)), index(choose_linear(layout, m, less)));
        }
      }
    }
  }
}

#if defined(__x86_64__)
// AMX takes as long for 16 inputs as for 64.
TEST(Choice, GroupsOf16AreNotForTiles) {
  for (int bits = 1; bits <= 8; ++bits) {
    for (const int64_t m : {8, 64}) {
      EXPECT_EQ(choose_linear(task(bits, 16), m, kAmx | kAvx512Vnni | kAvx2).isa, kAvx512Vnni);
      EXPECT_EQ(choose_linear(task(bits, 32), m, kAmx | kAvx512Vnni | kAvx2).isa, kAmx);
    }
  }
}
#endif

// Each kernel is the best choice for some case; an unreachable kernel is dead code.
TEST(Choice, EveryRowIsReachable) {
  std::set<std::string> reached;
  for (const IsaBits isa : isa_subsets()) {
    reached.insert(choose_quantize(isa).name);
    reached.insert(choose_attention(isa).name);
    for (int bits = 1; bits <= 8; ++bits) {
      reached.insert(choose_embedding(task(bits, 32), isa).name);
      for (const int64_t group_size : kGroupSizes) {
        for (const int64_t m : kRows) {
          for (const Streams streams : kStreams) reached.insert(choose_linear(task(bits, group_size), m, isa, streams).name);
        }
      }
    }
  }
  for (size_t i = 0; i < linear_kernel_count(); ++i)
    EXPECT_TRUE(reached.contains(linear_kernel(i).name)) << linear_kernel(i).name;
  for (size_t i = 0; i < embedding_kernel_count(); ++i) EXPECT_TRUE(reached.contains(embedding_kernel(i).name));
  for (size_t i = 0; i < quantize_kernel_count(); ++i) EXPECT_TRUE(reached.contains(quantize_kernel(i).name));
  for (size_t i = 0; i < attention_kernel_count(); ++i) EXPECT_TRUE(reached.contains(attention_kernel(i).name));
}

}  // namespace
}  // namespace lowbit::test
