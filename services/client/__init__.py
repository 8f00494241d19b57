"""The Python client: `LibraClient` (asyncio) and `BlockingClient`. Needs no torch."""

from services.client.blocking import BlockingClient
from services.client.client import LibraClient, Listed, Submitted, run_name
from services.common.errors import LibraError

__all__ = ["BlockingClient", "LibraClient", "LibraError", "Listed", "Submitted", "run_name"]
