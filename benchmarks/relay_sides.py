"""Other ways to bring the same bytes to four readers on this machine, for `benchmarks.relay`; and one raw socket stream.

Each returns seconds from the first byte's leaving to the moment when the last reader has everything in memory that it had
touched before. Start-up, connecting and allocating are not counted.
"""

import multiprocessing
import os
import socket
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy
import redis
import torch
from safetensors.torch import load_file, save_file

from laminar.experience.server import EmbeddedServer

NUM_READERS = 4
PIECE_BYTES = 16 * 1024**2
DEADLINE_SECONDS = 60.0

Reader = Callable[[Connection, int, int, str], None]
"""Says it is ready, waits for a word, reads everything, says it is done: (pipe, index, bytes, where)."""


Enter = Callable[[int], None]
"""Moves a process onto the machine of that number; 0 is the sender's."""


def stay(index: int) -> None:
    """All on one machine."""


def touched(num_bytes: int) -> torch.Tensor:
    """Memory whose pages are there."""
    return torch.ones(num_bytes, dtype=torch.uint8)


def with_readers(
    reader: Reader,
    num_readers: int,
    num_bytes: int,
    where: str,
    send: Callable[[], None],
    repeats: int,
    enter: Enter = stay,
) -> float:
    """Best seconds of several rounds: all readers are told to read, `send` sends, and the last says it is done."""
    context = multiprocessing.get_context("fork")
    pipes, processes = [], []
    for index in range(num_readers):
        mine, theirs = context.Pipe()
        process = context.Process(target=_loop, args=(reader, theirs, index, num_bytes, where, enter), daemon=True)
        process.start()
        pipes.append(mine)
        processes.append(process)
    try:
        seconds = []
        for pipe in pipes:
            _expect(pipe)
        for _ in range(repeats):
            started = time.perf_counter()
            for pipe in pipes:
                pipe.send("read")
            send()
            for pipe in pipes:
                _expect(pipe)
            seconds.append(time.perf_counter() - started)
        return min(seconds)
    finally:
        for process in processes:
            process.kill()
            process.join()


def _loop(reader: Reader, pipe: Connection, index: int, num_bytes: int, where: str, enter: Enter) -> None:
    enter(index + 1)
    os.sched_setaffinity(0, {(index + 1) % (os.cpu_count() or 1)})
    torch.set_num_threads(1)
    reader(pipe, index, num_bytes, where)


def _expect(pipe: Connection) -> None:
    if not pipe.poll(DEADLINE_SECONDS):
        raise TimeoutError("a reader did not answer")
    pipe.recv()


def raw_stream(num_bytes: int, repeats: int) -> float:
    """One TCP stream from touched memory into touched memory, on this machine's two cores."""
    source = memoryview(touched(num_bytes).numpy())
    with socket.create_server(("127.0.0.1", 0)) as server:
        host, port = server.getsockname()
        accepted: list[socket.socket] = []

        def send() -> None:
            if not accepted:
                accepted.append(server.accept()[0])
            accepted[0].sendall(source)

        try:
            return with_readers(_read_socket, 1, num_bytes, f"{host} {port}", send, repeats)
        finally:
            for connection in accepted:
                connection.close()


def _read_socket(pipe: Connection, index: int, num_bytes: int, where: str) -> None:
    host, port = where.split()
    target = memoryview(touched(num_bytes).numpy())
    pipe.send("ready")
    connection = None
    while pipe.recv():
        connection = connection or socket.create_connection((host, int(port)))
        done = 0
        while done < num_bytes:
            done += connection.recv_into(target[done:])
        pipe.send("done")


def redis_chunks(num_bytes: int, repeats: int, enter: Enter = stay, host: str = "") -> float:
    """16 MB values in the bundled Valkey: written once, read by each reader."""
    source = memoryview(touched(num_bytes).numpy())
    with tempfile.TemporaryDirectory() as folder, EmbeddedServer(Path(folder)) as server:
        client = redis.Redis.from_url(server.url)
        where = server.url
        if host:
            client.config_set("bind", f"127.0.0.1 {host}")
            where = server.tcp_url.replace("127.0.0.1", host)
        rounds = iter(range(repeats))

        def send() -> None:
            turn = next(rounds)
            for start in range(0, num_bytes, PIECE_BYTES):
                client.set(f"{turn}:{start}", bytes(source[start : start + PIECE_BYTES]))

        return with_readers(_read_redis, NUM_READERS, num_bytes, where, send, repeats, enter)


def _read_redis(pipe: Connection, index: int, num_bytes: int, where: str) -> None:
    client = redis.Redis.from_url(where)
    target = memoryview(touched(num_bytes).numpy())
    pipe.send("ready")
    turn = 0
    while pipe.recv():
        for start in range(0, num_bytes, PIECE_BYTES):
            while (piece := client.get(f"{turn}:{start}")) is None:
                time.sleep(0.001)
            target[start : start + len(piece)] = piece  # type: ignore[arg-type]
        turn += 1
        pipe.send("done")


def disk_file(num_bytes: int, repeats: int) -> float:
    """A safetensors file on disk: saved, then loaded by each reader."""
    source = {"a": touched(num_bytes)}
    with tempfile.TemporaryDirectory() as folder:
        rounds = iter(range(repeats))

        def send() -> None:
            path = Path(folder) / f"{next(rounds)}.safetensors"
            save_file(source, path.with_suffix(".partial"))
            path.with_suffix(".partial").rename(path)

        return with_readers(_read_file, NUM_READERS, num_bytes, folder, send, repeats)


def _read_file(pipe: Connection, index: int, num_bytes: int, where: str) -> None:
    target = touched(num_bytes)
    pipe.send("ready")
    turn = 0
    while pipe.recv():
        path = Path(where) / f"{turn}.safetensors"
        while not path.exists():
            time.sleep(0.001)
        target.copy_(load_file(path)["a"])
        turn += 1
        pipe.send("done")


def gloo_broadcast(num_bytes: int, repeats: int, enter: Enter = stay) -> float:
    """`torch.distributed.broadcast` by gloo among five processes."""
    source = touched(num_bytes)
    with tempfile.TemporaryDirectory() as folder:
        where = f"file://{folder}/meeting"
        joined: list[Any] = []

        def send() -> None:
            if not joined:
                joined.append(_join(where, 0))
            torch.distributed.broadcast(source, 0)

        try:
            # the first round connects
            return with_readers(_read_gloo, NUM_READERS, num_bytes, where, send, repeats + 1, enter)
        finally:
            if joined:
                torch.distributed.destroy_process_group()


def _join(where: str, rank: int) -> bool:
    torch.distributed.init_process_group("gloo", init_method=where, rank=rank, world_size=NUM_READERS + 1)
    return True


def _read_gloo(pipe: Connection, index: int, num_bytes: int, where: str) -> None:
    target = touched(num_bytes)
    pipe.send("ready")
    pipe.recv()
    _join(where, index + 1)
    while True:
        torch.distributed.broadcast(target, 0)
        pipe.send("done")
        pipe.recv()


def ray_object_store(num_bytes: int, repeats: int) -> float:
    """`ray.put` once, `ray.get` by four actors of the same machine, each copying into touched memory."""
    import ray

    class Reader:  # defined here, so that it travels by value and its process imports no torch
        def __init__(self) -> None:
            self._target = numpy.ones(num_bytes, numpy.uint8)

        def ready(self) -> bool:
            return True

        def read(self, references: list[Any]) -> None:
            self._target[:] = ray.get(references[0])

    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False, object_store_memory=(repeats + 1) * num_bytes)
    source = touched(num_bytes).numpy()
    try:
        readers = [ray.remote(num_cpus=0)(Reader).remote() for _ in range(NUM_READERS)]
        ray.get([reader.ready.remote() for reader in readers], timeout=2 * DEADLINE_SECONDS)
        seconds = []
        for _ in range(repeats):
            started = time.perf_counter()
            reference = ray.put(source)
            ray.get([reader.read.remote([reference]) for reader in readers], timeout=DEADLINE_SECONDS)
            seconds.append(time.perf_counter() - started)
            del reference
        return min(seconds)
    finally:
        ray.shutdown()


PEERS: dict[str, Callable[[int, int], float]] = {
    "redis_chunks": redis_chunks,
    "disk_file": disk_file,
    "gloo_broadcast": gloo_broadcast,
    "ray_object_store": ray_object_store,
}
