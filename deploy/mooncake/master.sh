#!/bin/sh
# Starts a Mooncake master with its metrics on the port that kvroute's coordinator reads, and KV events where wanted.
#   KV_CACHE_STORE_PORT       RPC port, default 50088
#   MOONCAKE_METRICS_PORT     metrics port, default 50090 (Mooncake's own default is 9003)
#   KV_EVENTS_ENABLE          "true" switches KV events on; off by default
#   KV_EVENTS_ENDPOINT        ZMQ bind address, default tcp://0.0.0.0:5557
#   KV_EVENTS_BACKEND_ID      owner stamped on every event, default POD_IP
#   KV_STORE_EVICTION_HIGH_WATERMARK_RATIO, KV_STORE_EVICTION_RATIO, DEFAULT_KV_LEASE_TTL (ms)
# Further arguments go to mooncake_master.
set -eu
set -- \
  --rpc_port "${KV_CACHE_STORE_PORT:-50088}" \
  --metrics_port "${MOONCAKE_METRICS_PORT:-50090}" \
  --eviction_high_watermark_ratio "${KV_STORE_EVICTION_HIGH_WATERMARK_RATIO:-0.9}" \
  --eviction_ratio "${KV_STORE_EVICTION_RATIO:-0.05}" \
  --default_kv_lease_ttl "${DEFAULT_KV_LEASE_TTL:-11000}" \
  "$@"
case "${KV_EVENTS_ENABLE:-false}" in
  1 | true | TRUE | True | yes | on)
    set -- --enable_kv_events=true \
      --kv_events_bind_endpoint "${KV_EVENTS_ENDPOINT:-tcp://0.0.0.0:5557}" \
      --kv_events_backend_id "${KV_EVENTS_BACKEND_ID:-${POD_IP:?set POD_IP or KV_EVENTS_BACKEND_ID}}" \
      "$@"
    ;;
esac
exec "${MOONCAKE_MASTER:-mooncake_master}" "$@"
