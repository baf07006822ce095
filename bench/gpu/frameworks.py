"""Programs of PyTorch and CuPy that bench/gpu.sh starts; this file needs nothing of podfabric.

frameworks.py fill           takes memory until it is refused; JSON: bytes, total, error
frameworks.py graph          replays a CUDA graph that allocates; JSON: ok
frameworks.py cupy           pools, managed memory and textures until refused; JSON by kind
frameworks.py step COUNT     ms of a training step of a small transformer: the median
"""

import importlib
import json
import statistics
import sys
import time
from typing import Any

MIB = 1 << 20
PIECE = 64 * MIB


def fill() -> object:
    torch: Any = importlib.import_module("torch")
    _, total = torch.cuda.mem_get_info()
    held: list[object] = []
    try:
        while True:
            held.append(torch.empty(PIECE, dtype=torch.uint8, device="cuda"))
    except torch.cuda.OutOfMemoryError as error:
        return {"bytes": len(held) * PIECE, "total": total, "error": type(error).__name__}


def graph() -> object:
    torch: Any = importlib.import_module("torch")
    x = torch.ones(1 << 20, device="cuda")
    for _ in range(3):  # before a capture, as PyTorch's documentation asks
        (x * 2).sum()
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        y = (torch.empty_like(x).fill_(3) + x).sum()
    for _ in range(100):
        captured.replay()
    torch.cuda.synchronize()
    return {"ok": float(y) == 4.0 * (1 << 20)}


def cupy_kinds() -> object:
    cupy: Any = importlib.import_module("cupy")
    runtime: Any = importlib.import_module("cupy.cuda.runtime")
    texture: Any = importlib.import_module("cupy.cuda.texture")
    pool = cupy.cuda.MemoryAsyncPool()

    def array(size: int) -> object:
        shape = texture.ChannelFormatDescriptor(32, 0, 0, 0, runtime.cudaChannelFormatKindFloat)
        return texture.CUDAarray(shape, 4096, size // (4096 * 4))

    takes = {"pool": pool.malloc, "managed": cupy.cuda.malloc_managed, "array": array}
    found: dict[str, int] = {}
    for name, take in takes.items():
        held: list[object] = []
        try:
            while True:
                held.append(take(PIECE))
        except (cupy.cuda.memory.OutOfMemoryError, runtime.CUDARuntimeError):
            found[name] = len(held) * PIECE
        held.clear()
        cupy.cuda.Device().synchronize()
    return found


def step(count: int) -> object:
    torch: Any = importlib.import_module("torch")
    model = torch.nn.TransformerEncoder(
        torch.nn.TransformerEncoderLayer(1024, 16, 4096, batch_first=True), 8
    ).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    batch = torch.randn(16, 512, 1024, device="cuda")
    times = []
    for number in range(count + 5):
        torch.cuda.synchronize()
        began = time.perf_counter()
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.cuda.synchronize()
        if number >= 5:
            times.append((time.perf_counter() - began) * 1e3)
    return statistics.median(times)


def main() -> None:
    what = sys.argv[1]
    if what == "step":
        found = step(int(sys.argv[2]))
    else:
        found = {"fill": fill, "graph": graph, "cupy": cupy_kinds}[what]()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
