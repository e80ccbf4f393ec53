"""What is printed when a stack is up: where everything is, and a first call."""

from kvroute.embedded.stack import EmbeddedStack


def lines_when_up(stack: EmbeddedStack) -> list[str]:
    """One line per address, then how to go on."""
    router, management = stack.router_url, stack.management_url
    return [
        "",
        "kvroute is up. Ctrl-C stops it.",
        f"  router        {router}   POST /register /query, GET /workers /docs /readyz /metrics",
        f"  OpenAI API    {stack.inference_url}/v1",
        f"  management    {management}   GET /instances /pools /readyz",
        f"  store metrics {stack.metrics_url}/metrics",
        f"  ingest        {stack.addresses.url('ingest')}   GET /publishers /readyz /metrics",
        f"  matcher       {stack.addresses.url('matcher')}   GET /asyncapi /readyz /metrics",
        "What engines and pools need: kvroute config engine --help, kvroute config pool --help",
        f"Who is registered:           curl {router}/workers",
        f"Events on their way:         kvroute tap --nats-url {stack.nats_url_for_display}",
        "",
    ]
