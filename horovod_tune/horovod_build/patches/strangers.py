"""What lets a rank connect to the ranks of its world, and to nobody else who finds its port.

Gloo opens a port for every pair of ranks and takes the first who connects for the other rank. A port scanner,
or any user of a shared host, so ends ``hvd.init()`` of the whole world. With these patches the address that a
rank puts into the rendezvous has a random token in it, and only who shows that token is taken for its peer:
the rendezvous serves those alone who know the trial's secret. A token is good for one connection.
"""

from __future__ import annotations

from horovod_tune.horovod_build.patching import Patch

_TCP = "third_party/gloo/gloo/transport/tcp"
_WHY = (
    "whoever connects first to a rank's port is taken for its peer, and ends the world with any other bytes"
)

_TOKENS = (
    Patch(
        name="peers show a token: include for addresses",
        why=_WHY,
        path=f"{_TCP}/address.h",
        before="#include <unistd.h>\n#include <mutex>\n",
        after="#include <unistd.h>\n#include <array>\n#include <mutex>\n",
    ),
    Patch(
        name="peers show a token: its type",
        why=_WHY,
        path=f"{_TCP}/address.h",
        before="  sequence_number_t getSeq() const {\n",
        after="""\
  using token_t = std::array<unsigned char, 16>;

  const token_t& getToken() const {
    return impl_.token;
  }

  void setToken(const token_t& token) {
    impl_.token = token;
  }

  sequence_number_t getSeq() const {
""",
    ),
    Patch(
        name="peers show a token: in the address",
        why=_WHY,
        path=f"{_TCP}/address.h",
        before="    sequence_number_t seq{kSequenceNumberUnset};\n",
        after="""\
    sequence_number_t seq{kSequenceNumberUnset};

    // horovod_tune: what a connection to the listening socket has to show
    // first. It travels with the address, through the store.
    std::array<unsigned char, 16> token{};
""",
    ),
    Patch(
        name="peers show a token: moved",
        why=_WHY,
        path=f"{_TCP}/address.cc",
        before="  impl_.ss = std::move(other.impl_.ss);\n  impl_.seq = other.impl_.seq;\n",
        after="  impl_ = other.impl_;\n",
    ),
    Patch(
        name="peers show a token: assigned",
        why=_WHY,
        path=f"{_TCP}/address.cc",
        before="  impl_.ss = other.impl_.ss;\n  impl_.seq = other.impl_.seq;\n",
        after="  impl_ = other.impl_;\n",
    ),
    Patch(
        name="peers show a token: copied",
        why=_WHY,
        path=f"{_TCP}/address.cc",
        before="    : Address(other.impl_.ss, other.impl_.seq) {}\n",
        after="    : Address(other.impl_.ss, other.impl_.seq) {\n  impl_.token = other.impl_.token;\n}\n",
    ),
)

# The thread that connects also accepts. Gloo's event loop would have to be told of each stranger, and hands
# its handlers no more than "something happened". Without it, a rank that connects need not wait for the loop
# to let go of a socket that it never used, up to 10 ms for each peer.
_LISTENING = (
    Patch(
        name="peers show a token: includes",
        why=_WHY,
        path=f"{_TCP}/pair.cc",
        before="#include <algorithm>\n#include <sstream>\n",
        after="#include <algorithm>\n#include <random>\n#include <sstream>\n",
    ),
    Patch(
        name="peers show a token: include for poll",
        why=_WHY,
        path=f"{_TCP}/pair.cc",
        before="#include <netinet/tcp.h>\n",
        after="#include <netinet/tcp.h>\n#include <poll.h>\n",
    ),
    Patch(
        name="peers show a token: made",
        why=_WHY,
        path=f"{_TCP}/pair.cc",
        before="""\
  self_ = Address::fromSockName(fd);

  // Register with device so we're called when peer connects
  changeState(LISTENING);
  device_->registerDescriptor(fd_, EPOLLIN, this);
""",
        after="""\
  self_ = Address::fromSockName(fd);

  // horovod_tune: whoever connects has to show this token first, see acceptPeer.
  Address::token_t token;
  std::random_device random;
  for (auto& byte : token) {
    byte = static_cast<unsigned char>(random());
  }
  self_.setToken(token);
  setSocketBlocking(fd_, false);
  changeState(LISTENING);
""",
    ),
    Patch(
        name="peers show a token: the listening side",
        why=_WHY,
        path=f"{_TCP}/pair.cc",
        before="  if (!is_client_) {\n    waitUntilConnected(lock, true);\n    return;\n  }\n",
        after="  if (!is_client_) {\n    acceptPeer();\n    return;\n  }\n",
    ),
    Patch(
        name="peers show a token: the connecting side",
        why=_WHY,
        path=f"{_TCP}/pair.cc",
        before="""\
  // First destroy listening socket.
  device_->unregisterDescriptor(fd_, this);
  ::close(fd_);
""",
        after="""\
  // First destroy listening socket.
  ::close(fd_);
""",
    ),
    Patch(
        name="peers show a token: no events while listening",
        why=_WHY,
        path=f"{_TCP}/pair.cc",
        before="  if (state_ == LISTENING) {\n    handleListening();\n    return;\n  }\n\n",
        after="",
    ),
    Patch(
        name="peers show a token: closed while listening",
        why=_WHY,
        path=f"{_TCP}/pair.cc",
        before="""\
        // The pair may be in the LISTENING state when it is destructed.
        if (fd_ != FD_INVALID) {
          device_->unregisterDescriptor(fd_, this);
""",
        after="""\
        // The pair may be in the LISTENING state when it is destructed.
        if (fd_ != FD_INVALID) {
""",
    ),
    Patch(
        name="peers show a token: declaration",
        why=_WHY,
        path=f"{_TCP}/pair.h",
        before="""\
  // Finishes connection setup if this side of the pair is on the
  // listening side of connection initiation. This is called from
  // `handleEvents` if the listening file descriptor is readable, i.e.
  // if there is an incoming connection.
  //
  // The pair mutex is expected to be held when called.
  //
  void handleListening();
""",
        after="""\
  // horovod_tune: finishes connection setup if this side of the pair is on
  // the listening side of connection initiation. Returns when a connection
  // has shown the token; throws after the timeout.
  //
  // The pair mutex is expected to be held when called.
  //
  void acceptPeer();
""",
    ),
    Patch(
        name="peers show a token: seen",
        why=_WHY,
        path=f"{_TCP}/pair.cc",
        before="""\
void Pair::handleListening() {
  struct sockaddr_storage addr;
  socklen_t addrlen = sizeof(addr);
  int rv;

  rv = accept(fd_, (struct sockaddr*)&addr, &addrlen);

  // Close the listening file descriptor whether we've successfully connected
  // or run into an error and will throw an exception.
  device_->unregisterDescriptor(fd_, this);
  ::close(fd_);
  fd_ = FD_INVALID;

  if (rv == -1) {
    signalException(GLOO_ERROR_MSG("accept: ", strerror(errno)));
    return;
  }

  // Connected, replace file descriptor
  fd_ = rv;

  // Common connection-made code
  handleConnected();
}
""",
        after="""\
// horovod_tune: anybody may connect to a listening socket. Who says something
// else than the token, or goes, is dropped; who is silent holds up nobody.
void Pair::acceptPeer() {
  struct Caller {
    int fd;
    size_t nread;
    Address::token_t shown;
  };
  constexpr size_t kMaxCallers = 64;
  std::deque<Caller> callers;
  size_t dropped = 0;
  const auto drop = [&](size_t i) {
    ::close(callers[i].fd);
    callers.erase(callers.begin() + i);
    dropped++;
  };
  const auto fail = [&](const std::string& msg) {
    while (!callers.empty()) {
      drop(0);
    }
    signalAndThrowException(msg);
  };

  const auto& token = self_.getToken();
  const bool timeoutSet = timeout_ != kNoTimeout;
  // As in waitUntil, not so long that it overflows.
  const auto end = std::chrono::steady_clock::now() +
      std::min(
          timeout_,
          std::chrono::duration_cast<std::chrono::milliseconds>(
              kLargeTimeDuration));
  int peer = FD_INVALID;
  while (peer == FD_INVALID) {
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(
        end - std::chrono::steady_clock::now()).count();
    if (timeoutSet && left <= 0) {
      fail(GLOO_ERROR_MSG(
          "Connect timeout ", peer_.str(), " (", dropped + callers.size(),
          " connections were none of its)"));
    }
    std::vector<struct pollfd> polled{{fd_, POLLIN, 0}};
    for (const auto& caller : callers) {
      polled.push_back({caller.fd, POLLIN, 0});
    }
    auto rv = ::poll(
        polled.data(), polled.size(),
        timeoutSet ? static_cast<int>(left) + 1 : -1);
    if (rv == -1 && errno != EINTR) {
      fail(GLOO_ERROR_MSG("poll: ", strerror(errno)));
    }
    if (rv <= 0) {
      continue;
    }

    for (size_t i = callers.size(); i-- > 0 && peer == FD_INVALID;) {
      if (polled[i + 1].revents == 0) {
        continue;
      }
      auto& caller = callers[i];
      // Not a byte more: what follows is the peer's first message.
      const auto nread = ::recv(
          caller.fd, caller.shown.data() + caller.nread,
          token.size() - caller.nread, MSG_DONTWAIT);
      if (nread == -1 && (errno == EAGAIN || errno == EINTR)) {
        continue;
      }
      if (nread > 0) {
        caller.nread += nread;
        if (caller.nread < token.size()) {
          continue;
        }
        // In the same time however many bytes are right.
        unsigned char wrong = 0;
        for (size_t k = 0; k < token.size(); k++) {
          wrong |= token[k] ^ caller.shown[k];
        }
        if (wrong == 0) {
          peer = caller.fd;
          callers.erase(callers.begin() + i);
          continue;
        }
      }
      drop(i);
    }

    if (peer == FD_INVALID && polled[0].revents != 0) {
      const auto fd = ::accept(fd_, nullptr, nullptr);
      if (fd != -1) {
        if (callers.size() == kMaxCallers) {
          drop(0);
        }
        setSocketBlocking(fd, false);
        callers.push_back({fd, 0, {}});
      } else if (
          errno == EMFILE || errno == ENFILE || errno == ENOBUFS ||
          errno == ENOMEM) {
        if (callers.empty()) {
          fail(GLOO_ERROR_MSG("accept: ", strerror(errno)));
        }
        drop(0);
      } else if (errno == EBADF || errno == EINVAL) {
        fail(GLOO_ERROR_MSG("accept: ", strerror(errno)));
      }
      // Other errors are of one connection, which is gone.
    }
  }

  while (!callers.empty()) {
    drop(0);
  }
  ::close(fd_);
  fd_ = peer;

  // Common connection-made code
  handleConnected();
}
""",
    ),
    Patch(
        name="peers show a token: shown",
        why=_WHY,
        path=f"{_TCP}/pair.cc",
        before="""\
        GLOO_ERROR_MSG("connect ", peer_.str(), ": ", strerror(optval)));
    return;
  }

  // Common connection-made code
""",
        after="""\
        GLOO_ERROR_MSG("connect ", peer_.str(), ": ", strerror(optval)));
    return;
  }

  // horovod_tune: a new connection takes so few bytes at once.
  const auto token = peer_.getToken();
  const auto sent = ::send(fd_, token.data(), token.size(), MSG_NOSIGNAL);
  if (sent != static_cast<ssize_t>(token.size())) {
    signalException(GLOO_ERROR_MSG(
        "connect ", peer_.str(), ": ", strerror(sent == -1 ? errno : EIO)));
    return;
  }

  // Common connection-made code
""",
    ),
)

STRANGERS = (*_TOKENS, *_LISTENING)
