// Shared by the two runners: command line and output.
#pragma once

#include <lowbit/kernels/numeric.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <stdexcept>
#include <string>
#include <vector>

#include "npy.h"

struct Options {
  std::string model;
  std::vector<std::string> inputs;  // .npy files, one per input of the model
  std::string output;               // outputs go to <output>0.npy, <output>1.npy, ...
  int runs = 0;                     // timed calls after the first one
};

inline Options parse_options(int argc, char** argv, const char* model_kind) {
  const std::string usage = std::string("usage: ") + argv[0] + " [--output PREFIX] [--runs N] MODEL" + model_kind +
                            " INPUT.npy...\n  --output PREFIX  write the outputs to PREFIX0.npy, PREFIX1.npy, ...\n"
                            "  --runs N         call the model N times more and print the time of a call";
  Options options;
  for (int i = 1; i < argc; ++i) {
    const std::string argument = argv[i];
    if (argument == "--help") {
      std::puts(usage.c_str());
      std::exit(0);
    } else if ((argument == "--output" || argument == "--runs") && i + 1 < argc) {
      const std::string value = argv[++i];
      if (argument == "--output") {
        options.output = value;
        continue;
      }
      char* end = nullptr;
      const long runs = std::strtol(value.c_str(), &end, 10);
      if (value.empty() || *end != '\0' || runs < 1 || runs > 1000000) {
        throw std::runtime_error("--runs is '" + value + "'; expected a number from 1 to 1000000");
      }
      options.runs = static_cast<int>(runs);
    } else if (argument.rfind("--", 0) == 0) {
      throw std::runtime_error("unknown option " + argument + " here\n" + usage);
    } else if (options.model.empty()) {
      options.model = argument;
    } else {
      options.inputs.push_back(argument);
    }
  }
  if (options.model.empty()) throw std::runtime_error("no model was given\n" + usage);
  return options;
}

inline double value_at(const Type& type, const void* data, int64_t index) {
  const auto integer = [&](auto value) {
    std::memcpy(&value, static_cast<const char*>(data) + index * type.bytes, sizeof value);
    return static_cast<double>(value);
  };
  switch (type.number) {
    case 0: case 11: return integer(uint8_t{});
    case 1: return integer(int8_t{});
    case 2: return integer(int16_t{});
    case 3: return integer(int32_t{});
    case 4: return integer(int64_t{});
    case 7: return integer(double{});
    case 6: return lowbit::load_as_f32(data, lowbit::DType::f32, index);
    case 5: return lowbit::load_as_f32(data, lowbit::DType::f16, index);
    default: return lowbit::load_as_f32(data, lowbit::DType::bf16, index);
  }
}

// Prints the first values of an output, and writes it to a file if requested.
inline void show(const Options& options, size_t index, const Type* type, const std::vector<int64_t>& shape,
                 const void* data) {
  if (!type) throw std::runtime_error("output " + std::to_string(index) + " has a type that this program cannot write to .npy");
  int64_t count = 1;
  for (const int64_t size : shape) count *= size;
  std::printf("output %zu: %s", index, describe(type, shape).c_str());
  for (int64_t i = 0; i < std::min<int64_t>(count, 6); ++i) {
    std::printf("%s %.6g", i ? "" : ":", value_at(*type, data, i));
  }
  std::printf("%s\n", count > 6 ? " ..." : "");
  if (!options.output.empty()) write_npy(options.output + std::to_string(index) + ".npy", *type, shape, data);
}

template <class Call>
void time_calls(int runs, const Call& call) {
  if (runs == 0) return;
  std::vector<double> ms;
  for (int i = 0; i < runs; ++i) {
    const auto begin = std::chrono::steady_clock::now();
    call();
    ms.push_back(std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - begin).count());
  }
  std::sort(ms.begin(), ms.end());
  std::printf("one call: %.4g ms (median of %d; fastest %.4g)\n", ms[ms.size() / 2], runs, ms[0]);
}

// Any error becomes a message and exit code 1.
template <class Main>
int guarded(const char* program, const Main& main) {
  try {
    main();
    return 0;
  } catch (const std::exception& error) {
    std::string message = error.what();
    while (!message.empty() && message.back() == '\n') message.pop_back();
    std::fprintf(stderr, "%s: %s\n", program, message.c_str());
  } catch (...) {
    std::fprintf(stderr, "%s: failed\n", program);
  }
  return 1;
}
