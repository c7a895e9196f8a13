"""Patches of Horovod's waits, in and between collectives: they leave the CPU to others, and each ends."""

from __future__ import annotations

from horovod_tune.horovod_build.patching import Patch

_OPERATIONS = "horovod/common/operations.cc"

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
