// A stand-in device on PyTorch's PrivateUse1 key: its memory is main memory, its kernels are the CPU's, and apart from
// that it is a device like any other. An operator that gets tensors of two devices is refused, as an accelerator does.
// Random numbers come from a generator per device. Nothing here is fast.

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/as_strided_cpu_dispatch.h>
#include <ATen/ops/copy_native.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/library.h>

#include <atomic>
#include <cstdlib>
#include <mutex>

namespace {

constexpr auto kDevice = c10::DeviceType::PrivateUse1;
constexpr int kNumDevices = 2;
thread_local c10::DeviceIndex current_device = 0;

// ---- memory, counted -------------------------------------------------------------------------------------------

std::atomic<int64_t> held[kNumDevices];
std::atomic<int64_t> peak[kNumDevices];

struct Block {
  void* data;
  int64_t num_bytes;
  int device;
};

void release(void* context) {
  auto* block = static_cast<Block*>(context);
  held[block->device] -= block->num_bytes;
  std::free(block->data);
  delete block;
}

struct Allocator final : c10::Allocator {
  c10::DataPtr allocate(size_t num_bytes) override {
    const int index = current_device;
    void* data = num_bytes == 0 ? nullptr : std::aligned_alloc(64, (num_bytes + 63) / 64 * 64);
    const auto now = held[index] += static_cast<int64_t>(num_bytes);
    if (now > peak[index]) peak[index] = now;
    auto* block = new Block{data, static_cast<int64_t>(num_bytes), index};
    return {data, block, &release, c10::Device(kDevice, static_cast<c10::DeviceIndex>(index))};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t num_bytes) const override { std::memcpy(to, from, num_bytes); }
};

Allocator allocator;

// ---- devices ---------------------------------------------------------------------------------------------------

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kDevice; }
  c10::Device exchangeDevice(c10::Device device) const override {
    const auto before = getDevice();
    setDevice(device);
    return before;
  }
  c10::Device getDevice() const override { return {kDevice, current_device}; }
  void setDevice(c10::Device device) const override {
    if (device.index() >= 0) current_device = device.index();
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.index() >= 0) current_device = device.index();
  }
  c10::Stream getStream(c10::Device device) const override { return c10::Stream(c10::Stream::DEFAULT, device); }
  c10::Stream getNewStream(c10::Device device, int) const override { return c10::Stream(c10::Stream::DEFAULT, device); }
  c10::Stream exchangeStream(c10::Stream stream) const override { return c10::Stream(c10::Stream::DEFAULT, stream.device()); }
  c10::DeviceIndex deviceCount() const noexcept override { return kNumDevices; }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
  void synchronizeDevice(c10::DeviceIndex) const override {}
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

at::Generator& generator(c10::DeviceIndex index) {
  static at::Generator each[kNumDevices] = {
      at::make_generator<at::CPUGeneratorImpl>(1), at::make_generator<at::CPUGeneratorImpl>(2)};
  return each[index < 0 ? current_device : index];
}

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return kNumDevices; }
  c10::DeviceIndex getCurrentDevice() const override { return current_device; }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex index) const override { return generator(index); }
  at::Generator getNewGenerator(c10::DeviceIndex) const override { return at::make_generator<at::CPUGeneratorImpl>(); }
  at::Device getDeviceFromPtr(void*) const override { return {kDevice, current_device}; }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t num_bytes) const override {
    c10::DeviceGuard on(storage.device());
    auto data = allocator.allocate(num_bytes);
    if (storage.data()) std::memcpy(data.get(), storage.data(), std::min(num_bytes, storage.nbytes()));
    storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(data));
    storage.unsafeGetStorageImpl()->set_nbytes(num_bytes);
  }
};

// ---- operators -------------------------------------------------------------------------------------------------

at::Tensor as_cpu(const at::Tensor& tensor) {
  // The same memory, seen as a CPU tensor.
  if (!tensor.defined() || tensor.device().type() != kDevice) return tensor;
  auto options = tensor.options().device(c10::kCPU).requires_grad(false);
  auto offset = tensor.storage_offset() * static_cast<int64_t>(tensor.element_size());
  auto* start = static_cast<char*>(const_cast<void*>(tensor.storage().data())) + offset;
  return at::from_blob(start, tensor.sizes(), tensor.strides(), [keep = tensor.storage()](void*) {}, options);
}

at::Tensor from_cpu(const at::Tensor& tensor, c10::Device device) {
  if (!tensor.defined()) return tensor;
  c10::DeviceGuard on(device);
  // An expanded result shares elements, and cannot be written to as it lies.
  const auto dense = tensor.is_non_overlapping_and_dense() ? tensor : tensor.contiguous();
  at::Tensor made = at::detail::empty_strided_generic(
      dense.sizes(), dense.strides(), &allocator, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
      dense.scalar_type());
  as_cpu(made).copy_(tensor);
  return made;
}

struct Arguments {
  std::vector<std::pair<at::Tensor, at::Tensor>> pairs;  // ours, and its CPU view
  std::optional<c10::Device> device;
  bool has_foreign = false;

  at::Tensor take(const at::Tensor& tensor) {
    if (!tensor.defined()) return tensor;
    if (tensor.device().type() != kDevice) {
      has_foreign = has_foreign || tensor.dim() > 0;
      return tensor;
    }
    device = device.value_or(tensor.device());
    TORCH_CHECK(*device == tensor.device(), "Expected all tensors to be on the same device, but found ", *device,
                " and ", tensor.device());
    // An empty one may be resized by what writes to it, which memory that is not its own cannot be.
    auto view = tensor.numel() == 0 ? at::empty(tensor.sizes(), tensor.options().device(c10::kCPU)) : as_cpu(tensor);
    pairs.emplace_back(tensor, view);
    return view;
  }

  at::Tensor give(const at::Tensor& result) {
    if (!result.defined() || result.device().type() != c10::kCPU) return result;
    for (auto& [ours, view] : pairs) {
      if (view.is_same(result)) {
        if (ours.sizes() != result.sizes()) {
          ours.resize_(result.sizes());
          as_cpu(ours).copy_(result);
        }
        return ours;
      }
    }
    return from_cpu(result, device.value_or(c10::Device(kDevice, current_device)));
  }
};

void run_on_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const auto first = stack->size() - schema.arguments().size();
  Arguments arguments;
  for (size_t i = 0; i < schema.arguments().size(); ++i) {
    auto& value = (*stack)[first + i];
    if (value.isTensor()) {
      value = arguments.take(value.toTensor());
    } else if (value.isTensorList()) {
      c10::List<at::Tensor> views;
      for (const at::Tensor& each : value.toTensorVector()) views.push_back(arguments.take(each));
      value = views;
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> views;
      for (const std::optional<at::Tensor>& each : value.toOptionalTensorList()) {
        views.push_back(each ? std::optional<at::Tensor>(arguments.take(*each)) : std::nullopt);
      }
      value = views;
    } else if (value.isDevice()) {
      if (!arguments.device) arguments.device = value.toDevice();
      value = c10::Device(c10::kCPU);
    }
  }
  TORCH_CHECK(!(arguments.has_foreign && !arguments.pairs.empty()), "Expected all tensors to be on the same device: ",
              schema.operator_name(), " got tensors of the CPU and of ", *arguments.device);
  const auto index = arguments.device.value_or(c10::Device(kDevice, current_device)).index();
  for (size_t i = 0; i < schema.arguments().size(); ++i) {
    auto& value = (*stack)[first + i];
    const auto& type = *schema.arguments()[i].type();
    if (type.str().find("Generator") != std::string::npos && value.isNone()) value = generator(index);
  }
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  const auto begin = stack->size() - schema.returns().size();
  for (size_t i = begin; i < stack->size(); ++i) {
    auto& value = (*stack)[i];
    if (value.isTensor()) {
      value = arguments.give(value.toTensor());
    } else if (value.isTensorList()) {
      c10::List<at::Tensor> ours;
      for (const at::Tensor& each : value.toTensorVector()) ours.push_back(arguments.give(each));
      value = ours;
    }
  }
}

// What torch calls for a convolution on a device of others. The CPU's has the same arguments, and its backward one more.

void convolution(const c10::OperatorHandle&, torch::jit::Stack* stack) {
  static const auto of_cpu = c10::Dispatcher::singleton().findSchemaOrThrow("aten::convolution", "");
  run_on_cpu(of_cpu, stack);
}

void convolution_backward(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  static const auto of_cpu = c10::Dispatcher::singleton().findSchemaOrThrow("aten::convolution_backward", "");
  const auto num_after_weight = op.schema().arguments().size() - 3;
  stack->insert(stack->end() - num_after_weight, c10::IValue());  // sizes of the bias: those of the output's channels
  run_on_cpu(of_cpu, stack);
}

at::Tensor empty(c10::SymIntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                 std::optional<at::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  c10::DeviceGuard on(device.value_or(c10::Device(kDevice, current_device)));
  return at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(size), &allocator,
                                   c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype),
                                   format);
}

at::Tensor empty_strided(c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>) {
  c10::DeviceGuard on(device.value_or(c10::Device(kDevice, current_device)));
  return at::detail::empty_strided_generic(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), &allocator,
                                           c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                           c10::dtype_or_default(dtype));
}

at::Tensor as_strided(const at::Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride,
                      std::optional<c10::SymInt> offset) {
  auto start = offset ? std::optional<int64_t>(offset->guard_int(__FILE__, __LINE__)) : std::nullopt;
  return at::cpu::as_strided(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), start);
}

at::Tensor view(const at::Tensor& self, c10::SymIntArrayRef size) {
  return at::native::view(self, C10_AS_INTARRAYREF_SLOW(size));
}

at::Tensor copy_from(const at::Tensor& self, const at::Tensor& to, bool) {
  as_cpu(to).copy_(as_cpu(self));
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& to) {
  to.resize_(self.sizes());
  return copy_from(self, to, false);
}

const at::Tensor& resize(const at::Tensor& self, c10::SymIntArrayRef size, std::optional<at::MemoryFormat>) {
  auto sizes = C10_AS_INTARRAYREF_SLOW(size);
  auto num_bytes = at::detail::computeStorageNbytesContiguous(sizes, self.element_size(), self.storage_offset());
  if (num_bytes > self.storage().nbytes()) Hooks().resizePrivateUse1Bytes(self.storage(), num_bytes);
  self.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
  return self;
}

at::Tensor& set_storage(at::Tensor& self, at::Storage source) {
  const auto num_items = static_cast<int64_t>(source.nbytes() / self.element_size());
  self.unsafeGetTensorImpl()->set_storage_keep_dtype(std::move(source));
  self.unsafeGetTensorImpl()->set_storage_offset(0);
  self.unsafeGetTensorImpl()->set_sizes_contiguous({num_items});
  return self;
}

at::Tensor& set_storage_at(at::Tensor& self, at::Storage source, c10::SymInt offset, c10::SymIntArrayRef size,
                           c10::SymIntArrayRef stride) {
  self.unsafeGetTensorImpl()->set_storage_keep_dtype(std::move(source));
  self.unsafeGetTensorImpl()->set_storage_offset(offset.guard_int(__FILE__, __LINE__));
  self.unsafeGetTensorImpl()->set_sizes_and_strides(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
  return self;
}

at::Scalar local_scalar(const at::Tensor& self) { return as_cpu(self).item(); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("as_strided", &as_strided);
  m.impl("view", &view);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("resize_", &resize);
  m.impl("set_.source_Storage", &set_storage);
  m.impl("set_.source_Storage_storage_offset", &set_storage_at);
  m.impl("_local_scalar_dense", &local_scalar);
  m.impl("convolution_overrideable", torch::CppFunction::makeFromBoxedFunction<&convolution>());
  m.impl("convolution_backward_overrideable", torch::CppFunction::makeFromBoxedFunction<&convolution_backward>());
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>()); }

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  KERNEL_PRIVATEUSEONE(addmm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(bmm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(linear, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(matmul, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(mm, lower_precision_fp)
}

// ---- collectives -----------------------------------------------------------------------------------------------

std::vector<at::Tensor> as_cpu(const std::vector<at::Tensor>& tensors) {
  std::vector<at::Tensor> views;
  for (const auto& each : tensors) {
    TORCH_CHECK(each.device().type() == kDevice, "a collective of this device got a tensor of ", each.device());
    views.push_back(as_cpu(each));
  }
  return views;
}

std::vector<std::vector<at::Tensor>> as_cpu(const std::vector<std::vector<at::Tensor>>& rows) {
  std::vector<std::vector<at::Tensor>> views;
  for (const auto& each : rows) views.push_back(as_cpu(each));
  return views;
}

using c10d::Work;
using WorkPtr = c10::intrusive_ptr<Work>;
using Tensors = std::vector<at::Tensor>;

// Gloo's collectives on the same memory; a mean is a sum and a division, which gloo leaves to others.
struct Collectives final : c10d::Backend {
  Collectives(c10::intrusive_ptr<c10d::Backend> inner) : Backend(inner->getRank(), inner->getSize()), inner_(inner) {}

  const std::string getBackendName() const override { return "hccl"; }
  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    auto views = as_cpu(tensors);
    return inner_->broadcast(views, options);
  }
  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    auto views = as_cpu(tensors);
    auto plain = options;
    const bool is_mean = take_mean(plain.reduceOp);
    return divided(inner_->allreduce(views, plain), views, is_mean);
  }
  WorkPtr allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override {
    return allreduce(tensors, options);
  }
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    auto views = as_cpu(tensors);
    return inner_->reduce(views, options);
  }
  WorkPtr allgather(std::vector<Tensors>& out, Tensors& in, const c10d::AllgatherOptions& options) override {
    auto outs = as_cpu(out);
    auto ins = as_cpu(in);
    return inner_->allgather(outs, ins, options);
  }
  WorkPtr _allgather_base(at::Tensor& out, at::Tensor& in, const c10d::AllgatherOptions& options) override {
    auto views = as_cpu(Tensors{out, in});
    return inner_->_allgather_base(views[0], views[1], options);
  }
  WorkPtr allgather_into_tensor_coalesced(Tensors& out, Tensors& in, const c10d::AllgatherOptions& options) override {
    auto outs = as_cpu(out);
    auto ins = as_cpu(in);
    return inner_->allgather_into_tensor_coalesced(outs, ins, options);
  }
  WorkPtr gather(std::vector<Tensors>& out, Tensors& in, const c10d::GatherOptions& options) override {
    auto outs = as_cpu(out);
    auto ins = as_cpu(in);
    return inner_->gather(outs, ins, options);
  }
  WorkPtr scatter(Tensors& out, std::vector<Tensors>& in, const c10d::ScatterOptions& options) override {
    auto outs = as_cpu(out);
    auto ins = as_cpu(in);
    return inner_->scatter(outs, ins, options);
  }
  WorkPtr reduce_scatter(Tensors& out, std::vector<Tensors>& in, const c10d::ReduceScatterOptions& options) override {
    auto outs = as_cpu(out);
    auto ins = as_cpu(in);
    auto plain = options;
    const bool is_mean = take_mean(plain.reduceOp);
    return divided(inner_->reduce_scatter(outs, ins, plain), outs, is_mean);
  }
  WorkPtr _reduce_scatter_base(at::Tensor& out, at::Tensor& in, const c10d::ReduceScatterOptions& options) override {
    auto views = as_cpu(Tensors{out, in});
    auto plain = options;
    const bool is_mean = take_mean(plain.reduceOp);
    return divided(inner_->_reduce_scatter_base(views[0], views[1], plain), {views[0]}, is_mean);
  }
  WorkPtr reduce_scatter_tensor_coalesced(Tensors& out, Tensors& in,
                                          const c10d::ReduceScatterOptions& options) override {
    auto outs = as_cpu(out);
    auto ins = as_cpu(in);
    auto plain = options;
    const bool is_mean = take_mean(plain.reduceOp);
    return divided(inner_->reduce_scatter_tensor_coalesced(outs, ins, plain), outs, is_mean);
  }
  WorkPtr alltoall_base(at::Tensor& out, at::Tensor& in, std::vector<int64_t>& out_sizes,
                        std::vector<int64_t>& in_sizes, const c10d::AllToAllOptions& options) override {
    auto views = as_cpu(Tensors{out, in});
    return inner_->alltoall_base(views[0], views[1], out_sizes, in_sizes, options);
  }
  WorkPtr send(Tensors& tensors, int to, int tag) override {
    auto views = as_cpu(tensors);
    return inner_->send(views, to, tag);
  }
  WorkPtr recv(Tensors& tensors, int from, int tag) override {
    auto views = as_cpu(tensors);
    return inner_->recv(views, from, tag);
  }
  WorkPtr barrier(const c10d::BarrierOptions& options) override { return inner_->barrier(options); }

 private:
  static bool take_mean(c10d::ReduceOp& op) {
    const bool is_mean = op == c10d::ReduceOp::AVG;
    if (is_mean) op = c10d::ReduceOp::SUM;
    return is_mean;
  }
  WorkPtr divided(WorkPtr work, const Tensors& tensors, bool is_mean) {
    if (is_mean) {
      work->wait();
      for (auto each : tensors) each.div_(getSize());
    }
    return work;
  }

  c10::intrusive_ptr<c10d::Backend> inner_;
};

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  c10::SetAllocator(kDevice, &allocator);
  at::RegisterPrivateUse1HooksInterface(new Hooks());
  module.def("num_devices", [] { return kNumDevices; });
  module.def("current_device", [] { return static_cast<int>(current_device); });
  module.def("set_device", [](int index) { current_device = static_cast<c10::DeviceIndex>(index); });
  module.def("held_bytes", [](int index) { return held[index].load(); });
  module.def("peak_bytes", [](int index) { return peak[index].load(); });
  module.def("reset_peak", [](int index) { peak[index] = held[index].load(); });
  module.def("rng_state", [](int index) { return generator(static_cast<c10::DeviceIndex>(index)).get_state(); });
  module.def("set_rng_state", [](int index, const at::Tensor& state) {
    generator(static_cast<c10::DeviceIndex>(index)).set_state(state);
  });
  module.def("seed", [](int index, uint64_t seed) {
    generator(static_cast<c10::DeviceIndex>(index)).set_current_seed(seed);
  });
  py::module_::import("torch.distributed");
  module.def("collectives", [](c10::intrusive_ptr<c10d::Backend> inner) -> c10::intrusive_ptr<c10d::Backend> {
    return c10::make_intrusive<Collectives>(std::move(inner));
  });
}
