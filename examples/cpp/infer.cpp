// infer PACKAGE INPUTS: runs a package of a graph that infers, and prints what it returns.
#include <iostream>

#include <torch/csrc/inductor/aoti_package/model_package_loader.h>

#include "tensors.h"

int main(int argc, char** argv) {
  if (argc != 3) {
    std::cerr << "infer PACKAGE INPUTS\n";
    return 2;
  }
  torch::inductor::AOTIModelPackageLoader package(argv[1]);
  for (const at::Tensor& result : package.run(read_tensors(argv[2]))) {
    std::cout << result << '\n';
  }
}
