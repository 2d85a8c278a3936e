// SPDX-License-Identifier: Apache-2.0
//
// Optimizer steps for Python: addresses and sizes in, checked; the GIL is released while the kernels run.

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cmath>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "optim/dispatch.h"
#include "optim/rounding.h"

namespace zerosharder {
namespace {

namespace py = pybind11;
using optim::DType;
using optim::Rule;
using optim::StepArgs;

// A pool that can be closed before it is destroyed, so that no thread is left when the interpreter goes.
class StepPool {
 public:
  explicit StepPool(int threads) : pool_(std::make_shared<optim::ThreadPool>(threads)), threads_(threads) {}
  ~StepPool() { close(); }

  std::shared_ptr<optim::ThreadPool> get() const {
    if (!pool_) throw std::runtime_error("the pool is closed");
    return pool_;
  }
  int threads() const { return threads_; }
  bool closed() const { return !pool_; }
  void close() {
    // Taken over with the GIL held; a step that runs in another thread holds a reference of its own, and the last
    // one to let go joins the threads.
    std::shared_ptr<optim::ThreadPool> last = std::move(pool_);
    py::gil_scoped_release released;
    last.reset();
  }

 private:
  std::shared_ptr<optim::ThreadPool> pool_;
  const int threads_;
};

DType parse(const std::string& name) {
  if (name == "float32") return DType::f32;
  if (name == "bfloat16") return DType::bf16;
  if (name == "float16") return DType::f16;
  throw py::value_error("dtype must be float32, bfloat16 or float16, got '" + name + "'");
}

std::size_t checked_size(std::int64_t n) {
  // Addresses are computed in bytes: 4 * n must not overflow.
  if (n < 0 || n > INT64_MAX / 8) throw py::value_error("n must be 0 or more elements, got " + std::to_string(n));
  return static_cast<std::size_t>(n);
}

template <class T>
T* pointer(std::uintptr_t address, const char* name, std::size_t n) {
  if (address == 0 && n != 0) throw py::value_error(std::string(name) + " is a null pointer");
  if (address % alignof(T) != 0) {
    throw py::value_error(std::string(name) + " is not aligned to " + std::to_string(alignof(T)) + " bytes");
  }
  return reinterpret_cast<T*>(address);
}

const void* data_pointer(std::uintptr_t address, const char* name, DType type, std::size_t n) {
  if (type == DType::f32) return pointer<const float>(address, name, n);
  return pointer<const std::uint16_t>(address, name, n);
}

double number(const py::dict& values, const char* name, double low, double high, bool open = false) {
  const double value = values[name].cast<double>();
  if (!(value >= low && (open ? value < high : value <= high)) || std::isinf(value)) {  // also NaN
    throw py::value_error(
        std::string(name) + " must be at least " + py::str(py::float_(low)).cast<std::string>() + " and " +
        (std::isinf(high) ? std::string("finite")
                          : (open ? "below " : "at most ") + py::str(py::float_(high)).cast<std::string>()) +
        ", got " + py::str(py::float_(value)).cast<std::string>());
  }
  return value;
}

// Hyperparameters in double, as torch computes with them, rounded to float once.
void fill(StepArgs& a, const std::string& rule, const py::dict& h) {
  const optim::ScopedDefaultRounding rounding;  // a flushed step size would be none
  const double inf = HUGE_VAL;
  const double lr = number(h, "lr", 0, inf);
  const double weight_decay = number(h, "weight_decay", 0, inf);
  const auto f = [](double x) { return static_cast<float>(x); };
  if (rule == "adam" || rule == "adamw") {
    const double beta1 = number(h, "beta1", 0, 1, true), beta2 = number(h, "beta2", 0, 1, true);
    const double t = number(h, "step", 1, inf);
    a.rule = h["amsgrad"].cast<bool>() ? Rule::adam_amsgrad : Rule::adam;
    const bool decoupled = rule == "adamw";
    a.l2 = decoupled ? 0.0f : f(weight_decay);
    a.decay = decoupled ? f(1 - lr * weight_decay) : 1.0f;
    a.lerp = f(1 - beta1);
    a.lerp_from_grad = std::fabs(a.lerp) >= 0.5f;
    if (a.lerp_from_grad) a.lerp -= 1.0f;
    a.beta2 = f(beta2);
    a.grad_share2 = f(1 - beta2);
    a.root_scale = f(std::sqrt(1 - std::pow(beta2, t)));
    a.step = f(-(lr / (1 - std::pow(beta1, t))));
    a.eps = f(number(h, "eps", 0, inf));
    a.roots = reinterpret_cast<optim::Roots>(h["roots"].cast<std::uintptr_t>());
    a.roots_mode = h["roots_mode"].cast<long long>();
  } else if (rule == "sgd") {
    const double momentum = number(h, "momentum", 0, inf);
    a.rule = momentum != 0 ? Rule::sgd_momentum : Rule::sgd;
    a.l2 = f(weight_decay);
    a.beta1 = f(momentum);
    a.grad_share1 = f(1 - number(h, "dampening", -inf, inf));
    a.nesterov = h["nesterov"].cast<bool>();
    a.first = h["first"].cast<bool>();
    a.step = f(-lr);
  } else if (rule == "lion") {
    const double beta1 = number(h, "beta1", 0, 1, true), beta2 = number(h, "beta2", 0, 1, true);
    a.rule = Rule::lion;
    a.decay = f(1 - lr * weight_decay);
    a.beta1 = f(beta1);
    a.grad_share1 = f(1 - beta1);
    a.beta2 = f(beta2);
    a.grad_share2 = f(1 - beta2);
    a.step = f(-lr);
  } else if (rule == "adagrad") {
    const double t = number(h, "step", 1, inf), lr_decay = number(h, "lr_decay", 0, inf);
    a.rule = Rule::adagrad;
    a.l2 = f(weight_decay);
    a.step = f(-(lr / (1 + (t - 1) * lr_decay)));
    a.eps = f(number(h, "eps", 0, inf));
  } else {
    throw py::value_error("rule must be adam, adamw, sgd, lion or adagrad, got '" + rule + "'");
  }
}

int states_of(Rule rule) {
  switch (rule) {
    case Rule::adam:
      return 2;
    case Rule::adam_amsgrad:
      return 3;
    case Rule::sgd:
      return 0;
    default:
      return 1;
  }
}

struct Tensors {
  std::int64_t n;
  std::uintptr_t weight, grad;
  std::string grad_dtype;
  std::vector<std::uintptr_t> state;
  std::uintptr_t copy;
  std::string copy_dtype;
};

StepArgs addresses(const Tensors& t) {
  const std::size_t n = checked_size(t.n);
  StepArgs a;
  a.weight = pointer<float>(t.weight, "weight", n);
  a.grad_type = parse(t.grad_dtype);
  a.grad = data_pointer(t.grad, "grad", a.grad_type, n);
  if (t.state.size() > 3) throw py::value_error("a step has at most 3 state ranges");
  for (std::size_t i = 0; i < t.state.size(); ++i) a.state[i] = pointer<float>(t.state[i], "state", n);
  if (t.copy != 0) {
    a.copy_type = parse(t.copy_dtype);
    if (a.copy_type == DType::f32) throw py::value_error("the copy must be bfloat16 or float16");
    a.copy = pointer<std::uint16_t>(t.copy, "copy", n);
  }
  return a;
}

void step(const StepPool& pool, const std::string& rule, const Tensors& tensors, const py::dict& hyper,
          const std::string& isa, int stream) {
  StepArgs a = addresses(tensors);
  fill(a, rule, hyper);
  if (static_cast<int>(tensors.state.size()) != states_of(a.rule)) {
    throw py::value_error(rule + " needs " + std::to_string(states_of(a.rule)) + " state ranges here, got " +
                          std::to_string(tensors.state.size()));
  }
  const double scale = hyper["grad_scale"].cast<double>();
  if (std::isnan(scale)) throw py::value_error("grad_scale is NaN");
  {
    const optim::ScopedDefaultRounding rounding;
    a.grad_scale = static_cast<float>(hyper["maximize"].cast<bool>() ? -scale : scale);
  }
  a.stream = stream;
  const optim::Kernels& kernels = optim::find_kernels(isa);
  const auto threads = pool.get();
  py::gil_scoped_release released;
  optim::run_step(*threads, kernels, a, static_cast<std::size_t>(tensors.n));
}

void bandwidth(const StepPool& pool, const Tensors& tensors, const std::string& isa, int stream) {
  StepArgs a = addresses(tensors);
  if (tensors.state.size() != 2) throw py::value_error("two state ranges are needed");
  a.stream = stream;
  const optim::Kernels& kernels = optim::find_kernels(isa);
  const auto threads = pool.get();
  py::gil_scoped_release released;
  optim::run_bandwidth(*threads, kernels, a, static_cast<std::size_t>(tensors.n));
}

}  // namespace

void bind_optim(py::module_& m) {
  m.attr("STEP_CHUNK") = optim::kChunk;
  m.def("step_isas", [] {
    std::vector<std::string> names;
    for (const optim::Kernels* kernels : optim::usable_kernels()) names.push_back(kernels->name);
    return names;
  });
  m.def("cpu_features", &optim::cpu_features);

  py::class_<StepPool>(m, "StepPool", "Threads for optimizer steps, the caller's among them.")
      .def(py::init<int>(), py::arg("threads"))
      .def_property_readonly("threads", &StepPool::threads)
      .def_property_readonly("closed", &StepPool::closed)
      .def("close", &StepPool::close, "End the threads. Steps raise RuntimeError from now on.");

  py::class_<Tensors>(m, "StepTensors", "Addresses of one range; 0 for no copy.")
      .def(py::init([](std::int64_t n, std::uintptr_t weight, std::uintptr_t grad, std::string grad_dtype,
                       std::vector<std::uintptr_t> state, std::uintptr_t copy, std::string copy_dtype) {
             Tensors t{n, weight, grad, std::move(grad_dtype), std::move(state), copy, std::move(copy_dtype)};
             addresses(t);  // complain now
             return t;
           }),
           py::arg("n"), py::arg("weight"), py::arg("grad"), py::arg("grad_dtype"), py::arg("state"),
           py::arg("copy") = 0, py::arg("copy_dtype") = "bfloat16");

  m.def("step", &step, py::arg("pool"), py::arg("rule"), py::arg("tensors"), py::arg("hyper"),
        py::arg("isa") = "auto", py::arg("stream") = 0);
  m.def("step_bandwidth", &bandwidth, py::arg("pool"), py::arg("tensors"), py::arg("isa") = "auto",
        py::arg("stream") = 0);
  m.def(
      "squared_norm",
      [](const StepPool& pool, std::uintptr_t address, const std::string& dtype, std::int64_t n,
         const std::string& isa) {
        const DType type = parse(dtype);
        const std::size_t size = checked_size(n);
        const void* data = data_pointer(address, "data", type, size);
        const optim::Kernels& kernels = optim::find_kernels(isa);
        const auto threads = pool.get();
        py::gil_scoped_release released;
        return optim::run_squared_norm(*threads, kernels, data, type, size);
      },
      py::arg("pool"), py::arg("address"), py::arg("dtype"), py::arg("n"), py::arg("isa") = "auto");
  m.def(
      "nonfinite",
      [](const StepPool& pool, std::uintptr_t address, const std::string& dtype, std::int64_t n,
         const std::string& isa) {
        const DType type = parse(dtype);
        const std::size_t size = checked_size(n);
        const void* data = data_pointer(address, "data", type, size);
        const optim::Kernels& kernels = optim::find_kernels(isa);
        const auto threads = pool.get();
        py::gil_scoped_release released;
        return optim::run_nonfinite(*threads, kernels, data, type, size);
      },
      py::arg("pool"), py::arg("address"), py::arg("dtype"), py::arg("n"), py::arg("isa") = "auto");
}

}  // namespace zerosharder
