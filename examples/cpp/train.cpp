// train PACKAGE INPUTS PARAMETER: makes five steps, five more with a tenth of the learning rate, and reads a parameter.
#include <iomanip>
#include <iostream>
#include <string>
#include <unordered_map>

#include <torch/csrc/inductor/aoti_package/model_package_loader.h>

#include "tensors.h"

int main(int argc, char** argv) {
  if (argc != 4) {
    std::cerr << "train PACKAGE INPUTS PARAMETER\n";
    return 2;
  }
  torch::inductor::AOTIModelPackageLoader package(argv[1]);
  const std::vector<at::Tensor> inputs = read_tensors(argv[2]);
  const auto steps = [&] {
    for (int step = 0; step < 5; ++step) {
      // a step: forward, backward and the optimizer's update, which changes the state inside the package
      std::cout << "loss " << std::setprecision(9) << package.run(inputs)[0].item<double>() << '\n';
    }
  };
  steps();

  // the state by its paths; these tensors live as long as the package, and show what later steps make of them
  const auto state = package.get_runner()->extract_constants_map(/*use_inactive=*/false);
  std::unordered_map<std::string, at::Tensor> changed;
  for (const auto& [path, value] : state) {
    if (path.ends_with("/lr")) {
      changed[path] = value.div(10);
    }
  }
  package.load_constants(changed, /*use_inactive=*/false, /*check_full_update=*/false);
  steps();

  const auto parameter = package.get_runner()->extract_constants_map(false).at(argv[3]);
  std::cout << argv[3] << " sum " << parameter.sum().item<double>() << '\n';
}
