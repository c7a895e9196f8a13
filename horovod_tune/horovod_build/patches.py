"""The changes that Horovod 0.28.1 needs on a current torch, and those that make it start and fail well."""

from __future__ import annotations

from horovod_tune.horovod_build.patching import Patch

PATCH_LEVEL = "ht5"
"""Stands in the built version (``0.28.1+ht4.cpu``); raised whenever a patch below changes."""

_GLOO_CONTEXT = "horovod/common/gloo/gloo_context.cc"


_CXX17_WHY = "torch's headers need C++17 since torch 2.1"

CXX17 = (
    Patch(
        name="C++17",
        why=_CXX17_WHY,
        path="CMakeLists.txt",
        before="set(CMAKE_CXX_STANDARD 14)\n",
        after="set(CMAKE_CXX_STANDARD 17)\n",
    ),
    Patch(
        name="C++17 for torch",
        why=_CXX17_WHY,
        path="horovod/torch/CMakeLists.txt",
        before="    set(CMAKE_CXX_STANDARD 14)\n",
        after="    set(CMAKE_CXX_STANDARD 17)\n",
    ),
)

NO_DEBUG_INFORMATION = Patch(
    name="no debug information",
    why="it makes the library 62 MB instead of 2 MB, which every rank maps and every node is sent",
    path="CMakeLists.txt",
    before='string(REPLACE "-O2" "-O3" CMAKE_CXX_FLAGS_RELWITHDEBINFO "${CMAKE_CXX_FLAGS_RELWITHDEBINFO}")\n',
    after='string(REPLACE "-O2" "-O3" CMAKE_CXX_FLAGS_RELWITHDEBINFO "${CMAKE_CXX_FLAGS_RELWITHDEBINFO}")\n'
    'string(REPLACE "-g" "" CMAKE_CXX_FLAGS_RELWITHDEBINFO "${CMAKE_CXX_FLAGS_RELWITHDEBINFO}")\n',
)

CPU_ONLY = Patch(
    name="no CUDA",
    why="a CUDA build of torch beside a CUDA toolkit would pull in CUDA code that nobody asked for",
    path="cmake/Modules/FindPytorch.cmake",
    before="True if ((torch.version.cuda is not None) and (CUDA_HOME is not None)) else False",
    after="False",
)

ANY_FOLDER = (
    Patch(
        name="a folder with a plus sign",
        why="its name is taken for a regular expression, and the library lands elsewhere",
        path="cmake/Utilities.cmake",
        before='string(REGEX REPLACE "${PROJECT_SOURCE_DIR}(/)?" "" SUB_FOLDER',
        after='string(REPLACE "${PROJECT_SOURCE_DIR}/" "" SUB_FOLDER',
    ),
    Patch(
        name="a folder with a space",
        why="the linker takes its name for two",
        path="CMakeLists.txt",
        before="-Wl,--version-script=${CMAKE_SOURCE_DIR}/horovod.lds",
        after='-Wl,--version-script=\\"${CMAKE_SOURCE_DIR}/horovod.lds\\"',
    ),
)

GLOO_INTERFACE = Patch(
    name="HOROVOD_GLOO_IFACE",
    why="without it the collectives ignore HOROVOD_GLOO_IFACE and take the address of the host's own name, "
    "which is 127.0.1.1 on Debian and Ubuntu",
    path=_GLOO_CONTEXT,
    before="  assert(global_context.IsEnabled());\n",
    after="  assert(global_context.IsEnabled());\n  gloo_iface_ = global_context.gloo_iface_;\n",
)

# hvd.init() connects every rank with every other six times: world, local and cross, then all three again for
# the process set of all ranks. On one host, four of the six are the world over again. Horovod drives all of
# its Gloo contexts from one background thread in the same order on all ranks, so they can be one.
ONE_MESH = (
    Patch(
        name="one mesh: the world's process set",
        why="the process set of all ranks needs no connections of its own",
        path=_GLOO_CONTEXT,
        before="""\
  auto rendezvous_addr_env = std::getenv(HOROVOD_GLOO_RENDEZVOUS_ADDR);
  auto rendezvous_port = GetIntEnvOrDefault(HOROVOD_GLOO_RENDEZVOUS_PORT, -1);
  if (rendezvous_addr_env != nullptr) {
    LOG(DEBUG) << "rendezvous server address: " << rendezvous_addr_env;
  } else {
    LOG(DEBUG) << "no rendezvous server provided, assuming single process execution";
  }

  attr device_attr;
""",
        after="""\
  if (registered_ranks.empty()) {
    // horovod_tune: the process set of all ranks uses the world's connections.
    timeout_ = global_context.timeout_;
    hostname_ = global_context.hostname_;
    global_ctx = global_context.ctx;
    ctx = global_context.ctx;
    local_ctx = global_context.local_ctx;
    cross_ctx = global_context.cross_ctx;
    return;
  }

  auto rendezvous_addr_env = std::getenv(HOROVOD_GLOO_RENDEZVOUS_ADDR);
  auto rendezvous_port = GetIntEnvOrDefault(HOROVOD_GLOO_RENDEZVOUS_PORT, -1);
  if (rendezvous_addr_env != nullptr) {
    LOG(DEBUG) << "rendezvous server address: " << rendezvous_addr_env;
  } else {
    LOG(DEBUG) << "no rendezvous server provided, assuming single process execution";
  }

  attr device_attr;
""",
    ),
    Patch(
        name="one mesh: the question",
        why="every rank must answer it alike, or some would connect and others not",
        path=_GLOO_CONTEXT,
        before="#if HAVE_MPI\nvoid GlooContext::InitializeFromMPI",
        after="""\
// horovod_tune: whether a group is the world in the world's order.
// A collective: the answer is the same on all ranks.
static bool IsWholeWorld(const std::shared_ptr<gloo::Context>& world, int rank,
                         int size) {
  int same = (rank == world->rank && size == world->size) ? 1 : 0;
  std::vector<int> all((size_t)world->size);
  gloo::AllgatherOptions opts(world);
  opts.setInput(&same, 1);
  opts.setOutput(all.data(), all.size());
  gloo::allgather(opts);
  return std::find(all.begin(), all.end(), 0) == all.end();
}

#if HAVE_MPI
void GlooContext::InitializeFromMPI""",
    ),
    Patch(
        name="one mesh: all ranks on one host",
        why="the local group is the world",
        path=_GLOO_CONTEXT,
        before="""\
  local_ctx = Rendezvous(HOROVOD_GLOO_LOCAL_PREFIX + hostname_,
                         rendezvous_addr_env, rendezvous_port,
                         local_rank, local_size, dev, timeout_);
""",
        after="""\
  local_ctx = IsWholeWorld(ctx, local_rank, local_size)
                  ? ctx
                  : Rendezvous(HOROVOD_GLOO_LOCAL_PREFIX + hostname_,
                               rendezvous_addr_env, rendezvous_port,
                               local_rank, local_size, dev, timeout_);
""",
    ),
    Patch(
        name="one mesh: one rank a host",
        why="the cross group is the world",
        path=_GLOO_CONTEXT,
        before="""\
  cross_ctx = Rendezvous(HOROVOD_GLOO_CROSS_PREFIX + std::to_string(local_rank),
                         rendezvous_addr_env, rendezvous_port,
                         cross_rank, cross_size, dev, timeout_);
""",
        after="""\
  cross_ctx = IsWholeWorld(ctx, cross_rank, cross_size)
                  ? ctx
                  : Rendezvous(HOROVOD_GLOO_CROSS_PREFIX + std::to_string(local_rank),
                               rendezvous_addr_env, rendezvous_port,
                               cross_rank, cross_size, dev, timeout_);
""",
    ),
)


_OPERATIONS = "horovod/common/operations.cc"
_INIT_WHY = "an exception that leaves Horovod's thread ends the process with SIGABRT, and nobody reads why"

INIT_RAISES = (
    Patch(
        name="hvd.init() that fails raises: begin",
        why=_INIT_WHY,
        path=_OPERATIONS,
        before="""\
#if HAVE_GLOO
#if HAVE_MPI
  if (global_mpi_context.IsEnabled()) {
    // Initialize gloo context if mpi context is available
""",
        after="""\
#if HAVE_GLOO
  try {
#if HAVE_MPI
  if (global_mpi_context.IsEnabled()) {
    // Initialize gloo context if mpi context is available
""",
    ),
    Patch(
        name="hvd.init() that fails raises: end",
        why=_INIT_WHY,
        path=_OPERATIONS,
        before="""\
    state.process_set_table.Initialize(global_gloo_context);
  }
#endif // HAVE_GLOO
""",
        after="""\
    state.process_set_table.Initialize(global_gloo_context);
  }
  } catch (const std::exception& ex) {
    // horovod_tune: hvd.init() waits for this flag, and raises.
    LOG(ERROR) << "Horovod could not connect its ranks: " << ex.what();
    global_gloo_context.Finalize();
    state.initialization_failed = true;
    return;
  }
#endif // HAVE_GLOO
""",
    ),
    Patch(
        name="hvd.init() that fails raises: again",
        why="after hvd.shutdown() the next hvd.init() is a new try",
        path=_OPERATIONS,
        before="    horovod_global.initialization_done = false;\n    horovod_global.background_thread =\n",
        after="    horovod_global.initialization_done = false;\n"
        "    horovod_global.initialization_failed = false;\n"
        "    horovod_global.background_thread =\n",
    ),
)

_IDLE_WHY = (
    "Horovod's thread asks all ranks for work a thousand times a second, also while none has any: a tenth of "
    "a CPU for each rank, which the ranks of other trials could use"
)

IDLE_CYCLES = (
    Patch(
        name="longer cycles when idle",
        why=_IDLE_WHY,
        path=_OPERATIONS,
        before="""\
  auto sleep_duration = state.last_cycle_start +
                        std::chrono::microseconds(long(
                            state.parameter_manager.CycleTimeMs() * 1000.)) -
                        start_time;
""",
        after="""\
  // horovod_tune: the longer nothing was to do, the longer is a cycle, up to
  // 10 ms. So work that comes waits 1 % longer than the ranks had none. Not
  // where HOROVOD_CYCLE_TIME=0 asks for no waiting at all.
  thread_local auto last_work = start_time;
  std::chrono::steady_clock::duration cycle = std::chrono::microseconds(
      long(state.parameter_manager.CycleTimeMs() * 1000.));
  if (cycle.count() > 0) {
    cycle = std::max(cycle, std::min<std::chrono::steady_clock::duration>(
                                (start_time - last_work) / 100,
                                std::chrono::milliseconds(10)));
  }
  auto sleep_duration = state.last_cycle_start + cycle - start_time;
""",
    ),
    Patch(
        name="longer cycles when idle: work",
        why=_IDLE_WHY,
        path=_OPERATIONS,
        before="""\
    if (process_set.IsCurrentProcessIncluded()) {
      int global_rank = state.global_controller->GetRank();
      for (auto& response : response_list.responses()) {
""",
        after="""\
    if (process_set.IsCurrentProcessIncluded()) {
      int global_rank = state.global_controller->GetRank();
      if (!response_list.responses().empty()) {
        last_work = state.last_cycle_start;
      }
      for (auto& response : response_list.responses()) {
""",
    ),
)

_WAIT_WHY = (
    "a rank that waits for a collective asks for it without a pause, takes Python's lock for each question, "
    "and so takes the CPU from the threads and ranks that it waits for"
)

WAITING_SLEEPS = (
    Patch(
        name="waiting ranks sleep: declaration",
        why=_WAIT_WHY,
        path="horovod/torch/handle_manager.h",
        before="  bool PollHandle(int handle);\n",
        after="  bool PollHandle(int handle);\n"
        "  void Wait(int handle);  // horovod_tune: until PollHandle would be true\n",
    ),
    Patch(
        name="waiting ranks sleep: the condition",
        why=_WAIT_WHY,
        path="horovod/torch/handle_manager.h",
        before="  std::mutex mutex_;\n",
        after="  std::mutex mutex_;\n  std::condition_variable done_;\n",
    ),
    Patch(
        name="waiting ranks sleep: include",
        why=_WAIT_WHY,
        path="horovod/torch/handle_manager.h",
        before="#include <atomic>\n",
        after="#include <atomic>\n#include <chrono>\n#include <condition_variable>\n",
    ),
    Patch(
        name="waiting ranks sleep: include for yield",
        why=_WAIT_WHY,
        path="horovod/torch/handle_manager.cc",
        before='#include "handle_manager.h"\n',
        after='#include "handle_manager.h"\n\n#include <thread>\n',
    ),
    Patch(
        name="waiting ranks sleep: done",
        why=_WAIT_WHY,
        path="horovod/torch/handle_manager.cc",
        before="  results_[handle] = std::make_shared<Status>(status);\n}\n",
        after="""\
  results_[handle] = std::make_shared<Status>(status);
  done_.notify_all();
}

void HandleManager::Wait(int handle) {
  // Most waits are short, and waking up takes longer than asking again.
  auto sleeps_at = std::chrono::steady_clock::now() + std::chrono::milliseconds(5);
  while (std::chrono::steady_clock::now() < sleeps_at) {
    if (PollHandle(handle)) return;
    std::this_thread::yield();
  }
  std::unique_lock<std::mutex> lock(mutex_);
  done_.wait(lock, [&] {
    auto result = results_.find(handle);
    return result == results_.end() || result->second != nullptr;
  });
}
""",
    ),
    Patch(
        name="waiting ranks sleep: reset",
        why=_WAIT_WHY,
        path="horovod/torch/handle_manager.cc",
        before="  results_.clear();\n",
        after="  results_.clear();\n  done_.notify_all();\n",
    ),
    Patch(
        name="waiting ranks sleep: the wait",
        why=_WAIT_WHY,
        path="horovod/torch/mpi_ops_v2.cc",
        before="""\
  while (true) {
    if (handle_manager.PollHandle(handle)) break;
    {
      py::gil_scoped_release release_python_gil;
      std::this_thread::yield();
    }
  }
""",
        after="""\
  {
    py::gil_scoped_release release_python_gil;
    handle_manager.Wait(handle);
  }
""",
    ),
)

_OPTIMIZER = "horovod/torch/optimizer.py"
_ZERO_GRAD_WHY = "torch's own optimizers take set_to_none, and training code passes it"

ZERO_GRAD = (
    Patch(
        name="zero_grad(set_to_none=...)",
        why=_ZERO_GRAD_WHY,
        path=_OPTIMIZER,
        before=".step(closure)\n\n    def zero_grad(self):\n",
        after=".step(closure)\n\n    def zero_grad(self, *args, **kwargs):\n",
    ),
    Patch(
        name="zero_grad(set_to_none=...): passed on",
        why=_ZERO_GRAD_WHY,
        path=_OPTIMIZER,
        before=".zero_grad()\n\n\nclass _DistributedAdasumOptimizer",
        after=".zero_grad(*args, **kwargs)\n\n\nclass _DistributedAdasumOptimizer",
    ),
)


STALL_INSPECTOR = Patch(
    name="the stall inspector under Gloo",
    why="it walks over the controller's list of ranks, which under Gloo is filled but has size 0 (reserve in "
    "place of resize), so it never finds a stalled rank: HOROVOD_STALL_SHUTDOWN_TIME_SECONDS has no effect",
    path="horovod/common/gloo/gloo_controller.cc",
    before="  global_ranks_.reserve(size_);\n",
    after="  global_ranks_.resize(size_);\n",
)


def patches_for(torch_version: tuple[int, int], gpu: str) -> tuple[Patch, ...]:
    """Return the patches of a build against torch `torch_version` (major, minor) with `gpu` operations."""
    chosen: tuple[Patch, ...] = (
        GLOO_INTERFACE,
        *ONE_MESH,
        *INIT_RAISES,
        *ZERO_GRAD,
        STALL_INSPECTOR,
        *IDLE_CYCLES,
        *WAITING_SLEEPS,
        NO_DEBUG_INFORMATION,
        *ANY_FOLDER,
    )
    if torch_version >= (2, 1):
        chosen = (*CXX17, *chosen)
    if gpu == "none":
        chosen = (*chosen, CPU_ONLY)
    return chosen
