"""Moving KV: from a tier of storage to the GPUs of a replica, or from one replica to another.

    time = latency + messages * message time + bytes / bandwidth

`bytes` and `messages` of one GPU where every GPU has a path of its own (PCIe, NVLink, its own network card), of all GPUs of the
replica where they share one (`shared`: a node's drives and its path to a store). A message is one KV block that lies together: all
layers of `block_tokens` tokens in vLLM since 0.12; before, and where connectors register layers one by one, layers (or twice as
many) times that. What else uses the path at the same time is not in it, nor is the overlap with computing layer by layer.

Sources. PCIe: data sheets in the GPU catalogue; 0.85 of it, what pinned copies of megabytes reach. Drives: Samsung PM9A3, 6.5
GB/s read (2020), one per node, about 100 us. Network: one ConnectX-7 of 400 Gb/s per GPU, as in NVIDIA's DGX H100, at 0.9. Store:
100 Gb/s per node, 1 ms. Message times: vLLM's blog on KV offloading (2026-01-08: blocks of 0.5 to 2 MB instead of tens of KB make
copies 4 to 5 times faster; 1 to 2 us per copy explain that), vllm-project/vllm#55434 (over 90,000 descriptors per transfer:
submitting them dominates). Latencies, shares and message times are orders of magnitude, not measured here: give your own where
they matter.
"""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.cost.defaults import LINK_SHARE
from schemas.hardware import Gpu

PCIE_SHARE = 0.85
NETWORK_SHARE = 0.90


@dataclass(frozen=True)
class Path:
    """A way for KV to go. gb_s: 1e9 bytes/s as reached, one direction."""

    name: str
    gb_s: float
    latency_us: float
    message_us: float
    shared: bool  # one for all GPUs of the replica, else one each
    basis: str


def host(gpu: Gpu) -> Path:
    """Host memory, over each GPU's own PCIe."""
    return Path("host", PCIE_SHARE * gpu.host_gb_s, 20.0, 1.5, shared=False, basis=f"PCIe of {gpu.host_gb_s:g} GB/s")


def nvme(drives: int = 1) -> Path:
    """Local drives, striped."""
    return Path("nvme", 6.5 * drives, 100.0, 1.5, shared=True, basis=f"{drives} x PCIe 4 drive of 6.5 GB/s")


def store(gbit_s: float = 100.0) -> Path:
    """A remote store, over the node's network."""
    return Path(
        "store", NETWORK_SHARE * gbit_s / 8, 1000.0, 5.0, shared=True, basis=f"network of {gbit_s:g} Gb/s per node"
    )


def same_node(gpu: Gpu) -> Path:
    """Another replica in the same link domain."""
    return Path("replica, same node", LINK_SHARE * gpu.link_gb_s, 20.0, 1.5, shared=False, basis=gpu.link)


def network(gbit_s: float = 400.0) -> Path:
    """Another replica elsewhere: RDMA, one card per GPU."""
    return Path(
        "replica, other node",
        NETWORK_SHARE * gbit_s / 8,
        20.0,
        1.0,
        shared=False,
        basis=f"RDMA of {gbit_s:g} Gb/s per GPU",
    )


def paths(gpu: Gpu) -> tuple[Path, ...]:
    """All of the above, with their defaults."""
    return host(gpu), nvme(), store(), same_node(gpu), network()


def transfer_seconds(path: Path, bytes_per_gpu: float, messages_per_gpu: float, gpus: int) -> float:
    """Seconds until the last of `gpus` GPUs has its part; 0 for nothing."""
    if bytes_per_gpu <= 0:
        return 0.0
    on_path = gpus if path.shared else 1
    moved_us = on_path * (messages_per_gpu * path.message_us + bytes_per_gpu / (path.gb_s * 1e3))
    return 1e-6 * (path.latency_us + moved_us)
