"""The contract between services: pure data, no sockets, no asyncio."""
