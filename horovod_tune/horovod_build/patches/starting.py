"""Patches of ``hvd.init()``: it connects fast, over the right interface, and raises when it fails."""

from __future__ import annotations

from horovod_tune.horovod_build.patching import Patch

_GLOO_CONTEXT = "horovod/common/gloo/gloo_context.cc"
_OPERATIONS = "horovod/common/operations.cc"

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
        why="all ranks must get the same answer, or some would connect and others not",
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


_INIT_WHY = "an exception that leaves Horovod's thread ends the process with SIGABRT and no readable reason"

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
