// What torch.save() wrote in Python: a list of tensors.
#pragma once

#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include <torch/csrc/jit/serialization/pickle.h>

inline std::vector<at::Tensor> read_tensors(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  const std::vector<char> bytes{std::istreambuf_iterator<char>(file), {}};
  std::vector<at::Tensor> tensors;
  const c10::IValue list = torch::jit::pickle_load(bytes);
  for (const c10::IValue& item : list.toListRef()) {
    tensors.push_back(item.toTensor());
  }
  return tensors;
}
