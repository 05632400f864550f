"""The line between the processes of a run: a TCP connection of each to the first one.

On it they send JSON, one object a line. They meet on the coordinator's address before JAX's own
runtime takes it, and keep what they have connected:

- JAX's client aborts the process where another one does not come. Here it is an error with a name.
- What one has found all are told, however long it takes. A collective gives up while the first
  process prepares text for hours, and needs arrays of one shape.
- It breaks at once when a process is killed, and in half a minute when its host is cut off. JAX
  waits for its heartbeat, or in a collective for ever, and then aborts.
"""

import contextlib
import json
import os
import queue
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from bert_jax.errors import CommandError, HostLost, UserError

# Seconds in which a process ends by itself after another one has stopped with an error. The first
# process goes last: JAX aborts the others, with a C++ trace, where it is gone.
GRACE = 5.0
_FIRST_AFTER = 0.5
_LONGEST = 1 << 16  # bytes of what a stranger may send
# A host that does not answer for 10 s is asked four times, every 5 s.
_KEEPALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 4, "TCP_USER_TIMEOUT": 30_000}


class _End:
    """One end of a connection: JSON objects, a line each."""

    def __init__(self, connected: socket.socket):
        self.socket = connected
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _KEEPALIVE.items():
            if hasattr(socket, name):  # as it is on Linux
                connected.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        self._file: BinaryIO = connected.makefile("rb")
        self._sending = threading.Lock()

    def send(self, message: Mapping[str, Any]) -> None:
        with self._sending:
            self.socket.sendall(json.dumps(message).encode() + b"\n")

    def receive(self, seconds: float | None = None, longest: int = -1) -> dict[str, Any]:
        """Returns the next message, of so many bytes at most.

        Raises:
          OSError: the connection has broken, or nothing came in time.
          ValueError: what came is no message of ours.
        """
        self.socket.settimeout(seconds)
        found = self._file.readline(longest)
        self.socket.settimeout(None)
        if not found.endswith(b"\n"):
            raise ConnectionError("the other side has hung up")
        message = json.loads(found)
        if not isinstance(message, dict):
            raise ValueError("no message of ours")
        return message

    def close(self) -> None:
        self._file.close()
        self.socket.close()


class Line:
    """The connections of this process, each with a thread that listens.

    Args:
      index: of this process.
      names: the host of each process.
      peers: the processes that it is connected to: all others if it is the first, else the first.
      advice: gives what a person should do when a process is lost.
    """

    def __init__(
        self,
        index: int,
        names: Sequence[str],
        peers: Mapping[int, _End],
        advice: Callable[[], str],
    ):
        self.index, self.names = index, names
        self._peers, self._advice = peers, advice
        self._inbox: dict[int, queue.SimpleQueue[Any]] = {p: queue.SimpleQueue() for p in peers}
        self._ends: set[int] = set()  # processes that have said that they end, on the first one
        self._ending = threading.Lock()
        self._all_ended = False  # all have said so
        self._over = threading.Event()  # there is nobody left to wait for
        self._stopping = False  # some process has stopped with an error
        self._failing = False  # this one has an error of its own to end with
        for peer in peers:
            threading.Thread(target=self._listen, args=(peer,), daemon=True).start()

    def name(self, index: int) -> str:
        """Returns how a process is called in messages."""
        return f"host {index} ({self.names[index]})"

    def gather(self, value: Any) -> list[Any]:
        """Returns what each process gives, in their order; waits for all of them."""
        if self.index:
            self._send(0, {"value": value})
            return self._inbox[0].get()
        values = [value, *(self._inbox[peer].get() for peer in sorted(self._peers))]
        for peer in self._peers:
            self._send(peer, {"value": values})
        return values

    def leave(self, code: int, reason: str = "") -> bool:
        """Says that this process ends, and waits for the others, with an error not for long.

        Returns:
          Whether all of them end.
        """
        if code:
            self._failing = self._stopping = True
        if self.index:
            self._send(0, {"end": code, "reason": reason})
        else:
            self._ended(0, code, reason)
        patience = GRACE - _FIRST_AFTER if self.index else GRACE + _FIRST_AFTER
        self._over.wait(patience if code else None)
        if not code and not self._all_ended:
            threading.Event().wait()  # until another one's error ends this process as well
        return self._all_ended

    def _listen(self, peer: int) -> None:
        while True:
            try:
                message = self._peers[peer].receive()
            except (OSError, ValueError):
                self._lost(peer)
                return
            if "value" in message:
                self._inbox[peer].put(message["value"])
            elif "end" in message:
                self._ended(peer, message["end"], message["reason"])
            elif "stopped" in message:
                self._stop_soon(message["stopped"], message["code"], message["reason"])
            elif "lost" in message:
                self._lost(message["lost"])
            elif "all ended" in message:
                self._all_ended = True
                self._over.set()

    def _ended(self, index: int, code: int, reason: str) -> None:
        """Notes, on the first process, that one ends, and tells the others what they must know."""
        with self._ending:
            self._ends.add(index)
            are_all = len(self._ends) == len(self.names)
        if code:
            self._tell_all({"stopped": index, "code": code, "reason": reason})
            self._stop_soon(index, code, reason)
        if are_all:
            self._tell_all({"all ended": True})
            self._all_ended = True
            self._over.set()

    def _stop_soon(self, index: int, code: int, reason: str) -> None:
        """Ends this process, which another's error leaves waiting, if it does not end by itself."""
        if index == self.index or self._stopping:
            return
        self._stopping = True

        def stop() -> None:
            if not self._failing:
                end_at_once(f"{self.name(index)} stopped: {reason}", code)

        timer = threading.Timer(GRACE if self.index else GRACE + _FIRST_AFTER, stop)
        timer.daemon = True
        timer.start()

    def _lost(self, index: int) -> None:
        """Ends this process, and the others, when one has gone without a word."""
        if self._all_ended or index in self._ends:
            return
        if self._stopping:  # nor can it be waited for
            self._over.set()
            return
        if self.index == 0:
            self._tell_all({"lost": index})
            time.sleep(_FIRST_AFTER)
        text = f"{self.name(index)} was lost; {self._advice()}"
        end_at_once(text, HostLost.exit_code)

    def _tell_all(self, message: Mapping[str, Any]) -> None:
        for end in self._peers.values():
            with contextlib.suppress(OSError):  # whoever has gone need not be told
                end.send(message)

    def _send(self, peer: int, message: Mapping[str, Any]) -> None:
        try:
            self._peers[peer].send(message)
        except OSError:
            self._lost(peer)


def end_at_once(text: str, code: int) -> NoReturn:
    """Ends the process with a line on stderr, whatever its main thread waits for."""
    print(f"{Path(sys.argv[0]).name}: {text}", file=sys.stderr, flush=True)
    os._exit(code)


def receive_all(address: str, number: int, seconds: float, advice: Callable[[], str]) -> Line:
    """Waits, as the first process, for all others.

    Args:
      address: HOST:PORT of this process.
      number: of processes.
      seconds: to wait, at most.
      advice: as for `Line`.

    Raises:
      UserError: the port is not free, or one came with other numbers.
      HostLost: not all of them came.
    """
    port = port_of(address)
    deadline = time.monotonic() + seconds
    names, peers = {0: socket.gethostname()}, {}
    try:
        # As JAX's own service, on all addresses of the host.
        six = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if six else socket.AF_INET
        server = socket.create_server(("", port), family=family, dualstack_ipv6=six, backlog=number)
    except OSError as error:
        raise UserError(
            f"the coordinator's port {port} ({address}) cannot be opened on this host, process 0: "
            f"{error.strerror}; choose another port"
        ) from error
    with server:
        while len(peers) < number - 1:
            server.settimeout(max(deadline - time.monotonic(), 0.001))
            try:
                end = _End(server.accept()[0])
            except TimeoutError:
                absent = [str(i) for i in range(number) if i not in names]
                _refuse(
                    peers.values(),
                    HostLost,
                    f"of {number} processes, {', '.join(absent)} did not come to the coordinator "
                    f"{address} in {seconds:g} s; start them, or mend --num_processes",
                )
            try:
                hello = end.receive(5.0, _LONGEST)
                index, of, name = hello["process"], hello["of"], hello["host"]
            except (OSError, ValueError, KeyError):  # a stranger that knocks at every port
                end.close()
                continue
            if of != number or index not in range(1, number) or index in peers:
                _refuse(
                    [*peers.values(), end],
                    UserError,
                    f"process {index} of {of} ({name}) has come to the coordinator {address}, "
                    f"which waits for {number} with an id each; mend --num_processes and "
                    "--process_id",
                )
            names[index], peers[index] = name, end
    for end in peers.values():
        end.send({"names": [names[i] for i in range(number)]})
    return Line(0, [names[i] for i in range(number)], peers, advice)


def _refuse(ends: Iterable[_End], kind: type[CommandError], text: str) -> NoReturn:
    for end in ends:
        with contextlib.suppress(OSError):  # it may have gone meanwhile
            end.send({"refused": text, "as": kind.__name__})
        end.close()
    raise kind(text)


def call(address: str, number: int, index: int, seconds: float, advice: Callable[[], str]) -> Line:
    """Connects to the first process: the arguments as for `receive_all`, and this one's index.

    Raises:
      UserError: it refuses this process's numbers.
      HostLost: it does not answer, or not all processes came to it.
    """
    host, port = address.rpartition(":")[0].strip("[]"), port_of(address)
    deadline = time.monotonic() + seconds
    reason = "no answer"
    while (left := deadline - time.monotonic()) > 0:
        end = None
        try:
            end = _End(socket.create_connection((host, port), timeout=left))
            end.send({"process": index, "of": number, "host": socket.gethostname()})
            # It knows best who has not come, and says so at its own deadline.
            answer = end.receive(max(deadline - time.monotonic(), 0) + GRACE)
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or str(error) or reason
            if end:
                end.close()
            time.sleep(0.2)
            continue
        if "refused" in answer:
            end.close()
            kind = HostLost if answer.get("as") == HostLost.__name__ else UserError
            raise kind(answer["refused"])
        return Line(index, answer["names"], {0: end}, advice)
    raise HostLost(
        f"the coordinator {address} cannot be reached from this host, process {index}, after "
        f"{seconds:g} s ({reason}); is process 0 running there, and the port open?"
    )


def port_of(address: str) -> int:
    """Returns the port of HOST:PORT.

    Raises:
      UserError: it has none.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 1 << 16:
        raise UserError(f"--coordinator_address is {address!r}; give HOST:PORT of process 0")
    return int(port)
