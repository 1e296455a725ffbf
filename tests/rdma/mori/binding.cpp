// SPDX-License-Identifier: Apache-2.0
// mori.io for the Python that this is compiled for, over the C++ library of the amd-mori wheel.
//
// The wheel's own extension module is for Python 3.10 alone. This one is read from the wheel's headers and from what its
// Python files ask for; it has the same names and, call by call, the same treatment of the interpreter lock:
// `CreateSession` holds it, transfers and waits let it go.

#include <pybind11/operators.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "mori/io/io.hpp"

namespace py = pybind11;
using namespace mori::io;
using Unlocked = py::call_guard<py::gil_scoped_release>;

namespace mori::io {
// The library exports them; none of its public headers says so.
void* FabricMalloc(size_t size, int device);
void FabricFree(void* address);
}  // namespace mori::io

namespace {

template <typename Description>
py::bytes Pack(const Description& description) {
  msgpack::sbuffer buffer;
  msgpack::pack(buffer, description);
  return {buffer.data(), buffer.size()};
}

template <typename Description>
Description Unpack(const py::bytes& packed) {
  const std::string_view view = packed;
  return msgpack::unpack(view.data(), view.size()).get().as<Description>();
}

template <typename Description>
void DefinePacking(py::class_<Description>& type) {
  type.def(py::self == py::self).def("pack", &Pack<Description>).def_static("unpack", &Unpack<Description>);
}

void DefineEnums(py::module_& module) {
  py::enum_<BackendType>(module, "BackendType")
      .value("Unknown", BackendType::Unknown)
      .value("XGMI", BackendType::XGMI)
      .value("RDMA", BackendType::RDMA)
      .value("TCP", BackendType::TCP)
      .value("FABRIC", BackendType::FABRIC);
  py::enum_<MemoryLocationType>(module, "MemoryLocationType")
      .value("Unknown", MemoryLocationType::Unknown)
      .value("CPU", MemoryLocationType::CPU)
      .value("GPU", MemoryLocationType::GPU);
  py::enum_<StatusCode>(module, "StatusCode")
      .value("SUCCESS", StatusCode::SUCCESS)
      .value("INIT", StatusCode::INIT)
      .value("IN_PROGRESS", StatusCode::IN_PROGRESS)
      .value("ERR_INVALID_ARGS", StatusCode::ERR_INVALID_ARGS)
      .value("ERR_NOT_FOUND", StatusCode::ERR_NOT_FOUND)
      .value("ERR_RDMA_OP", StatusCode::ERR_RDMA_OP)
      .value("ERR_BAD_STATE", StatusCode::ERR_BAD_STATE)
      .value("ERR_GPU_OP", StatusCode::ERR_GPU_OP);
  py::enum_<PollCqMode>(module, "PollCqMode")
      .value("POLLING", PollCqMode::POLLING)
      .value("EVENT", PollCqMode::EVENT);
  py::enum_<PeerFailureReason>(module, "PeerFailureReason")
      .value("UNKNOWN", PeerFailureReason::UNKNOWN)
      .value("PEER_UNREACHABLE", PeerFailureReason::PEER_UNREACHABLE)
      .value("LOCAL_QP_ERROR", PeerFailureReason::LOCAL_QP_ERROR)
      .value("LOCAL_PORT_DOWN", PeerFailureReason::LOCAL_PORT_DOWN)
      .value("LOCAL_DEVICE_FATAL", PeerFailureReason::LOCAL_DEVICE_FATAL)
      .value("LOCAL_CQ_ERROR", PeerFailureReason::LOCAL_CQ_ERROR);
}

void DefineSettings(py::module_& module) {
  py::class_<IOEngineConfig>(module, "IOEngineConfig")
      .def(py::init<std::string, uint16_t>(), py::arg("host") = "", py::arg("port") = 0)
      .def_readwrite("host", &IOEngineConfig::host)
      .def_readwrite("port", &IOEngineConfig::port);
  py::class_<BackendConfig>(module, "BackendConfig");
  using Rdma = RdmaBackendConfig;
  py::class_<Rdma, BackendConfig>(module, "RdmaBackendConfig")
      .def(py::init<int, int, int, PollCqMode, bool, uint32_t, bool, size_t, int, int>(),
           py::arg("qp_per_transfer") = 1, py::arg("post_batch_size") = -1, py::arg("num_worker_threads") = -1,
           py::arg("poll_cq_mode") = PollCqMode::POLLING, py::arg("enable_notification") = true,
           py::arg("notif_per_qp") = 1024, py::arg("enable_transfer_chunking") = false,
           py::arg("chunk_bytes") = 65536, py::arg("max_chunks_per_transfer") = 64,
           py::arg("num_nics_per_transfer") = 1)
      .def_readwrite("qp_per_transfer", &Rdma::qpPerTransfer)
      .def_readwrite("post_batch_size", &Rdma::postBatchSize)
      .def_readwrite("num_worker_threads", &Rdma::numWorkerThreads)
      .def_readwrite("poll_cq_mode", &Rdma::pollCqMode)
      .def_readwrite("enable_notification", &Rdma::enableNotification)
      .def_readwrite("notif_per_qp", &Rdma::notifPerQp)
      .def_readwrite("enable_transfer_chunking", &Rdma::enableTransferChunking)
      .def_readwrite("chunk_bytes", &Rdma::chunkBytes)
      .def_readwrite("max_chunks_per_transfer", &Rdma::maxChunksPerTransfer)
      .def_readwrite("num_nics_per_transfer", &Rdma::numNicsPerTransfer)
      .def_readwrite("max_send_wr", &Rdma::maxSendWr)
      .def_readwrite("max_cqe_num", &Rdma::maxCqeNum)
      .def_readwrite("max_msg_sge", &Rdma::maxMsgSge);
  py::class_<XgmiBackendConfig, BackendConfig>(module, "XgmiBackendConfig")
      .def(py::init<int, int>(), py::arg("num_streams") = 64, py::arg("num_events") = 64)
      .def_readwrite("num_streams", &XgmiBackendConfig::numStreams)
      .def_readwrite("num_events", &XgmiBackendConfig::numEvents);
  py::class_<FabricBackendConfig, BackendConfig>(module, "FabricBackendConfig")
      .def(py::init<int, int>(), py::arg("num_streams") = 64, py::arg("num_events") = 64)
      .def_readwrite("num_streams", &FabricBackendConfig::numStreams)
      .def_readwrite("num_events", &FabricBackendConfig::numEvents);
}

void DefineDescriptions(py::module_& module) {
  py::class_<EngineDesc> engine(module, "EngineDesc");
  engine.def_readonly("key", &EngineDesc::key)
      .def_readonly("node_id", &EngineDesc::nodeId)
      .def_readonly("hostname", &EngineDesc::hostname)
      .def_readonly("host", &EngineDesc::host)
      .def_readonly("port", &EngineDesc::port)
      .def_readonly("pid", &EngineDesc::pid);
  DefinePacking(engine);
  py::class_<MemoryDesc> memory(module, "MemoryDesc");
  memory.def(py::init<>())
      .def_readonly("engine_key", &MemoryDesc::engineKey)
      .def_readonly("id", &MemoryDesc::id)
      .def_readonly("device_id", &MemoryDesc::deviceId)
      .def_readonly("device_bus_id", &MemoryDesc::deviceBusId)
      .def_readonly("numa_node", &MemoryDesc::numaNode)
      .def_readonly("data", &MemoryDesc::data)
      .def_readonly("size", &MemoryDesc::size)
      .def_readonly("loc", &MemoryDesc::loc)
      .def_property_readonly("ipc_handle", [](const MemoryDesc& desc) {
        return py::bytes(desc.ipcHandle.data(), desc.ipcHandle.size());
      });
  DefinePacking(memory);
}

void DefineOutcomes(py::module_& module) {
  py::class_<TransferStatus>(module, "TransferStatus")
      .def(py::init<>())
      .def("Code", &TransferStatus::Code)
      .def("Message", &TransferStatus::Message)
      .def("Update", &TransferStatus::Update)
      .def("Init", &TransferStatus::Init)
      .def("InProgress", &TransferStatus::InProgress)
      .def("Succeeded", &TransferStatus::Succeeded)
      .def("Failed", &TransferStatus::Failed)
      .def("SetCode", &TransferStatus::SetCode)
      .def("SetMessage", &TransferStatus::SetMessage)
      .def("Wait", &TransferStatus::Wait, Unlocked())
      .def("WaitFor", &TransferStatus::WaitFor, py::arg("timeout_ms") = -1, Unlocked());
  py::class_<PeerFailureEvent>(module, "PeerFailureEvent")
      .def_readonly("remote_engine_key", &PeerFailureEvent::remoteEngineKey)
      .def_readonly("reason", &PeerFailureEvent::reason)
      .def_readonly("qp_num", &PeerFailureEvent::qpNum)
      .def_readonly("port_num", &PeerFailureEvent::portNum)
      .def_readonly("device_name", &PeerFailureEvent::deviceName)
      .def_readonly("detail", &PeerFailureEvent::detail);
}

std::optional<PeerFailureEvent> PopPeerFailure(IOEngine& engine) {
  PeerFailureEvent event;
  if (!engine.PopPeerFailure(&event)) return std::nullopt;
  return event;
}

void DefineEngine(py::module_& module) {
  py::class_<IOEngineSession>(module, "IOEngineSession")
      .def("AllocateTransferUniqueId", &IOEngineSession::AllocateTransferUniqueId, Unlocked())
      .def("Read", &IOEngineSession::Read, Unlocked())
      .def("Write", &IOEngineSession::Write, Unlocked())
      .def("BatchRead", &IOEngineSession::BatchRead, Unlocked())
      .def("BatchWrite", &IOEngineSession::BatchWrite, Unlocked())
      .def("Alive", &IOEngineSession::Alive);
  py::class_<IOEngine>(module, "IOEngine")
      .def(py::init<const EngineKey&, const IOEngineConfig&>())
      .def("GetEngineDesc", &IOEngine::GetEngineDesc)
      .def("CreateBackend", &IOEngine::CreateBackend)
      .def("RemoveBackend", &IOEngine::RemoveBackend)
      .def("RegisterRemoteEngine", &IOEngine::RegisterRemoteEngine)
      .def("DeregisterRemoteEngine", &IOEngine::DeregisterRemoteEngine)
      .def("RegisterMemory", &IOEngine::RegisterMemory)
      .def("DeregisterMemory", &IOEngine::DeregisterMemory)
      .def("AllocateTransferUniqueId", &IOEngine::AllocateTransferUniqueId, Unlocked())
      .def("Read", &IOEngine::Read, Unlocked())
      .def("Write", &IOEngine::Write, Unlocked())
      .def("BatchRead", &IOEngine::BatchRead, Unlocked())
      .def("BatchWrite", &IOEngine::BatchWrite, Unlocked())
      .def("CreateSession", &IOEngine::CreateSession)
      .def("PopInboundTransferStatus", &IOEngine::PopInboundTransferStatus, Unlocked())
      .def("PopPeerFailure", &PopPeerFailure)
      .def("WaitAll", &IOEngine::WaitAll, py::arg("statuses"), py::arg("timeout_ms") = -1, Unlocked())
      .def("LoadScatterGatherModule", &IOEngine::LoadScatterGatherModule)
      .def("LoadFabricCopyModule", &IOEngine::LoadFabricCopyModule);
}

}  // namespace

PYBIND11_MODULE(libmori_pybinds, module) {
  DefineEnums(module);
  DefineSettings(module);
  DefineDescriptions(module);
  DefineOutcomes(module);
  DefineEngine(module);
  module.def("set_log_level", &SetLogLevel);
  module.def("fabric_alloc", [](size_t size, int device) {
    return reinterpret_cast<uintptr_t>(FabricMalloc(size, device));
  }, py::arg("size"), py::arg("device"));
  module.def("fabric_free", [](uintptr_t address) { FabricFree(reinterpret_cast<void*>(address)); }, py::arg("ptr"));
}
