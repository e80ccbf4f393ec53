"""The OpenAI-compatible front door: asks the router who holds the prompt, then forwards to an engine."""
