// Tensors in .npy files, as numpy.save and numpy.load write and read them: one array per file, row-major.
//
// numpy lacks bfloat16; it is stored as two raw bytes per value ("V2"), as in the package ml_dtypes:
//   numpy.save("x.npy", x.view(torch.int16).numpy().view("V2"))
//   torch.from_numpy(numpy.load("y.npy").view("int16")).view(torch.bfloat16)
#pragma once

#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <stdexcept>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>
#include <vector>

struct Type {
  const char* name;
  const char* descr;  // in the file
  int64_t bytes;
  int number;  // PyTorch's and ExecuTorch's ScalarType
};

inline constexpr Type kTypes[] = {
    {"float32", "<f4", 4, 6}, {"bfloat16", "<V2", 2, 15}, {"float16", "<f2", 2, 5}, {"float64", "<f8", 8, 7},
    {"uint8", "|u1", 1, 0},   {"int8", "|i1", 1, 1},      {"int16", "<i2", 2, 2},   {"int32", "<i4", 4, 3},
    {"int64", "<i8", 8, 4},   {"bool", "|b1", 1, 11},
};

inline const Type* type_of_number(int number) {
  for (const Type& type : kTypes) {
    if (type.number == number) return &type;
  }
  return nullptr;
}

struct Array {
  const Type* type = nullptr;
  std::vector<int64_t> shape;
  std::vector<char> data;
};

inline std::string describe(const Type* type, const std::vector<int64_t>& shape) {
  std::string text = std::string(type ? type->name : "another type") + " [";
  for (size_t d = 0; d < shape.size(); ++d) text += (d ? ", " : "") + std::to_string(shape[d]);
  return text + "]";
}

namespace npy {

inline constexpr std::string_view kMagic("\x93NUMPY", 6);
inline constexpr int64_t kMostBytes = int64_t{1} << 40;  // so that sizes cannot overflow

[[noreturn]] inline void refuse(const std::string& path, const std::string& why) {
  throw std::runtime_error(path + " cannot be used: " + why);
}

// The text after `'key':` in the header, a Python dict, without spaces.
inline std::string_view value_of(const std::string& path, std::string_view header, const std::string& key) {
  const size_t at = header.find("'" + key + "':");
  if (at == std::string_view::npos) refuse(path, "its header has no '" + key + "'");
  const size_t begin = header.find_first_not_of(' ', at + key.size() + 3);
  return begin == std::string_view::npos ? std::string_view() : header.substr(begin);
}

inline std::vector<int64_t> shape_of(const std::string& path, std::string_view text) {
  std::vector<int64_t> shape;
  const size_t end = text.find(')');
  if (text.empty() || text[0] != '(' || end == std::string_view::npos) refuse(path, "its shape is not a tuple");
  bool in_number = false;
  for (const char c : text.substr(1, end - 1)) {
    if (c >= '0' && c <= '9') {
      if (!in_number) shape.push_back(0);
      in_number = true;
      shape.back() = shape.back() * 10 + (c - '0');
      if (shape.back() > kMostBytes) refuse(path, "its shape has a dimension beyond 2^40");
    } else if (c == ',' || c == ' ') {
      in_number = false;
    } else {
      refuse(path, "its shape is not a tuple of sizes");
    }
  }
  return shape;
}

}  // namespace npy

// Throws std::runtime_error with the file's name and the problem.
inline Array read_npy(const std::string& path) {
  std::error_code error;
  const auto file_bytes = static_cast<int64_t>(std::filesystem::file_size(path, error));
  if (error) npy::refuse(path, error.message());
  std::ifstream file(path, std::ios::binary);
  unsigned char start[12] = {};
  if (!file.read(reinterpret_cast<char*>(start), 10) ||
      std::string_view(reinterpret_cast<char*>(start), npy::kMagic.size()) != npy::kMagic) {
    npy::refuse(path, "it is not a .npy file");
  }
  int64_t header_bytes = start[8] | start[9] << 8, offset = 10;
  if (start[6] == 2 || start[6] == 3) {  // longer headers
    if (!file.read(reinterpret_cast<char*>(start + 10), 2)) npy::refuse(path, "it ends in its header");
    header_bytes |= int64_t{start[10]} << 16 | int64_t{start[11]} << 24;
    offset = 12;
  } else if (start[6] != 1) {
    npy::refuse(path, "its .npy version is " + std::to_string(start[6]) + "; expected 1 to 3");
  }
  if (header_bytes > file_bytes - offset) npy::refuse(path, "it ends in its header");
  std::string header(static_cast<size_t>(header_bytes), '\0');
  if (!file.read(header.data(), header_bytes)) npy::refuse(path, "it ends in its header");

  Array array;
  const std::string_view descr = npy::value_of(path, header, "descr");
  for (const Type& type : kTypes) {
    // Raw and single bytes have no byte order; numpy writes either sign.
    const bool any_order = type.bytes == 1 || type.descr[1] == 'V';
    const std::string_view found = descr.substr(0, 5);
    const std::string expected = std::string("'") + type.descr + "'";
    if (found == expected || (any_order && found.substr(0, 2) == "'|" && found.substr(2) == expected.substr(2))) {
      array.type = &type;
    }
  }
  if (!array.type) {
    npy::refuse(path, "its dtype is " + std::string(descr.substr(0, descr.find(','))) +
                          "; expected a little-endian float, integer or bool, or V2 for bfloat16");
  }
  if (npy::value_of(path, header, "fortran_order").substr(0, 5) != "False") {
    npy::refuse(path, "it is in Fortran order; save numpy.ascontiguousarray of it");
  }
  array.shape = npy::shape_of(path, npy::value_of(path, header, "shape"));
  int64_t bytes = array.type->bytes;
  for (const int64_t size : array.shape) {
    if (size != 0 && bytes > npy::kMostBytes / size) npy::refuse(path, "its shape is larger than 2^40 bytes");
    bytes *= size;
  }
  if (file_bytes - offset - header_bytes != bytes) {
    npy::refuse(path, "it holds " + std::to_string(file_bytes - offset - header_bytes) + " bytes of data; expected " +
                          std::to_string(bytes) + " for " + describe(array.type, array.shape));
  }
  array.data.resize(static_cast<size_t>(bytes));
  if (bytes > 0 && !file.read(array.data.data(), bytes)) npy::refuse(path, "it cannot be read");
  return array;
}

inline void write_npy(const std::string& path, const Type& type, const std::vector<int64_t>& shape, const void* data) {
  std::string header = std::string("{'descr': '") + type.descr + "', 'fortran_order': False, 'shape': (";
  int64_t bytes = type.bytes;
  for (const int64_t size : shape) {
    header += std::to_string(size) + ", ";
    bytes *= size;
  }
  header += ")}";
  header.resize((10 + header.size() + 1 + 63) / 64 * 64 - 11, ' ');  // numpy expects the data at a multiple of 64
  header += '\n';
  std::ofstream file(path, std::ios::binary);
  file << npy::kMagic << '\1' << '\0' << static_cast<char>(header.size() & 255) << static_cast<char>(header.size() >> 8)
       << header;
  if (bytes > 0) file.write(static_cast<const char*>(data), bytes);
  file.close();
  if (!file) throw std::runtime_error(path + " cannot be written");
}
