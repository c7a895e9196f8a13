"""Patches of how ranks find each other: one exchange for all of them, and an end to every wait.

Gloo asks the store five times for two ranks that connect, and is sent all addresses of a rank where it needs
one: at 512 ranks 650,000 requests and 40 GB. Our rendezvous gathers instead: a rank puts its addresses once
and is sent those that the others have for it, when all have come. Another store is used as before.
"""

from __future__ import annotations

from horovod_tune.horovod_build.patching import Patch

_GLOO = "third_party/gloo/gloo"
_CONTEXT = f"{_GLOO}/rendezvous/context.cc"
_STORE = "horovod/common/gloo/http_store"
_REQUEST = "third_party/HTTPRequest/include/HTTPRequest.hpp"

_GATHER_WHY = "ranks ask the rendezvous a number of times that grows with the square of their number"

GATHER = (
    Patch(
        name="one exchange: Gloo's store",
        why=_GATHER_WHY,
        path=f"{_GLOO}/rendezvous/store.h",
        before="""\
  virtual bool has_v2_support() {
""",
        after="""\
  // horovod_tune: puts `mine`, this rank's addresses for the other ranks, and
  // sets `theirs` to the others' for this rank, both in the order of ranks.
  // Returns false, and has done nothing, where the store cannot.
  virtual bool exchange(
      int /*rank*/,
      int /*size*/,
      const std::vector<char>& /*mine*/,
      std::vector<char>& /*theirs*/,
      const std::chrono::milliseconds& /*timeout*/) {
    return false;
  }

  virtual bool has_v2_support() {
""",
    ),
    Patch(
        name="one exchange: nobody asks for local ranks",
        why=f"{_GATHER_WHY}; what Gloo works out here is used by no transport",
        path=_CONTEXT,
        before="""\
  int localRank = 0;

  // Get Hostname using syscall
  char hostname[HOSTNAME_MAX_SIZE]; // NOLINT
  int rv = gethostname(hostname, HOSTNAME_MAX_SIZE);
  if (rv != 0) {
    throw std::system_error(errno, std::system_category());
  }

  auto localHostName = std::string(hostname);
  // Add global rank <> hostname pair to the Store. This store is then passed
  // to Gloo when connectFullMesh is called, where Gloo uses the global rank <>
  // hostname mapping to compute local ranks.
  std::string localKey("rank_" + std::to_string(rank));
  const std::vector<char> value(localHostName.begin(), localHostName.end());
  store.set(localKey, value);

  for (int i = 0; i < size; i++) {
    if (i == rank) {
      break;
    }

    std::string key("rank_" + std::to_string(i));
    auto val = store.get(key);
    auto hostName = std::string((const char*)val.data(), val.size());

    if (hostName == localHostName) {
      localRank++;
    }
  }

""",
        after="",
    ),
    Patch(
        name="one exchange: a pair needs no local rank",
        why=f"{_GATHER_WHY}; what Gloo works out here is used by no transport",
        path=_CONTEXT,
        before="    pair->setLocalRank(localRank);\n",
        after="",
    ),
    Patch(
        name="one exchange: in place of one a pair",
        why=_GATHER_WHY,
        path=_CONTEXT,
        before="""\
  store.set(storeKey.str(), allBytes);

  // Connect every pair
  for (int i = 0; i < size; i++) {
    if (i == rank) {
      continue;
    }

""",
        after="""\
  std::vector<char> theirs;
  const bool exchanged = size > 1 &&
      store.exchange(rank, size, allBytes, theirs, getTimeout());
  if (!exchanged) {
    store.set(storeKey.str(), allBytes);
  } else {
    GLOO_ENFORCE_EQ(
        theirs.size(), allBytes.size(), "Addresses of another size");
  }

  // Connect every pair
  for (int i = 0; i < size; i++) {
    if (i == rank) {
      continue;
    }

    if (exchanged) {
      const auto addrSize = theirs.size() / (size - 1);
      const auto addr = theirs.begin() + (i < rank ? i : i - 1) * addrSize;
      transportContext->getPair(i)->connect(
          std::vector<char>(addr, addr + addrSize));
      continue;
    }

""",
    ),
    Patch(
        name="one exchange: declaration",
        why=_GATHER_WHY,
        path=f"{_STORE}.h",
        before="  bool CheckKeys(const std::vector<std::string>& keys);\n",
        after="""\
  // horovod_tune: see gloo::rendezvous::Store.
  bool exchange(int rank, int size, const std::vector<char>& mine,
                std::vector<char>& theirs,
                const std::chrono::milliseconds& timeout) override;

  bool CheckKeys(const std::vector<std::string>& keys);
""",
    ),
    Patch(
        name="one exchange: over HTTP",
        why=_GATHER_WHY,
        path=f"{_STORE}.cc",
        before="bool HTTPStore::CheckKeys(const std::vector<std::string>& keys) {\n",
        after="""\
bool HTTPStore::exchange(int rank, int size, const std::vector<char>& mine,
                         std::vector<char>& theirs,
                         const std::chrono::milliseconds& timeout) {
  if (!gathers_) {
    return false;
  }
  HTTP_PUT(std::to_string(rank), mine);
  const auto start = std::chrono::steady_clock::now();
  const auto key = "gathered." + std::to_string(rank) + "." + std::to_string(size);
  while (!HTTP_GET(key, theirs)) {
    if (timeout != gloo::kNoTimeout &&
        std::chrono::steady_clock::now() - start > timeout) {
      GLOO_THROW_IO_EXCEPTION(GLOO_ERROR_MSG(
          "Wait timeout after ", timeout.count() / 1000.0,
          " seconds: not all of ", size, " ranks have come to the rendezvous. "
          "You may want to increase the timeout via ",
          HOROVOD_GLOO_TIMEOUT_SECONDS));
    }
    /* sleep override */
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  return true;
}

bool HTTPStore::CheckKeys(const std::vector<std::string>& keys) {
""",
    ),
)

_END_WHY = (
    "a rank whose packets to the rendezvous or to another rank are dropped waits without an end, or five "
    "times HOROVOD_GLOO_TIMEOUT_SECONDS"
)

WAITS_END = (
    Patch(
        name="waits end: a connection",
        why=_END_WHY,
        path=f"{_GLOO}/transport/tcp/pair.h",
        before="        timeout_ * 5,\n",
        after="        timeout_,\n",
    ),
    Patch(
        name="waits end: the store's timeout",
        why=_END_WHY,
        path=f"{_STORE}.h",
        before="            int rank)\n      : rank_(rank) {\n",
        after="""\
            int rank,
            const std::chrono::milliseconds& timeout = Store::kDefaultTimeout)
      // horovod_tune: only our rendezvous has a path in its address.
      : rank_(rank), gathers_(server_ip.find('/') != std::string::npos),
        timeout_(timeout) {
""",
    ),
    Patch(
        name="waits end: fields",
        why=_END_WHY,
        path=f"{_STORE}.h",
        before="  int rank_;\n",
        after="  int rank_;\n  bool gathers_;\n  std::chrono::milliseconds timeout_;\n",
    ),
    Patch(
        name="waits end: the timeout is given",
        why=_END_WHY,
        path="horovod/common/gloo/gloo_context.cc",
        before="    store.reset(new HTTPStore(server_addr, server_port, prefix, rank));\n",
        after="    store.reset(new HTTPStore(server_addr, server_port, prefix, rank, timeout));\n",
    ),
    Patch(
        name="waits end: all tries of a request together",
        why=_END_WHY,
        path=f"{_STORE}.cc",
        before="""\
  for (int retry_cnt = 0; retry_cnt < MAX_RETRY_TIMES; ++retry_cnt) {
    try {
      http::Response response = request.send(method, body);
""",
        after="""\
  const auto ends = std::chrono::steady_clock::now() + timeout_;
  std::string said = "no answer";
  for (int retry_cnt = 0; retry_cnt < MAX_RETRY_TIMES; ++retry_cnt) {
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(
        ends - std::chrono::steady_clock::now());
    if (left.count() <= 0) {
      break;
    }
    try {
      http::Response response = request.send(method, body, {}, left);
""",
    ),
    Patch(
        name="waits end: what a request says",
        why=_END_WHY,
        path=f"{_STORE}.cc",
        before='      LOG(DEBUG) << "Exception: " << e.what();\n',
        after='      LOG(DEBUG) << "Exception: " << e.what();\n      said = e.what();\n',
    ),
    Patch(
        name="waits end: the error says it",
        why=_END_WHY,
        path=f"{_STORE}.cc",
        before='  throw std::runtime_error("HTTP request failed.");\n',
        after='  throw std::runtime_error("a request to the rendezvous failed, timeout " +\n'
        '                           std::to_string(timeout_.count() / 1000) + " s: " + said);\n',
    ),
    Patch(
        name="waits end: includes of the request",
        why=_END_WHY,
        path=_REQUEST,
        before="#include <algorithm>\n",
        after="#include <algorithm>\n#include <cerrno>\n#include <chrono>\n",
    ),
    Patch(
        name="waits end: the request's parameter",
        why=_END_WHY,
        path=_REQUEST,
        before="""\
                      const std::string& body = "",
                      const std::vector<std::string>& headers = {})
""",
        after="""\
                      const std::string& body = "",
                      const std::vector<std::string>& headers = {},
                      const std::chrono::milliseconds& timeout = std::chrono::milliseconds(0))
""",
    ),
    Patch(
        name="waits end: connecting, sending and receiving",
        why=_END_WHY,
        path=_REQUEST,
        before="            Socket socket(internetProtocol);\n",
        after="""\
            Socket socket(internetProtocol);
#ifndef _WIN32
            // horovod_tune: on Linux the one for sending holds for connecting as well.
            timeval limit = {};
            limit.tv_sec = timeout.count() / 1000;
            limit.tv_usec = (timeout.count() % 1000) * 1000;
            ::setsockopt(socket, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof(limit));
            ::setsockopt(socket, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof(limit));
#endif
""",
    ),
    Patch(
        name="waits end: a signal is none",
        why="the kernel does not resume a read that has a timeout after a signal",
        path=_REQUEST,
        before="""\
                if (size < 0)
                    throw std::system_error(getLastError(), std::system_category(), "Failed to read \
""",
        after="""\
                if (size < 0 && getLastError() == EINTR)
                    continue;
                else if (size < 0)
                    throw std::system_error(getLastError(), std::system_category(), "Failed to read \
""",
    ),
)
