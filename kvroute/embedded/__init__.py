"""The whole stack on one host without containers: real NATS and Redis and the four services as child processes."""

from kvroute.embedded.options import SERVICES, StackOptions
from kvroute.embedded.stack import EmbeddedStack, StackError

__all__ = ["SERVICES", "EmbeddedStack", "StackError", "StackOptions"]
