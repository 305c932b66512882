"""Which replica gets a request."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def round_robin(requests: int, replicas: int) -> NDArray[np.int32]:
    """Request i (in order of arrival) to replica ``i mod replicas``."""
    return (np.arange(requests, dtype=np.int64) % replicas).astype(np.int32)


ROUTERS = {"round_robin": round_robin}
